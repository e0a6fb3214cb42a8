"""A problem's operands in the memory of a machine, and the call on them."""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import numpy as np

from .. import gdn, gla, kda, lightning
from .problems import LOWER_BOUND, D, Problem

FUNCTIONS = {"kda": kda.kda_decode, "gdn": gdn.gdn_decode, "gla": gla.gla_decode, "lightning": lightning.lightning_decode}
_TILE = 1 << 16  # random elements, which the states of hundreds of sets repeat: a generator makes 0.4 GB/s


class Call(NamedTuple):
    run: object  # the call, without arguments
    out: object  # what the machine gave for `out`


def make(problem: Problem, machine, seed: int) -> Call:
    """machine.put(values float32 [any size], shape, dtype) gives an operand whose elements are the values, repeated as often as needed."""
    random = np.random.default_rng(seed)
    normal = lambda shape: random.standard_normal(min(math.prod(shape), _TILE), dtype="float32")  # noqa: E731
    uniform = lambda shape: random.random(min(math.prod(shape), _TILE), dtype="float32")  # noqa: E731
    heads = problem.heads[1]
    given = {name: machine.put(normal(shape), shape, machine.io) for name, shape in problem.row_shapes.items() if name not in ("out", "gate")}
    given["out"] = machine.put(np.full(1, np.nan, "float32"), problem.row_shapes["out"], machine.io)
    given["state"] = machine.put(normal(problem.state_shape) * np.float32(0.3), problem.state_shape, problem.state)
    if problem.op == "lightning":  # slopes of the layer in the middle of a deep model
        slopes = (8 / heads * (1 - 12 / 80)) * np.arange(heads, dtype="float32")
        given["decay"] = machine.put(np.exp(-slopes), (heads,), "fp32")
    elif problem.op == "gla":
        shape = problem.row_shapes["gate"]
        given |= {"gate": machine.put(-0.2 * uniform(shape), shape, machine.io), "gate_kind": "log"}
    else:
        shape = problem.row_shapes["gate"]
        bias = (heads, D) if problem.op == "kda" else (heads,)
        given |= {"gate": machine.put(normal(shape), shape, machine.io), "gate_kind": "raw", "beta_kind": "logit", "l2norm": True,
                  "A_log": machine.put(0.5 * uniform((heads,)), (heads,), "fp32"), "dt_bias": machine.put(2 * uniform(bias) - 2, bias, "fp32")}
        if problem.op == "kda":
            given["lower_bound"] = LOWER_BOUND
    return Call(partial(FUNCTIONS[problem.op], stream=machine.stream, **given), given["out"])


def bf16_bits(values: np.ndarray) -> np.ndarray:
    """float32 to the bits of bf16, by truncation: numpy has no bf16 of its own."""
    return (np.ascontiguousarray(values, "float32").view("uint32") >> 16).astype("uint16")
