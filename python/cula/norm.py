"""Normalisation of queries and keys."""

from __future__ import annotations

from cula_loader import InvalidArgumentError, call, empty
from cula_loader.ops import L2NORM

from ._outputs import refuse_no_integers, shape_of


def l2norm(x, *, eps=1e-6, out=None, rstd=None, dtype=None, num_threads=0, stream=None, donate=False):
    """x / sqrt(sum x^2 + eps) over the last dimension; returns out.

    x       rank 2 to 4, [..., D], D from 1 to 1024; float32, bf16 or fp16; leading strides are free, the last is 1
    out     shape of x; float32, bf16 or fp16; it may be x itself. None: a new array of x's framework, of dtype "fp32", "bf16", "fp16", or
            that of x for None
    rstd    shape of x without the last dimension, float32, compact; written if given: 1 / sqrt(sum x^2 + eps)

    (flash-linear-attention: l2norm.) Raises as cula.kda.kda_decode does.
    """
    if type(num_threads) is not int:
        refuse_no_integers("l2norm", num_threads)
    fresh = ()
    if out is None:
        if dtype not in (None, "fp32", "bf16", "fp16"):
            raise InvalidArgumentError(f"l2norm: dtype={dtype!r}: allowed: None, 'fp32', 'bf16', 'fp16'")
        out, fresh = empty(x, "out", shape_of("l2norm", "x", x), dtype), ("y",)
    elif dtype is not None:
        raise InvalidArgumentError("l2norm: dtype is that of out when out is given")
    call(L2NORM, (x, out, rstd), (eps, num_threads), stream, donate, fresh)
    return out
