"""The kernels' own sources, thread by thread on the CPU, against float64: indices, strides, tails, alignment, grids.

What the emulation can't show: timing, and the three approximate instructions (test_gates_math bounds those).
"""

import re

import numpy as np
import pytest

from tests.gates_math import emulation as em

IO = ("bf16", "fp16", "fp32")


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("emulated_kernels")


@pytest.mark.parametrize("op", em.PARAMS)
def test_signature_is_the_parameter_list(op):
    source = (em.GATES / ("l2norm.cu" if op == "l2norm" else "gate.cuh")).read_text().replace("\\\n", " ")
    signature = re.search(r"__launch_bounds__\(.*?\)\s+(?:symbol|cula_l2norm)\((.*?)\)\s*\{", source, re.S).group(1)
    kinds = {"int64_t": "i64", "int32_t": "i32", "float": "f32"}
    found = []
    for declaration in signature.split(","):
        words = declaration.split()
        found.append(("ptr" if "*" in declaration else kinds[words[0]], words[-1]))
    assert found == em.params(op)


def softplus(y):
    return np.maximum(y, 0) + np.log1p(np.exp(-np.abs(y)))


def sigmoid(y):
    t = np.exp(-np.abs(y))
    return np.where(y < 0, t, 1.0) / (1.0 + t)


def strides_of(rng, shape, wide):
    """Free strides for [B, T, HV, row]: the three leading dimensions in a random memory order, padded; the last is 1."""
    quantum = 8 if wide else 1
    order, strides, step = rng.permutation(3), [0, 0, 0, 1], -(-shape[3] // quantum) * quantum
    if rng.random() < 0.3:
        order = np.array([2, 1, 0])  # compact order: head, token, batch outermost
    for axis in order:
        step += int(rng.integers(0, 3)) * quantum
        strides[axis] = step
        step *= shape[axis]
    return strides


def optional(rng, shape, low, high):
    """A_log or dt_bias: absent, or compact in any dtype at any alignment."""
    dtype = rng.choice(["fp32", "bf16", "fp16", None])
    if dtype is None:
        return None, np.zeros(shape)
    strides = [int(np.prod(shape[i + 1 :])) for i in range(len(shape))]
    tensor = em.Tensor(shape, strides, str(dtype), int(rng.integers(0, 8)), rng.uniform(low, high, shape))
    return tensor, tensor.values


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("io", IO)
@pytest.mark.parametrize("op", ["kda_gate", "gdn_gate"])
def test_gate(op, io, seed, folder):
    rng = np.random.default_rng([seed, IO.index(io), op == "kda_gate"])
    kda = op == "kda_gate"
    wide = bool(seed % 2)
    batch, tokens = int(rng.choice([1, 1, 2, 5])), int(rng.choice([1, 2, 3, 5, 17, 64, 131]))
    hv = int(rng.choice([1, 2, 3, 6, 12])) if kda else int(rng.choice([8, 16, 24, 64] if wide else [1, 3, 8, 17, 64]))
    k = (int(rng.choice([8, 24, 64, 128])) if wide else int(rng.choice([1, 5, 8, 33, 64]))) if kda else 1
    shape = (batch, tokens, hv, k) if kda else (batch, tokens, 1, hv)
    g_dtype, offset = str(rng.choice(IO)), 0 if wide else int(rng.integers(0, 8))
    strides = strides_of(rng, shape, wide)
    in_place = g_dtype == io and rng.random() < 0.4
    x = em.Tensor(shape, strides, io, offset, rng.normal(size=shape) * 4)
    values = x.values
    g = x if in_place else em.Tensor(shape, strides_of(rng, shape, wide), g_dtype, 0 if wide else int(rng.integers(0, 8)))
    a_log, a = optional(rng, (hv,), -3, 2)
    dt_bias, bias = optional(rng, (hv, k), -6, 2)
    lower_bound = float(rng.choice([0.0, -5.0, -1.25])) if kda else 0.0
    beta = beta_out = None
    if rng.random() < 0.6:
        beta_shape = (batch, tokens, hv)
        at = int(rng.integers(0, 8))
        beta = em.Tensor(beta_shape, strides_of(rng, (*beta_shape, 1), False)[:3], str(rng.choice(IO)), at, rng.normal(size=beta_shape) * 5)
        beta_out = em.Tensor(beta_shape, strides_of(rng, (*beta_shape, 1), False)[:3], str(rng.choice(IO)), 1)
    kind = int(rng.choice([1, 2])) if beta else 0
    logits = beta.values if beta else None

    def three(tensor, name):
        s = tensor.strides if tensor else (0, 0, 0)
        head = s[2] if kda or name.startswith("beta") else 1
        return {f"{name}_b": s[0], f"{name}_t": s[1], f"{name}_h": head}

    em.launch(
        op, io, folder, int(rng.choice([1, 2, 3, 7])),
        dict(
            x=x.pointer, g=g.pointer, a_log=a_log and a_log.pointer, dt_bias=dt_bias and dt_bias.pointer,
            beta=beta and beta.pointer, beta_out=beta_out and beta_out.pointer,
            **three(x, "x"), **three(g, "g"), **three(beta, "beta"), **three(beta_out, "beta_out"),
            batch=batch, tokens=tokens, hv=hv, head_dim=k, lower_bound=lower_bound,
            modes=em.modes(
                op, g_dtype=em.DTYPE_CODE[g_dtype], a_log_dtype=em.DTYPE_CODE[a_log and a_log.dtype],
                dt_bias_dtype=em.DTYPE_CODE[dt_bias and dt_bias.dtype], beta_dtype=em.DTYPE_CODE[beta and beta.dtype],
                beta_out_dtype=em.DTYPE_CODE[beta_out and beta_out.dtype], beta_kind=kind, wide=wide,
            ),
        ),
    )  # fmt: skip

    a, bias = np.exp(a).reshape(hv, 1), bias.reshape(hv, k)
    y = values.reshape(batch, tokens, hv, k) + bias
    ref = lower_bound * sigmoid(a * y) if lower_bound else -a * softplus(y)
    em.assert_close(g.values, ref.reshape(shape), g_dtype, 3e-7 if g_dtype == "fp32" or not wide else 1e-5)
    g.assert_poison_outside()
    if beta:
        em.assert_close(beta_out.values, kind * sigmoid(logits), beta_out.dtype, 3e-7)
        beta_out.assert_poison_outside()


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("io", IO)
def test_l2norm(io, seed, folder):
    rng = np.random.default_rng([seed, IO.index(io)])
    wide = bool(seed % 2)
    dim = int(rng.choice([8, 24, 64, 72, 128, 192, 256, 320, 512, 1000, 1024] if wide else [1, 2, 5, 32, 63, 64, 65, 127, 128, 513, 1024]))
    n = [int(rng.choice([1, 1, 2, 3])), int(rng.choice([1, 1, 4, 7])), int(rng.choice([1, 5, 16, 33]))]
    shape, y_dtype = (*n, dim), str(rng.choice(IO))
    x = em.Tensor(shape, strides_of(rng, shape, wide), io, 0 if wide else int(rng.integers(0, 8)), rng.normal(size=shape) * 10.0 ** rng.uniform(-3, 2))
    values = x.values
    in_place = y_dtype == io and rng.random() < 0.4
    y = x if in_place else em.Tensor(shape, strides_of(rng, shape, wide), y_dtype, 0 if wide else int(rng.integers(0, 8)))
    rstd = em.Tensor(n, (n[1] * n[2], n[2], 1), "fp32", 3) if rng.random() < 0.5 else None
    eps = float(rng.choice([1e-6, 1e-3]))
    em.launch(
        "l2norm", io, folder, int(rng.choice([1, 2, 3, 7])),
        dict(
            x=x.pointer, y=y.pointer, rstd=rstd and rstd.pointer, x_0=x.strides[0], x_1=x.strides[1], x_2=x.strides[2],
            y_0=y.strides[0], y_1=y.strides[1], y_2=y.strides[2], n_0=n[0], n_1=n[1], n_2=n[2], head_dim=dim, eps=eps,
            modes=em.modes("l2norm", y_dtype=em.DTYPE_CODE[y_dtype], wide=wide),
        ),
    )  # fmt: skip
    factor = 1 / np.sqrt((values**2).sum(-1) + np.float32(eps))
    em.assert_close(y.values, values * factor[..., None], y_dtype, 4e-7)
    y.assert_poison_outside()
    if rstd:
        em.assert_close(rstd.values, factor, "fp32", 4e-7)
        rstd.assert_poison_outside()


@pytest.mark.parametrize("wide", [False, True])
def test_gate_special_values(wide, folder):
    """NaN and infinity pass through; nothing else becomes one."""
    x = np.zeros((1, 1, 1, 8))
    x[0, 0, 0] = [np.nan, np.inf, -np.inf, 0.0, 3e38, -3e38, 1.0, -1.0]
    for op in ("kda_gate", "gdn_gate"):
        for g_dtype in ("fp32", "bf16"):
            tensor, g = em.Tensor(x.shape, (0, 0, 0, 1), "fp32", 0, x), em.Tensor(x.shape, (0, 0, 0, 1), g_dtype)
            bias = em.Tensor((8,), (1,), "fp32", 0, np.full(8, 0.5))
            gdn = op == "gdn_gate"
            em.launch(
                op, "fp32", folder, 1,
                dict(
                    x=tensor.pointer, g=g.pointer, a_log=None, dt_bias=bias.pointer, beta=None, beta_out=None,
                    **{f"{n}_{s}": 0 for n in ("x", "g", "beta", "beta_out") for s in "bth"},
                    batch=1, tokens=1, hv=8 if gdn else 1, head_dim=1 if gdn else 8, lower_bound=0.0,
                    modes=em.modes(op, g_dtype=em.DTYPE_CODE[g_dtype], a_log_dtype=3, dt_bias_dtype=0, beta_dtype=3,
                                   beta_out_dtype=3, beta_kind=0, wide=wide),
                ),
            )  # fmt: skip
            got = g.values.ravel()
            assert np.isnan(got[0]) and got[1] == -np.inf and got[2] == 0 and got[5] == 0
            np.testing.assert_allclose(got[[3, 4, 6, 7]], -softplus(np.array([0.5, 3e38, 1.5, -0.5])), rtol=2.0**-8)


def test_l2norm_special_values(folder):
    """A zero row stays zero; NaN and infinity stay in their own row."""
    x = np.ones((1, 1, 4, 64))
    x[0, 0, 0], x[0, 0, 1, 5], x[0, 0, 2, 7] = 0.0, np.nan, np.inf
    for wide in (0, 1):
        tensor, y = em.Tensor(x.shape, (0, 0, 64, 1), "fp32", 0, x), em.Tensor(x.shape, (0, 0, 64, 1), "fp32")
        em.launch(
            "l2norm", "fp32", folder, 1,
            dict(x=tensor.pointer, y=y.pointer, rstd=None, x_0=0, x_1=0, x_2=64, y_0=0, y_1=0, y_2=64, n_0=1, n_1=1, n_2=4, head_dim=64,
                 eps=1e-6, modes=em.modes("l2norm", y_dtype=0, wide=wide)),
        )  # fmt: skip
        got = y.values[0, 0]
        assert (got[0] == 0).all() and np.isnan(got[1]).all()
        assert np.isnan(got[2, 7]) and (np.delete(got[2], 7) == 0).all()
        np.testing.assert_allclose(got[3], 0.125, rtol=1e-6)
