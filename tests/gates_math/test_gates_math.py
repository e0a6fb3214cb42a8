"""The arithmetic of the gate kernels against float64, on the CPU.

aot/common/cuda/math.cuh compiles as plain C++: every multiply, add and fma is the one that the GPU does, and the three
approximate instructions of the special function unit are exact here times a chosen relative error. Running with that
error at both ends of what the PTX manual allows (ex2 2^-22, rcp 2^-23) bounds what the GPU can give.
"""

import ctypes
import pathlib
import shutil
import subprocess

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
ULP = 2.0**-23  # of a float32 mantissa, relative
SFU_ERRORS = (-1.0, 0.0, 1.0)  # part of the bound
FLOAT32_TINY = 2.0**-126


@pytest.fixture(scope="module")
def lib(tmp_path_factory):
    compiler = shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")
    assert compiler, "the tests need a C++ compiler, as the build does"
    out = tmp_path_factory.mktemp("gates_math") / "gates_math.so"
    source = pathlib.Path(__file__).with_name("gates_math.cpp")
    # -ffp-contract=off: the sums must round as written, as on the GPU
    subprocess.run(
        [compiler, "-std=c++17", "-O2", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
        + [f"-I{ROOT}", str(source), "-o", str(out)],
        check=True,
    )
    return ctypes.CDLL(str(out))


def call(function, inputs, scalars, outputs):
    arrays = [np.ascontiguousarray(a, dtype=np.float32) for a in inputs]
    results = [np.full(arrays[0].shape, np.nan, np.float32) for _ in range(outputs)]
    function(
        ctypes.c_int64(arrays[0].size),
        *[a.ctypes.data_as(ctypes.c_void_p) for a in arrays],
        *[ctypes.c_float(s) for s in scalars],
        *[r.ctypes.data_as(ctypes.c_void_p) for r in results],
    )
    return results


def arguments():
    """x over 20 orders of magnitude of both signs, dense where softplus and sigmoid bend, every bias from 0 to cancelling."""
    rng = np.random.default_rng(0)
    log = 10.0 ** rng.uniform(-18, 2, 200_000) * rng.choice([-1, 1], 200_000)
    dense = rng.uniform(-30, 30, 400_000)
    low = rng.uniform(-87, -10, 200_000)
    x = np.concatenate([log, dense, low]).astype(np.float32)
    bias = np.concatenate([rng.uniform(-8, 8, x.size // 2), np.zeros(x.size - x.size // 2)]).astype(np.float32)
    bias[::7] = (-x[::7] * (1 + rng.normal(size=x[::7].size) * 1e-4)).astype(np.float32)
    return x, bias


def relative(got, ref):
    """Largest and root-mean-square relative error where the result is a normal number; below that, absolute zero."""
    normal = np.abs(ref) >= 2 * FLOAT32_TINY
    assert np.isfinite(got).all()
    assert (np.abs(got[~normal]) <= 4 * FLOAT32_TINY).all()
    error = (got[normal].astype(np.float64) - ref[normal]) / ref[normal]
    return np.abs(error).max(), np.sqrt(np.mean(error**2))


def assert_fast(got, ref, y):
    """(4 + 2 |y|) ulp wherever the result is a normal number."""
    normal = ref >= 2 * FLOAT32_TINY
    error = np.abs(got[normal] - ref[normal]) / ref[normal] / (4 + 2 * y[normal])
    assert np.isfinite(got).all() and error.max() <= ULP, error.max() / ULP


def softplus64(y):
    return np.maximum(y, 0) + np.log1p(np.exp(-np.abs(y)))


def sigmoid64(z):
    t = np.exp(-np.abs(z))
    return np.where(z < 0, t, 1.0) / (1.0 + t)


@pytest.mark.parametrize("sfu", SFU_ERRORS)
def test_softplus(lib, sfu):
    x, bias = arguments()
    precise, fast = call(lib.softplus, (x, bias), (sfu,), 2)
    ref = softplus64(x.astype(np.float64) + bias)
    worst, rms = relative(precise, ref)
    assert worst <= (4 if sfu else 2) * ULP and rms <= (2e-7 if sfu else 5e-8), (worst / ULP, rms)
    assert_fast(fast, ref, np.abs(x.astype(np.float64) + bias))


@pytest.mark.parametrize("sfu", SFU_ERRORS)
@pytest.mark.parametrize("a", ["zero", "random"])
def test_sigmoid(lib, sfu, a):
    x, bias = arguments()
    a = np.random.default_rng(1).uniform(-4, 3, x.size).astype(np.float32) if a == "random" else np.zeros_like(x)
    precise, fast = call(lib.sigmoid, (x, bias, a), (sfu,), 2)
    z = np.exp(a.astype(np.float64)) * (x.astype(np.float64) + bias)
    worst, rms = relative(precise, sigmoid64(z))
    assert worst <= (5.5 if sfu else 2) * ULP and rms <= (3e-7 if sfu else 5e-8), (worst / ULP, rms)
    assert_fast(fast, sigmoid64(z), np.abs(z))


def test_typical_gate_is_within_the_stated_rms(lib):
    """Relative RMSE 2e-7 for float32 output, at gates as models have them, slow ones (dt_bias -8) included."""
    rng = np.random.default_rng(2)
    x = rng.normal(size=200_000).astype(np.float32)
    for mean in (0.0, -4.0, -8.0):
        bias = np.full_like(x, mean) + rng.uniform(0, 1, x.size).astype(np.float32)
        a = rng.uniform(0, 1, x.size).astype(np.float32)
        y = x.astype(np.float64) + bias
        precise, _ = call(lib.softplus, (x, bias), (0.0,), 2)
        ref = softplus64(y)
        assert np.linalg.norm(precise - ref) <= 1e-7 * np.linalg.norm(ref), mean
        precise, _ = call(lib.sigmoid, (x, bias, a), (0.0,), 2)
        ref = sigmoid64(np.exp(a.astype(np.float64)) * y)
        assert np.linalg.norm(precise - ref) <= 1e-7 * np.linalg.norm(ref), mean


def test_exp_pair(lib):
    a = np.concatenate([np.linspace(-87, 88.7, 300_001), np.linspace(-1, 1, 100_001), np.float32([0, -0.0, 1e-30])]).astype(np.float32)
    hi, lo = call(lib.exp_pair, (a,), (), 2)
    ref = np.exp(a.astype(np.float64))
    normal = ref > 2.0**-100  # lo is 2^-24 of hi and underflows earlier
    error = np.abs((hi.astype(np.float64) + lo - ref) / ref)
    assert error[normal].max() <= 2.0**-28, np.log2(error[normal].max())
    assert error.max() <= 2.0**-23


def test_special_values(lib):
    inf, nan = np.inf, np.nan
    big = 3.4e38
    x = np.float32([inf, -inf, nan, 0.0, inf, -inf, big, -big, 1.0, nan, -200.0, 200.0])
    bias = np.float32([0.0, 0.0, 0.0, 0.0, 1.0, 1.0, big, -big, nan, inf, 0.0, 0.0])
    zero = np.zeros_like(x)
    with np.errstate(all="ignore"):
        y = x.astype(np.float64) + bias
        softplus_ref, sigmoid_ref = softplus64(y), sigmoid64(y)
    softplus_ref[np.isposinf(y)] = inf
    softplus_ref[6] = inf  # beyond float32
    for got in call(lib.softplus, (x, bias), (0.0,), 2):
        np.testing.assert_allclose(got, softplus_ref, rtol=1e-5, atol=1e-37)
    for got in call(lib.sigmoid, (x, bias, zero), (0.0,), 2):
        np.testing.assert_allclose(got, sigmoid_ref, rtol=1e-5, atol=1e-37)
    hi, lo = call(lib.exp_pair, (np.float32([-inf, -200.0, 100.0, inf, nan, 0.0]),), (), 2)
    np.testing.assert_array_equal(hi[[2, 3, 5]], [inf, inf, 1.0])
    np.testing.assert_allclose(hi[:2], 0.0, atol=1e-37)
    assert np.isnan(hi[4]) and not np.isnan(lo[[0, 1, 2, 3, 5]]).any()
