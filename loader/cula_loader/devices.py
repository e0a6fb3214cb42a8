"""Which GPUs this machine has, asked of the driver without a context. For `cula info`, prepare and the choice of artifacts."""

from __future__ import annotations

import ctypes
from ctypes import byref, c_char, c_int
from dataclasses import dataclass

_CC_MAJOR, _CC_MINOR, _SM_COUNT = 75, 76, 16  # CUdevice_attribute
_BY_CC = {(9, 0): "sm90", (10, 0): "sm100", (10, 3): "sm103", (12, 0): "sm120"}


@dataclass(frozen=True)
class Device:
    ordinal: int
    name: str
    compute_capability: tuple[int, int]
    sm_count: int

    @property
    def arch(self) -> str | None:
        """The arch whose cubins run on this GPU, or None: cubins for one compute capability run on no other."""
        return _BY_CC.get(self.compute_capability)


@dataclass(frozen=True)
class Devices:
    driver: str  # CUDA version of the driver, "" without one
    problem: str  # why there is none, "" if there are some
    found: tuple[Device, ...]


def devices() -> Devices:
    """Asks libcuda. Calls cuInit, which a forked child cannot do again; creates no context."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return Devices("", f"no NVIDIA driver on this machine ({error})", ())
    version, count = c_int(), c_int()
    cuda.cuDriverGetVersion(byref(version))
    driver = f"{version.value // 1000}.{version.value % 1000 // 10}"
    for call in (lambda: cuda.cuInit(0), lambda: cuda.cuDeviceGetCount(byref(count))):
        status = call()
        if status:
            return Devices(driver, f"the driver cannot be used: CUDA error {status}{_error_text(cuda, status)}", ())
    if not count.value:
        return Devices(driver, "the driver shows no GPU (is CUDA_VISIBLE_DEVICES set?)", ())
    return Devices(driver, "", tuple(_describe(cuda, i) for i in range(count.value)))


def _describe(cuda: ctypes.CDLL, ordinal: int) -> Device:
    device, name, values = c_int(), (c_char * 256)(), []
    cuda.cuDeviceGet(byref(device), ordinal)
    cuda.cuDeviceGetName(name, len(name), device)
    for attribute in (_CC_MAJOR, _CC_MINOR, _SM_COUNT):
        value = c_int()
        cuda.cuDeviceGetAttribute(byref(value), attribute, device)
        values.append(value.value)
    return Device(ordinal, name.value.decode(errors="replace"), (values[0], values[1]), values[2])


def _error_text(cuda: ctypes.CDLL, status: int) -> str:
    text = ctypes.c_char_p()
    return f" ({text.value.decode()})" if not cuda.cuGetErrorString(status, byref(text)) and text.value else ""
