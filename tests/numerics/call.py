"""Decode by the names of cula.h, through the two executors that the tests compare.

decode       the Python front end: cula.kda.kda_decode and its siblings
decode_c     cula_run of libcula.so through ctypes
"""

from __future__ import annotations

import torch

import cula
from benchmarks.cula_call import FUNCTIONS, bind
from tests.numerics import cabi

INVALID, UNSUPPORTED = cula.InvalidArgumentError, cula.UnsupportedError

__all__ = ["FUNCTIONS", "INVALID", "UNSUPPORTED", "decode", "decode_c"]


def decode(op: str, **kw):
    """Runs and returns out; kw["out"] is written where it is given."""
    return bind(op, **kw)()


def decode_c(op: str, **kw) -> None:
    """What decode does, through cula_run on torch's current stream."""
    tensors = {name: kw.pop(name) for name in cabi.TENSORS if name in kw}
    call = cabi.Call(op, tensors, **kw)
    stream = 0
    if tensors["out"].is_cuda:
        cabi.raise_for(cabi.library().cula_prepare(tensors["out"].device.index or 0))
        stream = torch.cuda.current_stream().cuda_stream
    call.run(stream)
