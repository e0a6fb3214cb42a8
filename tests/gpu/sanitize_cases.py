"""A few dozen small decode and prefill cases, one process, no pytest: what `make sanitize` runs under compute-sanitizer.

Decode is picked from the numerics cases: every (op, layout, state, K) and every row and index form, at seven rows or fewer.
Prefill: every kernel with whole chunks and tails, side by side and one after the other, in segments, in place.
"""

from __future__ import annotations

import sys

import torch

import cula
from tests.gpu import prefill as pf
from tests.numerics import problem
from tests.numerics.call import decode
from tests.numerics.cases import CASES


def selection() -> list:
    seen, picked = set(), []
    for case in CASES:
        if case.n > 7:
            continue
        marks = {(case.op, case.layout, case.state, case.k), ("rows", case.rows, case.layout), ("index", case.index, case.layout),
                 ("pool", case.pool), ("gate", case.op, case.gate), ("v", case.v, case.layout), ("io", case.io, case.layout)}
        if marks - seen:
            seen |= marks
            picked.append(case)
    return picked


PREFILL = [  # problem, layout, state, segments, variant
    (dict(lens=[33, 0, 1], H=1, HV=2), "vk", pf.f32, 1, "overlap"),
    (dict(lens=[64, 7], H=1, HV=2, gate="log -20", gate_dtype=pf.f32, before=3, after=5), "kv", pf.f32, 1, "serial"),
    (dict(lens=[70], fixed=True, io=pf.fp16, gate="softplus A 16"), "kv", pf.bf16, 2, "serial"),
    (dict(lens=[100, 31], H=1, gate="slow", gate_dtype=pf.f32, beta_dtype=pf.f32), "vk", pf.bf16, 3, "overlap"),
]


def run_prefill() -> None:
    for seed, (form, layout, state, segments, variant) in enumerate(PREFILL):
        p = pf.make(seed=seed, **form)
        pool = pf.laid_out(p.h0, layout, state)
        a = pf.arguments(p, state=pool, state_out=pool, state_layout=layout, segments=segments, variant=variant)
        cula.kda.kda_prefill(**a)
        torch.cuda.synchronize()
        assert cula.last_kernels() == pf.kernels_of(p, pf.NAMES[state], layout, segments)
        pf.check(p, a["out"], pf.laid_out(pool, layout, state))


def main() -> int:
    picked = selection()
    for case in picked:
        p = problem.build(case, "cuda")
        decode(case.op, **{name: x.dev for name, x in p.op_args.items()}, **p.options)
        torch.cuda.synchronize()
        problem.check(p)
    run_prefill()
    print(f"{len(picked) + len(PREFILL)} cases")
    return 0


if __name__ == "__main__":
    sys.exit(main())
