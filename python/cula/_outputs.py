"""Outputs that the caller did not give."""

from __future__ import annotations

import numbers

from cula_loader import InvalidArgumentError, empty


def refuse_no_integers(op: str, num_threads, null_slot=None, **others) -> None:
    """For a call with another type than int in one of them. True and 2.0 equal allowed values, and option sets are kept under their values: so
    they cannot be told apart further down. NumPy's integers are taken. others: further integer options, by name."""
    for name, value in dict(num_threads=num_threads, null_slot=null_slot, **others).items():
        if isinstance(value, bool) or not (isinstance(value, numbers.Integral) or (name == "null_slot" and value is None)):
            raise InvalidArgumentError(f"{op}: {name}={value!r}: allowed: an integer" + (" or None" if name == "null_slot" else ""))


def new_out(op: str, v, mixed_qkv, state, state_layout):
    """out for rows v, or for packed rows, whose value heads only the state's shape tells."""
    if v is not None:
        return empty(v, "out", shape_of(op, "v", v))
    if mixed_qkv is None:
        raise InvalidArgumentError(f"{op}: v is missing: give q, k and v, or mixed_qkv")
    if state is None:
        raise InvalidArgumentError(f"{op}: mixed_qkv alone does not tell HV and V: pass out= or state")
    slots = shape_of(op, "state", state)
    if len(slots) != 4:
        raise InvalidArgumentError(f"{op}: state has shape {list(slots)}; expected [slots,HV,V,K] or [slots,HV,K,V]")
    value_dim = slots[3] if state_layout == "kv" else slots[2]
    return empty(mixed_qkv, "out", (*shape_of(op, "mixed_qkv", mixed_qkv)[:-1], slots[1], value_dim))


def shape_of(op: str, name: str, x) -> tuple[int, ...]:
    """x.shape, or the refusal of something that is no array."""
    if x is None:
        raise InvalidArgumentError(f"{op}: {name} is missing")
    try:
        return tuple(x.shape)
    except AttributeError:
        raise InvalidArgumentError(f"{op}: {name}: {type(x).__qualname__} is no array: it has no shape") from None
