"""cula as a backend of flash-linear-attention, through its public registry (fla-core 0.6 and later).

    import cula.fla
    cula.fla.enable()     # chunk_kda, fused_recurrent_kda, and fused_recurrent_simple_gla of one token now run cula's kernels
    cula.fla.status()     # what is registered, what ran, and why calls were refused
    cula.fla.disable()

FLA asks the backend's verifier for every call. A call that cula does not take (a gradient, context parallelism, dims or dtypes that are
not built, a device without kernels; T > 1 for simple GLA) is refused with a reason and runs FLA's own kernel, so results are never changed, only times.
FLA offers hooks for some functions only: for GLA, Lightning and the gated delta rule import the functions of cula.torch instead.
FLA_CULA=0 in the environment switches the backend off, as FLA's other backends.
"""

from __future__ import annotations

import collections
import re
import threading

import torch

from cula_loader import CulaError, UnsupportedError

from . import kda, lightning
from ._query import query
from .torch._fla_kda import check_sequences, readable, readable_state
from .torch._prefill import new_out

_BACKEND = "cula"
_registered: list[str] = []
_accepted: collections.Counter = collections.Counter()
_refused: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
_REASONS = 100  # kept a function: messages have shapes in them, and a server sees new shapes for ever
_OTHER = "other reasons"


class _Refused(Exception):
    """Why a call goes to FLA's own kernel."""


def _check_gradient(tensors) -> None:
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        raise _Refused("an operand requires grad: forward only")


def _no_others(others: dict) -> None:
    if "transpose_state_layout" in others:
        raise _Refused("transpose_state_layout is an old name")
    if others:
        raise _Refused(f"keyword {next(iter(others))!r} is not known")


def _gate_of(use_gate_in_kernel, A_log, dt_bias, lower_bound) -> dict:
    """FLA reads A_log, dt_bias and lower_bound only with use_gate_in_kernel."""
    return dict(gate_kind="raw", A_log=A_log, dt_bias=dt_bias, lower_bound=lower_bound) if use_gate_in_kernel else dict(gate_kind="log")


def _beta_of(sigmoid, neg_eigval) -> str:
    if neg_eigval and not sigmoid:
        raise _Refused("allow_neg_eigval without use_beta_sigmoid_in_kernel")
    return "logit_twice" if neg_eigval else "logit" if sigmoid else "value"


def _new_states(n, q, v, state_v_first):
    dims = (v.shape[-1], q.shape[-1]) if state_v_first else (q.shape[-1], v.shape[-1])
    return torch.empty((n, v.shape[2], *dims), dtype=torch.float32, device=q.device)


def _kda_call(q, k, v, g, beta, A_log=None, dt_bias=None, initial_state=None, scale=None, output_final_state=False, inplace_final_state=True,
              state_v_first=False, cu_seqlens=None, ssm_state_indices=None, num_accepted_tokens=None, use_qk_l2norm_in_kernel=False,
              use_gate_in_kernel=False, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, lower_bound=None, out=None, **others):
    """(cula's function, its keywords, results) for a call of FLA's fused_recurrent_kda_fwd."""
    _no_others(others)
    n = check_sequences("fused_recurrent_kda_fwd", q, None, cu_seqlens)
    _check_gradient((q, k, v, g, beta, A_log, dt_bias, initial_state))
    one_token = cu_seqlens is None and q.shape[1] == 1
    if num_accepted_tokens is not None:
        raise _Refused("num_accepted_tokens: speculative decoding is not built")
    if ssm_state_indices is not None and (ssm_state_indices.dim() != 1 or not inplace_final_state or initial_state is None or not one_token):
        raise _Refused("ssm_state_indices: only one slot a row of one token, updated in place")  # of more tokens FLA stores every state
    rows = dict(q=q, k=k, v=v, gate=g, beta=beta, l2norm=bool(use_qk_l2norm_in_kernel), scale=scale, state=initial_state,
                beta_kind=_beta_of(use_beta_sigmoid_in_kernel, allow_neg_eigval), state_layout="vk" if state_v_first else "kv",
                out=new_out(v, cu_seqlens) if out is None else out, **_gate_of(use_gate_in_kernel, A_log, dt_bias, lower_bound))
    if inplace_final_state and initial_state is not None:
        final = initial_state
        rows.update(dict(read_index=ssm_state_indices) if one_token else dict(state_out=final))
    else:
        final = _new_states(n, q, v, state_v_first) if output_final_state or one_token else None
        rows.update(state_out=final, state=readable_state(initial_state))
    if not one_token:
        rows.update(cu_seqlens=cu_seqlens)
    return (kda.kda_decode if one_token else kda.kda_prefill), rows, (rows["out"], final if output_final_state or inplace_final_state else None)


def _chunk_kda_call(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False,
                    use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, safe_gate=False, lower_bound=None, disable_recompute=False,
                    return_intermediate_states=False, state_v_first=False, cu_seqlens=None, cu_seqlens_cpu=None, cp_context=None, use_graph=False,
                    max_num_seqs=None, A_log=None, dt_bias=None, chunk_size=64, **others):
    """(cula's function, its keywords, results) for a call of FLA's chunk_kda. What FLA itself would refuse is left to it."""
    _no_others(others)
    for name, value in dict(disable_recompute=disable_recompute, return_intermediate_states=return_intermediate_states, cp_context=cp_context).items():
        if value is not None and value is not False:
            raise _Refused(f"{name} is not built")
    n = check_sequences("chunk_kda", q, initial_state, cu_seqlens, cu_seqlens_cpu)
    _check_gradient((q, k, v, g, beta, A_log, dt_bias, initial_state))
    if chunk_size not in (32, 64):
        raise _Refused(f"chunk_size={chunk_size!r}: 32 and 64 are FLA's")
    if use_graph and max_num_seqs not in (None, n):
        raise _Refused(f"max_num_seqs={max_num_seqs!r} for {n} sequences")
    if use_gate_in_kernel and lower_bound is None and (A_log is None or safe_gate):
        raise _Refused("use_gate_in_kernel without A_log and lower_bound, or safe_gate without lower_bound")
    if initial_state is not None and initial_state.dtype != torch.float32:
        raise _Refused(f"initial_state is {initial_state.dtype}: FLA's own check says torch.float32")
    final = _new_states(n, q, v, state_v_first) if output_final_state else None
    rows = dict(zip(("q", "k", "v", "gate"), map(readable, (q, k, v, g))), beta=beta, l2norm=bool(use_qk_l2norm_in_kernel), scale=scale, cu_seqlens=cu_seqlens,
                beta_kind=_beta_of(use_beta_sigmoid_in_kernel, allow_neg_eigval), state_layout="vk" if state_v_first else "kv", out=new_out(v, cu_seqlens),
                state=readable_state(initial_state), state_out=final, **_gate_of(use_gate_in_kernel, A_log, dt_bias, lower_bound))
    return kda.kda_prefill, rows, (rows["out"], final)


def _simple_gla_call(q, k, v, g=None, g_gamma=None, scale=None, initial_state=None, output_final_state=False, reverse=False,
                     state_v_first=False, cu_seqlens=None, **others):
    """(cula's function, its keywords, results) for a call of FLA's fused_recurrent_simple_gla."""
    _no_others(others)
    if cu_seqlens is not None:
        raise _Refused("cu_seqlens: only fixed rows of one token are built")
    if q.dim() != 4 or q.shape[1] != 1:
        raise _Refused(f"q of shape {list(q.shape)}: only T = 1 is built")
    _check_gradient((q, k, v, g, g_gamma, initial_state))
    if reverse or (g is not None and g_gamma is not None):
        raise _Refused("reverse, or both g and g_gamma")
    gate = g if g_gamma is None else g_gamma.expand(q.shape[0], 1, q.shape[2])
    final = _new_states(q.shape[0], q, v, state_v_first)
    rows = dict(q=q, k=k, v=v, gate=gate, gate_kind="none" if gate is None else "log", scale=scale, state=initial_state, state_out=final,
                state_layout="vk" if state_v_first else "kv", out=torch.empty_like(v))
    return lightning.lightning_decode, rows, (rows["out"], final if output_final_state else None)


# FLA's function name: how a call of it is read.
_CALLS = {"fused_recurrent_kda_fwd": _kda_call, "chunk_kda": _chunk_kda_call, "fused_recurrent_simple_gla": _simple_gla_call}


def _count_refusal(name: str, reason: str) -> None:
    reasons = _refused[name]
    reason = re.sub(r"\b0x[0-9a-f]+", "0x...", reason)  # one tensor at two addresses is refused for one reason
    reasons[reason if reason in reasons or len(reasons) < _REASONS else _OTHER] += 1


def _backend(base: type, name: str) -> type:
    """FLA's adapter class for one of its functions. FLA calls the verifier and, if that accepts, at once the implementation with the same
    arguments, in the same thread: what the verifier made is kept in between."""
    read = _CALLS[name]

    class Backend(base):
        backend_type = _BACKEND
        package_name = None
        env_var = "FLA_CULA"
        priority = 2  # before FLA's own alternatives (3 and later)

    ready = threading.local()

    def verifier(self, *args, **kwargs):
        try:
            function, rows, results = read(*args, **kwargs)
            query(function, **rows)
        except (_Refused, CulaError, TypeError, AttributeError) as error:
            _count_refusal(name, str(error))
            return False, str(error)
        ready.call = function, rows, results
        return True, None

    def implementation(self, *args, **kwargs):
        function, rows, results = ready.call
        del ready.call
        function(**rows)
        _accepted[name] += 1
        return results

    setattr(Backend, name, implementation)
    setattr(Backend, f"{name}_verifier", verifier)
    return Backend


def enable() -> tuple[str, ...]:
    """Registers the backend; returns the functions of FLA that it serves. Idempotent.

    Raises UnsupportedError without flash-linear-attention 0.6 or later, and where FLA_DISABLE_BACKEND_DISPATCH=1 switched its registry off.
    """
    if _registered:
        return tuple(_registered)
    try:
        from fla import backends
    except ImportError as error:
        raise UnsupportedError(f"cula.fla needs flash-linear-attention 0.6 or later (pip install fla-core): {error}") from None
    if getattr(backends, "_DISPATCH_DISABLED", False):
        raise UnsupportedError("FLA_DISABLE_BACKEND_DISPATCH=1 is set: FLA ignores all backends")
    import fla.ops.kda.backends  # noqa: F401  makes the registry of 'kda'
    from fla.ops.kda import chunk_kda
    from fla.ops.simple_gla import fused_recurrent_simple_gla

    backends.register("kda")(_backend(backends.BaseBackend, "fused_recurrent_kda_fwd"))
    backends.register(chunk_kda)(_backend(backends.BaseBackend, "chunk_kda"))
    backends.register(fused_recurrent_simple_gla)(_backend(backends.BaseBackend, "fused_recurrent_simple_gla"))
    _registered.extend(_CALLS)
    return tuple(_registered)


def disable() -> None:
    """Takes the backend out of FLA's registries."""
    if not _registered:
        return
    from fla import backends

    for registry in (*backends._operation_registries.values(), *backends._function_registries.values()):
        registry._backends.pop(_BACKEND, None)
    _registered.clear()


def status() -> dict:
    """registered: FLA functions served now; ran: calls by function; refused: reasons with counts, by function."""
    return {"registered": tuple(_registered), "ran": dict(_accepted), "refused": {name: dict(reasons) for name, reasons in _refused.items()}}
