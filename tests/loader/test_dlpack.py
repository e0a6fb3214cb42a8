"""Readers: the three protocols, numpy's memory, and what each refuses."""

from __future__ import annotations

import ctypes
import gc
import weakref

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

from cula_loader import abi, dlpack
from cula_loader.producers import producer_of

python = ctypes.pythonapi
new_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(("PyCapsule_New", python))
rename = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_SetName", python))
get_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_GetPointer", python))


def content(reading) -> dict:
    """A DLTensor as plain data."""
    t = abi.Tensor.from_address(reading.address)
    array = lambda address: tuple((ctypes.c_int64 * t.ndim).from_address(address) if t.ndim else ()) if address or not t.ndim else None  # noqa: E731
    return {"data": (t.data or 0) + t.byte_offset, "device": (t.device_type, t.device_id), "dtype": (t.code, t.bits, t.lanes), "shape": array(t.shape),
            "strides": array(t.strides)}


def read(x, stream=-1):
    return producer_of(type(x)).read(x, stream)


def effective(strides, shape):
    """Strides that count: those of extents above 1, compact ones written out."""
    compact, step = [], 1
    for extent in reversed(shape):
        compact.insert(0, step)
        step *= extent
    return tuple(s for s, extent in zip(strides or compact, shape) if extent > 1)


BASE = np.arange(5 * 6 * 8).reshape(5, 6, 8)
VIEWS = {"compact": lambda x: x, "rows": lambda x: x[::2], "inner": lambda x: x[:, 1:4], "offset": lambda x: x[1:, 2:, :], "empty": lambda x: x[:0],
         "one": lambda x: x[:1, :1], "scalar": lambda x: x[0, 0, 0]}


# JAX has no int64 without x64.
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize(("framework", "dtype"), [
    (f, d) for f in ("numpy", "torch", "jax") for d in ("float32", "float16", "bfloat16", "int32", "int64") if (f, d) != ("jax", "int64")])
def test_every_framework_reads_the_same(framework, dtype, view):
    """Against the framework's own address, shape and strides."""
    code = {"float32": (2, 32), "float16": (2, 16), "bfloat16": (4, 16), "int32": (0, 32), "int64": (0, 64)}[dtype]
    if framework == "torch":
        x = VIEWS[view](torch.from_numpy(BASE.copy()).to(getattr(torch, dtype)))
        address, strides = x.data_ptr(), x.stride()
    elif framework == "numpy":
        x = np.asarray(VIEWS[view](BASE.astype(getattr(ml_dtypes, dtype, dtype))))
        address, strides = x.__array_interface__["data"][0], tuple(s // x.itemsize for s in x.strides)
    else:
        x = VIEWS[view](jnp.asarray(BASE, dtype))
        address, strides = x.unsafe_buffer_pointer(), None
    got = content(reading := read(x))
    assert got["device"] == (abi.CPU, 0) and got["dtype"] == (*code, 1) and got["shape"] == tuple(x.shape)
    if 0 not in x.shape:
        assert got["data"] == address
        assert effective(got["strides"], x.shape) == effective(strides, x.shape)
    assert reading.read_only is False


def test_an_array_interface_of_the_wrong_byte_order_is_refused():
    with pytest.raises(BufferError, match="dtype"):
        read(np.zeros(3, ">f4"))


@pytest.mark.parametrize("dtype", ["bool", "uint8", "complex64", "float64", "S3"])
def test_other_dtypes_are_refused_or_named(dtype):
    """float64 is read and left to the library's rule, the others have no place in any op."""
    x = np.zeros(3, dtype)
    if dtype == "float64":
        assert content(read(x))["dtype"] == (2, 64, 1)
    else:
        with pytest.raises(BufferError, match="dtype .* is none that cula reads"):
            read(x)


def test_strides_between_elements_are_refused():
    x = np.zeros(4, [("a", "f4"), ("b", "i2")])["a"]
    with pytest.raises(BufferError, match="strides"):
        read(x)


def test_a_masked_array_is_refused():
    from cula_loader import UnsupportedError

    with pytest.raises(UnsupportedError, match="mask"):
        read(np.ma.array([1.0, 2.0], mask=[0, 1]))


def test_read_only_is_seen():
    x = np.zeros(3, "float32")
    x.flags.writeable = False
    assert read(x).read_only
    assert read(np.broadcast_to(np.zeros(1, "float32"), (4,))).read_only


class Exporter:
    """A producer with a DLPack export of numpy's, recording how it is asked."""

    def __init__(self, knows_max_version: bool, device=(1, 0), flags=None, major=None):
        self.array, self.knows, self.device, self.calls, self.flags, self.major = np.arange(6, dtype="float32"), knows_max_version, device, [], flags, major

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, **kwargs):
        self.calls.append(dict(kwargs))
        if "max_version" in kwargs and not self.knows:
            raise TypeError("unexpected keyword argument 'max_version'")
        kwargs.pop("stream", None)
        capsule = self.array.__dlpack__(**kwargs)
        if self.flags is not None or self.major is not None:
            managed = abi.ManagedTensorVersioned.from_address(get_pointer(capsule, b"dltensor_versioned"))
            managed.flags, managed.major = self.flags or 0, self.major or 1
        return capsule


def test_dlpack_with_a_version():
    x = Exporter(True)
    assert content(read(x))["shape"] == (6,) and x.calls == [{"max_version": (1, 3)}]


def test_dlpack_of_an_old_producer():
    x = Exporter(False)
    assert content(read(x))["shape"] == (6,) and x.calls == [{"max_version": (1, 3)}, {}]


@pytest.mark.parametrize("stream", [-1, 1, 77])
def test_the_stream_goes_to_gpu_producers_only(stream):
    cpu, gpu = Exporter(True), Exporter(True, device=(2, 0))
    read(cpu, stream), read(gpu, stream)
    assert "stream" not in cpu.calls[0] and gpu.calls[0]["stream"] == stream


def test_the_read_only_flag():
    assert read(Exporter(True, flags=abi.READ_ONLY)).read_only
    assert not read(Exporter(True, flags=2)).read_only


def test_a_later_major_version_is_refused():
    with pytest.raises(BufferError, match=r"speaks DLPack 2\."):
        read(Exporter(True, major=2))


@pytest.mark.parametrize("name", [b"dltensor", b"dltensor_versioned"])
def test_a_capsule_is_read_and_dropped(name):
    """The name is not changed, so the capsule's own destructor frees the export; with it goes the array."""
    x = np.arange(4, dtype="float32")
    gone = weakref.ref(x)
    capsule = x.__dlpack__(max_version=(1, 0) if name.endswith(b"versioned") else None)
    reading = dlpack.from_capsule(capsule)
    assert get_pointer(capsule, name) and content(reading)["shape"] == (4,)
    del x, capsule
    gc.collect()
    assert gone() is not None, "the reading keeps the memory"
    del reading
    gc.collect()
    assert gone() is None, "leaked"


def test_a_used_capsule_is_refused():
    capsule = np.zeros(3).__dlpack__()
    rename(capsule, b"used_dltensor")
    try:
        with pytest.raises(BufferError, match="no unused capsule"):
            dlpack.from_capsule(capsule)
        with pytest.raises(BufferError, match="no unused capsule"):
            dlpack.from_capsule(object())
    finally:
        rename(capsule, b"dltensor")


# -------------------------------------------------------------------------------------------------------- exchange API


def test_the_exchange_api_reads_what_torch_has():
    x = torch.arange(24.0).reshape(2, 3, 4)[:, 1:]
    got = content(dlpack.Exchange.of(torch.Tensor).read(x))
    assert (got["data"], got["shape"], got["strides"]) == (x.data_ptr(), (2, 2, 4), (12, 4, 1))


def test_a_type_without_the_api():
    assert dlpack.Exchange.of(int) is None
    assert dlpack.Exchange.of(type("X", (), {"__dlpack_c_exchange_api__": 140})) is None  # the early form, an address


@pytest.mark.parametrize(("majors", "chosen"), [((1,), 0), ((2, 1), 1), ((3, 2, 1), 2), ((2,), None)])
def test_the_chain_of_versions(majors, chosen):
    """A newer API may name older ones; the first of major version 1 counts."""
    real = abi.ExchangeAPI.from_address(get_pointer(torch.Tensor.__dlpack_c_exchange_api__, b"dlpack_exchange_api"))
    chain = [abi.ExchangeAPI.from_buffer_copy(real) for _ in majors]
    for i, major in enumerate(majors):
        chain[i].major, chain[i].prev_api = major, ctypes.addressof(chain[i + 1]) if i + 1 < len(majors) else None
    kind = type("X", (), {"__dlpack_c_exchange_api__": new_capsule(ctypes.addressof(chain[0]), b"dlpack_exchange_api", None)})
    found = dlpack.Exchange.of(kind)
    assert found is None if chosen is None else found.address == ctypes.addressof(chain[chosen])


def test_the_exchange_api_allocates():
    exchange = dlpack.Exchange.of(torch.Tensor)
    like = torch.zeros(3, dtype=torch.bfloat16)
    keep = exchange.read(like)
    x = exchange.empty(abi.Tensor.from_address(keep.address), (2, 5))
    assert type(x) is torch.Tensor and x.shape == (2, 5) and x.dtype == torch.bfloat16 and x.is_contiguous()
    assert exchange.empty(abi.Tensor.from_address(keep.address), (2,), abi.DTYPES["fp32"]).dtype == torch.float32
    x.fill_(1)
    storage = weakref.ref(x)
    del x
    gc.collect()
    assert storage() is None, "the reference that was handed over is dropped"
    with pytest.raises(MemoryError, match="negative dimension"):
        exchange.empty(abi.Tensor.from_address(keep.address), (-2,))


@pytest.mark.parametrize("framework", ["numpy", "torch", "jax"])
@pytest.mark.parametrize("dtype", [None, "fp32", "bf16", "fp16"])
def test_producers_allocate_their_own(framework, dtype):
    like = {"numpy": np.zeros(3, "float16"), "torch": torch.zeros(3, dtype=torch.float16), "jax": jnp.zeros(3, jnp.float16)}[framework]
    x = producer_of(type(like)).empty(like, (2, 3), dtype)
    expected = {None: "float16", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}[dtype]
    assert type(x) is type(like) and tuple(x.shape) == (2, 3) and str(x.dtype).endswith(expected)
    others = [producer_of(type(like)).empty(like, (2, 3), dtype) for _ in range(3)]
    assert len({content(read(y))["data"] for y in [x, *others]}) == 4, "memory of its own, even where the framework could share a constant"


# ------------------------------------------------------------------------------------------------ operands to refuse


def test_a_jax_tracer_is_refused():
    from cula_loader import UnsupportedError

    def traced(x):
        with pytest.raises(UnsupportedError, match="tracer"):
            producer_of(type(x))
        return x

    jax.jit(traced)(jnp.zeros(3))


def test_torch_tensors_without_memory_are_refused():
    from torch._subclasses.fake_tensor import FakeTensorMode

    from cula_loader import InvalidArgumentError, UnsupportedError

    with FakeTensorMode():
        fake = torch.zeros(3)
    with pytest.raises(UnsupportedError, match="FakeTensor has no memory"):
        producer_of(type(fake))
    meta = torch.zeros(3, device="meta")
    with pytest.raises(InvalidArgumentError, match="meta"):
        producer_of(type(meta)).device(meta)


@pytest.mark.parametrize("wrap", [torch.nn.Parameter, lambda x: x.requires_grad_()])
def test_a_gradient_is_refused_only_where_it_would_be_recorded(wrap):
    from cula_loader import UnsupportedError

    x = wrap(torch.zeros(3))
    with pytest.raises(UnsupportedError, match=r"requires grad.*no_grad"):
        read(x)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert content(read(x))["data"] == x.data_ptr()


# ----------------------------------------------------------------------------------------------- __cuda_array_interface__


class CudaArray:
    def __init__(self, **entries):
        self.__cuda_array_interface__ = {"version": 3, "shape": (2, 3), "typestr": "<f4", "data": (4096, False), "strides": None} | entries


def interface(x):
    return dlpack.from_array_interface(x.__cuda_array_interface__, (abi.CUDA, 1), x)


def test_cuda_array_interface():
    got = content(reading := interface(CudaArray(strides=(48, 8), typestr="<f2", data=(4096, True))))
    assert got == {"data": 4096, "device": (abi.CUDA, 1), "dtype": (2, 16, 1), "shape": (2, 3), "strides": (24, 4)} and reading.read_only
    assert content(interface(CudaArray()))["strides"] is None
    assert content(interface(CudaArray(shape=(0, 3), data=(0, False))))["shape"] == (0, 3)


@pytest.mark.parametrize(("entries", "text"), [(dict(typestr=">f4"), "dtype"), (dict(typestr="<V2"), "dtype"), (dict(strides=(10, 4)), "strides"),
                                               (dict(mask=object()), "masked")])
def test_cuda_array_interface_refuses(entries, text):
    with pytest.raises(BufferError, match=text):
        interface(CudaArray(**entries))


def test_bfloat16_goes_by_the_dtype_name():
    x = CudaArray(typestr="<V2")
    x.dtype = np.dtype(ml_dtypes.bfloat16)
    assert content(interface(x))["dtype"] == (4, 16, 1)
