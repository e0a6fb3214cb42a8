"""cula for JAX: the ops as XLA custom calls, inside jit and outside, on the CPU and on CUDA devices.

    kda_decode, gdn_decode, gla_decode, lightning_decode      one token a row; return out and the updated states
    kda_prefill                                               all tokens of N sequences; returns out and the final states
    kda_gate, gdn_gate, l2norm                                elementwise

Functional, as everything in JAX: no array that was passed changes. A pool is updated in place all the same where XLA sees that nobody
needs its old contents: in a jit that it was donated to, in a loop that carries it, or in a plain call with donate=True, which deletes
the array that was passed. Otherwise XLA copies the pool first.

Shapes, dtypes and options are checked while the call is traced, and raise what cula raises everywhere. What only the machine knows (a GPU
that these artifacts have no kernels for) is an error of XLA's when the program runs, with cula's message. The kernels for a
GPU are loaded before the first program with a call of cula runs on it; work is on XLA's own stream.

vmap and differentiation raise UnsupportedError: N is the batch, and the kernels are forward only. Under sharding use jax.shard_map.
"""

from ._ops import gdn_decode, gdn_gate, gla_decode, kda_decode, kda_gate, l2norm, lightning_decode
from ._prefill import kda_prefill
from ._xla import register

__all__ = ["gdn_decode", "gdn_gate", "gla_decode", "kda_decode", "kda_gate", "kda_prefill", "l2norm", "lightning_decode", "register"]
