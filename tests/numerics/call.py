"""Decode by the names of cula.h, through the two executors that the tests compare.

decode       the Python front end: cula.kda.kda_decode and its siblings
decode_c     cula_run of libcula.so through ctypes
"""

from __future__ import annotations

import cula
import torch

from tests.numerics import cabi

INVALID, UNSUPPORTED = cula.InvalidArgumentError, cula.UnsupportedError
FUNCTIONS = {"kda": cula.kda.kda_decode, "gdn": cula.gdn.gdn_decode, "gla": cula.gla.gla_decode,
             "lightning": cula.lightning.lightning_decode}
_GATE_KIND = {"log_head": "log", "log_channel": "log"}  # the op says which of the two "log" is


def arguments(op: str, *, gate_kind="none", layout="vk", lower_bound=0.0, **kw) -> dict:
    """The keywords of the front end for operands and options by the names of cula.h."""
    if gate_kind == "const_head":
        kw["decay"] = kw.pop("gate")
    else:
        kw["gate_kind"] = _GATE_KIND.get(gate_kind, gate_kind)
    if op in ("gla", "lightning") and kw.get("beta_kind") == "value":
        del kw["beta_kind"]
    if lower_bound != 0:
        kw["lower_bound"] = lower_bound
    return {**kw, "state_layout": layout}


def decode(op: str, **kw):
    """Runs and returns out; kw["out"] is written where it is given."""
    return FUNCTIONS[op](**arguments(op, **kw))


def decode_c(op: str, **kw) -> None:
    """The same through cula_run, on torch's current stream."""
    tensors = {name: kw.pop(name) for name in cabi.TENSORS if name in kw}
    call = cabi.Call(op, tensors, **kw)
    stream = 0
    if tensors["out"].is_cuda:
        cabi.raise_for(cabi.library().cula_prepare(tensors["out"].device.index or 0))
        stream = torch.cuda.current_stream().cuda_stream
    call.run(stream)
