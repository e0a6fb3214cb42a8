"""Why an operand does not fit: cula.doctor.explain."""

from __future__ import annotations

import ctypes

from cula_loader import CulaError, InvalidArgumentError, abi
from cula_loader.producers import producer_of, type_name

_FLOATS = ("fp32", "bf16", "fp16")
DTYPES = {"row": _FLOATS, "head": _FLOATS, "vector": _FLOATS, "pool": ("fp32", "bf16"), "index": ("int32", "int64")}
DEVICES = {1: "CPU", 2: "CUDA", 3: "pinned CPU memory", 4: "OpenCL", 7: "Vulkan", 8: "Metal", 10: "ROCm", 13: "CUDA managed", 14: "oneAPI"}
SLOT_BYTES = 16  # what a pool's base and strides are multiples of


def explain(x, role: str = "row") -> tuple[str, ...]:
    """What keeps x from being an operand, a sentence each with what to do; () if nothing does. Reads no element.

    role: "row" (q, k, v, mixed_qkv, out, a gate [N,HV,K]), "head" (beta, a gate [N,HV]), "vector" (A_log, dt_bias), "pool"
    (state, state_out: [slots,HV,V,K] or [slots,HV,K,V]) or "index" (read_index, write_index). What depends on other operands, shapes
    above all, the call itself checks: see its message, or ask cula.query.
    """
    if role not in DTYPES:
        raise InvalidArgumentError(f"explain: role={role!r}: allowed: {', '.join(map(repr, DTYPES))}")
    try:
        producer = producer_of(type(x))
        device = producer.device(x)
        reading = producer.read(x, -1)
    except AttributeError:
        return (f"{type_name(type(x))} offers neither DLPack nor __cuda_array_interface__: pass an array of torch, JAX, CuPy or NumPy",)
    except (CulaError, BufferError, RuntimeError, TypeError, ValueError) as error:
        return ((str(error) or type(error).__name__).splitlines()[0],)
    tensor = abi.Tensor.from_address(reading.address)
    found = [*_device(device), *_dtype(tensor, role), *_strides(tensor, role)]
    if reading.read_only and role != "index":
        found.append("it is read-only: it can be an input, and not be written")
    return tuple(found)


def _device(device: tuple[int, int]):
    kind, ordinal = device
    if kind == abi.CPU:
        return
    if kind not in (abi.CUDA, 13):
        yield f"it is on {DEVICES.get(kind, f'DLPack device {kind}')}: cula runs on CPU and CUDA memory; copy it there"
        return
    from ._query import info

    here = {d["ordinal"]: d["problem"] for d in info()["devices"]}
    if here.get(ordinal):
        yield f"it is on cuda:{ordinal}, which cannot run: {here[ordinal]}"


def _dtype(tensor: abi.Tensor, role: str):
    name = next((name for name, code in abi.DTYPES.items() if code == (tensor.code, tensor.bits)), None)
    if name not in DTYPES[role] or tensor.lanes != 1:
        what = name or f"DLPack code {tensor.code} with {tensor.bits} bits"
        yield f"its dtype is {what}: for role={role!r} it is one of {', '.join(DTYPES[role])}; convert it once, outside the call"


def _strides(tensor: abi.Tensor, role: str):
    """The rules of cula.h for one operand. A stride counts only where the extent is larger than 1."""
    rank = tensor.ndim
    shape = list((ctypes.c_int64 * rank).from_address(tensor.shape)) if rank else []
    strides = list((ctypes.c_int64 * rank).from_address(tensor.strides)) if rank and tensor.strides else _compact(shape)
    size = tensor.bits // 8
    address = (tensor.data or 0) + tensor.byte_offset
    if address % size:
        yield f"its address {address:#x} is no multiple of its element's {size} bytes"
    if role == "index":
        if rank != 1:
            yield f"its shape is {shape}: an index is [N]; take one column"
    elif role == "head":
        return
    elif role == "vector":
        if any(extent > 1 and stride != want for extent, stride, want in zip(shape, strides, _compact(shape))):
            yield f"its strides are {strides}: a vector must be compact, {_compact(shape)}; x.contiguous()"
    elif role == "row":
        if rank and shape[-1] > 1 and strides[-1] != 1:
            yield f"its last stride is {strides[-1]}: elements of a head must be next to each other (x.contiguous(), or transpose before a copy)"
    elif rank != 4:
        yield f"its shape is {shape}: a pool is [slots,HV,V,K] or [slots,HV,K,V]"
    else:
        inner = _compact(shape)[2:]
        if any(extent > 1 and stride != want for extent, stride, want in zip(shape[2:], strides[2:], inner)):
            yield f"the strides of its last two dimensions are {strides[2:]}: a head must be compact, {inner}; choose the other state_layout, or copy"
        for name, extent, stride in zip(("slot", "head"), shape, strides):
            if extent > 1 and stride * size % SLOT_BYTES:
                yield f"its {name} stride is {stride * size} bytes, no multiple of {SLOT_BYTES}"
        if address % SLOT_BYTES:
            yield f"its address {address:#x} is no multiple of {SLOT_BYTES}: begin the pool at such an offset of the page"


def _compact(shape: list[int]) -> list[int]:
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return strides[::-1]
