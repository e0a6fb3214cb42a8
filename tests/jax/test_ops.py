"""cula.jax against the float64 recurrences, on the CPU and, marked gpu, on a GPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import cula.jax
from tests.jax import cases
from tests.jax.cases import DTYPE, as_torch, f64
from tests.numerics.compare import assert_close
from tests.reference import recurrence


@pytest.mark.parametrize("case", cases.cases(), ids=lambda c: c.id)
def test_decode(platform, case):
    cases.run(case)


@pytest.mark.parametrize("how", ["plain", "jit"])
@pytest.mark.parametrize("io, result, bound, twice", [("bf16", "fp32", None, False), ("fp32", "bf16", -5.0, True), ("fp16", "fp16", -0.5, False)])
def test_gates(platform, how, io, result, bound, twice):
    rng = np.random.default_rng(1)
    wrap = jax.jit if how == "jit" else lambda f: f
    x, a_log, dt_bias = (jnp.asarray(rng.standard_normal(s), DTYPE[io]) for s in ((2, 5, 4, 64), (4,), (4, 64)))
    head, logits = x[..., 0], jnp.asarray(rng.standard_normal((2, 5, 4)), DTYPE[io])
    kind = "logit_twice" if twice else "logit"
    want = recurrence.log_decay("raw", f64(x).reshape(10, 4, 64), 4, 64, f64(a_log), f64(dt_bias), bound or 0.0).reshape(x.shape)
    want_beta = recurrence.activate_beta(kind, f64(logits))
    g, beta = wrap(lambda x, a, d, b: cula.jax.kda_gate(x, a, d, lower_bound=bound, beta=b, beta_kind=kind, dtype=result))(x, a_log, dt_bias, logits)
    assert g.dtype == beta.dtype == DTYPE[result]
    assert_close("g", as_torch(g), torch.from_numpy(want))
    assert_close("beta", as_torch(beta), torch.from_numpy(want_beta))
    alone = wrap(lambda x, a: cula.jax.gdn_gate(x, a, dtype=result))(head, a_log)
    want = recurrence.log_decay("raw", f64(head).reshape(10, 4), 4, 64, f64(a_log)).reshape(head.shape)
    assert_close("g", as_torch(alone), torch.from_numpy(want))


@pytest.mark.parametrize("how", ["plain", "jit"])
@pytest.mark.parametrize("io, result", [("bf16", None), ("fp32", "bf16"), ("fp16", "fp32")])
def test_l2norm(platform, how, io, result):
    x = jnp.asarray(np.random.default_rng(2).standard_normal((3, 7, 96)), DTYPE[io])
    function = lambda x: cula.jax.l2norm(x, eps=1e-3, dtype=result)  # noqa: E731
    y = (jax.jit(function) if how == "jit" else function)(x)
    assert y.dtype == DTYPE[result or io]
    want = f64(x) / np.sqrt((f64(x) ** 2).sum(-1, keepdims=True) + np.float64(np.float32(1e-3)))
    assert_close("y", as_torch(y), torch.from_numpy(want))


def test_no_rows(platform):
    empty, pool = jnp.zeros((0, 4, 64), jnp.bfloat16), jnp.ones((2, 4, 64, 64))
    out, states = cula.jax.gla_decode(empty, empty, empty, state=pool)
    assert out.shape == (0, 4, 64) and np.array_equal(states, pool)
    assert cula.jax.l2norm(empty).shape == empty.shape


def test_a_loop_of_steps(platform):
    """Steps in one program: each sees the states that the one before left, and what JAX itself computed in between."""
    rng = np.random.default_rng(3)
    steps, n, h, d = 6, 2, 4, 64
    q, k, v, g = (jnp.asarray(rng.standard_normal((steps, n, h, d)), jnp.float32) for _ in range(4))
    beta = jnp.asarray(rng.random((steps, n, h)), jnp.float32)

    @jax.jit
    def program(pool):
        def step(pool, x):
            q, k, v, g, beta = x
            out, pool = cula.jax.kda_decode(q + 1, k, v * 2, -jnp.exp(g), beta, pool, gate_kind="log", l2norm=True, state_layout="kv")
            return pool, out * 3

        return jax.lax.scan(step, pool, (q, k, v, g, beta))

    pool, outs = program(jnp.zeros((n, h, d, d), jnp.float32))
    state, wants = np.zeros((n, h, d, d)), []
    for t in range(steps):
        r = recurrence.decode("kda", f64(q[t] + 1), f64(k[t]), f64(v[t] * 2), gate=f64(-jnp.exp(g[t])), gate_kind="log_channel",
                              beta=f64(beta[t]), l2norm=True, state=state, layout="kv")
        state = r.state
        wants.append(r.out * 3)
    # float32 states are rounded once a step: the error of six steps
    assert_close("out", as_torch(outs), torch.from_numpy(np.stack(wants)), 6 * 2e-7)
    assert_close("states", as_torch(pool), torch.from_numpy(state), 6 * 2e-7)
