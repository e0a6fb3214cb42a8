"""kda_prefill for JAX: its results are returned, so there is no out=, and no stream=."""

from __future__ import annotations

from cula_loader import InvalidArgumentError

from ._xla import arrays, call, dtype_of


def kda_prefill(q, k, v, gate, beta, state=None, *, gate_kind, cu_seqlens=None, A_log=None, dt_bias=None, lower_bound=None, beta_kind="value",
                l2norm=False, scale=None, state_layout="vk", state_out=None, read_index=None, write_index=None, checkpoints=None,
                checkpoint_index=None, checkpoint_interval=0, null_slot=None, variant="auto", segments=0, exact=False, num_threads=0, donate=False):
    """(out, states) of all tokens of N sequences, or (out, states, checkpoints) where checkpoints are given. Operands and options are those of
    cula.kda.kda_prefill; here they are JAX arrays.

    out         [B,T,HV,V], dtype of v; with cu_seqlens, rows of tokens of no sequence have no meaning
    states      the pool after the call, with the final states in it: state_out where that is given, else state (for final states of
                sequences that start from nothing pass zeros); None without a pool. read_index and write_index as everywhere: with
                read_index, write_index must be given
    checkpoints the pool after the call. It must be an array of its own, because each pool that is given comes back as an array
    donate      a call outside jit: the pools that come back are in the memory of those that were passed, which are deleted

    On a GPU the call has a workspace among its results, of the size that is enough on every GPU, whatever its number of multiprocessors.
    Raises InvalidArgumentError and UnsupportedError while the call is traced; UnsupportedError under vmap and differentiation.
    """
    name = "kda_prefill"
    if state_out is state:
        state_out = None
    given = arrays(name, q=q, k=k, v=v, gate=gate, A_log=A_log, dt_bias=dt_bias, beta=beta, cu_seqlens=cu_seqlens, state=state, state_out=state_out,
                   read_index=read_index, write_index=write_index, checkpoints=checkpoints, checkpoint_index=checkpoint_index)
    if "v" not in given:
        raise InvalidArgumentError(f"{name}: v is missing")
    if checkpoints is not None and (checkpoints is state or checkpoints is state_out):
        raise InvalidArgumentError(f"{name}: checkpoints is the array of state or state_out: each comes back as an array, so it must be one of its own")
    pools = [("state_out" if state_out is not None else "state", "state_out")] if state is not None or state_out is not None else []
    if checkpoints is not None:
        pools.append(("checkpoints", "checkpoints"))
    options = (gate_kind, beta_kind, l2norm, scale, state_layout, lower_bound, null_slot, checkpoint_interval, variant, segments, exact, num_threads)
    out, *updated = call(name, options, given, {"out": (given["v"].shape, dtype_of(name, "v", given["v"]))}, tuple(pools), donate)
    states = updated.pop(0) if state is not None or state_out is not None else None
    return (out, states) if checkpoints is None else (out, states, updated[0])
