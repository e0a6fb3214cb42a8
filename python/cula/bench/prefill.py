"""KDA prefill on the cpu arch: one sequence, its time and how many tokens of a head that is a second. It is bound by arithmetic, not by memory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from .. import kda
from .problems import LOWER_BOUND, D

# Two heads: as many long items as threads on a small machine, which must not stay on one of them.
SHAPES = ((1024, 8), (4096, 2))


@dataclass(frozen=True)
class Prefill:
    tokens: int
    heads: int
    state: str = "fp32"
    op: str = "kda_prefill"


def enumerate_prefills(quick: bool) -> list[Prefill]:
    return [Prefill(*shape) for shape in (SHAPES[:1] if quick else SHAPES)]


def make(problem: Prefill, machine, seed: int = 0):
    """The call without arguments, and its `out`, poisoned."""
    random = np.random.default_rng(seed)
    rows, state = (1, problem.tokens, problem.heads, D), (1, problem.heads, D, D)
    put = lambda shape, dtype, scale=1.0: machine.put(random.standard_normal(shape, dtype="float32") * np.float32(scale), shape, dtype)  # noqa: E731
    q, k, v, gate, beta = *(put(rows, machine.io) for _ in range(4)), put(rows[:3], machine.io)
    out = machine.put(np.full(1, np.nan, "float32"), rows, machine.io)
    final = machine.put(np.full(1, np.nan, "float32"), state, problem.state)
    given = dict(state=put(state, problem.state, 0.3), state_out=final, out=out, A_log=put((problem.heads,), "fp32", 0.5), dt_bias=put((problem.heads, D), "fp32"),
                 gate_kind="raw", lower_bound=LOWER_BOUND, beta_kind="logit", l2norm=True, stream=machine.stream)  # fmt: skip
    return partial(kda.kda_prefill, q, k, v, gate, beta, **given), out


def header() -> str:
    return f"{'op':<12} {'state':<5} {'heads':>5} {'tokens':>6} {'us':>10} {'Mtokens x heads / s':>20}  kernel"


def line(row: dict) -> str:
    head = f"{row['op']:<12} {row['state']:<5} {row['heads']:>5} {row['tokens']:>6}"
    if "error" in row:
        return f"{head}  {row['error']}"
    return f"{head} {row['us']:>10.2f} {row['rate'] / 1e6:>20.2f}  {row['kernel']}"
