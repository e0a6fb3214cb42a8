"""The functions of flash-linear-attention 0.6 that a decoding model calls, with its keywords and results; those of KDA are in _fla_kda.

    from cula.torch import fused_recurrent_gated_delta_rule, fused_recurrent_gla, ...

What is here: one token a row (T = 1), which is what a layer passes while it decodes. Everything else is refused by name and never
computed in another way: T > 1, cu_seqlens, gradients, gv, reverse, an unknown keyword. Results are FLA's: (o [B,1,HV,V], final state or
None), states [B,HV,K,V], or [B,HV,V,K] with state_v_first; final states are new tensors, float32 as initial states are.
Where FLA would read `g`, `beta` and the states in float32, so does cula; l2norm is x / sqrt(sum x^2 + 1e-6) in both.
"""

from __future__ import annotations

import functools
import warnings

import torch

from cula_loader import InvalidArgumentError, UnsupportedError

from ._native import gdn_decode, gla_decode, lightning_decode
from ._tracing import refuse_no_tensor


def refuse(function: str, **given) -> None:
    """given: what is not supported, with its value; None and False mean that it was not asked for."""
    for name, value in given.items():
        if value is not None and value is not False:
            raise UnsupportedError(f"{function}: {name} is not supported by cula; flash-linear-attention's own {function} has it")


def check_tensors(function: str, required: dict, **others) -> None:
    """Each operand is a torch tensor; one of `others` may be None."""
    for name, x in (*required.items(), *others.items()):
        if x is None and name in required:
            raise InvalidArgumentError(f"{function}: {name} is missing")
        refuse_no_tensor(x, f"{function}: {name}")


def state_v_first_of(function: str, state_v_first: bool, others: dict) -> bool:
    """FLA's **kwargs: the old name of state_v_first, and nothing else."""
    if "transpose_state_layout" in others:
        if state_v_first:
            raise InvalidArgumentError(f"{function}: state_v_first and its old name transpose_state_layout are both given")
        warnings.warn("transpose_state_layout is the old name of state_v_first", DeprecationWarning, stacklevel=3)
        state_v_first = others.pop("transpose_state_layout")
    if others:
        raise TypeError(f"{function}() got an unexpected keyword argument {next(iter(others))!r}")
    return bool(state_v_first)


def _one_token(function: str, q, k, v, **others) -> None:
    check_tensors(function, dict(q=q, k=k, v=v), **others)
    if q.dim() != 4:
        raise InvalidArgumentError(f"{function}: q has shape {list(q.shape)}; expected [B,T,H,K]")
    if q.shape[1] != 1:
        raise UnsupportedError(f"{function}: T = {q.shape[1]}; cula's decode kernels take one token a row, T = 1, and the prefill kernels of "
                               f"this op are not built; flash-linear-attention's own {function} takes any T")


def _states(q, v, initial_state, v_first: bool) -> dict:
    """The state operands: read from initial_state, written to a new tensor."""
    if initial_state is not None:
        final = torch.empty_like(initial_state, memory_format=torch.contiguous_format)
    else:
        dims = (v.shape[-1], q.shape[-1]) if v_first else (q.shape[-1], v.shape[-1])
        final = torch.empty((q.shape[0], v.shape[2], *dims), dtype=torch.float32, device=q.device)
    return dict(state=initial_state, state_out=final, state_layout="vk" if v_first else "kv")


def beta_kind(function: str, sigmoid: bool, neg_eigval: bool) -> str:
    if neg_eigval and not sigmoid:
        raise InvalidArgumentError(f"{function}: allow_neg_eigval=True requires use_beta_sigmoid_in_kernel=True")
    return "logit_twice" if neg_eigval else "logit" if sigmoid else "value"


def fused_recurrent_gated_delta_rule(q, k, v, g=None, gk=None, gv=None, beta=None, scale=None, initial_state=None, output_final_state=False,
                                     use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False, A_log=None, dt_bias=None,
                                     use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, state_v_first=False, cu_seqlens=None,
                                     **kwargs):
    """fla.ops.gated_delta_rule.fused_recurrent_gated_delta_rule at T = 1. g [B,1,HV]; beta None: 1."""
    name = "fused_recurrent_gated_delta_rule"
    v_first = state_v_first_of(name, state_v_first, kwargs)
    refuse(name, cu_seqlens=cu_seqlens, gk=gk, gv=gv)
    _one_token(name, q, k, v, g=g, beta=beta, A_log=A_log, dt_bias=dt_bias, initial_state=initial_state)
    gate = dict(gate_kind="none" if g is None else "log")
    if use_gate_in_kernel:
        if g is None or A_log is None:
            raise InvalidArgumentError(f"{name}: use_gate_in_kernel=True requires g and A_log")
        gate = dict(A_log=A_log, dt_bias=dt_bias, gate_kind="raw")
    if beta is None:
        if use_beta_sigmoid_in_kernel:
            raise InvalidArgumentError(f"{name}: use_beta_sigmoid_in_kernel=True requires beta")
        beta = torch.ones(v.shape[:3], dtype=q.dtype, device=q.device)
    states = _states(q, v, initial_state, v_first)
    o = gdn_decode(q, k, v, g, beta, **states, **gate, beta_kind=beta_kind(name, use_beta_sigmoid_in_kernel, allow_neg_eigval),
                   l2norm=bool(use_qk_l2norm_in_kernel), scale=scale)
    return o, states["state_out"] if output_final_state else None


def fused_recurrent_gla(q, k, v, gk=None, gv=None, scale=None, initial_state=None, output_final_state=False, reverse=False,
                        state_v_first=False, cu_seqlens=None, **kwargs):
    """fla.ops.gla.fused_recurrent_gla at T = 1. gk [B,1,H,K]."""
    name = "fused_recurrent_gla"
    v_first = state_v_first_of(name, state_v_first, kwargs)
    refuse(name, cu_seqlens=cu_seqlens, gv=gv, reverse=reverse)
    _one_token(name, q, k, v, gk=gk, initial_state=initial_state)
    states = _states(q, v, initial_state, v_first)
    o = gla_decode(q, k, v, gk, **states, gate_kind="none" if gk is None else "log", scale=scale)
    return o, states["state_out"] if output_final_state else None


def fused_recurrent_simple_gla(q, k, v, g=None, g_gamma=None, scale=None, initial_state=None, output_final_state=False, reverse=False,
                               state_v_first=False, cu_seqlens=None, **kwargs):
    """fla.ops.simple_gla.fused_recurrent_simple_gla at T = 1. g [B,1,H] or g_gamma [H], logs of the decay."""
    name = "fused_recurrent_simple_gla"
    v_first = state_v_first_of(name, state_v_first, kwargs)
    refuse(name, cu_seqlens=cu_seqlens, reverse=reverse)
    _one_token(name, q, k, v, g=g, g_gamma=g_gamma, initial_state=initial_state)
    if g is not None and g_gamma is not None:
        raise InvalidArgumentError(f"{name}: g and g_gamma exclude each other")
    gate = g
    if g_gamma is not None:
        gate = g_gamma.expand(q.shape[0], 1, q.shape[2])
    states = _states(q, v, initial_state, v_first)
    o = lightning_decode(q, k, v, gate=gate, **states, gate_kind="none" if gate is None else "log", scale=scale)
    return o, states["state_out"] if output_final_state else None


@functools.lru_cache(maxsize=256)
def _lightning_decay(heads: int, layer_idx: int, num_layers: int, device: torch.device) -> torch.Tensor:
    """lambda [H] of a layer: exp(-(8 / H) (1 - layer_idx / num_layers) h)."""
    slopes = 8 / heads * (1 - layer_idx / num_layers) * torch.arange(heads, dtype=torch.float64)
    return torch.exp(-slopes).float().to(device)


def fused_recurrent_lightning_attn(q, k, v, layer_idx, num_layers, scale=None, initial_state=None, output_final_state=False, reverse=False,
                                   cu_seqlens=None):
    """fla.ops.lightning_attn.fused_recurrent_lightning_attn at T = 1; the decay of a layer is made once and kept."""
    name = "fused_recurrent_lightning_attn"
    refuse(name, cu_seqlens=cu_seqlens, reverse=reverse)
    _one_token(name, q, k, v, initial_state=initial_state)
    states = _states(q, v, initial_state, False)
    o = lightning_decode(q, k, v, decay=_lightning_decay(q.shape[2], layer_idx, num_layers, q.device), **states, scale=scale)
    return o, states["state_out"] if output_final_state else None
