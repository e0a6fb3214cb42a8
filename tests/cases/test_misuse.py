"""Field cases 27, 45 to 51: what is wrong is refused before a launch, by name, with what would work. Nothing is written."""

from __future__ import annotations

import inspect

import pytest
import torch

from tests.cases.tools import GATE, OPS, pool, rows, run
from tests.numerics import cabi
from tests.numerics.call import FUNCTIONS, INVALID, UNSUPPORTED, decode, decode_c
from tests.numerics.device import DEVICES

pytestmark = pytest.mark.parametrize("device", DEVICES)


def refused(error, match, op, x, state, **kw):
    """The call raises `error` with every word of `match` in its message, and neither out nor the pool changes."""
    out, before = x.get("out"), None if state is None else state.clone()
    kw.setdefault("gate_kind", GATE[op])
    with pytest.raises(error) as caught:
        decode(op, **x, state=state, **kw)
    for word in match.split():
        assert word in str(caught.value), f"{word!r} is not in the message: {caught.value}"
    if out is not None:
        assert torch.isnan(out).all()
    if state is not None:
        assert torch.equal(state, before)


@pytest.mark.parametrize("k", [32, 96, 512])
def test_case_27_key_dim_that_is_not_built(device, k):
    refused(UNSUPPORTED, f"{k} 64 128 256", "gdn", rows("gdn", 2, k=k, device=device), pool(2, k=k, device=device))


@pytest.mark.parametrize("v", [32, 96, 576])
def test_case_27_value_dim_that_is_not_built(device, v):
    refused(UNSUPPORTED, f"{v} 64 512", "gdn", rows("gdn", 2, v=v, device=device), pool(2, v=v, device=device))


def test_case_45_gate_per_head_where_kda_wants_channels(device):
    x = rows("kda", 2, 2, 4, 64, 512, device=device)
    x["gate"] = x["gate"][..., 0].contiguous()
    refused(INVALID, "gate [2,4] [N,HV,K]", "kda", x, pool(2, 4, 64, 512, device=device))


def test_case_45_gate_per_channel_where_gdn_wants_heads(device):
    x = rows("gdn", 2, device=device)
    x["gate"] = torch.zeros(2, 2, 64, device=device)
    refused(INVALID, "gate [2,2,64] [N,HV]", "gdn", x, pool(2, device=device))


@pytest.mark.parametrize("op", OPS)
def test_case_46_heads_first(device, op):
    """[H,N,K] for [N,H,K]: the operands that do not fit are named with the layout that is expected."""
    x = rows(op, 5, device=device)
    x["q"], x["k"] = x["q"].transpose(0, 1).contiguous(), x["k"].transpose(0, 1).contiguous()
    refused(INVALID, "[N,H,K]", op, x, pool(5, device=device))


def test_case_47_value_heads_that_are_no_multiple(device):
    refused(INVALID, "HV H", "gdn", rows("gdn", 2, 2, 3, device=device), pool(2, 3, device=device))


@pytest.mark.parametrize("shape", [(2, 2, 64), (2, 2, 64, 128), (2, 3, 64, 64), (2, 2, 64, 64, 1)])
def test_case_45_state_of_another_shape(device, shape):
    refused(INVALID, "state", "kda", rows("kda", 2, device=device), torch.zeros(shape, device=device))


@pytest.mark.parametrize("name", ["q", "k", "v", "gate", "beta"])
def test_missing_operand(device, name):
    x = rows("kda", 2, device=device)
    del x[name]
    with pytest.raises(INVALID, match=name):
        decode("kda", **x, gate_kind="log_channel", state=pool(2, device=device))
    assert torch.isnan(x["out"]).all()


@pytest.mark.parametrize("op, extra", [
    ("gla", {"beta": "heads"}), ("lightning", {"beta": "heads"}),             # no delta rule, no beta
    ("gla", {"A_log": "hv"}), ("kda", {"dt_bias": "hv"}), ("gdn", {"A_log": "hv"}),  # parameters of a raw gate only
    ("gdn", {"lower_bound": -5.0}), ("kda", {"lower_bound": -5.0}),           # the safe form is of raw KDA gates
    ("gla", {"beta_kind": "logit"}),
])
def test_case_49_option_that_would_be_ignored(device, op, extra):
    x = rows(op, 2, device=device)
    made = {"heads": torch.zeros(2, 2, device=device), "hv": torch.zeros(2, device=device)}
    kw = {name: made[value] if isinstance(value, str) and value in made else value for name, value in extra.items()}
    # What a front end has no keyword for is Python's own TypeError; what it has, the library refuses.
    refused((INVALID, TypeError), next(iter(extra)), op, x, pool(2, device=device), **kw)


@pytest.mark.parametrize("op, kind", [("kda", "log_head"), ("gdn", "log_channel"), ("gla", "raw"), ("gla", "log_head"),
                                      ("lightning", "log_channel"), ("lightning", "raw"), ("kda", "const_head")])
def test_case_49_gate_form_of_another_op(device, op, kind):
    x, state = rows(op, 2, device=device), pool(2, device=device)
    with pytest.raises(cabi.CulaError, match="gate_kind") as caught:
        decode_c(op, **x, state=state, gate_kind=kind)
    assert caught.value.status == "CULA_ERR_INVALID_ARGUMENT" and torch.isnan(x["out"]).all()


@pytest.mark.parametrize("op, kind", [("kda", "decay"), ("gla", "raw"), ("lightning", "raw"), ("lightning", "decay"), ("gdn", "log_head"),
                                      ("kda", None), ("kda", 1)])
def test_case_49_gate_form_by_another_name(device, op, kind):
    x, state = rows(op, 2, device=device), pool(2, device=device)
    with pytest.raises(INVALID, match="gate_kind.*allowed"):
        FUNCTIONS[op](x["q"], x["k"], x["v"], gate=x["gate"], state=state, gate_kind=kind, out=x["out"],
                      **({"beta": x["beta"]} if "beta" in x else {}))
    assert torch.isnan(x["out"]).all()


@pytest.mark.parametrize("lower_bound", [-5.5, 1.0, float("nan"), float("-inf")])
def test_case_49_lower_bound_out_of_range(device, lower_bound):
    refused(INVALID, "lower_bound", "kda", rows("kda", 2, device=device), pool(2, device=device), gate_kind="raw",
            lower_bound=lower_bound)


def test_case_50_pools_of_two_dtypes(device):
    refused(INVALID, "state_out", "kda", rows("kda", 2, device=device), pool(2, device=device),
            state_out=pool(2, dtype=torch.bfloat16, device=device))


def test_case_50_no_A_log(device):
    """Absent A_log is exp(A_log) = 1, not a crash."""
    for lower_bound in (0.0, -5.0):
        run("kda", rows("kda", 2, device=device), state=pool(2, device=device), gate_kind="raw", lower_bound=lower_bound)


@pytest.mark.parametrize("name", ["state", "q", "out"])
def test_dtype_that_no_kernel_has(device, name):
    x, state = rows("kda", 2, device=device), pool(2, device=device)
    if name == "state":
        state = state.double()
    else:
        x[name] = x[name].double()
    refused((INVALID, UNSUPPORTED), name, "kda", x, state)


def test_row_dtypes_that_differ(device):
    x = rows("kda", 2, device=device)
    x["k"] = x["k"].bfloat16()
    refused(INVALID, "k", "kda", x, pool(2, device=device))


@pytest.mark.parametrize("scale", [None, 1.0, 0.0, -2.5])
def test_case_51_scale(device, scale):
    """Scale 0 is zero, not the default; None is K^-0.5."""
    x = rows("gdn", 2, device=device)
    run("gdn", x, state=pool(2, device=device), scale=scale)
    assert (x["out"] == 0).all() == (scale == 0)


@pytest.mark.parametrize("scale", [float("nan"), float("inf")])
def test_case_51_scale_that_is_no_number(device, scale):
    refused(INVALID, "scale", "gdn", rows("gdn", 2, device=device), pool(2, device=device), scale=scale)


@pytest.mark.parametrize("offset", [1, 2, 3])
def test_case_44_state_that_is_not_16_byte_aligned(device, offset):
    """Rows may start anywhere, states may not: base, slot stride and head stride are checked on the host."""
    flat = torch.zeros(2 * 2 * 64 * 64 + 64, device=device)
    base = flat[offset:].as_strided((2, 2, 64, 64), (8192, 4096, 64, 1))
    refused(INVALID, "state 16", "kda", rows("kda", 2, device=device), base)
    strided = torch.zeros(20000, device=device).as_strided((2, 2, 64, 64), (8192 + offset, 4096, 64, 1))
    refused(INVALID, "state 16", "kda", rows("kda", 2, device=device), strided)


@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
def test_last_stride_that_is_not_one(device, name):
    x = rows("kda", 2, device=device)
    wide = torch.full((*x[name].shape, 2), float("nan"), device=device)
    wide[..., 0] = x[name]
    x[name] = wide[..., 0]
    refused(INVALID, f"{name} stride", "kda", x, pool(2, device=device))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int16, torch.uint8])
def test_index_of_another_dtype(device, dtype):
    refused((INVALID, BufferError), "read_index", "kda", rows("kda", 2, device=device), pool(2, device=device),
            read_index=torch.zeros(2, device=device).to(dtype))


def test_index_of_another_length(device):
    refused(INVALID, "read_index", "kda", rows("kda", 2, device=device), pool(2, device=device),
            read_index=torch.zeros(3, dtype=torch.int32, device=device))


def test_state_pool_smaller_than_the_rows_without_an_index(device):
    """Row n would use slot n: a pool with fewer slots than rows needs an index."""
    refused(INVALID, "state 2 3 read_index", "kda", rows("kda", 3, device=device), pool(2, device=device))


def test_case_48_keywords(device):
    """The keywords are a promise: no release renames or drops one. (FLA's names: tests of cula.torch.)"""
    common = ["mixed_qkv", "l2norm", "scale", "state_layout", "state_out", "read_index", "write_index", "null_slot", "out",
              "num_threads", "stream", "donate"]
    for op, own in (("kda", ["gate", "beta", "gate_kind", "beta_kind", "A_log", "dt_bias", "lower_bound"]),
                    ("gdn", ["gate", "beta", "gate_kind", "beta_kind", "A_log", "dt_bias"]), ("gla", ["gate", "gate_kind"]),
                    ("lightning", ["decay", "gate", "gate_kind"])):
        parameters = inspect.signature(FUNCTIONS[op]).parameters
        assert set(parameters) == {"q", "k", "v", "state", *common, *own}
        x = rows(op, 2, device=device)
        with pytest.raises(TypeError, match="allow_neg_eigval"):
            FUNCTIONS[op](x["q"], x["k"], x["v"], out=x["out"], allow_neg_eigval=True)
