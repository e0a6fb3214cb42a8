"""Decode through the Python front end by the names of cula.h, importing nothing but cula: the cold start runs it without torch."""

from __future__ import annotations

from functools import partial

import cula

FUNCTIONS = {"kda": cula.kda.kda_decode, "gdn": cula.gdn.gdn_decode, "gla": cula.gla.gla_decode,
             "lightning": cula.lightning.lightning_decode}
_GATE_KIND = {"log_head": "log", "log_channel": "log"}  # the op says which of the two "log" is


def decode(op: str, q, k, v, *, gate_kind: str = "none", layout: str = "vk", lower_bound: float = 0.0, **kw):
    """The call as an object, so that what is timed is the public function and nothing around it."""
    if gate_kind == "const_head":
        kw["decay"] = kw.pop("gate")
    else:
        kw["gate_kind"] = _GATE_KIND.get(gate_kind, gate_kind)
    if lower_bound:
        kw["lower_bound"] = lower_bound
    return partial(FUNCTIONS[op], q, k, v, state_layout=layout, **kw)
