"""chunk_kda and fused_recurrent_kda with the keywords and results of flash-linear-attention 0.6, forward only.

    from cula.torch import chunk_kda, fused_recurrent_kda

Any T, fixed rows or cu_seqlens; one token a row runs kda_decode, all else kda_prefill. Results are FLA's: (o [B,T,HV,V], final state [N,HV,K,V] float32,
or [N,HV,V,K] with state_v_first, or None). With cu_seqlens, rows of o that belong to no sequence are zeros, where FLA leaves them undefined.

An option is used or refused by name. Some of FLA's say how its kernels work, not what they compute; these are checked and need nothing here:
    safe_gate        with use_gate_in_kernel it asks for lower_bound, as in FLA; without, it promises g >= -5, which no kernel here needs
    cu_seqlens_cpu   a copy for the host, which FLA reads to make its list of chunks; cula needs none, and refuses one that is no cu_seqlens
    chunk_size       32 or 64, the chunks of FLA's kernels
    use_graph, max_num_seqs   every call here may be captured; max_num_seqs must be the number of sequences, as in FLA
"""

from __future__ import annotations

import torch

from cula_loader import InvalidArgumentError

from ._fla import beta_kind, check_tensors, refuse, state_v_first_of
from ._native import kda_decode
from ._prefill import kda_prefill, new_out


def _gate(function: str, in_kernel: bool, A_log, dt_bias, lower_bound) -> dict:
    if in_kernel:
        return dict(gate_kind="raw", A_log=A_log, dt_bias=dt_bias, lower_bound=lower_bound)
    for name, value in dict(A_log=A_log, dt_bias=dt_bias, lower_bound=lower_bound).items():
        if value is not None:
            raise InvalidArgumentError(f"{function}: {name} is given, but it belongs to use_gate_in_kernel=True: without, g is the log of the decay as it is")
    return dict(gate_kind="log")


def check_sequences(function: str, q, initial_state, cu_seqlens, cu_seqlens_cpu=None) -> int:
    """The number of sequences. Refuses what FLA refuses, and a host copy of cu_seqlens whose numbers cannot be one."""
    check_tensors(function, dict(q=q), initial_state=initial_state, cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens_cpu)
    if q.dim() != 4:
        raise InvalidArgumentError(f"{function}: q has shape {list(q.shape)}; expected [B,T,H,K]")
    if cu_seqlens is None:
        if cu_seqlens_cpu is not None:
            raise InvalidArgumentError(f"{function}: cu_seqlens_cpu is given without cu_seqlens, whose copy it is")
        n = q.shape[0]
    else:
        if q.shape[0] != 1:
            raise InvalidArgumentError(f"{function}: q has shape {list(q.shape)}; with cu_seqlens B must be 1: flatten the sequences into one row")
        if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
            raise InvalidArgumentError(f"{function}: cu_seqlens has shape {list(cu_seqlens.shape)}; expected [N+1]")
        n = cu_seqlens.shape[0] - 1
        if cu_seqlens_cpu is not None:
            _check_host_copy(function, q.shape[1], cu_seqlens, cu_seqlens_cpu)
    if initial_state is not None and (initial_state.dim() != 4 or initial_state.shape[0] != n):
        raise InvalidArgumentError(f"{function}: initial_state has shape {list(initial_state.shape)}; expected one state for each of {n} sequences")
    return n


def _check_host_copy(function: str, tokens: int, cu_seqlens, copy) -> None:
    if copy.device.type != "cpu" or copy.shape != cu_seqlens.shape:
        raise InvalidArgumentError(f"{function}: cu_seqlens_cpu has shape {list(copy.shape)} on {copy.device}; expected {list(cu_seqlens.shape)} on cpu, "
                                   "a copy of cu_seqlens")
    if copy.dtype not in (torch.int32, torch.int64):
        raise InvalidArgumentError(f"{function}: cu_seqlens_cpu is {copy.dtype}; must be torch.int32 or torch.int64")
    if torch.compiler.is_compiling() or type(copy) is not torch.Tensor:  # no values to look at in a trace
        return
    ends = copy.tolist()
    if ends[0] < 0 or ends[-1] > tokens or any(a > b for a, b in zip(ends, ends[1:])):
        raise InvalidArgumentError(f"{function}: cu_seqlens_cpu is {_some(ends)}; expected numbers that never fall, from 0 to T = {tokens}")
    if cu_seqlens.device.type == "cpu" and type(cu_seqlens) is torch.Tensor and ends != cu_seqlens.tolist():
        raise InvalidArgumentError(f"{function}: cu_seqlens_cpu is {_some(ends)}; expected the numbers of cu_seqlens, {_some(cu_seqlens.tolist())}")


def _some(numbers: list) -> str:
    return f"{numbers[:8]}{'...' if len(numbers) > 8 else ''}"


def readable(x):
    """FLA copies what is not contiguous before its kernels run; cula only where its kernels cannot read it: a last stride other than 1."""
    return x if x is None or x.shape[-1] < 2 or x.stride(-1) == 1 else x.contiguous()


def readable_state(state):
    """An initial state in float32 (a rounded one has no more digits than it had), compact in each head."""
    if state is None:
        return None
    state = state.float()
    inner = state.shape[-1]
    return state if state.stride(-1) == 1 and state.stride(-2) == inner else state.contiguous()


def _prefill(q, k, v, g, beta, n, cu_seqlens, initial_state, output_final_state, v_first, gate, kind, l2norm, scale):
    state = readable_state(initial_state)
    final = None
    if output_final_state:
        dims = (v.shape[-1], q.shape[-1]) if v_first else (q.shape[-1], v.shape[-1])
        final = torch.empty((n, v.shape[-2], *dims), dtype=torch.float32, device=v.device)
    cu_seqlens = cu_seqlens if cu_seqlens is None else cu_seqlens.contiguous()
    o = kda_prefill(*map(readable, (q, k, v, g)), beta, state, **gate, cu_seqlens=cu_seqlens, beta_kind=kind, l2norm=l2norm, scale=scale,
                    state_layout="vk" if v_first else "kv", state_out=final, out=new_out(v, cu_seqlens))
    return o, final


def chunk_kda(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False,
              use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, safe_gate=False, lower_bound=None, disable_recompute=False,
              return_intermediate_states=False, state_v_first=False, cu_seqlens=None, cu_seqlens_cpu=None, cp_context=None, use_graph=False,
              max_num_seqs=None, **kwargs):
    """fla.ops.kda.chunk_kda, forward. q, k [B,T,H,K], v [B,T,HV,V], g [B,T,HV,K], beta [B,T,HV]; further keywords: A_log [HV], dt_bias [HV*K], chunk_size."""
    name = "chunk_kda"
    A_log, dt_bias, chunk_size = kwargs.pop("A_log", None), kwargs.pop("dt_bias", None), kwargs.pop("chunk_size", 64)
    v_first = state_v_first_of(name, state_v_first, kwargs)
    refuse(name, disable_recompute=disable_recompute, return_intermediate_states=return_intermediate_states, cp_context=cp_context)
    if chunk_size not in (32, 64):
        raise InvalidArgumentError(f"{name}: chunk_size={chunk_size!r}: allowed: 32, 64")
    check_tensors(name, dict(q=q, k=k, v=v, g=g, beta=beta), A_log=A_log, dt_bias=dt_bias)
    n = check_sequences(name, q, initial_state, cu_seqlens, cu_seqlens_cpu)
    if initial_state is not None and initial_state.dtype != torch.float32:
        raise InvalidArgumentError(f"{name}: initial_state is {initial_state.dtype}; must be torch.float32")
    if max_num_seqs is not None and (not use_graph or max_num_seqs != n):
        raise InvalidArgumentError(f"{name}: max_num_seqs={max_num_seqs!r}: it belongs to use_graph=True and is the number of sequences, {n}: pad cu_seqlens with empty ones")
    if use_gate_in_kernel:
        if A_log is None and lower_bound is None:
            raise InvalidArgumentError(f"{name}: use_gate_in_kernel=True requires A_log or lower_bound")
        if safe_gate and lower_bound is None:
            raise InvalidArgumentError(f"{name}: safe_gate=True with use_gate_in_kernel=True requires lower_bound")
    elif safe_gate and lower_bound is not None:
        lower_bound = None  # the bound that the caller's own g keeps
    return _prefill(q, k, v, g, beta, n, cu_seqlens, initial_state, output_final_state, v_first, _gate(name, use_gate_in_kernel, A_log, dt_bias, lower_bound),
                    beta_kind(name, use_beta_sigmoid_in_kernel, allow_neg_eigval), bool(use_qk_l2norm_in_kernel), scale)


def fused_recurrent_kda(q, k, v, g, beta, A_log=None, dt_bias=None, scale=None, initial_state=None, output_final_state=False,
                        use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False,
                        lower_bound=None, state_v_first=False, cu_seqlens=None, **kwargs):
    """fla.ops.kda.fused_recurrent_kda. q, k [B,T,H,K], v [B,T,HV,V], g [B,T,HV,K], beta [B,T,HV]."""
    name = "fused_recurrent_kda"
    v_first = state_v_first_of(name, state_v_first, kwargs)
    check_tensors(name, dict(q=q, k=k, v=v, g=g, beta=beta), A_log=A_log, dt_bias=dt_bias)
    n = check_sequences(name, q, initial_state, cu_seqlens)
    gate = _gate(name, use_gate_in_kernel, A_log, dt_bias, lower_bound)
    kind, l2norm = beta_kind(name, use_beta_sigmoid_in_kernel, allow_neg_eigval), bool(use_qk_l2norm_in_kernel)
    if cu_seqlens is not None or q.shape[1] != 1:
        return _prefill(q, k, v, g, beta, n, cu_seqlens, initial_state, output_final_state, v_first, gate, kind, l2norm, scale)
    dims = (v.shape[-1], q.shape[-1]) if v_first else (q.shape[-1], v.shape[-1])
    final = torch.empty((n, v.shape[2], *dims), dtype=torch.float32, device=v.device)
    o = kda_decode(*map(readable, (q, k, v, g)), beta, readable_state(initial_state), state_out=final, state_layout="vk" if v_first else "kv", **gate,
                   beta_kind=kind, l2norm=l2norm, scale=scale)
    return o, final if output_final_state else None
