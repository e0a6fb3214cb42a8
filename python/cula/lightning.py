"""Lightning attention (arXiv 2401.04658): a constant decay a head; and simple GLA: a decay a token and head. No delta rule."""

from __future__ import annotations

from cula_loader import InvalidArgumentError, call
from cula_loader.ops import LIGHTNING_DECODE

from ._outputs import new_out, refuse_no_integers


def lightning_decode(q=None, k=None, v=None, state=None, *, decay=None, gate=None, gate_kind="none", mixed_qkv=None, l2norm=False,
                     scale=None, state_layout="vk", state_out=None, read_index=None, write_index=None, null_slot=None, out=None,
                     num_threads=0, stream=None, donate=False):
    """One token for each of N rows; returns out and updates the states.

        S <- lambda S + k v^T;   out = scale * S^T q

    decay       lambda [HV] float32 in (0,1], the decay itself and not its log: exp(-slope) of Lightning attention
    gate        instead of decay, with gate_kind="log": g [N,HV], lambda = exp(g), g <= 0 (simple GLA); float32, bf16 or fp16
    Neither: lambda = 1. Lightning attention in MiniMax and Ling uses scale=1.0. Everything else is as in cula.kda.kda_decode.
    """
    if decay is not None:
        if gate is not None or gate_kind != "none":
            raise InvalidArgumentError("lightning_decode: decay and gate exclude each other: lambda is a constant a head, or exp(gate)")
        gate, gate_kind = decay, "decay"
    elif gate_kind == "decay":
        raise InvalidArgumentError("lightning_decode: gate_kind='decay': allowed: 'none', 'log'; pass the constant as decay=")
    if type(num_threads) is not int or (null_slot is not None and type(null_slot) is not int):
        refuse_no_integers("lightning_decode", num_threads, null_slot)
    fresh = ()
    if out is None:
        out, fresh = new_out("lightning_decode", v, mixed_qkv, state, state_layout), ("out",)
    call(LIGHTNING_DECODE, (q, k, v, mixed_qkv, out, gate, None, None, None, state, state_out, read_index, write_index),
         (gate_kind, "value", l2norm, scale, state_layout, None, null_slot, num_threads), stream, donate, fresh)
    return out
