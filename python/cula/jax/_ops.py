"""The functions of cula.kda, cula.gdn, cula.gla, cula.lightning and cula.norm for JAX: same names, operands and options, but results are
returned instead of written, so there is no out=, and no stream=, since XLA has its own."""

from __future__ import annotations

from cula_loader import InvalidArgumentError

from .._gate import gate_options
from ._xla import arrays, call, dtype_of


def _decode(name, q, k, v, mixed_qkv, gate, A_log, dt_bias, beta, state, state_out, read_index, write_index, gate_kind, beta_kind, l2norm,
            scale, state_layout, lower_bound, null_slot, num_threads, donate):
    given = arrays(name, q=q, k=k, v=v, mixed_qkv=mixed_qkv, gate=gate, A_log=A_log, dt_bias=dt_bias, beta=beta, state=state,
                   state_out=state_out, read_index=read_index, write_index=write_index)
    options = (gate_kind, beta_kind, l2norm, scale, state_layout, lower_bound, null_slot, num_threads)
    pool = next((key for key in ("state_out", "state") if key in given), None)
    out = _out(name, given.get("v"), given.get("mixed_qkv"), given.get(pool), state_layout)
    results = call(name, options, given, {"out": out}, ((pool, pool),) if pool else (), donate)
    return results if pool else (*results, None)


def _out(name, v, mixed_qkv, pool, state_layout):
    """Shape and dtype of out for rows v, or for packed rows, whose value heads only a pool tells."""
    if v is not None:
        return v.shape, dtype_of(name, "v", v)
    if mixed_qkv is None:
        raise InvalidArgumentError(f"{name}: v is missing: give q, k and v, or mixed_qkv")
    if pool is None or len(pool.shape) != 4:
        raise InvalidArgumentError(f"{name}: mixed_qkv alone does not tell HV and V: pass state, [slots,HV,V,K] or [slots,HV,K,V]")
    value_dim = pool.shape[3] if state_layout == "kv" else pool.shape[2]
    return (*mixed_qkv.shape[:-1], pool.shape[1], value_dim), dtype_of(name, "mixed_qkv", mixed_qkv)


def kda_decode(q=None, k=None, v=None, gate=None, beta=None, state=None, *, mixed_qkv=None, A_log=None, dt_bias=None, lower_bound=None,
               gate_kind="none", beta_kind="value", l2norm=False, scale=None, state_layout="vk", state_out=None, read_index=None,
               write_index=None, null_slot=None, num_threads=0, donate=False):
    """(out, states) of one token for each of N rows. Operands and options are those of cula.kda.kda_decode; here they are JAX arrays.

    out         [N,HV,V], dtype of the rows
    states      the pool after the call: state, or state_out where that is given, with the written slots updated; None without a pool
    donate      a call outside jit: the pool's memory is used for the result, and the array that was passed is deleted. Inside jit XLA does
                so by itself where the pool is not used afterwards; donate it to the jit then, or carry it through the loop
    read_index, write_index   with jax_enable_x64 off JAX makes int32 of int64 before cula sees them; both are read

    Raises InvalidArgumentError and UnsupportedError while the call is traced; UnsupportedError under vmap and differentiation.
    """
    return _decode("kda_decode", q, k, v, mixed_qkv, gate, A_log, dt_bias, beta, state, state_out, read_index, write_index, gate_kind,
                   beta_kind, l2norm, scale, state_layout, lower_bound, null_slot, num_threads, donate)


def gdn_decode(q=None, k=None, v=None, gate=None, beta=None, state=None, *, mixed_qkv=None, A_log=None, dt_bias=None, gate_kind="none",
               beta_kind="value", l2norm=False, scale=None, state_layout="vk", state_out=None, read_index=None, write_index=None,
               null_slot=None, num_threads=0, donate=False):
    """(out, states) of one token for each of N rows: cula.gdn.gdn_decode; results and donate as in kda_decode here."""
    return _decode("gdn_decode", q, k, v, mixed_qkv, gate, A_log, dt_bias, beta, state, state_out, read_index, write_index, gate_kind,
                   beta_kind, l2norm, scale, state_layout, None, null_slot, num_threads, donate)


def gla_decode(q=None, k=None, v=None, gate=None, state=None, *, mixed_qkv=None, gate_kind="none", l2norm=False, scale=None,
               state_layout="vk", state_out=None, read_index=None, write_index=None, null_slot=None, num_threads=0, donate=False):
    """(out, states) of one token for each of N rows: cula.gla.gla_decode; results and donate as in kda_decode here."""
    return _decode("gla_decode", q, k, v, mixed_qkv, gate, None, None, None, state, state_out, read_index, write_index, gate_kind, "value",
                   l2norm, scale, state_layout, None, null_slot, num_threads, donate)


def lightning_decode(q=None, k=None, v=None, state=None, *, decay=None, gate=None, gate_kind="none", mixed_qkv=None, l2norm=False,
                     scale=None, state_layout="vk", state_out=None, read_index=None, write_index=None, null_slot=None, num_threads=0,
                     donate=False):
    """(out, states) of one token for each of N rows: cula.lightning.lightning_decode; results and donate as in kda_decode here."""
    if decay is not None:
        if gate is not None or gate_kind != "none":
            raise InvalidArgumentError("lightning_decode: decay and gate exclude each other: lambda is a constant a head, or exp(gate)")
        gate, gate_kind = decay, "decay"
    elif gate_kind == "decay":
        raise InvalidArgumentError("lightning_decode: gate_kind='decay': allowed: 'none', 'log'; pass the constant as decay=")
    return _decode("lightning_decode", q, k, v, mixed_qkv, gate, None, None, None, state, state_out, read_index, write_index, gate_kind,
                   "value", l2norm, scale, state_layout, None, null_slot, num_threads, donate)


def _gate(name, x, A_log, dt_bias, lower_bound, beta, beta_kind, dtype, num_threads):
    beta_kind, dtype = gate_options(name, beta, beta_kind, dtype)
    given = arrays(name, x=x, A_log=A_log, dt_bias=dt_bias, beta=beta)
    if "x" not in given:
        raise InvalidArgumentError(f"{name}: x is missing")
    results = {"g": (given["x"].shape, dtype)}
    if beta is not None:
        results["beta_out"] = (given["beta"].shape, dtype)
    made = call(name, (beta_kind, lower_bound, num_threads), given, results)
    return made[0] if beta is None else made


def kda_gate(x, A_log=None, dt_bias=None, *, lower_bound=None, beta=None, beta_kind=None, dtype=None, num_threads=0):
    """g, or (g, beta) where beta is given: cula.kda.kda_gate."""
    return _gate("kda_gate", x, A_log, dt_bias, lower_bound, beta, beta_kind, dtype, num_threads)


def gdn_gate(x, A_log=None, dt_bias=None, *, beta=None, beta_kind=None, dtype=None, num_threads=0):
    """g, or (g, beta) where beta is given: cula.gdn.gdn_gate."""
    return _gate("gdn_gate", x, A_log, dt_bias, None, beta, beta_kind, dtype, num_threads)


def l2norm(x, *, eps=1e-6, dtype=None, num_threads=0):
    """x / sqrt(sum x^2 + eps) over the last dimension, of x's dtype or dtype: cula.norm.l2norm."""
    if dtype not in (None, "fp32", "bf16", "fp16"):
        raise InvalidArgumentError(f"l2norm: dtype={dtype!r}: allowed: None, 'fp32', 'bf16', 'fp16'")
    given = arrays("l2norm", x=x)
    if "x" not in given:
        raise InvalidArgumentError("l2norm: x is missing")
    return call("l2norm", (eps, num_threads), given, {"y": (given["x"].shape, dtype or dtype_of("l2norm", "x", given["x"]))})[0]
