"""Kernels on GPUs, through cuda.bindings.driver. Imported when the first GPU operand or `prepare` comes.

Cubins are read from the artifacts folder, checked, and loaded once a process (CUlibrary is independent of contexts); what a device needs
of its own is done once a device. Both under one lock, with the thread's capture mode relaxed, so that a first call is legal while this
or another thread captures a graph. Nothing is unloaded: at interpreter exit the driver may be gone already.
"""

from __future__ import annotations

import os
import threading
from contextlib import contextmanager

from . import abi
from .artifacts import AGAIN, check_sha256
from .errors import ArtifactError, CudaError, InvalidArgumentError, UnsupportedError
from .library import Library, library

try:
    from cuda.bindings import driver
except ImportError as error:
    raise CudaError(f"GPU operands need the Python package cuda-bindings, 12.8 or later ({error}); install it with "
                    "`pip install cuda-bindings`") from None

OK = driver.CUresult.CUDA_SUCCESS
NO_CONTEXT = driver.CUresult.CUDA_ERROR_INVALID_CONTEXT
launch_kernel = driver.cuLaunchKernelEx
_DEFAULT_SMEM = 48 * 1024  # what a block may use without opting in


class Gpu:
    """One device: its loaded kernels by index of the library."""

    __slots__ = ("device", "functions", "ordinal", "sole")

    def __init__(self, ordinal: int, device, sole: bool):
        self.ordinal, self.device = ordinal, device
        self.sole = sole  # the only GPU of the process: whatever context is current is on it
        self.functions: dict[int, object] = {}


gpus: dict[int, Gpu] = {}  # those that were used; emptied in a forked child
_primary: dict[int, object] = {}
_kernels: dict[int, object] = {}
_pools: dict[int, object] = {}
_lock = threading.Lock()
_started = False
_forked = False


def check(result: tuple, what: str):
    """The values of a driver call's result, or CudaError with the driver's name and text."""
    status, *values = result
    if status is not OK:
        raise CudaError(f"{what}: {describe(status)}")
    return values[0] if len(values) == 1 else values


def describe(status) -> str:
    text = driver.cuGetErrorString(status)[1]
    return f"{driver.CUresult(status).name} ({int(status)}): {text.decode() if text else 'unknown error'}"


def gpu(ordinal: int) -> Gpu:
    """The device, initialised. Raises CudaError where CUDA cannot be used."""
    with _lock:
        return _gpu(ordinal)


def _gpu(ordinal: int) -> Gpu:
    global _started
    if _forked:
        raise CudaError("this process was forked from one that had used CUDA, and CUDA does not survive a fork: start workers with the "
                        "multiprocessing method 'spawn' or 'forkserver', or fork before the first GPU call; CPU calls work here")
    if not _started:
        try:
            status, = driver.cuInit(0)
        except RuntimeError as error:  # how cuda.bindings says that it finds no libcuda
            raise CudaError(f"CUDA cannot be used: {error}") from None
        if status is driver.CUresult.CUDA_ERROR_NOT_INITIALIZED:
            raise CudaError(f"cuInit: {describe(status)}: this process was probably forked from one that had used CUDA; start workers with "
                            "the multiprocessing method 'spawn' or 'forkserver'")
        check((status,), "cuInit")
        _started = True
    found = gpus.get(ordinal)
    if found is None:
        count = check(driver.cuDeviceGetCount(), "cuDeviceGetCount")
        if not 0 <= ordinal < count:
            raise CudaError(f"there is no CUDA device {ordinal}: the process sees {count}")
        found = gpus[ordinal] = Gpu(ordinal, check(driver.cuDeviceGet(ordinal), "cuDeviceGet"), count == 1)
    return found


def is_current(device: Gpu) -> bool:
    """Whether the thread's current context is on the device."""
    status, current = driver.cuCtxGetDevice()
    return status is OK and int(current) == int(device.device)


@contextmanager
def context_of(device: Gpu):
    """Inside, a context of the device is current; afterwards the one that was before. The primary context unless one is current already."""
    if is_current(device):
        yield
        return
    before = check(driver.cuCtxGetCurrent(), "cuCtxGetCurrent")
    primary = _primary.get(device.ordinal)
    if primary is None:  # retained for the life of the process, as the runtime does; a second retain of a race is harmless
        primary = _primary[device.ordinal] = check(driver.cuDevicePrimaryCtxRetain(device.device), "cuDevicePrimaryCtxRetain")
    check(driver.cuCtxSetCurrent(primary), "cuCtxSetCurrent")
    try:
        yield
    finally:
        check(driver.cuCtxSetCurrent(before), "cuCtxSetCurrent")


@contextmanager
def _relaxed_capture():
    """Loading is a "potentially unsafe" call that a capture in this thread, or a global one in another, would refuse."""
    relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    before = check(driver.cuThreadExchangeStreamCaptureMode(relaxed), "cuThreadExchangeStreamCaptureMode")
    try:
        yield
    finally:
        check(driver.cuThreadExchangeStreamCaptureMode(before), "cuThreadExchangeStreamCaptureMode")


def load(device: Gpu, index: int):
    """The launchable handle of kernel `index` on the device, loading it first if this is its first use there."""
    with _lock:
        if _forked:
            _gpu(device.ordinal)
        found = device.functions.get(index)
        if found is None:
            with _relaxed_capture(), context_of(device):
                found = device.functions[index] = _load(library(), device, index)
        return found


def _load(lib: Library, device: Gpu, index: int):
    info = lib.kernel(index)
    kernel = _kernels.get(index)
    if kernel is None:
        entry = lib.artifacts.kernels.get(info.id)
        if entry is None or entry.cubin is None:
            raise ArtifactError(f"{lib.artifacts.root}/manifest.json has no kernel {info.id}, which the library beside it plans for: they "
                                f"come from two builds; {AGAIN}")
        if entry.param_sizes != info.param_sizes or entry.entry_symbol != info.entry_symbol:
            raise ArtifactError(f"{info.id}: the manifest and the library disagree on its parameters or entry symbol; {AGAIN}")
        try:
            image = entry.cubin.read_bytes()
        except OSError as error:
            raise ArtifactError(f"{entry.cubin}: {error.strerror}; {AGAIN}") from None
        check_sha256(entry.cubin, image, entry.cubin_sha256)
        loaded = check(driver.cuLibraryLoadData(image, [], [], 0, [], [], 0), f"{info.id}: cuLibraryLoadData")
        kernel = check(driver.cuLibraryGetKernel(loaded, info.entry_symbol.encode()), f"{info.id}: cuLibraryGetKernel")
        _check_parameters(info, kernel)
        _kernels[index] = kernel
    # Code is loaded lazily; asking for the function of the current context does it now rather than inside a capture.
    check(driver.cuKernelGetFunction(kernel), f"{info.id}: cuKernelGetFunction")
    attributes = driver.CUfunction_attribute
    if info.max_dynamic_smem > _DEFAULT_SMEM:
        attribute = attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        check(driver.cuKernelSetAttribute(attribute, info.max_dynamic_smem, kernel, device.device), f"{info.id}: cuKernelSetAttribute")
    if info.smem_carveout:
        attribute = attributes.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
        check(driver.cuKernelSetAttribute(attribute, info.smem_carveout, kernel, device.device), f"{info.id}: cuKernelSetAttribute")
    # The CUkernel itself is launched: the driver takes its function of whatever context is current, green contexts included.
    return driver.CUfunction(int(kernel))


def _check_parameters(info, kernel) -> None:
    """The cubin's parameters against the plan's: a wrong one would make the driver read past the parameter storage."""
    for i, size in enumerate(info.param_sizes):
        _, found = check(driver.cuKernelGetParamInfo(kernel, i), f"{info.id}: cuKernelGetParamInfo({i})")
        if found != size:
            raise ArtifactError(f"{info.id}: parameter {i} has {found} bytes in the cubin, {size} in the plan")
    if driver.cuKernelGetParamInfo(kernel, len(info.param_sizes))[0] is OK:
        raise ArtifactError(f"{info.id}: the cubin has more than the plan's {len(info.param_sizes)} parameters")


def take_memory(device: Gpu, size: int, stream: int):
    """Memory in the order of a stream: (what gives it back, its address). Legal under a capture, where it becomes a node of the graph."""
    with context_of(device):
        pool = _pools.get(device.ordinal) or _new_memory_pool(device)
        address = check(driver.cuMemAllocFromPoolAsync(size, pool, stream), f"cuMemAllocFromPoolAsync of {size} bytes")

    def give_back():
        with context_of(device):
            check(driver.cuMemFreeAsync(address, stream), "cuMemFreeAsync")

    return give_back, int(address)


def _new_memory_pool(device: Gpu):
    """One pool a device. It keeps what it has: with the driver's default every synchronisation would give the memory back to the system, and
    the next call would map it again."""
    with _lock, _relaxed_capture():
        if device.ordinal not in _pools:
            properties = driver.CUmemPoolProps()
            properties.allocType = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
            properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
            properties.location.id = int(device.device)
            pool = check(driver.cuMemPoolCreate(properties), "cuMemPoolCreate")
            threshold = driver.CUmemPool_attribute.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD
            check(driver.cuMemPoolSetAttribute(pool, threshold, driver.cuuint64_t(2**64 - 1)), "cuMemPoolSetAttribute")
            _pools[device.ordinal] = pool
        return _pools[device.ordinal]


def launch_elsewhere(device: Gpu, config, function, params: int):
    """A launch while no context of the device is current."""
    with context_of(device):
        return launch_kernel(config, function, params, 0)


def prepare(ordinal: int) -> None:
    """Loads every kernel of the device's arch. Raises UnsupportedError if these artifacts have none."""
    from .devices import devices

    device, lib = gpu(ordinal), library()
    found = devices().found[ordinal]
    indices = [i for i in range(lib.kernel_count) if lib.kernel(i).arch == found.arch]
    if not indices:
        raise UnsupportedError(f"device {ordinal} ({found.name}, compute capability {'.'.join(map(str, found.compute_capability))}) "
                               + (f"needs {found.arch} kernels" if found.arch else "is of no arch that cula is built for")
                               + f"; {lib.artifacts.root} has {', '.join(lib.artifacts.archs)}")
    for index in indices:
        load(device, index)


def device_of_pointer(pointer: int) -> tuple[int, int]:
    """DLPack device of an address that an array interface gives without one."""
    gpu(0)
    if not pointer:  # an empty array: any device would do, so the current one
        status, current = driver.cuCtxGetDevice()
        return abi.CUDA, int(current) if status is OK else 0
    kinds = driver.CUpointer_attribute
    status, kind = driver.cuPointerGetAttribute(kinds.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, pointer)
    if status is not OK:
        raise InvalidArgumentError(f"address {pointer:#x} is no memory that CUDA knows: {describe(status)}")
    if int(kind) == int(driver.CUmemorytype.CU_MEMORYTYPE_HOST):
        return abi.CUDA_HOST, 0
    return abi.CUDA, int(check(driver.cuPointerGetAttribute(kinds.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, pointer), "cuPointerGetAttribute"))


def _after_fork() -> None:
    global _lock, _forked
    _lock = threading.Lock()  # another thread of the parent may have held it
    _forked = _forked or _started
    gpus.clear()
    _pools.clear()


os.register_at_fork(after_in_child=_after_fork)
