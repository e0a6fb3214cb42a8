"""`python -m cula bench`: decode of every family on this machine, beside the rate at which it copies memory; on the CPU also KDA prefill.

Needs numpy, and cuda-bindings for a GPU; no framework and no source tree. Decode reads and writes every state once a token, so the time is
bound by memory: `of copy` is the least traffic (states in and out, rows once) over the time, as a share of the copy rate measured here. Calls
take turns on states that no cache holds together.

    problems.py  what is timed       calls.py  operands and calls       gpu.py, cpu.py  memory and clocks       report.py  table, plot
    prefill.py   likewise of a prefill, on the CPU
"""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path

from cula_loader import CulaError, last_kernels

from .problems import BATCHES, HEADS, QUICK_BATCHES, Problem, enumerate_problems, rotations

CPU_BATCHES = (1, 8, 32)
_SLACK = 1 << 30  # memory left to everyone else


def bench(device: str = "auto", ops: tuple[str, ...] = tuple(HEADS), quick: bool = False, out: Path | None = None) -> int:
    """Prints the table; with `out`, writes bench.json there, and bench.png if matplotlib is installed. Exit code: 0 if all was measured.

    device: "cpu", "cuda", "cuda:1"; "auto": the first GPU that can run, else the CPU. ops: of HEADS. quick: fewer batches, one set of
    heads an op. A batch that does not fit into the free memory is left out and is no failure.
    """
    try:
        machine = _machine(device)
    except CulaError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    result = run(machine, ops, quick)
    if out is not None:
        from .report import plot

        out.mkdir(parents=True, exist_ok=True)
        (out / "bench.json").write_text(json.dumps(result, indent=2) + "\n")
        missing = plot(result, out / "bench.png")
        print(f"written: {out / 'bench.json'}" + (f"; no plot: {missing}" if missing else f", {out / 'bench.png'}"))
    return 1 if any(row.get("failed") for row in result["rows"] + result["prefill"]) else 0


def run(machine, ops: tuple[str, ...], quick: bool) -> dict:
    """Measures on a machine (gpu.Gpu or cpu.Cpu), printing as it goes. Rows have us, GBs, share and kernel, or error."""
    from .. import __version__
    from .report import header, line

    if machine.arch == "cpu":
        batches = CPU_BATCHES[-1:] if quick else CPU_BATCHES
    else:
        batches = QUICK_BATCHES if quick else BATCHES
    with _context(machine):
        copy = machine.copy_rate()
        print(f"cula {__version__} on {machine.name}: copy {copy:.0f} GB/s, rows {machine.io}\n{header()}", flush=True)
        rows = []
        for problem in enumerate_problems(ops, batches, all_heads=not quick):
            rows.append(measure(problem, machine, copy))
            print(line(rows[-1]), flush=True)
        prefills = run_prefill(machine, quick) if machine.arch == "cpu" and "kda" in ops else []
    return {"version": __version__, "machine": machine.name, "arch": machine.arch, "io": machine.io, "copy_GBs": copy, "rows": rows, "prefill": prefills}


def run_prefill(machine, quick: bool) -> list[dict]:
    from . import prefill

    print(f"\n{prefill.header()}", flush=True)
    rows = []
    for problem in prefill.enumerate_prefills(quick):
        rows.append(measure_prefill(problem, machine))
        print(prefill.line(rows[-1]), flush=True)
    return rows


def measure_prefill(problem, machine) -> dict:
    from .prefill import make

    row = vars(problem) | timed(lambda: [make(problem, machine)], machine, problem.op)
    return row if "error" in row else row | {"rate": problem.tokens * problem.heads / row["us"] * 1e6}


def timed(make_calls, machine, op: str) -> dict:
    """us and kernel of calls that take turns; make_calls gives (call, its `out`) of each. A wrong kernel or a result that is not a number
    is an error, not a time."""
    try:
        calls = make_calls()
        us = machine.median_us([run for run, _ in calls])
        kernels = last_kernels()
        if len(kernels) != 1 or not kernels[0].startswith(f"{op}.{machine.arch}."):
            return {"failed": True, "error": f"FAILED: the kernel that ran is {', '.join(kernels) or 'none'}"}
        values = machine.get(calls[0][1])
        if not (abs(values) < float("inf")).all() or not values.any():  # False for NaN, which `out` was filled with
            return {"failed": True, "error": "FAILED: the output is not finite, or zero; `python -m cula selftest` says more"}
    except CulaError as error:
        return {"failed": True, "error": f"FAILED: {type(error).__name__}: {error}"}
    finally:
        machine.release()
    return {"us": us, "kernel": kernels[0]}


def measure(problem: Problem, machine, copy: float) -> dict:
    """One row."""
    from .calls import make

    row = {"op": problem.op, "state": problem.state, "heads": list(problem.heads), "n": problem.n}
    if machine.arch == "cpu" and not machine.can_hold(problem.state):
        return row | {"error": "left out: numpy has no bfloat16 without ml_dtypes (pip install ml_dtypes)"}
    sets = rotations(problem.state_bytes, *machine.rotate)
    needed = sets * (problem.least_bytes - problem.state_bytes) + _SLACK
    if needed > machine.free_bytes():
        return row | {"error": f"left out: needs {needed / 1e9:.1f} GB of free memory"}
    row |= timed(lambda: [make(problem, machine, seed) for seed in range(sets)], machine, f"{problem.op}_decode")
    if "error" in row:
        return row
    rate = problem.least_bytes / row["us"] / 1e3
    return row | {"bytes": problem.least_bytes, "GBs": rate, "share": rate / copy}


def _machine(device: str):
    """Raises CulaError with the reason why the device cannot be measured."""
    from .. import info
    from .cpu import Cpu

    facts = info()
    if facts["artifacts"]["error"]:
        raise CulaError(facts["artifacts"]["error"])
    if device == "cpu":
        return Cpu()
    able = [d for d in facts["devices"] if not d["problem"]]
    if device == "auto":
        if not able:
            return Cpu()
        chosen = able[0]
    else:
        wanted = int(device.removeprefix("cuda").removeprefix(":") or (able[0]["ordinal"] if able else 0))
        chosen = next((d for d in facts["devices"] if d["ordinal"] == wanted), None)
        reason = facts["driver"]["problem"] or f"the process sees {len(facts['devices'])}" if chosen is None else chosen["problem"]
        if reason:
            raise CulaError(f"cuda:{wanted} cannot run: {reason}; `python -m cula doctor` says more")
    from .gpu import Gpu

    return Gpu(chosen)


def _context(machine):
    if machine.arch == "cpu":
        return nullcontext()
    from cula_loader import cuda

    return cuda.context_of(machine.device)
