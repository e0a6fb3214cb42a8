"""The decode problems that are timed, here and by the project's own benchmarks: shapes, options, least memory traffic."""

from __future__ import annotations

import math
from dataclasses import dataclass

D = 128  # K and V of every model below
LOWER_BOUND = -5.0
BATCHES = (1, 8, 32, 128, 256)
QUICK_BATCHES = (1, 128)
# query heads, value heads: Kimi Linear; Qwen3-Next on 1, 2 and 4 GPUs; GLA and MiniMax
HEADS = {"kda": ((64, 64),), "gdn": ((16, 64), (8, 32), (4, 16)), "gla": ((64, 64),), "lightning": ((64, 64),)}
STATE_BYTES = {"fp32": 4, "bf16": 2}
GPU_ROTATE = (600e6, 48)  # bytes of the states of all rotated buffers together, several times an L2; most buffers, all in one graph


@dataclass(frozen=True)
class Problem:
    """One decode call: N rows of bf16 (or another dtype of 2 bytes), a slot for each."""

    op: str
    n: int
    heads: tuple[int, int]
    state: str  # "fp32" or "bf16"

    @property
    def state_shape(self) -> tuple[int, ...]:
        return (self.n, self.heads[1], D, D)

    @property
    def state_bytes(self) -> int:
        return self.n * self.heads[1] * D * D * STATE_BYTES[self.state]

    @property
    def row_shapes(self) -> dict[str, tuple[int, ...]]:
        """Operands that are read or written once a row."""
        h, hv = self.heads
        shapes = {"q": (self.n, h, D), "k": (self.n, h, D), "v": (self.n, hv, D), "out": (self.n, hv, D)}
        if self.op in ("kda", "gdn"):
            shapes["beta"] = (self.n, hv)
        if self.op in ("kda", "gla"):
            shapes["gate"] = (self.n, hv, D)
        elif self.op == "gdn":
            shapes["gate"] = (self.n, hv)
        return shapes

    @property
    def least_bytes(self) -> int:
        """The state in and out, every row operand once; parameters of a few KB are left out."""
        return 2 * self.state_bytes + sum(2 * math.prod(shape) for shape in self.row_shapes.values())


def enumerate_problems(ops: tuple[str, ...] = tuple(HEADS), batches: tuple[int, ...] = BATCHES, all_heads: bool = True) -> list[Problem]:
    return [Problem(op, n, heads, state) for op in ops for heads in HEADS[op][: None if all_heads else 1] for state in STATE_BYTES
            for n in batches]


def rotations(state_bytes: int, total: float, most: int) -> int:
    """How many sets of buffers the calls take turns on, so that no state is in a cache when its turn comes."""
    return min(max(math.ceil(total / state_bytes), 2), most)
