"""One way to call decode in the tests, by the names of cula.h."""

from __future__ import annotations

import torch

from tests.numerics import cabi

INVALID = cabi.CulaError
UNSUPPORTED = cabi.CulaError


def decode(op, *, num_threads=0, **kw):
    tensors = {name: kw.pop(name) for name in cabi.TENSORS if name in kw}
    call = cabi.Call(op, tensors, num_threads=num_threads, **kw)
    stream = 0
    if tensors["out"].is_cuda:
        cabi.raise_for(cabi.library().cula_prepare(tensors["out"].device.index or 0))
        stream = torch.cuda.current_stream().cuda_stream
    call.run(stream)


def prepare(device=0):
    cabi.raise_for(cabi.library().cula_prepare(device))
