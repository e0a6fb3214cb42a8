"""GPU and host timing. Needs torch with CUDA; the cpu rows use cpu_timing.py.

What keeps the numbers honest: states rotate over enough buffers that none is in the L2 when its turn comes, the L2 is
overwritten before each replay, the queue is kept full by a spin kernel so that the GPU never waits for the host, and the copy
rate that everything is compared with is measured in the same run.
"""

from __future__ import annotations

import statistics
import time

import torch

from cula.bench.problems import rotations  # noqa: F401  as decode.py and gates.py use it

FLUSH_BYTES = 256 << 20       # several times the 50 to 60 MB of L2
COPY_BYTES = 4 << 30
SPIN_CYCLES = 200_000         # about 0.1 ms: covers the launch of a graph

_flush = None


def flush_l2() -> None:
    global _flush
    if _flush is None:
        _flush = torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")
    _flush.zero_()


def graph_us(calls, repeats: int = 9) -> dict:
    """Median and least microseconds a call: all calls captured once in one CUDA graph, the replays timed by events."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls[:2]:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        keep = [call() for call in calls]
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        flush_l2()
        torch.cuda._sleep(SPIN_CYCLES)
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) * 1e3 / len(calls))
    del graph, keep
    return {"us": statistics.median(times), "us_min": min(times)}


def host_us(calls, n: int = 60) -> float:
    """Median over five loops of the host's microseconds for a call to return, nothing captured."""
    for i in range(6):
        calls[i % len(calls)]()
    torch.cuda.synchronize()
    loops = []
    for _ in range(5):
        start = time.perf_counter()
        for i in range(n):
            calls[i % len(calls)]()
        loops.append((time.perf_counter() - start) / n * 1e6)
        torch.cuda.synchronize()
    return statistics.median(loops)


def copy_rate(repeats: int = 9) -> float:
    """Bytes read plus written a second of a device-to-device copy of COPY_BYTES, in GB/s: the ceiling of decode."""
    source = torch.empty(COPY_BYTES // 4, dtype=torch.int32, device="cuda").random_()
    target = torch.empty_like(source)
    times = []
    for _ in range(repeats):
        torch.cuda._sleep(SPIN_CYCLES)
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        target.copy_(source)
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) * 1e-3)
    del source, target
    torch.cuda.empty_cache()
    return 2 * COPY_BYTES / statistics.median(times) / 1e9
