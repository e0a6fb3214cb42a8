"""Random calls of the Python front end.

Valid ones: any combination of the axes of cases.py, beyond the covering selection, judged as every case is. Spoiled ones: a valid
call with one or two operands or options replaced by something arbitrary; it either raises what it should, with the operator's
name first and nothing written, or it is legal and writes nothing but out and the states.

CULA_FUZZ=5000 draws that many new examples instead of the fixed ones.
"""

from __future__ import annotations

import os

import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import cula
from benchmarks.cula_call import FUNCTIONS
from tests.cases.tools import DELTA, pool, rows
from tests.numerics import cases, problem
from tests.numerics.call import decode

EXAMPLES = int(os.environ.get("CULA_FUZZ", "0"))
FIXED = settings(max_examples=EXAMPLES or 80, derandomize=not EXAMPLES, deadline=None, database=None,
                 suppress_health_check=list(HealthCheck))


@st.composite
def valid_cases(draw) -> cases.Case:
    row = {"op": draw(st.sampled_from(sorted(cases.GATES)))}
    for axis, values in cases.axes_of(row["op"]).items():
        allowed = [v for v in values if cases.feasible({**row, axis: v})]
        row[axis] = draw(st.sampled_from(allowed))
    return cases.Case(**row)


@FIXED
@given(valid_cases())
def test_any_combination(case):
    p = problem.build(case, "cpu")
    decode(case.op, **{name: x.dev for name, x in p.op_args.items()}, **p.options)
    assert cula.last_kernels() == (case.kernel_id("cpu"),)
    problem.check(p)


DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.int64, torch.int8, torch.bool,
          torch.complex64)
EXTENTS = st.one_of(st.integers(0, 5), st.sampled_from((16, 32, 64, 128, 256, 2**20 + 1)))


@st.composite
def odd_tensors(draw):
    """A tensor of any shape, dtype, strides and offset within a small storage, and things that are nearly tensors."""
    kind = draw(st.sampled_from(("tensor", "tensor", "tensor", "numpy", "expanded", "transposed", "meta", "grad")))
    shape = draw(st.lists(EXTENTS, max_size=6))
    while np.prod([max(e, 1) for e in shape]) > 2**21:
        shape.remove(max(shape))
    dtype = draw(st.sampled_from(DTYPES))
    if kind == "meta":
        return torch.empty(shape, dtype=dtype, device="meta")
    if kind == "numpy":
        return np.zeros(shape, draw(st.sampled_from((np.float32, np.float16, np.float64, np.int32, np.uint64, "S3", object))))
    x = torch.ones(shape, dtype=dtype)
    if kind == "expanded":
        return torch.ones((), dtype=dtype).expand(shape)
    if kind == "transposed" and len(shape) > 1:
        return x.transpose(draw(st.integers(0, len(shape) - 1)), draw(st.integers(0, len(shape) - 1)))
    if kind == "grad" and dtype in (torch.float32, torch.bfloat16):
        return x.requires_grad_()
    return x


JUNK = st.one_of(st.none(), st.booleans(), st.integers(-2**70, 2**70), st.floats(), st.text(max_size=5), st.binary(max_size=3),
                 st.lists(st.integers(), max_size=3), st.just(object()), st.just(torch.float32), st.just(b"raw"), st.just(("kv",)))
OPTIONS = ("gate_kind", "beta_kind", "l2norm", "scale", "state_layout", "lower_bound", "null_slot", "num_threads", "donate", "stream")
OPERANDS = ("q", "k", "v", "gate", "beta", "state", "state_out", "read_index", "write_index", "A_log", "dt_bias", "mixed_qkv", "out")


@st.composite
def spoiled_calls(draw):
    op = draw(st.sampled_from(sorted(FUNCTIONS)))
    x = {**rows(op, 3, seed=draw(st.integers(0, 3))), "state": pool(3)}
    kw = {**x, "gate_kind": "log", "out": x["out"]}
    for _ in range(draw(st.integers(1, 2))):
        if draw(st.booleans()):
            kw[draw(st.sampled_from(OPERANDS))] = draw(st.one_of(odd_tensors(), JUNK, st.sampled_from(sorted(x)).map(x.get)))
        else:
            kw[draw(st.sampled_from(OPTIONS))] = draw(st.one_of(JUNK, st.sampled_from(
                ("none", "log", "raw", "value", "logit", "vk", "kv", 0, 1, 2, -1, True, False, 0.5, float("nan")))))
    if op not in DELTA and draw(st.booleans()):
        kw.pop("beta", None)
    return op, kw


def snapshot(kw) -> dict[str, bytes]:
    return {name: x.detach().clone().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for name, x in kw.items()
            if isinstance(x, torch.Tensor) and x.device.type == "cpu" and x.numel() and x.dtype is not torch.bool}


def allowed_to_change(kw) -> set[str]:
    written = {"out", "state_out" if kw.get("state_out") is not None else "state"}
    storages = {kw[name].untyped_storage().data_ptr() for name in written if isinstance(kw.get(name), torch.Tensor)
                and kw[name].device.type == "cpu"}
    return {name for name, x in kw.items() if isinstance(x, torch.Tensor) and x.device.type == "cpu"
            and x.untyped_storage().data_ptr() in storages}


@FIXED
@given(spoiled_calls())
def test_spoiled_calls(call):
    op, kw = call
    before = snapshot(kw)
    try:
        FUNCTIONS[op](**kw)
        may_change = allowed_to_change(kw)
    except (cula.InvalidArgumentError, cula.UnsupportedError) as error:
        assert str(error).startswith(f"{op}_decode: "), error
        may_change = set()
    except TypeError as error:  # a keyword that this op does not have
        assert "unexpected keyword argument" in str(error), error
        may_change = set()
    after = snapshot(kw)
    changed = {name for name in before if before[name] != after[name]}
    assert changed <= may_change, changed
