"""Operands into DLTensors: the DLPack exchange API, `__dlpack__`, `__cuda_array_interface__`, numpy's `__array_interface__`.

Nothing here copies, synchronises or takes ownership: a capsule is read and dropped, its destructor frees it. What a reading points to
lives as long as the reading's `keep`, which the caller holds until the launch has been issued.
"""

from __future__ import annotations

import ctypes
import itertools
from ctypes import POINTER, PYFUNCTYPE, addressof, byref, c_char_p, c_int, c_int32, c_int64, c_void_p, py_object
from typing import NamedTuple

from . import abi

_capsule_pointer = PYFUNCTYPE(c_void_p, py_object, c_char_p)(("PyCapsule_GetPointer", ctypes.pythonapi))
_capsule_is = PYFUNCTYPE(c_int, py_object, c_char_p)(("PyCapsule_IsValid", ctypes.pythonapi))
_MAX_VERSION = (1, 3)
_TYPESTR = {"<f4": "fp32", "<f2": "fp16", "<f8": "fp64", "<i4": "int32", "<i8": "int64"}


class Reading(NamedTuple):
    address: int  # of a DLTensor
    read_only: bool
    keep: object


class Spec:
    """An operand without memory, for cula.query: shape, dtype ("fp32", "bf16", "fp16", "int32", "int64"), device, strides in elements."""

    __slots__ = ("address", "device", "dtype", "shape", "strides")
    _places = itertools.count(1)

    def __init__(self, shape: tuple[int, ...], dtype: str, device: tuple[int, int] = (abi.CUDA, 0), strides: tuple[int, ...] | None = None):
        if dtype not in abi.DTYPES:
            raise ValueError(f"dtype {dtype!r} is none of {', '.join(abi.DTYPES)}")
        self.shape, self.dtype, self.device, self.strides = tuple(shape), dtype, device, strides
        # An address that is never followed. Each Spec has its own, far from the others: the library refuses outputs that overlap inputs.
        self.address = (1 + next(self._places) % 4096) << 48

    def read(self) -> Reading:
        return describe(self.address, self.device, self.shape, abi.DTYPES[self.dtype], self.strides)


def describe(pointer: int, device: tuple[int, int], shape, dtype: tuple[int, int], strides, read_only: bool = False, keep=None) -> Reading:
    """A DLTensor made here. strides in elements, or None for compact."""
    rank = len(shape)
    extents = (c_int64 * rank)(*shape)
    steps = (c_int64 * rank)(*strides) if strides is not None else None
    tensor = abi.Tensor(pointer, *device, rank, *dtype, 1, addressof(extents), addressof(steps) if steps is not None else 0, 0)
    return Reading(addressof(tensor), read_only, (tensor, extents, steps, keep))


# ---------------------------------------------------------------------------------------------------- exchange API


class Exchange:
    """A DLPackExchangeAPI. `address` goes to cula_bind_objects; the methods are for everything off the fast path."""

    def __init__(self, address: int):
        api = abi.ExchangeAPI.from_address(address)
        self.address = address
        self.can_read = bool(api.dltensor_from_py_object_no_sync)
        self._read = PYFUNCTYPE(c_int, py_object, c_void_p)(api.dltensor_from_py_object_no_sync or 0)
        self._stream = PYFUNCTYPE(c_int, c_int32, c_int32, POINTER(c_void_p))(api.current_work_stream)
        self._allocate = PYFUNCTYPE(c_int, c_void_p, POINTER(c_void_p), c_void_p, c_void_p)(api.managed_tensor_allocator)
        self._wrap = PYFUNCTYPE(c_int, c_void_p, POINTER(c_void_p))(api.managed_tensor_to_py_object_no_sync)

    @classmethod
    def of(cls, kind: type) -> Exchange | None:
        """The API that a type offers under a major version known here, or None."""
        capsule = getattr(kind, "__dlpack_c_exchange_api__", None)
        if capsule is None or not _capsule_is(capsule, b"dlpack_exchange_api"):
            return None
        address = _capsule_pointer(capsule, b"dlpack_exchange_api")
        while address and abi.ExchangeAPI.from_address(address).major != 1:
            address = abi.ExchangeAPI.from_address(address).prev_api  # the chain of older versions
        return cls(address) if address else None

    def read(self, x) -> Reading:
        tensor = abi.Tensor()
        self._read(x, addressof(tensor))  # an error is a Python exception, which PYFUNCTYPE raises
        return Reading(addressof(tensor), False, (tensor, x))

    def current_stream(self, device_type: int, device_id: int) -> int:
        stream = c_void_p()
        self._stream(device_type, device_id, byref(stream))
        return stream.value or 0

    def empty(self, like: abi.Tensor, shape, dtype: tuple[int, int] | None = None):
        """A new compact tensor of the producer on the device of `like`; dtype (code, bits), or None for that of `like`."""
        made, wrapped, failure = c_void_p(), c_void_p(), []
        extents = (c_int64 * len(shape))(*shape)
        prototype = abi.Tensor(0, like.device_type, like.device_id, len(shape), *(dtype or (like.code, like.bits)), 1, addressof(extents),
                               0, 0)

        @PYFUNCTYPE(None, c_void_p, c_char_p, c_char_p)
        def set_error(_context, kind, message):
            failure.append(f"{(kind or b'').decode()}: {(message or b'').decode()}")

        if self._allocate(addressof(prototype), byref(made), None, ctypes.cast(set_error, c_void_p)):
            raise MemoryError("; ".join(failure) or "the producer's allocator failed")
        self._wrap(made, byref(wrapped))
        x = ctypes.cast(wrapped, py_object).value  # takes a reference of its own, so the one that was handed over is dropped
        _decref(wrapped)
        return x


_decref = PYFUNCTYPE(None, c_void_p)(("Py_DecRef", ctypes.pythonapi))


# -------------------------------------------------------------------------------------------------------- __dlpack__


def from_dlpack(x, device: tuple[int, int], stream: int) -> Reading:
    """Through `__dlpack__`. stream: what DLPack's argument of that name gets on a GPU; CPU producers get none, JAX's refuses it."""
    arguments = {} if device[0] == abi.CPU else {"stream": stream}
    try:
        capsule = x.__dlpack__(max_version=_MAX_VERSION, **arguments)
    except TypeError:  # a producer from before DLPack 1.0, which does not know max_version
        capsule = x.__dlpack__(**arguments)
    return from_capsule(capsule)


def from_capsule(capsule) -> Reading:
    if _capsule_is(capsule, b"dltensor_versioned"):
        managed = abi.ManagedTensorVersioned.from_address(_capsule_pointer(capsule, b"dltensor_versioned"))
        if managed.major != 1:
            raise BufferError(f"the producer speaks DLPack {managed.major}.{managed.minor}, cula reads version 1")
        return Reading(addressof(managed.tensor), bool(managed.flags & abi.READ_ONLY), capsule)
    if _capsule_is(capsule, b"dltensor"):
        return Reading(_capsule_pointer(capsule, b"dltensor"), False, capsule)
    raise BufferError("__dlpack__ returned no unused capsule named dltensor or dltensor_versioned")


# ---------------------------------------------------------------------------------------------- array interfaces


def from_array_interface(interface: dict, device: tuple[int, int], x) -> Reading:
    """Through `__cuda_array_interface__` (versions 2 and 3) or numpy's `__array_interface__` of x."""
    typestr = interface["typestr"]
    name = _TYPESTR.get(typestr)
    if name is None:
        if typestr[0] == ">":
            raise BufferError(f"dtype {typestr} is big-endian, cula reads little-endian numbers: x.astype(x.dtype.newbyteorder('<'))")
        dtype = getattr(getattr(x, "dtype", None), "name", typestr)  # bfloat16 has no typestr, and asking for the name costs 2 us
        if dtype != "bfloat16":
            raise BufferError(f"dtype {dtype} is none that cula reads ({', '.join(abi.DTYPES)})")
        name = "bf16"
    if interface.get("mask") is not None:
        raise BufferError("a masked array")
    code, bits = abi.DTYPES[name]
    pointer, read_only = interface["data"]
    strides = interface.get("strides")
    if strides is not None:
        size = bits // 8
        if any(step % size for step in strides):
            raise BufferError(f"strides {tuple(strides)} bytes are no multiples of the {size} bytes of an element")
        strides = [step // size for step in strides]
    return describe(pointer or 0, device, interface["shape"], (code, bits), strides, bool(read_only), x)
