"""Timing on the cpu arch: numpy arrays, the wall clock."""

from __future__ import annotations

import itertools
import math
import os
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

COPY_BYTES = 512 << 20
REPEATS = 5
UNKNOWN_CACHE = 256 << 20


class Cpu:
    arch, stream = "cpu", None

    def __init__(self):
        self.cores = len(os.sched_getaffinity(0))
        self.name = f"{_model()}, {self.cores} cores"
        self.rotate = (4 * cache_bytes(), 1 << 16)  # not twice: a cache that does not replace the oldest line still has a part of that
        try:
            import ml_dtypes
        except ImportError:
            self.io, self._bf16 = "fp16", None
        else:
            self.io, self._bf16 = "bf16", ml_dtypes.bfloat16

    def can_hold(self, dtype: str) -> bool:
        return dtype != "bf16" or self._bf16 is not None

    def free_bytes(self) -> int:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def put(self, values: np.ndarray, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        kind = {"fp32": np.float32, "fp16": np.float16, "bf16": self._bf16}[dtype]
        return np.resize(values.astype(kind), math.prod(shape)).reshape(shape)

    def get(self, x: np.ndarray) -> np.ndarray:
        return x.astype("float32")

    def median_us(self, calls: list) -> float:
        calls[0]()
        turn = itertools.cycle(calls)
        return statistics.median(_seconds(lambda: next(turn)(), max(REPEATS, len(calls)))) * 1e6

    def copy_rate(self) -> float:
        """Bytes read plus written a second by all cores, GB/s: the better of a copy and of a pass in place, which is what decode does; a copy may
        fetch the lines that it overwrites. The best of a few, so that other work does not lower the ceiling."""
        size = min(max(COPY_BYTES, self.rotate[0]), self.free_bytes() // 8) // 4
        source, target = np.ones(size, "int32"), np.ones(size, "int32")
        parts = list(zip(np.array_split(target, self.cores), np.array_split(source, self.cores)))
        with ThreadPoolExecutor(self.cores) as pool:  # numpy works without the GIL
            copy = lambda: list(pool.map(lambda part: np.copyto(*part), parts))  # noqa: E731
            in_place = lambda: list(pool.map(lambda part: np.add(part[0], 1, out=part[0]), parts))  # noqa: E731
            copy()
            return 8 * size / min(_seconds(copy) + _seconds(in_place)) / 1e9

    def release(self) -> None:
        pass


def _seconds(work, repeats: int = REPEATS) -> list[float]:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return times


def cache_bytes(root: Path = Path("/sys/devices/system/cpu")) -> int:
    """All last-level caches of the machine together; UNKNOWN_CACHE where the system does not say."""
    found: dict[str, tuple[int, int]] = {}  # CPUs that share it: level, bytes
    for index in root.glob("cpu[0-9]*/cache/index*"):
        try:
            level, size = int((index / "level").read_text()), (index / "size").read_text().strip()
            found[f"{level}:{(index / 'shared_cpu_list').read_text().strip()}"] = level, int(size[:-1]) << {"K": 10, "M": 20, "G": 30}[size[-1]]
        except (OSError, ValueError, KeyError, IndexError):
            continue
    last = max((level for level, _ in found.values()), default=0)
    return sum(size for level, size in found.values() if level == last) or UNKNOWN_CACHE


def _model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return "CPU"
