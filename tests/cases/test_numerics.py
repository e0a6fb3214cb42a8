"""Field cases 17 to 22, 25 to 27, 29 and 40: strong and absent decay, unnormalised and identical keys, state precision."""

from __future__ import annotations

import pytest
import torch

from tests.cases.tools import DELTA, GATE, OPS, pool, rows, run, same_bits
from tests.numerics.call import decode
from tests.numerics.compare import FLOAT32, assert_close
from tests.numerics.device import DEVICES
from tests.reference import recurrence

pytestmark = pytest.mark.parametrize("device", DEVICES)
LAYOUTS = pytest.mark.parametrize("layout", ["vk", "kv"])


def steps(op, count, device, layout="vk", state_dtype=torch.float32, n=3, **kw):
    """count tokens one after the other into one pool. Returns the last out, the pool, and both in float64."""
    state = pool(n, layout=layout, dtype=state_dtype, device=device)
    exact = state.double().cpu().numpy()
    for t in range(count):
        x = rows(op, n, device=device, **{"seed": t, **kw})
        want = recurrence.decode(op, *(x[name].double().cpu().numpy() for name in "qkv"), gate_kind=GATE[op],
                                 gate=x["gate"].double().cpu().numpy(), state=exact, layout=layout,
                                 beta=x["beta"].double().cpu().numpy() if "beta" in x else None)
        exact = want.state
        decode(op, **x, gate_kind=GATE[op], state=state, layout=layout)
    return x["out"], state, torch.from_numpy(want.out), torch.from_numpy(exact)


@LAYOUTS
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("g", [-8.0, -20.0, -50.0, -1000.0])
def test_case_17_19_20_21_strong_decay(device, op, g, layout):
    """exp(g) underflows to zero; the result is the last token alone, never NaN."""
    out, state, want_out, want_state = steps(op, 3, device, layout, g=g)
    assert_close("out", out, want_out)
    assert_close("state", state, want_state)


@LAYOUTS
def test_case_17_raw_gate_far_out(device, layout):
    """Raw gates where softplus, exp(A_log) and the sigmoid saturate: exact limits, no inf times zero."""
    for op, lower_bound in (("kda", 0.0), ("kda", -5.0), ("gdn", 0.0)):
        x = rows(op, 6, device=device)
        for i, value in enumerate((-200.0, -40.0, 19.9, 20.1, 200.0, 3e4)):
            x["gate"][i] = value
        state = pool(6, layout=layout, device=device)
        A_log = torch.tensor([4.0, -3.0], device=device)
        run(op, x, state=state, gate_kind="raw", A_log=A_log, lower_bound=lower_bound, layout=layout)


@LAYOUTS
@pytest.mark.parametrize("op", DELTA)
def test_case_18_keys_that_are_not_normalised(device, op, layout):
    """|k|^2 = 64 amplifies the state by up to 18 a token; fp16 rows, and the state still follows float64."""
    out, state, want_out, want_state = steps(op, 8, device, layout, io=torch.float16, k_norm=8.0, beta=0.3)
    # Each step multiplies state and error alike, and adds one rounding of its own.
    assert_close("state", state, want_state, float32=8 * FLOAT32)
    small = want_out.abs() < 6e4  # fp16 ends at 65504
    assert torch.isfinite(out.cpu()[small]).all() and small.any()
    assert_close("out", out.cpu()[small], want_out[small], float32=8 * FLOAT32)


@LAYOUTS
def test_case_22_gdn_without_decay_is_the_delta_rule(device, layout):
    """g = 0, no gate at all, and KDA with g = 0 in every channel are one computation: equal bits."""
    results = []
    for op, kind in (("gdn", "log_head"), ("gdn", "none"), ("kda", "log_channel"), ("kda", "none")):
        x = rows("gdn", 5, 2, 4, 128, 128, io=torch.bfloat16, device=device)
        x["gate"] = torch.zeros(*((5, 4) if kind == "log_head" else (5, 4, 128)), device=device)
        if kind == "none":
            del x["gate"]
        state = pool(5, 4, 128, 128, layout=layout, device=device)
        run(op, x, gate_kind=kind, state=state, layout=layout)
        results.append((x["out"], state))
    for out, state in results[1:]:
        assert same_bits(out, results[0][0]) and same_bits(state, results[0][1])


@LAYOUTS
def test_case_22_simple_gla_is_gla_with_equal_channels(device, layout):
    results = []
    for op in ("lightning", "gla"):
        x = rows("lightning", 4, device=device)
        if op == "gla":
            x["gate"] = x["gate"][..., None].expand(4, 2, 64).contiguous()
        state = pool(4, layout=layout, device=device)
        run(op, x, state=state, layout=layout)
        results.append((x["out"], state))
    assert same_bits(results[0][0], results[1][0]) and same_bits(results[0][1], results[1][1])


@pytest.mark.parametrize("op", DELTA)
@pytest.mark.parametrize("beta", [0.0, 1.0, 2.0])
@LAYOUTS
def test_beta_at_its_limits_with_identical_keys(device, op, beta, layout):
    """The same unit key 16 times: beta 0 never stores, 1 replaces, 2 reflects. None of them grows."""
    state = pool(2, layout=layout, device=device)
    exact = state.double().cpu().numpy()
    key = rows(op, 1, device=device)["k"]
    for t in range(16):
        x = rows(op, 2, device=device, seed=t, g=0.0, beta=beta)
        x["k"] = key.expand(2, 2, 64).contiguous()
        want = recurrence.decode(op, *(x[name].double().cpu().numpy() for name in "qkv"), gate_kind=GATE[op],
                                 gate=x["gate"].double().cpu().numpy(), state=exact, layout=layout,
                                 beta=x["beta"].double().cpu().numpy())
        exact = want.state
        decode(op, **x, gate_kind=GATE[op], state=state, layout=layout)
    assert_close("out", x["out"], torch.from_numpy(want.out), float32=16 * FLOAT32)
    assert_close("state", state, torch.from_numpy(exact), float32=16 * FLOAT32)


@LAYOUTS
@pytest.mark.parametrize("op", OPS)
def test_case_25_40_many_tokens_in_float32(device, op, layout):
    """256 tokens: the error of a float32 state stays at the rounding of its last few steps, because it decays too."""
    out, state, want_out, want_state = steps(op, 256, device, layout)
    assert_close("state", state, want_state, float32=3 * FLOAT32)
    assert_close("out", out, want_out, float32=3 * FLOAT32)


@LAYOUTS
@pytest.mark.parametrize("op", OPS)
def test_case_26_bf16_state_is_rounded_once_a_token(device, op, layout):
    """One token: one rounding (test_decode has that). 32 tokens of slow decay: roundings add up like a random walk at most."""
    slow = {"g": -0.01}
    *_, state32, _, exact = steps(op, 32, device, layout, **slow)
    *_, state16, _, _ = steps(op, 32, device, layout, torch.bfloat16, **slow)
    rel = lambda a: ((a.double().cpu() - exact).norm() / exact.norm()).item()
    assert rel(state32) < 4 * FLOAT32
    assert 1e-3 < rel(state16) < 1.7e-3 * 32**0.5


@LAYOUTS
def test_case_29_steep_decay_per_head(device, layout):
    """Lightning slopes from 2^-8 to 64: the steepest head forgets everything in one token and stays finite."""
    n, hv = 3, 8
    slopes = torch.tensor([2.0**e for e in (-8, -4, -1, 0, 2, 4, 5, 6)], device=device)
    state = pool(n, hv, layout=layout, device=device)
    for t in range(4):
        x = rows("lightning", n, hv, device=device, seed=t)
        x["gate"] = torch.exp(-slopes)
        run("lightning", x, gate_kind="const_head", state=state, layout=layout)


@pytest.mark.parametrize("op", OPS)
@LAYOUTS
def test_repeats_are_bitwise_equal(device, op, layout):
    """No atomics, no order that depends on the machine's mood; and on the CPU not on the number of threads."""
    results = []
    for threads in (1, 0, 2, 0) if device == "cpu" else (0, 0, 0, 0):
        x = rows(op, 65, 2, 4, 128, 128, io=torch.bfloat16, device=device)
        state = pool(65, 4, 128, 128, layout=layout, device=device)
        decode(op, **x, gate_kind=GATE[op], state=state, layout=layout, num_threads=threads)
        results.append((x["out"], state))
    for out, state in results[1:]:
        assert same_bits(out, results[0][0]) and same_bits(state, results[0][1])
