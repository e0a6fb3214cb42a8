"""cula.doctor.explain says yes exactly where a call does, and names what is wrong where it does not."""

import numpy as np
import pytest
import torch

import cula
from cula.doctor import explain

N, H, D = 3, 2, 64
ROLE = {"q": "row", "beta": "head", "A_log": "vector", "state": "pool", "read_index": "index"}


def operands():
    rows = {name: torch.randn(N, H, D) for name in ("q", "k", "v", "gate")}
    return rows | dict(beta=torch.rand(N, H), A_log=torch.zeros(H), state=torch.zeros(5, H, D, D), read_index=torch.tensor([3, 0, 1]))


def pool(offset=0, slot=H * D * D, head=D * D):
    return torch.zeros(6 * max(slot, H * head) + offset).as_strided((5, H, D, D), (slot, head, D, 1), offset)


@pytest.mark.parametrize("name, x, text", [
    ("q", torch.randn(N, H, D), None),
    ("q", torch.randn(N, 5 * H * D)[:, 7:7 + H * D].unflatten(1, (H, D)), None),
    ("q", torch.randn(N, H, 2 * D)[:, :, ::2], "its last stride is 2"),
    ("q", torch.randn(N, H, D, dtype=torch.float64), "its dtype is fp64: for role='row' it is one of fp32, bf16, fp16"),
    ("q", torch.zeros(N, H, D, dtype=torch.int8), "DLPack code 0 with 8 bits"),
    ("q", torch.randn(N, H, D, requires_grad=True), "torch.no_grad"),
    ("q", torch.randn(N, H, D, device="meta"), "meta"),
    ("q", "text", "str offers neither DLPack nor"),
    ("beta", torch.rand(H, N).T, None),
    ("beta", torch.rand(N, H, dtype=torch.float64), "dtype is fp64"),
    ("A_log", torch.zeros(1, 1, H, 1), None),
    ("A_log", torch.zeros(2 * H)[::2], "its strides are [2]"),
    ("state", pool(), None),
    ("state", pool(slot=H * D * D + 1024), None),
    ("state", pool(offset=4), None),
    ("state", pool(offset=1), "begin the pool at such an offset"),
    ("state", pool(slot=H * D * D + 2), f"its slot stride is {4 * (H * D * D + 2)} bytes, no multiple of 16"),
    ("state", pool(head=D * D + 1, slot=2 * H * D * D), f"its head stride is {4 * (D * D + 1)} bytes"),
    ("state", pool().transpose(2, 3), "choose the other state_layout"),
    ("state", torch.zeros(5, H, D * D), "a pool is [slots,HV,V,K]"),
    ("state", torch.zeros(5, H, D, D, dtype=torch.float16), "for role='pool' it is one of fp32, bf16"),
    ("read_index", torch.tensor([3, 0, 1], dtype=torch.int32), None),
    ("read_index", torch.zeros(N, 4, dtype=torch.int64)[:, 1], None),
    ("read_index", torch.zeros(N, 2, dtype=torch.int64), "an index is [N]"),
    ("read_index", torch.zeros(N), "for role='index' it is one of int32, int64"),
])
def test_explain_agrees_with_the_call(name, x, text):
    given = operands() | {name: x}
    found = explain(x, ROLE[name])
    if text is None:
        assert found == ()
        cula.kda.kda_decode(gate_kind="raw", **given)
    else:
        assert any(text in sentence for sentence in found), found
        with pytest.raises(cula.CulaError):
            cula.kda.kda_decode(gate_kind="raw", **given)


def test_a_view_that_torch_negates_lazily():
    """Its memory has the other sign, and that is what DLPack hands out."""
    x = torch.complex(torch.rand(N, H), torch.rand(N, H)).conj().imag
    assert x.is_neg() and torch.equal(torch.from_dlpack(x), -x)
    assert any("pass x.resolve_neg()" in sentence for sentence in explain(x, "head")) and not explain(x.resolve_neg(), "head")
    mixed = {key: y.numpy() for key, y in operands().items()} | dict(beta=x)  # read one by one
    with pytest.raises(cula.InvalidArgumentError, match="kda_decode: beta: torch negates this view lazily"):
        cula.kda.kda_decode(gate_kind="raw", **mixed)


def test_written_arrays_and_devices():
    x = np.zeros((2, 2), "float32")
    assert explain(x) == ()
    x.flags.writeable = False
    assert any("read-only" in sentence for sentence in explain(x))
    assert any("is no multiple of its element's 4 bytes" in sentence for sentence in explain(shifted()))
    with pytest.raises(cula.InvalidArgumentError, match="'row', 'head', 'vector', 'pool', 'index'"):
        explain(x, "gate")


def shifted():
    """float32 elements at an odd address."""
    raw = np.zeros(17, "u1")
    return np.ndarray((3,), "float32", raw, 1 + raw.ctypes.data % 2)


class Elsewhere:
    """An array of a device that cula does not run on."""

    def __init__(self, device):
        self.device, self.tensor = device, torch.zeros(4)

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, **_):
        return self.tensor.__dlpack__()


def test_other_devices(monkeypatch):
    assert any("ROCm" in sentence for sentence in explain(Elsewhere((10, 0))))
    assert any("DLPack device 99" in sentence for sentence in explain(Elsewhere((99, 0))))
    facts = {"devices": [{"ordinal": 0, "problem": "no sm90 kernels here: build them"}, {"ordinal": 1, "problem": ""}]}
    monkeypatch.setattr("cula._query.info", lambda: facts)
    assert explain(Elsewhere((2, 0))) == ("it is on cuda:0, which cannot run: no sm90 kernels here: build them",)
    assert explain(Elsewhere((2, 1))) == ()
