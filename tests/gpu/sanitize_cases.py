"""A few dozen small decode cases, one process, no pytest: what `make sanitize` runs under compute-sanitizer.

Picked from the numerics cases: every (op, layout, state, K) and every row and index form, at seven rows or fewer.
"""

from __future__ import annotations

import sys

import torch

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


def main() -> int:
    picked = selection()
    for case in picked:
        p = problem.build(case, "cuda")
        decode(case.op, **{name: x.dev for name, x in p.op_args.items()}, **p.options)
        torch.cuda.synchronize()
        problem.check(p)
    print(f"{len(picked)} cases")
    return 0


if __name__ == "__main__":
    sys.exit(main())
