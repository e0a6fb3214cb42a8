"""The ops as the loader sees them: which operands, which of them are written, and how scalar options go into the args struct."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from ctypes import c_float, c_uint16
from dataclasses import dataclass, field

from . import abi
from .errors import InvalidArgumentError


@dataclass(frozen=True, eq=False)
class Op:
    name: str
    options: tuple[str, ...]  # names, in the order of a call's options tuple
    fill: Callable  # (args, *options): checks the options and writes them
    lead: str  # the operand that is always there; its framework's stream is asked for first
    outputs: tuple[str, ...]
    in_place: tuple[tuple[str, str], ...] = ()  # (operand, other): written unless `other` is given
    number: int = field(init=False)
    struct: type = field(init=False)
    tensors: tuple[str, ...] = field(init=False)  # order of a call's objects tuple
    lead_index: int = field(init=False)
    offsets: object = field(init=False)  # of the tensor fields, for cula_bind_objects

    def __post_init__(self):
        struct = abi.ARGS[self.name]
        offsets = (c_uint16 * len(struct.TENSORS))(*(getattr(struct, name).offset for name in struct.TENSORS))
        for name, value in dict(number=abi.OPS[self.name], struct=struct, tensors=struct.TENSORS, offsets=offsets,
                                lead_index=struct.TENSORS.index(self.lead)).items():
            object.__setattr__(self, name, value)

    def written(self, given: set[str]) -> set[str]:
        """Names of the operands that a call with the operands `given` writes."""
        return given & (set(self.outputs) | {name for name, other in self.in_place if other not in given})


def _fail(name: str, value, allowed: str):
    raise InvalidArgumentError(f"{name}={value!r}: allowed: {allowed}")


# Option sets are kept under their values, so what equals an allowed value must be allowed whether or not it came first: True is 1 is 1.0.


def _choice(name: str, value, table: dict[str, int]) -> int:
    if not isinstance(value, str) or value not in table:
        _fail(name, value, ", ".join(map(repr, table)))
    return table[value]


def _flag(name: str, value) -> int:
    if not isinstance(value, numbers.Real) or value not in (0, 1):
        _fail(name, value, "True, False")
    return int(value)


def _real(name: str, value) -> float:
    if not isinstance(value, numbers.Real):
        _fail(name, value, "a real number" + (" or None" if name in ("scale", "lower_bound") else ""))
    try:
        number = float(value)
        fits = math.isinf(number) or not math.isinf(c_float(number).value)
    except OverflowError:  # 10**400
        fits = False
    if not fits:  # the library would say "inf", which is not what was given
        _fail(name, value, "a number that float32 can hold")
    return number


def _integer(name: str, value, low: int, high: int) -> int:
    if not isinstance(value, numbers.Real) or not low <= value <= high or value != int(value):
        _fail(name, value, f"an integer from {low} to {high}")
    return int(value)


def _bound(lower_bound) -> float:
    """The field has 0 for "no bound", so a bound of 0 that was meant as one must not slip through."""
    if lower_bound is None:
        return 0.0
    if not -5 <= _real("lower_bound", lower_bound) < 0 or c_float(lower_bound).value == 0:  # -1e-50 is 0 in the field
        _fail("lower_bound", lower_bound, "a number in [-5, 0), or None for the softplus form")
    return float(lower_bound)


def _decode(name: str, gate_kinds: dict[str, str]) -> Op:
    """gate_kinds: this op's texts for gate_kind, with the names of cula.h."""
    numbers_of = {text: abi.GATE_KINDS[kind] for text, kind in gate_kinds.items()}

    def fill(args, gate_kind, *others):
        args.gate_kind = _choice("gate_kind", gate_kind, numbers_of)
        _fill_decode(args, *others)

    options = ("gate_kind", "beta_kind", "l2norm", "scale", "state_layout", "lower_bound", "null_slot", "num_threads")
    return Op(name, options, fill, lead="out", outputs=("out", "state_out"), in_place=(("state", "state_out"),))


def _fill_decode(args, beta_kind, l2norm, scale, state_layout, lower_bound, null_slot, num_threads):
    args.beta_kind = _choice("beta_kind", beta_kind, abi.BETA_KINDS)
    args.l2norm = _flag("l2norm", l2norm)
    args.has_scale, args.scale = (0, 0.0) if scale is None else (1, _real("scale", scale))
    args.state_layout = _choice("state_layout", state_layout, abi.STATE_LAYOUTS)
    args.lower_bound = _bound(lower_bound)
    args.has_null_slot, args.null_slot = (0, 0) if null_slot is None else (1, _integer("null_slot", null_slot, -(2**63), 2**63 - 1))
    args.num_threads = _integer("num_threads", num_threads, 0, 2**31 - 1)


def _fill_prefill(args, gate_kind, beta_kind, l2norm, scale, state_layout, lower_bound, null_slot, checkpoint_interval, variant, segments, exact,
                  num_threads):
    args.gate_kind = _choice("gate_kind", gate_kind, _PREFILL_GATES)
    _fill_decode(args, beta_kind, l2norm, scale, state_layout, lower_bound, null_slot, num_threads)
    args.checkpoint_interval = _integer("checkpoint_interval", checkpoint_interval, 0, 2**63 - 1)
    args.variant = _choice("variant", variant, abi.PREFILL_VARIANTS)
    args.segments = _integer("segments", segments, 0, 64)
    args.exact = _flag("exact", exact)


def _fill_gate(args, beta_kind, lower_bound, num_threads):
    args.beta_kind = _choice("beta_kind", beta_kind, abi.BETA_KINDS)
    args.lower_bound = _bound(lower_bound)
    args.num_threads = _integer("num_threads", num_threads, 0, 2**31 - 1)


def _fill_l2norm(args, eps, num_threads):
    args.eps = _real("eps", eps)
    if args.eps <= 0:  # 0 would mean the default
        _fail("eps", eps, "a number above 0")
    args.num_threads = _integer("num_threads", num_threads, 0, 2**31 - 1)


KDA_DECODE = _decode("kda_decode", {"none": "none", "log": "log_channel", "raw": "raw"})
GDN_DECODE = _decode("gdn_decode", {"none": "none", "log": "log_head", "raw": "raw"})
GLA_DECODE = _decode("gla_decode", {"none": "none", "log": "log_channel"})
LIGHTNING_DECODE = _decode("lightning_decode", {"none": "none", "log": "log_head", "decay": "const_head"})

_PREFILL_GATES = {"log": abi.GATE_KINDS["log_channel"], "raw": abi.GATE_KINDS["raw"]}
KDA_PREFILL = Op("kda_prefill", options=("gate_kind", "beta_kind", "l2norm", "scale", "state_layout", "lower_bound", "null_slot",
                                         "checkpoint_interval", "variant", "segments", "exact", "num_threads"),
                 fill=_fill_prefill, lead="out", outputs=("out", "state_out", "checkpoints"))

_GATE = dict(options=("beta_kind", "lower_bound", "num_threads"), fill=_fill_gate, lead="g", outputs=("g", "beta_out"))
KDA_GATE = Op("kda_gate", **_GATE)
GDN_GATE = Op("gdn_gate", **_GATE)
L2NORM = Op("l2norm", options=("eps", "num_threads"), fill=_fill_l2norm, lead="y", outputs=("y", "rstd"))

BY_NAME = {op.name: op for op in (KDA_DECODE, GDN_DECODE, GLA_DECODE, LIGHTNING_DECODE, KDA_PREFILL, KDA_GATE, GDN_GATE, L2NORM)}
