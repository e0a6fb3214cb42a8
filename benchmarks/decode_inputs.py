"""The decode problems that are timed: shapes, targets, and one set of tensors as every library gets it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cula.bench.problems import BATCHES, HEADS, LOWER_BOUND, QUICK_BATCHES, D

__all__ = ["BATCHES", "CPU_SHARE_TARGET", "D", "HEADS", "Inputs", "LOWER_BOUND", "QUICK_BATCHES", "SHARE_TARGET", "US_TARGET_N1", "make"]

# What the project has promised: share of the copy rate at N = 128 and 256 with 64 value heads, and microseconds at N = 1.
SHARE_TARGET = {"fp32": 0.95, "bf16": 0.90}
US_TARGET_N1 = 4.5
CPU_SHARE_TARGET = 0.40


@dataclass
class Inputs:
    """Tensors of one call, on one device: rows [N,1,...] as engines and peers take them."""

    op: str
    n: int
    heads: tuple[int, int]
    state_dtype: torch.dtype
    q: torch.Tensor       # [N,1,H,D] bf16
    k: torch.Tensor
    v: torch.Tensor       # [N,1,HV,D] bf16
    out: torch.Tensor     # [N,1,HV,D] bf16
    beta: torch.Tensor    # [N,1,HV] bf16 logits
    gate: torch.Tensor    # kda [N,1,HV,D] raw bf16, gdn [N,1,HV] raw bf16, gla [N,1,HV,D] log decay bf16, lightning [HV] lambda
    A_log: torch.Tensor   # [HV] float32
    dt_bias: torch.Tensor  # kda [HV,D], gdn [HV] float32
    state: torch.Tensor   # [N,HV,D,D]; the layout is the library's, the values are as good either way
    scale: float

    @property
    def bytes(self) -> int:
        """Least traffic: the state in and out, every row operand once (parameters of a few KB left out)."""
        rows = [self.q, self.k, self.v, self.out]
        rows += [self.beta] if self.op in ("kda", "gdn") else []
        rows += [self.gate] if self.op != "lightning" else []
        return 2 * self.state.numel() * self.state.element_size() + sum(x.numel() * x.element_size() for x in rows)


def make(op: str, n: int, heads: tuple[int, int], state: str, seed: int, device: str = "cuda") -> Inputs:
    h, hv = heads
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, device=device, generator=generator)

    def uniform(*shape):
        return torch.rand(*shape, device=device, generator=generator)

    state_dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[state]
    q, k = normal(n, 1, h, D).bfloat16(), normal(n, 1, h, D).bfloat16()
    v, beta = normal(n, 1, hv, D).bfloat16(), normal(n, 1, hv).bfloat16()
    if op == "kda":
        gate = normal(n, 1, hv, D).bfloat16()
    elif op == "gdn":
        gate = normal(n, 1, hv).bfloat16()
    elif op == "gla":
        gate = (-0.2 * uniform(n, 1, hv, D)).bfloat16()
    else:  # slopes of the layer in the middle of a deep model, as flash-linear-attention computes them
        gate = torch.exp(-(8 / hv * (1 - 12 / 80)) * torch.arange(hv, device=device, dtype=torch.float32))
    return Inputs(op=op, n=n, heads=heads, state_dtype=state_dtype, q=q, k=k, v=v,
                  out=torch.empty(n, 1, hv, D, device=device, dtype=torch.bfloat16), beta=beta, gate=gate,
                  A_log=uniform(hv) * 0.5, dt_bias=uniform(*((hv, D) if op == "kda" else (hv,))) * 2 - 2,
                  state=(normal(n, hv, D, D) * 0.3).to(state_dtype), scale=D**-0.5)
