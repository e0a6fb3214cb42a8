"""Covering arrays: a small set of rows in which every wanted combination of axis values occurs at least once.

Greedy: fix a combination that is still missing, fill the other axes one by one with the value that covers most of what is
missing, and repeat. Deterministic for a seed, so that test ids are stable.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence


def combinations(axes: Mapping[str, Sequence], groups: Sequence[Sequence[str]], feasible: Callable[[dict], bool]) -> set:
    """Every feasible value combination of each group, as a frozenset of (axis, value)."""
    wanted = set()
    for group in groups:
        for values in itertools.product(*(axes[a] for a in group)):
            if feasible(dict(zip(group, values))):
                wanted.add(frozenset(zip(group, values)))
    return wanted


def pairs(axes: Mapping[str, Sequence]) -> list[tuple[str, str]]:
    return list(itertools.combinations(axes, 2))


def covering(axes: Mapping[str, Sequence], groups: Sequence[Sequence[str]], feasible: Callable[[dict], bool],
             seed: int = 0, cheap_first: Sequence[str] = ()) -> list[dict]:
    """Rows that cover combinations(axes, groups, feasible).

    feasible takes a partial row and must be monotone: where it says yes, some completion exists. Between values that cover
    equally much, an axis of cheap_first takes its first one, any other a random one.
    """
    rng = random.Random(seed)
    missing = combinations(axes, groups, feasible)
    by_axis: dict[str, list] = {a: [set(g) for g in groups if a in g] for a in axes}
    order = sorted(missing, key=lambda c: sorted(map(str, c)))
    rng.shuffle(order)
    rows = []
    for want in order:
        if want not in missing:
            continue
        row = dict(want)
        for axis in rng.sample([a for a in axes if a not in row], len(axes) - len(row)):
            best, best_gain = None, -1
            values = axes[axis] if axis in cheap_first else rng.sample(list(axes[axis]), len(axes[axis]))
            for value in values:
                row[axis] = value
                if not feasible(row):
                    continue
                gain = sum(frozenset((a, row[a]) for a in g) in missing for g in by_axis[axis] if g <= row.keys())
                if gain > best_gain:
                    best, best_gain = value, gain
            if best_gain < 0:
                raise ValueError(f"no value of {axis} completes {row}: feasible is not monotone")
            row[axis] = best
        rows.append({a: row[a] for a in axes})
        missing -= {frozenset((a, row[a]) for a in g) for g in groups}
    return rows
