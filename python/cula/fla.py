"""cula as a backend of flash-linear-attention, through its public registry (fla-core 0.6 and later).

    import cula.fla
    cula.fla.enable()     # fused_recurrent_kda and fused_recurrent_simple_gla of one token now run cula's kernels
    cula.fla.status()     # what is registered, what ran, and why calls were refused
    cula.fla.disable()

FLA asks the backend's verifier for every call. A call that cula does not take (T > 1, cu_seqlens, a gradient, dims or dtypes that are not
built, a device without kernels) is refused with a reason and runs FLA's own kernel, so results are never changed, only times.
FLA offers hooks for some functions only: for GLA, Lightning and the gated delta rule import the functions of cula.torch instead.
FLA_CULA=0 in the environment switches the backend off, as FLA's other backends.
"""

from __future__ import annotations

import collections
import threading

import torch

from cula_loader import CulaError, UnsupportedError

from . import kda, lightning
from ._query import query

_BACKEND = "cula"
_registered: list[str] = []
_accepted: collections.Counter = collections.Counter()
_refused: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)


class _Refused(Exception):
    """Why a call goes to FLA's own kernel."""


def _check_rows(q, tensors, cu_seqlens) -> None:
    if cu_seqlens is not None:
        raise _Refused("cu_seqlens: only fixed rows of one token are built")
    if q.dim() != 4 or q.shape[1] != 1:
        raise _Refused(f"q of shape {list(q.shape)}: only T = 1 is built")
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        raise _Refused("an operand requires grad: forward only")


def _kda_call(q, k, v, g, beta, A_log=None, dt_bias=None, initial_state=None, scale=None, output_final_state=False, inplace_final_state=True,
              state_v_first=False, cu_seqlens=None, ssm_state_indices=None, num_accepted_tokens=None, use_qk_l2norm_in_kernel=False,
              use_gate_in_kernel=False, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, lower_bound=None, out=None, **others):
    """(keywords of cula.kda.kda_decode, results) for a call of FLA's fused_recurrent_kda_fwd."""
    if others:
        raise _Refused(f"keyword {next(iter(others))!r} is not known")
    _check_rows(q, (q, k, v, g, beta, A_log, dt_bias, initial_state), cu_seqlens)
    if num_accepted_tokens is not None:
        raise _Refused("num_accepted_tokens: speculative decoding is not built")
    if ssm_state_indices is not None and (ssm_state_indices.dim() != 1 or not inplace_final_state or initial_state is None):
        raise _Refused("ssm_state_indices: only one slot a row, updated in place")
    if allow_neg_eigval and not use_beta_sigmoid_in_kernel:
        raise _Refused("allow_neg_eigval without use_beta_sigmoid_in_kernel")
    rows = dict(q=q, k=k, v=v, gate=g, beta=beta, l2norm=bool(use_qk_l2norm_in_kernel), scale=scale,
                beta_kind="logit_twice" if allow_neg_eigval else "logit" if use_beta_sigmoid_in_kernel else "value",
                state_layout="vk" if state_v_first else "kv", gate_kind="log", out=torch.empty_like(v) if out is None else out)
    if use_gate_in_kernel:
        rows.update(gate_kind="raw", A_log=A_log, dt_bias=dt_bias, lower_bound=lower_bound)
    if inplace_final_state and initial_state is not None:
        rows.update(state=initial_state, read_index=ssm_state_indices)
        final = initial_state
    else:
        dims = (v.shape[-1], q.shape[-1]) if state_v_first else (q.shape[-1], v.shape[-1])
        final = torch.empty((q.shape[0], v.shape[2], *dims), dtype=torch.float32, device=q.device)
        rows.update(state=initial_state, state_out=final)
    return rows, (rows["out"], final if output_final_state or inplace_final_state else None)


def _simple_gla_call(q, k, v, g=None, g_gamma=None, scale=None, initial_state=None, output_final_state=False, reverse=False,
                     state_v_first=False, cu_seqlens=None, **others):
    """(keywords of cula.lightning.lightning_decode, results) for a call of FLA's fused_recurrent_simple_gla."""
    if "transpose_state_layout" in others:
        raise _Refused("transpose_state_layout is an old name")
    if others:
        raise _Refused(f"keyword {next(iter(others))!r} is not known")
    _check_rows(q, (q, k, v, g, g_gamma, initial_state), cu_seqlens)
    if reverse or (g is not None and g_gamma is not None):
        raise _Refused("reverse, or both g and g_gamma")
    gate = g if g_gamma is None else g_gamma.expand(q.shape[0], 1, q.shape[2])
    dims = (v.shape[-1], q.shape[-1]) if state_v_first else (q.shape[-1], v.shape[-1])
    final = torch.empty((q.shape[0], v.shape[2], *dims), dtype=torch.float32, device=q.device)
    rows = dict(q=q, k=k, v=v, gate=gate, gate_kind="none" if gate is None else "log", scale=scale, state=initial_state, state_out=final,
                state_layout="vk" if state_v_first else "kv", out=torch.empty_like(v))
    return rows, (rows["out"], final if output_final_state else None)


# FLA's function name: how a call is read, and cula's function for it.
_CALLS = {"fused_recurrent_kda_fwd": (_kda_call, kda.kda_decode), "fused_recurrent_simple_gla": (_simple_gla_call, lightning.lightning_decode)}


def _backend(base: type, name: str) -> type:
    """FLA's adapter class for one of its functions. FLA calls the verifier and, if that accepts, at once the implementation with the same
    arguments, in the same thread: what the verifier made is kept in between."""
    read, function = _CALLS[name]

    class Backend(base):
        backend_type = _BACKEND
        package_name = None
        env_var = "FLA_CULA"
        priority = 2  # before FLA's own alternatives (3 and later)

    ready = threading.local()

    def verifier(self, *args, **kwargs):
        try:
            rows, results = read(*args, **kwargs)
            query(function, **rows)
        except (_Refused, CulaError, TypeError) as error:
            _refused[name][str(error)] += 1
            return False, str(error)
        ready.call = rows, results
        return True, None

    def implementation(self, *args, **kwargs):
        rows, results = ready.call
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
    from fla.ops.simple_gla import fused_recurrent_simple_gla

    backends.register("kda")(_backend(backends.BaseBackend, "fused_recurrent_kda_fwd"))
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
