"""kda_prefill for torch: its two custom ops, and the function that is a custom op where a trace is made.

    cula::kda_prefill_out   writes out, state_out and checkpoints, and returns nothing. in_place: state_out is also the pool that initial states
                            are read from, and `initial_state` is absent. One tensor under two names, one of them read only, would
                            be wrong as a schema: a trace may give the two names different memory
    cula::kda_prefill       functional: returns out and the final states, and writes nothing that it was given
"""

from __future__ import annotations

import torch

from cula_loader import InvalidArgumentError, call
from cula_loader.ops import KDA_PREFILL

from .. import kda
from . import _fake
from ._library import register
from ._tracing import keep_for, refuse_stream, traced

_OPERANDS = ("Tensor q, Tensor k, Tensor v, Tensor gate, Tensor beta, Tensor? A_log, Tensor? dt_bias, Tensor? cu_seqlens, "
             "Tensor? initial_state")
_OPTIONS = "str gate_kind, str beta_kind, bool l2norm, float? scale, str state_layout, float? lower_bound"
_RUN = "str variant, int segments, bool exact, int num_threads"
_OUT = (f"({_OPERANDS}, Tensor? read_index, Tensor? write_index, Tensor? checkpoint_index, Tensor(a!)? state_out, Tensor(b!)? checkpoints, "
        f"Tensor(c!) out, bool in_place, {_OPTIONS}, int? null_slot, int checkpoint_interval, {_RUN}) -> ()")
_FUNCTIONAL = f"({_OPERANDS}, {_OPTIONS}, {_RUN}) -> (Tensor, Tensor)"


def new_out(v, cu_seqlens):
    """out of a call. Rows of no sequence are not written: they are zeros here, since a NaN that the allocator left there would come out of a
    padded batch's next sum."""
    return v.new_empty(v.shape) if cu_seqlens is None else v.new_zeros(v.shape)


def new_states(q, v, cu_seqlens, initial_state, state_layout):
    """Final states of a call: [N,HV,V,K] or [N,HV,K,V]."""
    if initial_state is not None:
        return torch.empty_like(initial_state, memory_format=torch.contiguous_format)
    n = v.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    dims = (q.shape[-1], v.shape[-1]) if state_layout == "kv" else (v.shape[-1], q.shape[-1])
    return v.new_empty((n, v.shape[-2], *dims), dtype=torch.float32)


def _run(q, k, v, gate, beta, A_log, dt_bias, cu_seqlens, initial_state, read_index, write_index, checkpoint_index, state_out, checkpoints, out,
         in_place, gate_kind, beta_kind, l2norm, scale, state_layout, lower_bound, null_slot, checkpoint_interval, variant, segments, exact, num_threads):
    if in_place and (initial_state is not None or state_out is None):
        raise InvalidArgumentError("kda_prefill_out: in_place=True reads initial states from state_out: it must be there, and initial_state not")
    call(KDA_PREFILL, (q, k, v, out, gate, A_log, dt_bias, beta, cu_seqlens, state_out if in_place else initial_state, state_out, read_index,
                       write_index, checkpoints, checkpoint_index),
         (gate_kind, beta_kind, l2norm, scale, state_layout, lower_bound, null_slot, checkpoint_interval, variant, segments, exact, num_threads))


def _results(q, k, v, gate, beta, A_log, dt_bias, cu_seqlens, initial_state, gate_kind, beta_kind, l2norm, scale, state_layout, *_):
    return new_out(v, cu_seqlens), new_states(q, v, cu_seqlens, initial_state, state_layout)


def _functional(q, k, v, gate, beta, A_log, dt_bias, cu_seqlens, initial_state, gate_kind, beta_kind, l2norm, scale, state_layout, lower_bound,
                variant, segments, exact, num_threads):
    out, final = _results(q, k, v, gate, beta, A_log, dt_bias, cu_seqlens, initial_state, gate_kind, beta_kind, l2norm, scale, state_layout)
    _run(q, k, v, gate, beta, A_log, dt_bias, cu_seqlens, initial_state, None, None, None, final, None, out, False, gate_kind, beta_kind, l2norm,
         scale, state_layout, lower_bound, None, 0, variant, segments, exact, num_threads)
    return out, final


def _fake_run(q, k, v, gate, beta, A_log, dt_bias, cu_seqlens, initial_state, read_index, write_index, checkpoint_index, state_out, checkpoints, out,
              in_place, gate_kind, beta_kind, l2norm, scale, state_layout, lower_bound, null_slot, checkpoint_interval, *how):
    _fake.check(KDA_PREFILL, (q, k, v, out, gate, A_log, dt_bias, beta, cu_seqlens, state_out if in_place else initial_state, state_out, read_index,
                              write_index, checkpoints, checkpoint_index),
                (gate_kind, beta_kind, l2norm, scale, state_layout, lower_bound, null_slot, checkpoint_interval, *how))


def _fake_functional(q, k, v, gate, beta, A_log, dt_bias, cu_seqlens, initial_state, gate_kind, beta_kind, l2norm, scale, state_layout, lower_bound, *how):
    out, final = _results(q, k, v, gate, beta, A_log, dt_bias, cu_seqlens, initial_state, gate_kind, beta_kind, l2norm, scale, state_layout)
    _fake_run(q, k, v, gate, beta, A_log, dt_bias, cu_seqlens, initial_state, None, None, None, final, None, out, False, gate_kind, beta_kind, l2norm, scale,
              state_layout, lower_bound, None, 0, *how)
    return out, final


register("kda_prefill_out", _OUT, _run, _fake_run)
register("kda_prefill", _FUNCTIONAL, _functional, _fake_functional)


def kda_prefill(q, k, v, gate, beta, state=None, *, gate_kind, cu_seqlens=None, A_log=None, dt_bias=None, lower_bound=None, beta_kind="value",
                l2norm=False, scale=None, state_layout="vk", state_out=None, read_index=None, write_index=None, checkpoints=None,
                checkpoint_index=None, checkpoint_interval=0, null_slot=None, out=None, variant="auto", segments=0, exact=False, num_threads=0, stream=None):
    """cula.kda.kda_prefill on torch tensors; see there. With cu_seqlens, rows of no sequence are zeros where out is not given. In a trace, a pool
    that is read and written is one tensor passed as state and as state_out, and checkpoints go to a pool of their own."""
    if not traced(q):
        if out is None and cu_seqlens is not None and isinstance(v, torch.Tensor):
            out = new_out(v, cu_seqlens)
        out = kda.kda_prefill(q, k, v, gate, beta, state, gate_kind=gate_kind, cu_seqlens=cu_seqlens, A_log=A_log, dt_bias=dt_bias,
                              lower_bound=lower_bound, beta_kind=beta_kind, l2norm=l2norm, scale=scale, state_layout=state_layout,
                              state_out=state_out, read_index=read_index, write_index=write_index, checkpoints=checkpoints,
                              checkpoint_index=checkpoint_index, checkpoint_interval=checkpoint_interval, null_slot=null_slot, out=out,
                              variant=variant, segments=segments, exact=exact, num_threads=num_threads, stream=stream)
        if stream is not None:
            keep_for(stream, (q, k, v, gate, beta, state, cu_seqlens, A_log, dt_bias, state_out, read_index, write_index, checkpoints,
                              checkpoint_index, out))
        return out
    refuse_stream(stream)
    if checkpoints is not None and (checkpoints is state or checkpoints is state_out):
        raise InvalidArgumentError("kda_prefill: checkpoints is the tensor of state or state_out: in a traced graph it must be a pool of its own, "
                                   "because a trace may give the two operands different memory")
    in_place = state is not None and state is state_out
    if out is None:
        if v is None:
            raise InvalidArgumentError("kda_prefill: v is missing")
        out = new_out(v, cu_seqlens)
    torch.ops.cula.kda_prefill_out.default(q, k, v, gate, beta, A_log, dt_bias, cu_seqlens, None if in_place else state, read_index, write_index,
                                           checkpoint_index, state_out, checkpoints, out, in_place, gate_kind, beta_kind, l2norm, scale,
                                           state_layout, lower_bound, null_slot, checkpoint_interval, variant, segments, exact, num_threads)
    return out
