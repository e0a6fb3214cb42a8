"""Timing on a GPU through cuda-python: buffers, a graph of calls, events. No framework.

What keeps the numbers honest: calls rotate over enough states that none is in the L2 when its turn comes, the L2 is overwritten before each
replay, which also keeps the queue full while the host launches the graph, and the copy rate is measured in the same run.
"""

from __future__ import annotations

import math
import statistics

import numpy as np

from cula_loader import cuda

from .calls import bf16_bits
from .problems import GPU_ROTATE

FLUSH_BYTES = 256 << 20
COPY_BYTES = 4 << 30
REPEATS = 9
driver, check = cuda.driver, cuda.check


class Bfloat16:
    """The dtype of a buffer, as far as cula asks: __cuda_array_interface__ has no typestr for bf16."""

    name = "bfloat16"


class Buffer:
    """Device memory with __cuda_array_interface__."""

    def __init__(self, pointer: int, shape: tuple[int, ...], dtype: str):
        self.pointer, self.shape = pointer, shape
        self.dtype = Bfloat16 if dtype == "bf16" else np.dtype("float32")
        self.__cuda_array_interface__ = {"version": 3, "shape": shape, "typestr": "<u2" if dtype == "bf16" else "<f4",
                                         "data": (pointer, False), "strides": None}


class Gpu:
    """One GPU; use it inside `with cuda.context_of(gpu.device)`."""

    io, rotate = "bf16", GPU_ROTATE

    def __init__(self, facts: dict):
        """facts: the device's entry of cula.info()."""
        self.facts, self.arch, self.name = facts, facts["arch"], f"cuda:{facts['ordinal']} {facts['name']}"
        self.device = cuda.gpu(facts["ordinal"])
        self.buffers: list[int] = []
        with cuda.context_of(self.device):
            self.queue = check(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING), "cuStreamCreate")
            self.start, self.stop = (check(driver.cuEventCreate(0), "cuEventCreate") for _ in range(2))
            self.flush = self._allocate(FLUSH_BYTES)
        self.stream = int(self.queue)

    def _allocate(self, size: int) -> int:
        return int(check(driver.cuMemAlloc(size), f"cuMemAlloc of {size} bytes"))

    def free_bytes(self) -> int:
        return check(driver.cuMemGetInfo(), "cuMemGetInfo")[0]

    def put(self, values: np.ndarray, shape: tuple[int, ...], dtype: str) -> Buffer:
        """Uploads the values and repeats them on the device: a state of a GB would take a second to upload."""
        content = bf16_bits(values) if dtype == "bf16" else np.ascontiguousarray(values, "float32")
        content = np.resize(content, min(max(content.size, 1024), math.prod(shape)))  # a tile of one element would be copied element by element
        size, have = math.prod(shape) * content.itemsize, content.nbytes
        pointer = self._allocate(size)
        self.buffers.append(pointer)
        check(driver.cuMemcpyHtoD(pointer, content.ctypes.data, have), "cuMemcpyHtoD")
        while have < size:
            part = min(have, size - have)
            check(driver.cuMemcpyDtoD(pointer + have, pointer, part), "cuMemcpyDtoD")
            have += part
        return Buffer(pointer, shape, dtype)

    def get(self, buffer: Buffer) -> np.ndarray:
        """The elements of a bf16 buffer as float32."""
        bits = np.empty(buffer.shape, "uint16")
        check(driver.cuMemcpyDtoH(bits.ctypes.data, buffer.pointer, bits.nbytes), "cuMemcpyDtoH")
        return (bits.astype("uint32") << 16).view("float32")

    def median_us(self, calls: list) -> float:
        """Microseconds a call: all captured once in one graph, replays timed by events."""
        for call in calls[:2]:
            call()
        self.synchronize()
        # Relaxed: the process is the benchmark's own, and cula asks the driver about pointers during the calls.
        check(driver.cuStreamBeginCapture(self.queue, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED), "cuStreamBeginCapture")
        try:
            for call in calls:
                call()
        finally:
            graph = check(driver.cuStreamEndCapture(self.queue), "cuStreamEndCapture")
        executable = check(driver.cuGraphInstantiate(graph, 0), "cuGraphInstantiate")
        try:
            launch = lambda: check(driver.cuGraphLaunch(executable, self.queue), "cuGraphLaunch")  # noqa: E731
            for _ in range(3):
                launch()
            return self._median_ms(launch) * 1e3 / len(calls)
        finally:
            self.synchronize()
            check(driver.cuGraphExecDestroy(executable), "cuGraphExecDestroy")
            check(driver.cuGraphDestroy(graph), "cuGraphDestroy")

    def copy_rate(self) -> float:
        """Bytes read plus written a second of a copy on the device, GB/s: the ceiling of decode."""
        size = min(COPY_BYTES, self.free_bytes() // 4) // 512 * 512
        source, target = self._allocate(size), self._allocate(size)
        try:
            check(driver.cuMemsetD8(source, 1, size), "cuMemsetD8")
            copy = lambda: check(driver.cuMemcpyDtoDAsync(target, source, size, self.queue), "cuMemcpyDtoDAsync")  # noqa: E731
            copy()
            return 2 * size / self._median_ms(copy) / 1e6
        finally:
            self.synchronize()
            for pointer in (source, target):
                check(driver.cuMemFree(pointer), "cuMemFree")

    def _median_ms(self, work) -> float:
        self.synchronize()
        times = []
        for _ in range(REPEATS):
            check(driver.cuMemsetD8Async(self.flush, 0, FLUSH_BYTES, self.queue), "cuMemsetD8Async")
            check(driver.cuEventRecord(self.start, self.queue), "cuEventRecord")
            work()
            check(driver.cuEventRecord(self.stop, self.queue), "cuEventRecord")
            self.synchronize()
            times.append(check(driver.cuEventElapsedTime(self.start, self.stop), "cuEventElapsedTime"))
        return statistics.median(times)

    def synchronize(self) -> None:
        check(driver.cuStreamSynchronize(self.queue), "cuStreamSynchronize")

    def release(self) -> None:
        """Frees what put() gave."""
        for pointer in self.buffers:
            check(driver.cuMemFree(pointer), "cuMemFree")
        self.buffers.clear()
