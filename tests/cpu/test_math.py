"""exp, log1p, sigmoid, softplus and the conversions of every ISA level, against float64 and bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

from tests.cpu import native
from tests.cpu.native import BF16, FP16, FP32

EXP, LOG1P, SIGMOID, SOFTPLUS, RAW_GATE, BOUNDED_GATE = range(6)
PAIRS = 3  # bf16 as states are stored


@pytest.fixture(params=range(len(native.LEVEL_NAMES)), ids=native.LEVEL_NAMES)
def level(request):
    if request.param not in native.levels():
        pytest.skip(f"this machine has no {native.LEVEL_NAMES[request.param]}")
    return request.param


def run(level, function, x, y=None, parameter=0.0):
    x = np.ascontiguousarray(x, np.float32)
    y = np.zeros_like(x) if y is None else np.ascontiguousarray(y, np.float32)
    out = np.full_like(x, np.nan)
    assert len(x) % 32 == 0
    native.library().harness_math(level, function, x.ctypes.data, y.ctypes.data, parameter, out.ctypes.data, len(x))
    return out.astype(np.float64)


def ulps(got, want):
    """Error in units of the float32 spacing at want; below 2^-126 in units of 2^-149."""
    spacing = np.ldexp(1.0, np.maximum(np.frexp(want)[1] - 24, -149))
    return np.abs(got - want) / spacing


def grid(low, high, n=1 << 16):
    return np.random.default_rng(0).uniform(low, high, n).astype(np.float32)


def softplus(x):
    return np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))


def sigmoid(x):
    return np.where(x < 0, np.exp(np.minimum(x, 0)), 1.0) / (1 + np.exp(-np.abs(x)))


@pytest.mark.parametrize("low, high", [(-1, 0), (-20, 1), (-104, 88.7), (-1e-6, 1e-6)])
def test_exp(level, low, high):
    # Below 1 half an ulp from the last sum, a quarter each from the sum it rounds and from the reduced argument, 0.1 for the rest.
    x = grid(low, high)
    assert ulps(run(level, EXP, x), np.exp(x.astype(np.float64))).max() < 1.1


def test_exp_special(level):
    x = np.array([0, -0.0, -np.inf, np.inf, np.nan, -1e30, 1e30, -103.9, 88.73, -87.4, -150, 89] + [0] * 20, np.float32)
    with np.errstate(over="ignore"):
        want = np.exp(x).astype(np.float64)
    got = run(level, EXP, x)
    assert np.array_equal(np.isnan(got), np.isnan(want)) and np.array_equal(np.isinf(got), np.isinf(want))
    finite = np.isfinite(want)
    assert ulps(got[finite], want[finite]).max() <= 1 and got[0] == 1 and got[1] == 1


def test_log1p(level):
    for x in (grid(0, 1), np.exp2(grid(-140, 0)).astype(np.float32)):
        assert ulps(run(level, LOG1P, x), np.log1p(x.astype(np.float64))).max() < 2.01


def test_sigmoid(level):
    x = np.concatenate([grid(-30, 30), grid(-85, 85)])
    assert ulps(run(level, SIGMOID, x), sigmoid(x.astype(np.float64))).max() < 2.51
    edge = np.array([-np.inf, np.inf, np.nan, -1e9, 1e9, 0, -88, -100] * 4, np.float32)
    got = run(level, SIGMOID, edge)
    assert list(got[:2]) == [0, 1] and np.isnan(got[2]) and list(got[3:6]) == [0, 1, 0.5]
    assert ulps(got[6:8], sigmoid(edge[6:8].astype(np.float64))).max() < 2.51


def test_softplus(level):
    """Of x + bias, whose rounding must not show."""
    x, y = grid(-40, 40), np.random.default_rng(1).uniform(-40, 40, 1 << 16).astype(np.float32)
    want = softplus(x.astype(np.float64) + y.astype(np.float64))
    keep = want > 1e-36
    assert ulps(run(level, SOFTPLUS, x, y), want)[keep].max() < 2.51
    edge = np.array([-np.inf, np.inf, np.nan, 1e30, -1e30, 21, 20, 19.99] * 4, np.float32)
    got = run(level, SOFTPLUS, edge)
    assert got[0] == 0 and np.isposinf(got[1]) and np.isnan(got[2]) and got[3] == np.float32(1e30) and got[4] == 0 and got[5] == 21
    assert ulps(got[6:8], softplus(edge[6:8].astype(np.float64))).max() < 1.01


def test_raw_gates(level):
    x, y = grid(-12, 12), np.random.default_rng(1).uniform(-2, 2, 1 << 16).astype(np.float32)
    total, rate = x.astype(np.float64) + y.astype(np.float64), np.float32(1.7)
    assert ulps(run(level, RAW_GATE, x, y, rate), -np.float64(rate) * softplus(total)).max() < 4.01
    # One ulp more where the level has no FMA: its product with the rate is rounded.
    assert ulps(run(level, BOUNDED_GATE, x, y, -5.0), -5.0 * sigmoid(total)).max() < 4.01


def convert(level, code, x, narrow):
    out = np.zeros(len(x), {FP16: np.uint16, BF16: np.uint16, PAIRS: np.uint16, FP32: np.uint32}[code] if narrow else np.uint32)
    x = np.ascontiguousarray(x)
    native.library().harness_convert(level, code, x.ctypes.data, out.ctypes.data, len(x), narrow)
    return out


@pytest.mark.parametrize("code", (BF16, FP16, PAIRS))
def test_widen_every_value(level, code):
    h = np.arange(1 << 16, dtype=np.uint16)
    got = convert(level, code, h, False).view(np.float32)
    want = h.view(np.float16).astype(np.float32) if code == FP16 else (h.astype(np.uint32) << 16).view(np.float32)
    nan = np.isnan(want)
    assert np.isnan(got[nan]).all() and np.array_equal(got[~nan].view(np.uint32), want[~nan].view(np.uint32))


@pytest.mark.parametrize("code", (BF16, FP16, PAIRS))
def test_narrow(level, code):
    rng = np.random.default_rng(2)
    bits = rng.integers(0, 1 << 32, 1 << 18, dtype=np.uint32)
    # Ties, their neighbours, everything near the ends of the formats, NaN of all payloads.
    h = np.arange(1 << 16, dtype=np.uint32)
    step = 1 << 12 if code == FP16 else 1 << 15
    base = h.astype(np.uint16).view(np.float16).astype(np.float32).view(np.uint32) if code == FP16 else h << 16
    x = np.concatenate([bits, base + step, base + step - 1, base + step + 1, base - 1, 0x7F800000 + (h << 7), 0xFFFFFF00 + (h & 0xFF),
                        ((h << 3) + 0x33000000)]).astype(np.uint32).view(np.float32)  # fmt: skip
    x = x[: len(x) // 64 * 64]
    # A NaN has been through arithmetic before it is stored.
    nan = np.isnan(x)
    x = np.where(nan, (x.view(np.uint32) | 0x00400000).view(np.float32), x).view(np.float32)
    got = convert(level, code, x, True)
    with np.errstate(over="ignore"):
        want = native.round_to(x, FP16 if code == FP16 else BF16).view(np.uint16)
    wide = got.view(np.float16) if code == FP16 else (got.astype(np.uint32) << 16).view(np.float32)
    assert np.isnan(wide[nan]).all()
    bad = np.flatnonzero(got[~nan] != want[~nan])
    assert not bad.size, f"{x[~nan][bad[0]]!r}: {got[~nan][bad[0]]:#x}, expected {want[~nan][bad[0]]:#x}"


def test_denormals_are_zero_does_not_reach_fp16():
    """fp16 subnormals are ordinary numbers in float32: a process that flushes subnormals must still get them."""
    h = np.arange(0x400, dtype=np.uint16)
    want = h.view(np.float16).astype(np.float64)
    for level in native.levels():
        got = np.zeros(len(h), np.uint32)
        native.library().harness_convert_flushed(level, FP16, h.ctypes.data, got.ctypes.data, len(h))
        assert np.array_equal(got.view(np.float32).astype(np.float64), want)
