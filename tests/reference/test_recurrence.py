"""The float64 recurrence against flash-linear-attention's naive functions (a second, separately written source), and
against closed forms that can be worked out on paper."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.reference import recurrence as ref
from tests.reference.fla_naive import fla_function

# FLA's naive functions compute in float32: T = 64 steps of sums over K = 64 leave a few 1e-7.
FLOAT32_SEQUENCE = 3e-6


def rel(a, b):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    assert np.isfinite(a).all() and np.isfinite(b).all()
    return np.linalg.norm(a - b) / np.linalg.norm(b)


def draw(seed, t=64, h=2, hv=2, k=64, v=48, per_channel=True):
    rng = np.random.default_rng(seed)
    q, key = rng.standard_normal((2, t, h, k))
    key = ref.l2_normalise(key)
    g = -rng.random((t, hv, k) if per_channel else (t, hv)) * 0.5
    return q, key, rng.standard_normal((t, hv, v)), g, rng.random((t, hv)), rng.standard_normal((hv, k, v))


def as_torch(*arrays):
    return [torch.from_numpy(np.ascontiguousarray(a)).float()[None] for a in arrays]


@pytest.mark.parametrize("form", ["recurrent", "chunk"])
@pytest.mark.parametrize("hv", [2, 6])
def test_kda_is_fla(form, hv):
    q, k, v, g, beta, s0 = draw(1, hv=hv)
    o, s = ref.sequence("kda", q, k, v, g, beta, initial_state=s0)
    fo, fs = fla_function("kda/naive.py", f"naive_{form}_kda")(*as_torch(q, k, v, g, beta), initial_state=as_torch(s0)[0],
                                                                output_final_state=True)
    assert rel(o, fo[0]) < FLOAT32_SEQUENCE and rel(s, fs[0]) < FLOAT32_SEQUENCE


@pytest.mark.parametrize("form", ["recurrent", "chunk"])
def test_gdn_is_fla(form):
    q, k, v, g, beta, s0 = draw(2, per_channel=False)
    o, s = ref.sequence("gdn", q, k, v, g, beta, initial_state=s0)
    tq, tk, tv, tg, tb = as_torch(q, k, v, g, beta)
    fo, fs = fla_function("gated_delta_rule/naive.py", f"naive_{form}_gated_delta_rule")(
        q=tq, k=tk, v=tv, beta=tb, g=tg, initial_state=as_torch(s0)[0], output_final_state=True)
    assert rel(o, fo[0]) < FLOAT32_SEQUENCE and rel(s, fs[0]) < FLOAT32_SEQUENCE


def test_gla_is_fla():
    q, k, v, g, _, s0 = draw(3)
    o, s = ref.sequence("gla", q, k, v, g, initial_state=s0)
    fo, fs = fla_function("gla/naive.py", "naive_recurrent_gla")(*as_torch(q, k, v, g), initial_state=as_torch(s0)[0],
                                                                output_final_state=True)
    assert rel(o, fo[0]) < FLOAT32_SEQUENCE and rel(s, fs[0]) < FLOAT32_SEQUENCE


def test_simple_gla_is_fla():
    q, k, v, g, _, s0 = draw(4, per_channel=False)
    o, s = ref.sequence("lightning", q, k, v, g, scale=1.0, initial_state=s0)
    fo, fs = fla_function("simple_gla/naive.py", "naive_recurrent_simple_gla")(
        *as_torch(q, k, v, g), scale=1.0, initial_state=as_torch(s0)[0], output_final_state=True)
    assert rel(o, fo[0]) < FLOAT32_SEQUENCE and rel(s, fs[0]) < FLOAT32_SEQUENCE


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("lower_bound", [0.0, -5.0, -1.0])
@pytest.mark.parametrize("with_A_log", [True, False])
def test_kda_gate_is_fla(with_bias, lower_bound, with_A_log):
    A_log = np.linspace(-1, 1, 3) if with_A_log else None
    rng = np.random.default_rng(5)
    x, bias = 4 * rng.standard_normal((7, 3, 64)), rng.standard_normal(3 * 64) if with_bias else None
    t = lambda a: None if a is None else torch.from_numpy(a).float()
    if lower_bound:
        want = fla_function("kda/gate.py", "naive_kda_lowerbound_gate")(t(x), t(A_log), t(bias), lower_bound)
    else:
        want = fla_function("kda/gate.py", "naive_kda_gate")(t(x), torch.zeros(3) if A_log is None else t(A_log), t(bias))
    got = ref.log_decay("raw", x, 3, 64, A_log, bias, lower_bound)
    assert rel(got, want) < 1e-6


@pytest.mark.parametrize("with_bias", [True, False])
def test_gdn_gate_is_fla(with_bias):
    rng = np.random.default_rng(6)
    x, A_log = 15 * rng.standard_normal((33, 5)), rng.standard_normal(5)  # 15: softplus beyond its linear threshold too
    bias = rng.standard_normal(5) if with_bias else None
    t = lambda a: None if a is None else torch.from_numpy(a).float()
    want = fla_function("gated_delta_rule/gate.py", "naive_gdn_gate")(t(x), t(A_log), t(bias))
    got = ref.log_decay("raw", x, 5, 1, A_log, bias)[..., 0]
    assert rel(got, want) < 1e-6


def test_decode_by_hand():
    """K = V = 1, where every quantity is one number."""
    common = dict(q=[[[2.0]]], k=[[[3.0]]], v=[[[5.0]]], state=np.full((1, 1, 1, 1), 7.0), scale=0.5)
    d = ref.decode("kda", **common, gate=[[[np.log(0.5)]]], gate_kind="log_channel", beta=[[0.25]])
    s = 3.5 + 3 * 0.25 * (5 - 3 * 3.5)  # decay, then the delta rule on the decayed state
    assert np.isclose(d.state.item(), s) and np.isclose(d.out.item(), s * 1.0)
    d = ref.decode("lightning", **common, gate=[0.5], gate_kind="const_head")
    assert np.isclose(d.state.item(), 3.5 + 15)
    d = ref.decode("gdn", **common, beta=[[0.0]], beta_kind="logit_twice")  # 2 sigmoid(0) = 1
    assert np.isclose(d.state.item(), 7 + 3 * (5 - 21))
    d = ref.decode("gla", **common, l2norm=True)
    assert np.isclose(d.state.item(), 7 + 5 * 3 / np.sqrt(9 + 1e-6))


def test_slots():
    rng = np.random.default_rng(7)
    q, k, v = rng.standard_normal((3, 5, 1, 4))
    q, k, v = (x[:, None] for x in (q[:, 0], k[:, 0], v[:, 0]))
    pool = rng.standard_normal((4, 1, 4, 4))
    run = lambda **kw: ref.decode("gla", q, k, v, state=pool, **kw)
    d = run(read_index=[3, -1, 0, 9, -1], write_index=[2, 0, -1, 1, -5], null_slot=None)
    assert d.written.tolist() == [0, 1, 2]
    assert (d.state[3] == pool[3]).all() and not d.out[4].any()
    np.testing.assert_allclose(d.state[0, 0], np.outer(v[1], k[1]))  # v-first, from zero
    np.testing.assert_allclose(d.state[2, 0], pool[3, 0] + np.outer(v[0], k[0]))
    np.testing.assert_allclose(d.out[2, 0], (pool[0, 0] + np.outer(v[2], k[2])) @ q[2, 0] / 2)  # read, not stored
    d = run(read_index=[3, 1, 0, 2, 2], null_slot=3)
    assert d.written.tolist() == [0, 1, 2] and not d.out[0].any()
