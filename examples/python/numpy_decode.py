"""GDN decode on NumPy arrays (the cpu arch): a pool of states, three rows, one of them padding.

NumPy has no bfloat16, so rows are float32 here; float16 works too.
"""

import numpy as np

import cula


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def reference_step(S, q, k, v, a, b, A_log, dt_bias):
    """The recurrence for one row in float64. S [HV,K,V], q, k [H,K], v [HV,V], a, b [HV]."""
    group = v.shape[0] // q.shape[0]
    q, k = (np.repeat(x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6), group, axis=0) for x in (q, k))
    S = S * np.exp(-np.exp(A_log) * np.log1p(np.exp(a + dt_bias)))[:, None, None]
    u = sigmoid(b)[:, None] * (v - np.einsum("hkv,hk->hv", S, k))
    S = S + np.einsum("hk,hv->hkv", k, u)
    return S, np.einsum("hkv,hk->hv", S, q * q.shape[-1] ** -0.5)


def main():
    rng = np.random.default_rng(0)
    N, H, HV, K, V, slots, steps = 3, 2, 4, 128, 128, 8, 5
    A_log, dt_bias = rng.uniform(-1, 1, HV).astype("f"), rng.uniform(-4, -2, HV).astype("f")
    pool = np.full((slots, HV, V, K), np.nan, "f")  # never cleared: a new request starts from slot -1
    write = np.array([6, -1, 3], "i4")  # row 1 is padding
    expected = {6: np.zeros((HV, K, V)), 3: np.zeros((HV, K, V))}

    for step in range(steps):
        q, k, v = (rng.standard_normal((N, heads, dim)).astype("f") for heads, dim in ((H, K), (H, K), (HV, V)))
        a, b = (rng.standard_normal((N, HV)).astype("f") for _ in range(2))
        read = np.full(N, -1, "i4") if step == 0 else write
        out = cula.gdn.gdn_decode(q, k, v, a, b, pool, A_log=A_log, dt_bias=dt_bias, gate_kind="raw", beta_kind="logit", l2norm=True,
                                  read_index=read, write_index=write)
        for n, slot in enumerate(write):
            if slot < 0:
                assert not out[n].any()
                continue
            row = [x[n].astype("d") for x in (q, k, v, a, b)]
            expected[slot], want = reference_step(expected[slot], *row, A_log.astype("d"), dt_bias.astype("d"))
            assert np.linalg.norm(out[n] - want) < 1e-5 * np.linalg.norm(want)

    for slot, S in expected.items():
        assert np.linalg.norm(pool[slot].transpose(0, 2, 1) - S) < 1e-6 * np.linalg.norm(S)
    assert np.isnan(np.delete(pool, list(expected), axis=0)).all()  # nobody else's slot was touched
    print("kernel", cula.last_kernels()[0])
    print("OK")


if __name__ == "__main__":
    main()
