"""Lightning decode on JAX arrays, eagerly, on the CPU.

JAX arrays are immutable by contract and a state pool is updated in place, so the pool must be given up: donate=True. The name that
was passed then holds the new states; no other reference to it may be in use. On a GPU pass stream= as well: JAX has no current stream
that a library could ask for.
"""

import cula
import jax
import jax.numpy as jnp
import numpy as np


def main():
    jax.config.update("jax_platforms", "cpu")
    N, H, D, steps = 2, 4, 128, 4
    keys = jax.random.split(jax.random.PRNGKey(0), steps)
    decay = jnp.exp(-jnp.linspace(0.01, 0.5, H, dtype=jnp.float32))  # lambda, one a head
    pool = jax.block_until_ready(jnp.zeros((N, H, D, D), jnp.float32))  # [slots,HV,V,K]; row n uses slot n
    S = np.zeros((N, H, D, D))  # [.., K, V], float64

    for key in keys:
        q, k, v = (jax.random.normal(x, (N, H, D), jnp.bfloat16) for x in jax.random.split(key, 3))
        out = cula.lightning.lightning_decode(q, k, v, pool, decay=decay, scale=1.0, donate=True)
        q, k, v = (np.asarray(x.astype(jnp.float32), "d") for x in (q, k, v))
        S = np.asarray(decay, "d")[:, None, None] * S + np.einsum("nhk,nhv->nhkv", k, v)
        want = np.einsum("nhkv,nhk->nhv", S, q)
        error = np.linalg.norm(np.asarray(out.astype(jnp.float32), "d") - want) / np.linalg.norm(want)
        assert error < 2.5e-3, error  # one rounding to bf16
    state_error = np.linalg.norm(np.asarray(pool, "d").swapaxes(2, 3) - S) / np.linalg.norm(S)
    assert state_error < 1e-6, state_error
    print(f"out {error:.1e}, state {state_error:.1e}")
    print("OK")


if __name__ == "__main__":
    main()
