"""kda_gate, gdn_gate and l2norm of every ISA level against float64, called directly with parameter arrays."""

from __future__ import annotations

import numpy as np
import pytest

from tests.cpu import native
from tests.cpu.native import ABSENT, BF16, FP16, FP32, Params, address, assert_close, operand
from tests.reference.recurrence import activate_beta, log_decay

DTYPES = (FP32, BF16, FP16)
CASES = 40


@pytest.fixture(params=range(-1, len(native.LEVEL_NAMES)))
def level(request):
    if request.param not in (-1, *native.levels()):
        pytest.skip(f"this machine has no {native.LEVEL_NAMES[request.param]}")
    return request.param


def tokens_of(rng, batch, tokens, tail, code):
    """[batch, tokens, *tail] with gaps between everything but the last dimension, and its strides in elements."""
    gap, dim = int(rng.choice([0, 0, 5])), tail[-1]
    strides = [1]
    for extent in reversed(tail[1:] if len(tail) > 1 else []):
        strides.insert(0, extent * strides[0] + gap)
    strides.insert(0, tail[0] * strides[0] + gap)
    strides.insert(0, tokens * strides[0] + 3 * gap)
    assert dim and len(strides) == len(tail) + 2
    return operand((batch, tokens, *tail), code, strides, int(rng.integers(8)))


@pytest.mark.parametrize("seed", range(CASES))
@pytest.mark.parametrize("op", ("kda", "gdn"))
def test_gate(level, op, seed):
    rng = np.random.default_rng([level + 1, op == "kda", seed])
    batch, tokens, hv = int(rng.integers(1, 4)), int(rng.integers(1, 7)), int(rng.choice([1, 2, 3, 8, 17, 64, 300]))
    dim = int(rng.choice([1, 2, 15, 16, 33, 64, 128, 200, 257, 600])) if op == "kda" else 1
    io, g_code = (int(rng.choice(DTYPES)) for _ in range(2))
    if hv * dim > 20000:
        hv = 3
    tail = (hv, dim) if op == "kda" else (hv,)
    x = tokens_of(rng, batch, tokens, tail, io)
    x.set(rng.standard_normal(x.view.shape) * rng.choice([1, 5]) - 1)
    in_place = rng.random() < 0.3
    g = x if in_place else tokens_of(rng, batch, tokens, tail, g_code)
    g_code = g.code
    a_log = dt_bias = beta = beta_out = None
    code = int(rng.choice(DTYPES))
    if rng.random() < 0.7:
        a_log = operand((hv,), code, None, 1)
        a_log.set(rng.standard_normal(hv) * 0.5)
    if rng.random() < 0.7:
        dt_bias = operand((hv * dim,), int(rng.choice(DTYPES)), None, 1)
        dt_bias.set(rng.standard_normal(hv * dim))
    kind = str(rng.choice(["none", "logit", "logit_twice"]))
    if kind != "none":
        beta = tokens_of(rng, batch, tokens, (hv,), int(rng.choice(DTYPES)))
        beta.set(rng.standard_normal(beta.view.shape) * 3)
        beta_out = tokens_of(rng, batch, tokens, (hv,), int(rng.choice(DTYPES)))
    bound = float(rng.choice([0.0, -5.0, -0.5])) if op == "kda" else 0.0

    values = x.values.reshape(batch * tokens, *tail)
    want = log_decay("raw", values, hv, dim, *(None if t is None else t.values for t in (a_log, dt_bias)), bound)
    want = np.reshape(want, x.view.shape)
    code_of = lambda t: ABSENT if t is None else t.code  # noqa: E731
    strides = lambda t: [0, 0, 0] if t is None else t.strides[:3]  # noqa: E731
    fields = dict(x=address(x), g=address(g), a_log=address(a_log), dt_bias=address(dt_bias), beta=address(beta),
                  beta_out=address(beta_out), batch=batch, tokens=tokens, hv=hv, head_dim=dim, lower_bound=bound)  # fmt: skip
    for name, t in (("x", x), ("g", g), ("beta", beta), ("beta_out", beta_out)):
        fields |= dict(zip((f"{name}_b", f"{name}_t", f"{name}_h"), strides(t)))
    p = Params("aot/ops/gates/params_gate.def",
               dict(g_dtype=g_code, a_log_dtype=code_of(a_log), dt_bias_dtype=code_of(dt_bias), beta_dtype=code_of(beta),
                    beta_out_dtype=code_of(beta_out), beta_kind=0 if beta is None else 1 + (kind == "logit_twice")), **fields)  # fmt: skip
    items = batch * tokens * (hv if op == "kda" else 1)
    native.library().harness_gate(level, 0 if op == "kda" else 1, io, p.array, items, native.GRAIN_BYTES // int(rng.integers(1, 4)), 1 + seed % 3)
    assert_close("g", g.view, want, g_code)
    assert not g.changed_outside(np.s_[:])
    assert in_place or not x.changed_outside()
    if beta is not None:
        assert_close("beta_out", beta_out.view, activate_beta(kind, beta.values), beta_out.code)
        assert not beta_out.changed_outside(np.s_[:]) and not beta.changed_outside()


@pytest.mark.parametrize("seed", range(CASES))
def test_l2norm(level, seed):
    rng = np.random.default_rng([level + 1, seed])
    shape = [int(rng.integers(1, 5)) for _ in range(3)]
    dim = int(rng.choice([1, 2, 15, 16, 17, 64, 96, 128, 257, 1000, 1024]))
    io, y_code = (int(rng.choice(DTYPES)) for _ in range(2))
    gap = int(rng.choice([0, 3]))
    row = dim + gap

    def rows(code):
        strides = [shape[1] * shape[2] * row + gap, row, shape[1] * row, 1]  # the middle two dimensions swapped in memory
        return operand((*shape, dim), code, strides, int(rng.integers(8)))

    x = rows(io)
    # Squares of float32 values may leave its range.
    x.set(rng.standard_normal(x.view.shape) * (rng.choice([1, 1e-3, 1e25]) if io == FP32 else rng.choice([1, 1e-2])))
    if seed % 7 == 0:
        x.set(np.zeros(x.view.shape))
    in_place = rng.random() < 0.3
    y = x if in_place else rows(y_code)
    rstd = operand(tuple(shape), FP32) if rng.random() < 0.5 else None
    eps = float(np.float32(rng.choice([1e-6, 1e-3])))
    scale = 1 / np.sqrt((x.values**2).sum(-1) + eps)
    want = x.values * scale[..., None]
    fields = dict(x=address(x), y=address(y), rstd=address(rstd), head_dim=dim, eps=eps)
    for i in range(3):
        fields |= {f"x_{i}": x.strides[i], f"y_{i}": y.strides[i], f"n_{i}": shape[i]}
    p = Params("aot/ops/gates/params_l2norm.def", dict(y_dtype=y.code), **fields)
    native.library().harness_gate(level, 2, io, p.array, int(np.prod(shape)), native.GRAIN_BYTES, 1 + seed % 3)
    assert_close("y", y.view, want, y.code)
    assert not y.changed_outside(np.s_[:])
    if rstd is not None:
        assert_close("rstd", rstd.view, scale, FP32)
        assert not rstd.changed_outside(np.s_[:])
