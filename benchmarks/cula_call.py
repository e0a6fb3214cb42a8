"""Decode through the Python front end by the names of cula.h, importing nothing but cula: the cold start runs it without torch."""

from __future__ import annotations

from functools import partial

import cula

FUNCTIONS = {"kda": cula.kda.kda_decode, "gdn": cula.gdn.gdn_decode, "gla": cula.gla.gla_decode,
             "lightning": cula.lightning.lightning_decode}
_GATE_KIND = {"log_head": "log", "log_channel": "log"}  # the op says which of the two "log" is


def bind(op: str, q=None, k=None, v=None, *, gate_kind: str = "none", layout: str = "vk", lower_bound: float = 0.0,
         beta_kind: str = "value", **kw) -> partial:
    """The call as an object, so that what is timed is the public function and nothing around it. Neutral options are left out:
    an op that does not have an option has no keyword for it."""
    if gate_kind == "const_head":
        kw["decay"] = kw.pop("gate")
    else:
        kw["gate_kind"] = _GATE_KIND.get(gate_kind, gate_kind)
    if lower_bound != 0:
        kw["lower_bound"] = lower_bound
    if beta_kind != "value":
        kw["beta_kind"] = beta_kind
    return partial(FUNCTIONS[op], q, k, v, state_layout=layout, **kw)
