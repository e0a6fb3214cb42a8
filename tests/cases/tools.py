"""Small problems for the field cases: plain tensors, one call, the float64 expectation."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from tests.numerics.call import decode
from tests.numerics.compare import assert_close
from tests.reference import recurrence

OPS = ("kda", "gdn", "gla", "lightning")
DELTA = ("kda", "gdn")
GATE = {"kda": "log_channel", "gdn": "log_head", "gla": "log_channel", "lightning": "log_head"}
NAN = float("nan")


def rows(op, n, h=2, hv=None, k=64, v=64, *, io=torch.float32, device="cpu", seed=0, g=None, beta=None, k_norm=1.0):
    """Row operands of one call: q, k, v, gate (log decay; g: one value for all), beta, and out full of NaN."""
    hv = hv or h
    gen = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=gen)

    key = normal(n, h, k)
    key *= k_norm / key.norm(dim=-1, keepdim=True)
    gate = -torch.rand(n, hv, k, generator=gen) if GATE[op] == "log_channel" else -torch.rand(n, hv, generator=gen)
    if g is not None:
        gate.fill_(g)
    x = dict(q=normal(n, h, k).to(io), k=key.to(io), v=normal(n, hv, v).to(io), gate=gate, out=torch.full((n, hv, v), NAN).to(io))
    if op in DELTA:
        x["beta"] = torch.rand(n, hv, generator=gen) if beta is None else torch.full((n, hv), float(beta))
    return {name: t.to(device) for name, t in x.items()}


def pool(slots, hv=2, k=64, v=64, *, layout="vk", dtype=torch.float32, device="cpu", seed=9):
    gen = torch.Generator().manual_seed(seed)
    tile = (v, k) if layout == "vk" else (k, v)
    return (torch.randn(slots, hv, *tile, generator=gen) * 0.5).to(dtype).to(device)


def index(values, dtype=torch.int32, device="cpu"):
    return torch.tensor(values, dtype=dtype, device=device)


def expectation(op, x, **kw):
    """recurrence.decode on the same operands."""
    f64 = {}
    for name, t in {**x, **kw}.items():
        if name == "out":
            continue
        f64[name] = t.cpu().tolist() if isinstance(t, torch.Tensor) and "index" in name else (
            t.detach().double().cpu().numpy() if isinstance(t, torch.Tensor) else t)
    return recurrence.decode(op, **{"gate_kind": GATE[op], **f64})


def run(op, x, **kw) -> SimpleNamespace:
    """Calls decode and compares out and every written slot with float64; everything else in the pool must keep its bits."""
    target = kw["state_out"] if kw.get("state_out") is not None else kw.get("state")
    before = None if target is None else target.clone()
    want = expectation(op, x, **kw)
    decode(op, **{"gate_kind": GATE[op], **x, **kw})
    assert_close("out", x["out"], torch.from_numpy(want.out), addends=want.addends)
    if target is not None:
        written = torch.from_numpy(want.written).to(target.device)
        assert_close("state", target[written], torch.from_numpy(want.state[want.written]))
        untouched = torch.ones(len(target), dtype=torch.bool, device=target.device)
        untouched[written] = False
        assert torch.equal(as_bits(target[untouched]), as_bits(before[untouched])), "a slot changed that no row writes"
    return SimpleNamespace(out=x["out"], state=target, want=want, before=before)


def as_bits(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous().view({2: torch.int16, 4: torch.int32}[t.element_size()])


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(as_bits(a), as_bits(b))
