"""The cpu arch: time a decode call over states far larger than the caches, as a share of this machine's memory rate.

The share compares the best time of a call with the best time of a pass over plain memory: cores and memory of a CPU are shared with whatever else
runs, and the best of several is what that disturbs least. Medians are reported beside it.
"""

from __future__ import annotations

import os
import statistics
import time

import torch

from cula.bench.cpu import cache_bytes

BYTES = max(512 << 20, 4 * cache_bytes())


def seconds(call, repeats: int) -> tuple[float, float]:
    """Median and least seconds of a call, after one that is not counted."""
    call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times), min(times)


class MemoryRate:
    """Bytes read plus written a second with all threads, GB/s: the better of a large copy and of a pass in place, since a copy
    may fetch the lines that it is going to overwrite. Measured again beside every row, and the best counts for all."""

    def __init__(self):
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        self.source = torch.randint(1 << 30, (BYTES // 4,), dtype=torch.int32)
        self.target = torch.empty_like(self.source)
        self.best = 0.0
        self.measure(9)

    def measure(self, repeats: int = 3) -> None:
        for touch in (lambda: self.target.copy_(self.source), lambda: self.target.add_(1)):
            _, least = seconds(touch, repeats)
            self.best = max(self.best, 2 * BYTES / least / 1e9)
