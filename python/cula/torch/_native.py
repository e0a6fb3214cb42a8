"""cula's own functions for torch: those of cula.kda, cula.gdn, cula.gla, cula.lightning and cula.norm, made safe to trace.

Outside a trace they are the same calls. Under torch.compile they become custom ops without a graph break; out= and state pools are
then mutated operands of the op, and stream= is refused, since a compiled graph has the stream that it is run on.
Autocast does not touch them: operands are taken as they are, in any mix of dtypes that the functions allow.
"""

from __future__ import annotations

import torch

from cula_loader import InvalidArgumentError

from .. import gdn, gla, kda, lightning, norm
from .._gate import gate_options
from . import _library  # noqa: F401  defines torch.ops.cula
from ._tracing import keep_for, refuse_stream, traced

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def _decode_traced(op, q, k, v, mixed_qkv, gate, A_log, dt_bias, beta, state, state_out, read_index, write_index, out, gate_kind, beta_kind,
                   l2norm, scale, state_layout, lower_bound, null_slot, num_threads, stream):
    refuse_stream(stream)
    if out is None:
        rows = v if v is not None else mixed_qkv
        out = rows.new_empty(_library._rows_shape(v, mixed_qkv, state if state is not None else state_out, state_layout))
    op(q, k, v, mixed_qkv, gate, A_log, dt_bias, beta, read_index, write_index, state, state_out, out, gate_kind, beta_kind, l2norm, scale,
       state_layout, lower_bound, null_slot, num_threads)
    return out


def kda_decode(q=None, k=None, v=None, gate=None, beta=None, state=None, *, mixed_qkv=None, A_log=None, dt_bias=None, lower_bound=None,
               gate_kind="none", beta_kind="value", l2norm=False, scale=None, state_layout="vk", state_out=None, read_index=None,
               write_index=None, null_slot=None, out=None, num_threads=0, stream=None):
    """cula.kda.kda_decode on torch tensors; see there."""
    if traced(q if q is not None else mixed_qkv):
        return _decode_traced(torch.ops.cula.kda_decode_out.default, q, k, v, mixed_qkv, gate, A_log, dt_bias, beta, state, state_out,
                              read_index, write_index, out, gate_kind, beta_kind, l2norm, scale, state_layout, lower_bound, null_slot,
                              num_threads, stream)
    out = kda.kda_decode(q, k, v, gate, beta, state, mixed_qkv=mixed_qkv, A_log=A_log, dt_bias=dt_bias, lower_bound=lower_bound,
                         gate_kind=gate_kind, beta_kind=beta_kind, l2norm=l2norm, scale=scale, state_layout=state_layout,
                         state_out=state_out, read_index=read_index, write_index=write_index, null_slot=null_slot, out=out,
                         num_threads=num_threads, stream=stream)
    if stream is not None:
        keep_for(stream, (q, k, v, mixed_qkv, gate, A_log, dt_bias, beta, state, state_out, read_index, write_index, out))
    return out


def gdn_decode(q=None, k=None, v=None, gate=None, beta=None, state=None, *, mixed_qkv=None, A_log=None, dt_bias=None, gate_kind="none",
               beta_kind="value", l2norm=False, scale=None, state_layout="vk", state_out=None, read_index=None, write_index=None,
               null_slot=None, out=None, num_threads=0, stream=None):
    """cula.gdn.gdn_decode on torch tensors; see there."""
    if traced(q if q is not None else mixed_qkv):
        return _decode_traced(torch.ops.cula.gdn_decode_out.default, q, k, v, mixed_qkv, gate, A_log, dt_bias, beta, state, state_out,
                              read_index, write_index, out, gate_kind, beta_kind, l2norm, scale, state_layout, None, null_slot, num_threads,
                              stream)
    out = gdn.gdn_decode(q, k, v, gate, beta, state, mixed_qkv=mixed_qkv, A_log=A_log, dt_bias=dt_bias, gate_kind=gate_kind,
                         beta_kind=beta_kind, l2norm=l2norm, scale=scale, state_layout=state_layout, state_out=state_out,
                         read_index=read_index, write_index=write_index, null_slot=null_slot, out=out, num_threads=num_threads,
                         stream=stream)
    if stream is not None:
        keep_for(stream, (q, k, v, mixed_qkv, gate, A_log, dt_bias, beta, state, state_out, read_index, write_index, out))
    return out


def gla_decode(q=None, k=None, v=None, gate=None, state=None, *, mixed_qkv=None, gate_kind="none", l2norm=False, scale=None,
               state_layout="vk", state_out=None, read_index=None, write_index=None, null_slot=None, out=None, num_threads=0, stream=None):
    """cula.gla.gla_decode on torch tensors; see there."""
    if traced(q if q is not None else mixed_qkv):
        return _decode_traced(torch.ops.cula.gla_decode_out.default, q, k, v, mixed_qkv, gate, None, None, None, state, state_out,
                              read_index, write_index, out, gate_kind, "value", l2norm, scale, state_layout, None, null_slot, num_threads,
                              stream)
    out = gla.gla_decode(q, k, v, gate, state, mixed_qkv=mixed_qkv, gate_kind=gate_kind, l2norm=l2norm, scale=scale,
                         state_layout=state_layout, state_out=state_out, read_index=read_index, write_index=write_index,
                         null_slot=null_slot, out=out, num_threads=num_threads, stream=stream)
    if stream is not None:
        keep_for(stream, (q, k, v, mixed_qkv, gate, state, state_out, read_index, write_index, out))
    return out


def lightning_decode(q=None, k=None, v=None, state=None, *, decay=None, gate=None, gate_kind="none", mixed_qkv=None, l2norm=False,
                     scale=None, state_layout="vk", state_out=None, read_index=None, write_index=None, null_slot=None, out=None,
                     num_threads=0, stream=None):
    """cula.lightning.lightning_decode on torch tensors; see there."""
    if traced(q if q is not None else mixed_qkv):
        if decay is not None and (gate is not None or gate_kind != "none"):
            raise InvalidArgumentError("lightning_decode: decay and gate exclude each other: lambda is a constant a head, or exp(gate)")
        return _decode_traced(torch.ops.cula.lightning_decode_out.default, q, k, v, mixed_qkv, gate if decay is None else decay, None, None,
                              None, state, state_out, read_index, write_index, out, gate_kind if decay is None else "decay", "value",
                              l2norm, scale, state_layout, None, null_slot, num_threads, stream)
    out = lightning.lightning_decode(q, k, v, state, decay=decay, gate=gate, gate_kind=gate_kind, mixed_qkv=mixed_qkv, l2norm=l2norm,
                                     scale=scale, state_layout=state_layout, state_out=state_out, read_index=read_index,
                                     write_index=write_index, null_slot=null_slot, out=out, num_threads=num_threads, stream=stream)
    if stream is not None:
        keep_for(stream, (q, k, v, mixed_qkv, decay, gate, state, state_out, read_index, write_index, out))
    return out


def _dtype(dtype) -> torch.dtype:
    if dtype not in _DTYPES:
        raise InvalidArgumentError(f"dtype={dtype!r}: allowed: 'fp32', 'bf16', 'fp16'")
    return _DTYPES[dtype]


def kda_gate(x, A_log=None, dt_bias=None, *, lower_bound=None, beta=None, beta_kind=None, dtype=None, num_threads=0):
    """cula.kda.kda_gate on torch tensors; see there."""
    if not traced(x):
        return kda.kda_gate(x, A_log, dt_bias, lower_bound=lower_bound, beta=beta, beta_kind=beta_kind, dtype=dtype, num_threads=num_threads)
    beta_kind, dtype = gate_options("kda_gate", beta, beta_kind, dtype)
    op = torch.ops.cula.kda_gate if beta is None else torch.ops.cula.kda_gate_beta
    return op.default(x, A_log, dt_bias, beta, lower_bound, beta_kind, _dtype(dtype), num_threads)


def gdn_gate(x, A_log=None, dt_bias=None, *, beta=None, beta_kind=None, dtype=None, num_threads=0):
    """cula.gdn.gdn_gate on torch tensors; see there."""
    if not traced(x):
        return gdn.gdn_gate(x, A_log, dt_bias, beta=beta, beta_kind=beta_kind, dtype=dtype, num_threads=num_threads)
    beta_kind, dtype = gate_options("gdn_gate", beta, beta_kind, dtype)
    op = torch.ops.cula.gdn_gate if beta is None else torch.ops.cula.gdn_gate_beta
    return op.default(x, A_log, dt_bias, beta, None, beta_kind, _dtype(dtype), num_threads)


def l2norm(x, *, eps=1e-6, dtype=None, num_threads=0):
    """cula.norm.l2norm on torch tensors; see there."""
    if not traced(x):
        return norm.l2norm(x, eps=eps, dtype=dtype, num_threads=num_threads)
    return torch.ops.cula.l2norm.default(x, eps, x.dtype if dtype is None else _dtype(dtype), num_threads)
