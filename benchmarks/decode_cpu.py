"""Decode on the cpu arch: share of this machine's copy rate, all threads."""

from __future__ import annotations

import os

from benchmarks import decode_inputs, timing_cpu
from benchmarks.decode import accuracy, cula_call
from benchmarks.decode_inputs import HEADS

BATCHES = (1, 8, 128)  # 128 rows of 64 heads: 537 MB of float32 states, beyond every cache
QUICK_BATCHES = (128,)


def run(quick: bool) -> dict:
    copy = timing_cpu.copy_rate()
    print(f"cpu copy {copy:.1f} GB/s, {len(os.sched_getaffinity(0))} cores", flush=True)
    rows = []
    for op, heads_list in HEADS.items():
        for state in ("fp32", "bf16"):
            for layout in ("vk",) if quick else ("vk", "kv"):
                for n in QUICK_BATCHES if quick else BATCHES:
                    x = decode_inputs.make(op, n, heads_list[0], state, seed=0, device="cpu")
                    us = timing_cpu.median_seconds(cula_call(x, layout), 5 if quick else 9) * 1e6
                    share = x.bytes / us / 1e3 / copy
                    rows.append({"op": op, "state": state, "layout": layout, "heads": heads_list[0], "n": n, "us": us,
                                 "GBs": x.bytes / us / 1e3, "share": share})
                    print(f"cpu {op} {state} {layout} N={n}: {us:.0f} us, {share:.0%} of copy", flush=True)
    return {"copy_GBs": copy, "cores": len(os.sched_getaffinity(0)), "rows": rows,
            "accuracy": [accuracy(op, state, device="cpu") for op in HEADS for state in ("fp32", "bf16")]}
