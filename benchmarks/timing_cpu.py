"""The cpu arch: time a decode call over states far larger than the caches, as a share of this machine's copy rate."""

from __future__ import annotations

import os
import statistics
import time

import torch

COPY_BYTES = 512 << 20


def median_seconds(call, repeats: int) -> float:
    call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def copy_rate(repeats: int = 9) -> float:
    """Bytes read plus written a second of a large copy with all threads, GB/s."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    source = torch.randint(1 << 30, (COPY_BYTES // 4,), dtype=torch.int32)
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / median_seconds(lambda: target.copy_(source), repeats) / 1e9
