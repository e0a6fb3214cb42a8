"""Decode on the cpu arch: share of this machine's memory rate, all threads."""

from __future__ import annotations

import os

from benchmarks import decode_inputs, timing_cpu
from benchmarks.decode import accuracy, cula_call
from benchmarks.decode_inputs import HEADS

BATCHES = (1, 8, 128)  # 128 rows of 64 heads: 537 MB of float32 states, beyond every cache
QUICK_BATCHES = (128,)


def run(quick: bool) -> dict:
    cores = len(os.sched_getaffinity(0))
    memory, rows = timing_cpu.MemoryRate(), []
    for op, heads_list in HEADS.items():
        for state in ("fp32", "bf16"):
            for layout in ("vk",) if quick else ("vk", "kv"):
                for n in QUICK_BATCHES if quick else BATCHES:
                    x = decode_inputs.make(op, n, heads_list[0], state, seed=0, device="cpu")
                    us, us_min = (1e6 * t for t in timing_cpu.seconds(cula_call(x, layout), 7 if quick else 15))
                    memory.measure()
                    rows.append({"op": op, "state": state, "layout": layout, "heads": heads_list[0], "n": n, "us": us,
                                 "us_min": us_min, "GBs": x.bytes / us_min / 1e3})
                    print(f"cpu {op} {state} {layout} N={n}: {us:.0f} us, best {us_min:.0f}: {rows[-1]['GBs']:.1f} GB/s", flush=True)
    for row in rows:
        row["share"] = row["GBs"] / memory.best
    print(f"cpu memory {memory.best:.1f} GB/s, {cores} cores", flush=True)
    return {"memory_GBs": memory.best, "cores": cores, "rows": rows,
            "accuracy": [accuracy(op, state, device="cpu") for op in HEADS for state in ("fp32", "bf16")]}
