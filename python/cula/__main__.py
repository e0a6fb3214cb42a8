"""python -m cula info | doctor | selftest | bench"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

from . import info


def print_info(facts: dict) -> None:
    artifacts, devices = facts["artifacts"], facts["devices"]
    print(f"cula {facts['version']}")
    if artifacts["error"]:
        print(f"artifacts: none usable\n  {artifacts['error']}")
    else:
        print(f"artifacts: {artifacts['path']} (version {artifacts['version']}{'' if artifacts['complete'] else ', an incomplete build'})")
        for arch, ops in artifacts["kernels"].items():
            print(f"  {arch:6} {sum(ops.values()):4} kernels: {', '.join(f'{op} {count}' for op, count in ops.items())}")
    bindings = facts["cuda_bindings"]
    print(f"cuda-bindings: {bindings or 'not installed (GPU calls from Python need it)'}")
    print(f"driver: {'CUDA ' + facts['driver']['cuda'] if facts['driver']['cuda'] else 'none'}")
    if facts["driver"]["problem"]:
        print(f"  {facts['driver']['problem']}")
    can_cpu = not artifacts["error"]
    print(f"cpu: {'can run' if can_cpu else 'cannot run: there are no artifacts'}")
    for d in devices:
        verdict = "can run" if not d["problem"] else f"cannot run: {d['problem']}"
        print(f"cuda:{d['ordinal']}: {d['name']}, compute capability {d['compute_capability']}, {d['sm_count']} SMs: {verdict}")


def run_bench(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    try:
        import numpy  # noqa: F401
    except ImportError:
        print("bench: needs numpy: pip install numpy", file=sys.stderr)
        return 1
    from .bench import HEADS, bench

    ops = tuple(HEADS) if options.op == "all" else tuple(options.op.split(","))
    for op in ops:
        if op not in HEADS:
            parser.error(f"--op {op}: allowed: all, {', '.join(HEADS)}")
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", options.device):
        parser.error(f"--device {options.device}: allowed: auto, cpu, cuda, cuda:<ordinal>")
    return bench(options.device, ops, options.quick, Path(options.out) if options.out else None)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m cula", description="What this installation of cula has, and whether it works.")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("info", help="version, artifacts, archs, ops, kernels; the GPUs seen, and why each can or cannot run")
    command.add_argument("--json", action="store_true", help="the same as one JSON object")
    command = commands.add_parser("doctor", help="what is wrong here and what to do: wheels, files, driver, GPUs, Python packages")
    command.add_argument("--device", default="all", help="all (the default: no GPU is all right), cuda (no GPU is wrong), or cpu (GPUs are left out)")
    command = commands.add_parser("selftest", help="every op on the CPU, and on each GPU that can run, against a float64 recurrence")
    command.add_argument("--device", default="all", help="all (the default), cpu, or cuda")
    command = commands.add_parser("bench", help="time of a decode call of every family on a GPU or the CPU, beside the copy rate; of KDA prefill on the CPU")
    command.add_argument("--device", default="auto", help="auto (the default: the first GPU that can run, else the CPU), cpu, cuda, cuda:<ordinal>")
    command.add_argument("--op", default="all", help="all, or a list: kda,gdn,gla,lightning")
    command.add_argument("--quick", action="store_true", help="fewer batches, one set of heads an op")
    command.add_argument("--out", help="folder for bench.json, and bench.png if matplotlib is installed; nothing is written without it")
    options = parser.parse_args(arguments)
    if options.command == "info":
        facts = info()
        if options.json:
            print(json.dumps(facts, indent=2))
        else:
            print_info(facts)
        return 0
    if options.command == "bench":
        return run_bench(parser, options)
    if options.device not in ("all", "cpu", "cuda"):
        parser.error(f"--device {options.device}: allowed: all, cpu, cuda")
    if options.command == "doctor":
        from .doctor import doctor

        return doctor(options.device)
    from ._selftest import selftest

    return selftest(options.device)


if __name__ == "__main__":
    sys.exit(main())
