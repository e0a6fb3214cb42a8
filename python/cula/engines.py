"""From what an inference engine has at a decode step to one cula call a layer. For torch tensors; knows no engine.

    read, write = slots_of_step(cache_indices, rows, has_initial_state=mask)      once a step, for all layers
    out = decode_rows("gdn", state=ssm_states, read_index=read, write_index=write, mixed_qkv=x, a=a, b=b, A_log=A_log, dt_bias=dt_bias)

Everything is read and written where the engine has it: the functions here make views, and in slots_of_step a few index tensors on the
device. Nothing is read on the host, so all of it may be captured in a CUDA graph. docs/engines.md has the names of vLLM and SGLang.

Only rows of one token. Prompts (chunk_kda, chunk_gated_delta_rule, ...) and the verification of draft tokens are refused.
"""

from __future__ import annotations

import math
import operator

import torch

from cula_loader import InvalidArgumentError, UnsupportedError

from . import gdn, gla, kda, lightning

_DECODE = {"kda": kda.kda_decode, "gdn": gdn.gdn_decode, "gla": gla.gla_decode, "lightning": lightning.lightning_decode}
_DELTA = ("kda", "gdn")  # have beta, and a raw gate
_CHANNEL_GATE = ("kda", "gla")  # a gate [N,HV,K]; the others have [N,HV]


def slots_of_step(slots, rows: int, *, write_slots=None, has_initial_state=None, query_start_loc=None, max_query_len: int = 1,
                  num_accepted_tokens=None):
    """read_index and write_index [rows] of a decode step, for every layer of it.

    slots        [S] int32 or int64, S >= rows without query_start_loc: the slot of each sequence (ssm_state_indices, cache_indices); or
                 [S,1]. Padding is -1, or the engine's null slot, which decode_rows is told. More than `rows` are left out
    rows         tokens of the step, padded ones included: the length of mixed_qkv or q
    write_slots  as slots: where the new state goes, if not where it comes from (a prefix cache keeps the old one)
    has_initial_state   [S] bool: False: the sequence starts from zero, whatever its slot holds
    query_start_loc     [S+1] int32 or int64, on the device, its tail padded by repeating the last value: for sequences without a token
                 in this step. Token t is then of the sequence whose range holds it, and tokens past the last are padding. Without
                 it row n is sequence n. No sequence may have more than one token: that is device data and not checked here; say what
                 the host knows in max_query_len
    max_query_len, num_accepted_tokens   as the engine has them: more than one token a sequence is refused

    Without has_initial_state and query_start_loc the results are views of slots, else new tensors of its dtype. Raises
    InvalidArgumentError for shapes and dtypes, UnsupportedError for steps that are not decode.
    """
    if num_accepted_tokens is not None:
        raise UnsupportedError("slots_of_step: num_accepted_tokens: the verification of draft tokens is not in cula yet; decode takes one token "
                               "a sequence")
    if max_query_len > 1:
        raise UnsupportedError(f"slots_of_step: max_query_len={max_query_len}: these are rows of one token. A prompt of KDA is cula.kda.kda_prefill's, with "
                               "query_start_loc as cu_seqlens; prefill of other ops and verification are not in cula yet; split the one-token rows off")
    rows = _count("slots_of_step: rows", rows)
    read = _slots("slots", slots)
    write = read if write_slots is None else _slots("write_slots", write_slots)
    if write.shape != read.shape:
        raise InvalidArgumentError(f"slots_of_step: write_slots has {write.shape[0]} sequences, slots has {read.shape[0]}")
    if query_start_loc is not None:
        _tensor("slots_of_step: query_start_loc", query_start_loc)
        sequences = query_start_loc.shape[0] - 1 if query_start_loc.ndim == 1 else -1
        if sequences < 0:
            raise InvalidArgumentError(f"slots_of_step: query_start_loc has shape {list(query_start_loc.shape)}; expected [sequences + 1]")
        _index_tensor("slots_of_step: query_start_loc", query_start_loc)
    else:
        sequences = read.shape[0]
    if rows > sequences:
        raise UnsupportedError(f"slots_of_step: {rows} rows of {sequences} sequences: some have more than one token, which is prefill "
                               "(of KDA: cula.kda.kda_prefill) or verification; decode takes one token a sequence")
    if read.shape[0] < sequences:
        raise InvalidArgumentError(f"slots_of_step: slots has {read.shape[0]} entries for {sequences} sequences")
    if query_start_loc is None:
        sequences = rows
    in_place = write is read
    read = read[:sequences]
    write = read if in_place else write[:sequences]
    if has_initial_state is not None:
        _tensor("slots_of_step: has_initial_state", has_initial_state)
        if has_initial_state.dtype != torch.bool or has_initial_state.ndim != 1 or has_initial_state.shape[0] < sequences:
            raise InvalidArgumentError(f"slots_of_step: has_initial_state is {has_initial_state.dtype} {list(has_initial_state.shape)}; "
                                       f"expected torch.bool [{sequences}] or longer")
        read = read.masked_fill(~has_initial_state[:sequences], -1)
        in_place = False
    if query_start_loc is not None:
        token = torch.arange(rows, dtype=query_start_loc.dtype, device=query_start_loc.device)
        sequence = torch.searchsorted(query_start_loc, token, right=True) - 1
        beyond = sequence >= sequences
        sequence = sequence.clamp(max=sequences - 1)
        read, written = read[sequence].masked_fill(beyond, -1), write
        write = read if in_place else written[sequence].masked_fill(beyond, -1)
    return read, write


def slots_of_blocks(block_table, block_index):
    """The slot of each sequence, [S], from a table of state blocks [S, blocks].

    block_index   an int: that column, as a view; or [S] int32 or int64 on the device: a column for each sequence, below `blocks`;
                  a negative one gives -1, padding
    """
    _tensor("slots_of_blocks: block_table", block_table)
    if block_table.ndim != 2 or block_table.dtype not in (torch.int32, torch.int64):
        raise InvalidArgumentError(f"slots_of_blocks: block_table is {block_table.dtype} {list(block_table.shape)}; expected int32 or int64 "
                                   "[sequences, blocks]")
    if not isinstance(block_index, torch.Tensor):
        block_index = _count("slots_of_blocks: block_index", block_index)
        if not 0 <= block_index < block_table.shape[1]:
            raise InvalidArgumentError(f"slots_of_blocks: block_index={block_index}: the table has {block_table.shape[1]} columns")
        return block_table[:, block_index]
    _index_tensor("slots_of_blocks: block_index", block_index)
    if block_index.shape != block_table.shape[:1]:
        raise InvalidArgumentError(f"slots_of_blocks: block_index has shape {list(block_index.shape)}; expected [{block_table.shape[0]}]")
    column = block_index.to(torch.int64).clamp(min=0).unsqueeze(1)
    return block_table.gather(1, column).squeeze(1).masked_fill(block_index < 0, -1)


def decode_rows(family: str, *, state, read_index, write_index=None, null_slot=None, q=None, k=None, v=None, mixed_qkv=None, a=None, b=None,
                g=None, beta=None, decay=None, A_log=None, dt_bias=None, lower_bound=None, allow_neg_eigval=False, l2norm=False, scale=None,
                state_layout="vk", state_out=None, out=None, num_threads=0, stream=None):
    """One token for each of N rows; returns out. family: "kda", "gdn", "gla" or "lightning".

    state        pool [slots,HV,V,K] (state_layout "vk") or [slots,HV,K,V] ("kv"), float32 or bf16; slots and heads at any stride of 16
                 bytes. It tells HV, V and K
    read_index, write_index   [N], from slots_of_step; write_index None: the slots that are read
    null_slot    the engine's padding slot, 0 in most that have one; None: only -1 is padding
    Rows, each [N,...], [1,N,...] or [N,1,...], with heads apart or in one dimension ([N,HV*K] for [N,HV,K]), at any row stride
        mixed_qkv [N, 2*H*K + HV*V], or q, k [N,H,K] and v [N,HV,V]
        a         kda, gdn: the raw gate, [N,HV,K] or [N,HV], with A_log and dt_bias of any shape;   g instead: the log of the decay
        b         kda, gdn: logits of beta [N,HV];   beta instead: its value.   allow_neg_eigval: 2 * sigmoid(b)
        decay     lightning: [HV] float32, exp(-slope), computed once for a layer;   g [N,HV] instead: simple GLA
        out       [N,HV,V], written and returned in the shape that it has; None: a new [N,HV,V]
    l2norm       use_qk_l2norm_in_kernel of the delta rule. Other options as in cula.kda.kda_decode

    Padding rows get zeros and touch no state. Raises as kda_decode does, and for a mixture of raw and activated operands.
    """
    if not isinstance(family, str) or family not in _DECODE:
        raise InvalidArgumentError(f"decode_rows: family={family!r}: allowed: {', '.join(map(repr, _DECODE))}")
    name = f"decode_rows: {family}"
    _tensor(f"{name}: state", state)
    _index_tensor(f"{name}: read_index", read_index)
    if state.ndim != 4:
        raise InvalidArgumentError(f"{name}: state has shape {list(state.shape)}; expected [slots,HV,V,K] or [slots,HV,K,V]")
    heads, value_dim, key_dim = state.shape[1], *(state.shape[2:] if state_layout == "vk" else reversed(state.shape[2:]))
    n = read_index.shape[0]
    options = {}
    if family in _DELTA:
        options |= _gate_of_delta_rule(name, family, n, heads, key_dim, a, g, A_log, dt_bias, lower_bound)
        options |= _beta(name, n, heads, b, beta, allow_neg_eigval)
        _refuse(name, decay=decay)
    else:
        _refuse(name, a=a, b=b, beta=beta, A_log=A_log, dt_bias=dt_bias, lower_bound=lower_bound, allow_neg_eigval=allow_neg_eigval or None)
        if decay is not None:
            if family == "gla":
                _refuse(name, decay=decay)
            options["decay"] = decay
        if g is not None:
            options |= {"gate": _rows(name, "g", g, n, _gate_shape(family, heads, key_dim)), "gate_kind": "log"}
    if mixed_qkv is not None:
        _refuse(f"{name}: mixed_qkv is given", q=q, k=k, v=v)
        _tensor(f"{name}: mixed_qkv", mixed_qkv)
        options["mixed_qkv"] = _rows(name, "mixed_qkv", mixed_qkv, n, (mixed_qkv.shape[-1],))
        given = out if out is not None else mixed_qkv.new_empty((n, heads, value_dim))
    else:
        if q is None or k is None or v is None:
            raise InvalidArgumentError(f"{name}: give mixed_qkv, or q, k and v")
        _tensor(f"{name}: q", q)
        query_heads = q.numel() // (n * key_dim) if n else q.shape[-2] if q.shape[-1] == key_dim else q.shape[-1] // key_dim
        options |= {"q": _rows(name, "q", q, n, (query_heads, key_dim)), "k": _rows(name, "k", k, n, (query_heads, key_dim)),
                    "v": _rows(name, "v", v, n, (heads, value_dim))}
        given = out if out is not None else v.new_empty((n, heads, value_dim))
    _DECODE[family](state=state, state_out=state_out, read_index=read_index, write_index=write_index, null_slot=null_slot,
                    out=_rows(name, "out", given, n, (heads, value_dim)), l2norm=l2norm, scale=scale, state_layout=state_layout,
                    num_threads=num_threads, stream=stream, **options)
    return given


def _gate_of_delta_rule(name, family, n, heads, key_dim, a, g, A_log, dt_bias, lower_bound) -> dict:
    if (a is None) == (g is None):
        raise InvalidArgumentError(f"{name}: give a, the raw gate, or g, the log of the decay" + (", not both" if a is not None else ""))
    if g is not None:
        _refuse(f"{name}: g is activated already", A_log=A_log, dt_bias=dt_bias, lower_bound=lower_bound)
        return {"gate": _rows(name, "g", g, n, _gate_shape(family, heads, key_dim)), "gate_kind": "log"}
    if A_log is None:
        raise InvalidArgumentError(f"{name}: a is a raw gate and needs A_log")
    made = {"gate": _rows(name, "a", a, n, _gate_shape(family, heads, key_dim)), "gate_kind": "raw", "A_log": A_log, "dt_bias": dt_bias}
    if family == "kda":
        made["lower_bound"] = lower_bound
    else:
        _refuse(name, lower_bound=lower_bound)
    return made


def _beta(name, n, heads, b, beta, twice) -> dict:
    if (b is None) == (beta is None):
        raise InvalidArgumentError(f"{name}: give b, the logits of beta, or beta" + (", not both" if b is not None else ""))
    if b is not None:
        return {"beta": _rows(name, "b", b, n, (heads,)), "beta_kind": "logit_twice" if twice else "logit"}
    if twice:
        raise InvalidArgumentError(f"{name}: allow_neg_eigval is for logits: a beta that is given as a value holds the factor 2 already")
    return {"beta": _rows(name, "beta", beta, n, (heads,)), "beta_kind": "value"}


def _gate_shape(family: str, heads: int, key_dim: int) -> tuple[int, ...]:
    return (heads, key_dim) if family in _CHANNEL_GATE else (heads,)


def _refuse(name: str, **operands) -> None:
    for operand, value in operands.items():
        if value is not None:
            raise InvalidArgumentError(f"{name}: {operand} does not apply")


def _rows(name: str, operand: str, x, n: int, row: tuple[int, ...]):
    """x as a view [n, *row]; a batch dimension of 1 goes, and heads in one dimension are taken apart. Never a copy."""
    _tensor(f"{name}: {operand}", x)
    given = x.shape
    if given == (n, *row):  # nearly always
        return x
    flat = (math.prod(row),)
    for shape in (row, flat):
        if given == (n, *shape):
            view = x
        elif given == (1, n, *shape):
            view = x[0]
        elif given == (n, 1, *shape):
            view = x[:, 0]
        else:
            continue
        return view if shape == row else view.unflatten(1, row)
    raise InvalidArgumentError(f"{name}: {operand} has shape {list(given)}; expected {[n, *row]}, also with a dimension of 1 before or after "
                               f"the {n} rows" + (f", or {[n, *flat]}" if len(row) > 1 else ""))


def _tensor(what: str, x) -> None:
    if not isinstance(x, torch.Tensor):
        raise InvalidArgumentError(f"{what} is a {type(x).__name__}; expected a torch tensor")


def _index_tensor(what: str, x) -> None:
    _tensor(what, x)
    if x.dtype not in (torch.int32, torch.int64):
        raise InvalidArgumentError(f"{what} is {x.dtype}; expected int32 or int64")


def _count(what: str, x) -> int:
    """A host integer that is not negative; True is 1 to Python, and a mask to torch."""
    try:
        value = -1 if isinstance(x, bool) else operator.index(x)
    except TypeError:
        value = -1
    if value < 0:
        raise InvalidArgumentError(f"{what}={x!r}; expected an integer from 0 on")
    return value


def _slots(operand: str, x):
    _index_tensor(f"slots_of_step: {operand}", x)
    if x.ndim == 2 and x.shape[1] == 1:
        return x[:, 0]
    if x.ndim == 2:
        raise UnsupportedError(f"slots_of_step: {operand} has shape {list(x.shape)}: a slot for each of several tokens is verification, which is "
                               "not in cula yet; of a block table take a column with slots_of_blocks")
    if x.ndim != 1:
        raise InvalidArgumentError(f"slots_of_step: {operand} has shape {list(x.shape)}; expected [sequences]")
    return x
