"""Gated delta rule (Gated DeltaNet, arXiv 2412.06464): delta rule with a decay a token and value head."""

from __future__ import annotations

from cula_loader import call
from cula_loader.ops import GDN_DECODE, GDN_GATE

from ._gate import run_gate
from ._outputs import new_out, refuse_no_integers


def gdn_decode(q=None, k=None, v=None, gate=None, beta=None, state=None, *, mixed_qkv=None, A_log=None, dt_bias=None, gate_kind="none",
               beta_kind="value", l2norm=False, scale=None, state_layout="vk", state_out=None, read_index=None, write_index=None,
               null_slot=None, out=None, num_threads=0, stream=None, donate=False):
    """One token for each of N rows; returns out and updates the states.

        S <- exp(g) S;   u = beta (v - S^T k);   S <- S + k u^T;   out = scale * S^T q

    gate        by gate_kind; float32, bf16 or fp16
                "none"  no gate, decay 1: the plain delta rule
                "log"   g [N,HV], the natural log of the decay, g <= 0
                "raw"   a [N,HV]: g = -exp(A_log[hv]) * softplus(a + dt_bias[hv])
    A_log, dt_bias   HV elements of any shape, "raw" only; None: exp(A_log) = 1, dt_bias = 0
    Everything else is as in cula.kda.kda_decode.
    """
    if type(num_threads) is not int or (null_slot is not None and type(null_slot) is not int):
        refuse_no_integers("gdn_decode", num_threads, null_slot)
    fresh = ()
    if out is None:
        out, fresh = new_out("gdn_decode", v, mixed_qkv, state, state_layout), ("out",)
    call(GDN_DECODE, (q, k, v, mixed_qkv, out, gate, A_log, dt_bias, beta, state, state_out, read_index, write_index),
         (gate_kind, beta_kind, l2norm, scale, state_layout, None, null_slot, num_threads), stream, donate, fresh)
    return out


def gdn_gate(x, A_log=None, dt_bias=None, *, beta=None, beta_kind=None, out=None, beta_out=None, dtype=None, num_threads=0,
             stream=None, donate=False):
    """The log decay g = -exp(A_log[hv]) * softplus(x + dt_bias[hv]) of a raw gate; with beta also its activation.

    x           [T,HV] or [B,T,HV]; float32, bf16 or fp16; the token stride is free
    A_log, dt_bias   HV elements of any shape; None: exp(A_log) = 1, dt_bias = 0
    The other operands and the result are as in cula.kda.kda_gate. (flash-linear-attention: fused_gdn_gate.)
    """
    return run_gate(GDN_GATE, x, A_log, dt_bias, None, beta, beta_kind, out, beta_out, dtype, num_threads, stream, donate)
