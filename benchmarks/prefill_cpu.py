"""KDA prefill on the cpu arch, all threads: tokens of a head a second. It is bound by arithmetic, so that no memory rate stands beside it."""

from __future__ import annotations

import os
from functools import partial

import torch

import cula
from benchmarks import prefill, timing_cpu
from benchmarks.report import table
from tests.gpu import prefill as problems

# heads, tokens of each sequence
SHAPES = ((8, (1024,)), (64, (1024,)), (4, (4096,)), (2, (4096,)), (8, (300, 17, 1, 706)), (8, (1,) * 64))
QUICK = SHAPES[:1]


def run(quick: bool) -> dict:
    rows = []
    for heads, lens in QUICK if quick else SHAPES:
        p = problems.make(list(lens), heads, fixed=len(lens) == 1, device="cpu")
        a = problems.arguments(p, state=p.h0, state_out=torch.empty_like(p.h0))
        call = partial(cula.kda.kda_prefill, **a)
        us, us_min = (1e6 * t for t in timing_cpu.seconds(call, 5 if quick else 11))
        one, _ = (1e6 * t for t in timing_cpu.seconds(partial(call, num_threads=1), 3))
        rows.append({"heads": heads, "tokens": sum(lens), "sequences": len(lens), "us": us, "us_min": us_min, "us_one_thread": one,
                     "rate": sum(lens) * heads / us * 1e6})
        print(f"cpu {line(rows[-1])}", flush=True)
    return {"cores": len(os.sched_getaffinity(0)), "rows": rows, "accuracy": prefill.accuracy(device="cpu")}


def line(r: dict) -> str:
    return (f"kda_prefill H={r['heads']} {r['tokens']} tokens of {r['sequences']} sequences: {r['us']:.0f} us, best {r['us_min']:.0f}, one thread "
            f"{r['us_one_thread']:.0f}; {r['rate'] / 1e6:.2f} million tokens x heads / s")


def markdown(result: dict) -> str:
    body = [[r["heads"], r["tokens"], r["sequences"], f"{r['us']:.0f}", f"{r['us_min']:.0f}", f"{r['us_one_thread']:.0f}", f"{r['rate'] / 1e6:.2f}"]
            for r in result["rows"]]
    a = result["accuracy"]
    return "\n\n".join([
        f"## KDA prefill on the cpu arch, {result['cores']} cores, bf16 rows, float32 states",
        table(["H", "tokens", "sequences", "us", "best us", "one thread, us", "million tokens x heads / s"], body),
        f"Relative RMSE against float64, 512 tokens, 2 heads: out {a['out']:.2e}, state {a['state']:.2e}."])
