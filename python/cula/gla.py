"""Gated linear attention (arXiv 2312.06635): a decay a key channel, no delta rule."""

from __future__ import annotations

from cula_loader import call
from cula_loader.ops import GLA_DECODE

from ._outputs import new_out, refuse_no_integers


def gla_decode(q=None, k=None, v=None, gate=None, state=None, *, mixed_qkv=None, gate_kind="none", l2norm=False, scale=None,
               state_layout="vk", state_out=None, read_index=None, write_index=None, null_slot=None, out=None, num_threads=0, stream=None,
               donate=False):
    """One token for each of N rows; returns out and updates the states.

        S <- diag(exp g) S + k v^T;   out = scale * S^T q

    gate        by gate_kind: "none" (decay 1) or "log": g [N,HV,K], the natural log of the decay, g <= 0; float32, bf16 or fp16
    Everything else is as in cula.kda.kda_decode.
    """
    if type(num_threads) is not int or (null_slot is not None and type(null_slot) is not int):
        refuse_no_integers("gla_decode", num_threads, null_slot)
    fresh = ()
    if out is None:
        out, fresh = new_out("gla_decode", v, mixed_qkv, state, state_layout), ("out",)
    call(GLA_DECODE, (q, k, v, mixed_qkv, out, gate, None, None, None, state, state_out, read_index, write_index),
         (gate_kind, "value", l2norm, scale, state_layout, None, null_slot, num_threads), stream, donate, fresh)
    return out
