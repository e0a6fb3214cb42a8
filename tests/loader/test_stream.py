"""Stream arguments, and which stream a call without one goes to. (That the launch goes there: test_fake_gpu.py, test_gpu_*.py.)"""

from __future__ import annotations

import types

import pytest

from cula_loader import InvalidArgumentError, stream


def protocol(version, handle, as_method=True):
    value = (version, handle)
    return types.SimpleNamespace(__cuda_stream__=(lambda: value) if as_method else value)


class CUstream:
    def __int__(self):
        return 55


@pytest.mark.parametrize(("given", "handle"), [
    (0, 0), (1, 1), (2, 2), (2**63 - 1, 2**63 - 1), (protocol(0, 77), 77), (protocol(0, 77, False), 77), (types.SimpleNamespace(cuda_stream=33), 33),
    (types.SimpleNamespace(ptr=44), 44), (CUstream(), 55)])
def test_handles(given, handle):
    assert stream.handle_of(given) == handle


@pytest.mark.parametrize(("given", "text"), [
    (True, "allowed: None"), ("0", "allowed: None"), (1.0, "allowed: None"), (object(), "allowed: None"), (-1, "no CUstream"), (2**63, "no CUstream"),
    (protocol(1, 5), "version 1"), (protocol(0, -5), "no CUstream"), (types.SimpleNamespace(ptr=None), "no CUstream")])
def test_refused(given, text):
    with pytest.raises(InvalidArgumentError, match=text):
        stream.handle_of(given)


def test_dlpack_has_no_stream_zero():
    assert [stream.as_dlpack(h) for h in (0, 1, 2, 77)] == [1, 1, 2, 77]


def test_one_stream_or_an_explicit_one():
    assert stream.agreed([("q", "torch", 7), ("k", "cupy", 7)], "op") == 7
    assert stream.agreed([("q", "torch", 0), ("k", "cuda_array", 1)], "op") == 0  # two names of the legacy default stream
    with pytest.raises(InvalidArgumentError, match=r"op: stream: .* differ: q \(torch\) 0x7, k \(cupy\) 0x9; .*pass stream="):
        stream.agreed([("q", "torch", 7), ("k", "cupy", 9)], "op")
    with pytest.raises(InvalidArgumentError, match="no.* current stream .*pass stream=") as caught:
        stream.agreed([], "op")
    assert isinstance(caught.value, ValueError)
