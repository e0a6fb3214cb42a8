"""Lightning decode in a jitted loop of steps, on the CPU or a GPU.

The pool of states goes in, the new one comes out, as everything in JAX. It is donated to the program, so that no step copies it.
"""

import jax
import jax.numpy as jnp
import numpy as np

import cula.jax


@jax.jit
def rows(key):
    return jax.random.normal(key, (3, 2, 4, 128), jnp.bfloat16)  # q, k, v of N rows and H heads


def decode(pool, keys, decay):
    """A step for each key. Returns the pool and the outputs [steps,N,H,V]."""

    def step(pool, key):
        q, k, v = rows(key)
        out, pool = cula.jax.lightning_decode(q, k, v, pool, decay=decay, scale=1.0)
        return pool, out

    return jax.lax.scan(step, pool, keys)


def main():
    N, H, D, steps = 2, 4, 128, 4
    keys = jax.random.split(jax.random.PRNGKey(0), steps)
    decay = jnp.exp(-jnp.linspace(0.01, 0.5, H, dtype=jnp.float32))  # lambda, one a head
    pool = jnp.zeros((N, H, D, D), jnp.float32)  # [slots,HV,V,K]; row n uses slot n
    states, outs = jax.jit(decode, donate_argnums=0)(pool, keys, decay)
    assert pool.is_deleted()  # its memory holds the states now

    f64 = lambda x: np.asarray(x.astype(jnp.float32), "d")  # noqa: E731
    S = np.zeros((N, H, D, D))  # [..,K,V], float64
    for key, out in zip(keys, outs):
        q, k, v = f64(rows(key))
        S = f64(decay)[:, None, None] * S + np.einsum("nhk,nhv->nhkv", k, v)
        want = np.einsum("nhkv,nhk->nhv", S, q)
        error = np.linalg.norm(f64(out) - want) / np.linalg.norm(want)
        assert error < 2.5e-3, error  # one rounding to bf16
    state_error = np.linalg.norm(f64(states).swapaxes(2, 3) - S) / np.linalg.norm(S)
    assert state_error < 1e-6, state_error
    print(f"out {error:.1e}, state {state_error:.1e}")
    print("OK")


if __name__ == "__main__":
    main()
