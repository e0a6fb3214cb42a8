"""Decode on the cpu arch: share of this machine's memory rate, all threads. Calls take turns on states that no cache holds together."""

from __future__ import annotations

import itertools
import os

from benchmarks import decode_inputs, timing_cpu
from benchmarks.decode import accuracy, cula_call
from benchmarks.decode_inputs import HEADS
from cula.bench.cpu import cache_bytes
from cula.bench.problems import rotations

BATCHES = (1, 8, 128)
QUICK_BATCHES = (128,)


def turns(op: str, n: int, state: str, cached: int) -> list[decode_inputs.Inputs]:
    """Inputs whose states are together four times the caches: a share above 100 % would be one of a cache."""
    first = decode_inputs.make(op, n, HEADS[op][0], state, seed=0, device="cpu")
    sets = rotations(first.state.numel() * first.state.element_size(), 4 * cached, 1 << 16)
    return [first, *(decode_inputs.make(op, n, HEADS[op][0], state, seed, device="cpu") for seed in range(1, sets))]


def run(quick: bool) -> dict:
    cores, cached = len(os.sched_getaffinity(0)), cache_bytes()
    memory, rows = timing_cpu.MemoryRate(), []
    for op, state, n in itertools.product(HEADS, ("fp32", "bf16"), QUICK_BATCHES if quick else BATCHES):
        inputs = turns(op, n, state, cached)
        for layout in ("vk",) if quick else ("vk", "kv"):
            calls = itertools.cycle([cula_call(x, layout) for x in inputs])
            us, us_min = (1e6 * t for t in timing_cpu.seconds(lambda: next(calls)(), max(7 if quick else 15, len(inputs))))
            memory.measure()
            rows.append({"op": op, "state": state, "layout": layout, "heads": HEADS[op][0], "n": n, "us": us, "us_min": us_min,
                         "GBs": inputs[0].bytes / us_min / 1e3})
            print(f"cpu {op} {state} {layout} N={n}: {us:.0f} us, best {us_min:.0f}: {rows[-1]['GBs']:.1f} GB/s", flush=True)
    for row in rows:
        row["share"] = row["GBs"] / memory.best
    print(f"cpu memory {memory.best:.1f} GB/s, {cores} cores", flush=True)
    return {"memory_GBs": memory.best, "cores": cores, "rows": rows,
            "accuracy": [accuracy(op, state, device="cpu") for op in HEADS for state in ("fp32", "bf16")]}
