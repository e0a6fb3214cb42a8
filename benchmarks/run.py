#!/usr/bin/env python3
"""`make bench`: what this machine reaches, beside the floor and the peers. Writes Markdown, JSON and a plot.

With a GPU: decode of every family and shape, the gate and norm ops, KDA prefill, host time, cold start, import time, accuracy, and the cpu arch. Without: the last
ones that need no GPU. Nothing is compiled on the way except the few lines of C++ whose host time is measured.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "loader"), str(ROOT / "python")]


def machine(gpu: bool) -> dict:
    import torch

    facts = {"python": platform.python_version(), "torch": torch.__version__}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            facts["cpu"] = line.split(":", 1)[1].strip()
            break
    if gpu:
        facts["gpu"] = torch.cuda.get_device_name()
    return facts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", choices=["decode", "gates", "prefill", "all"], default="all", help="which operators to measure")
    parser.add_argument("--quick", action="store_true", help="decode: N = 1 and 128 only, one state layout; gates: T = 8192 only; prefill: three shapes, on the CPU one")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder for bench.md, .json and .png")
    parser.add_argument("--no-cpu", action="store_true", help="leave out the cpu arch")
    args = parser.parse_args()

    try:
        import torch
    except ImportError:
        parser.error("the benchmark makes its tensors with torch, which is not installed")
    from benchmarks import decode, decode_cpu, gates, host, prefill, prefill_cpu, report

    gpu = torch.cuda.is_available()
    result = {"machine": machine(gpu), "quick": args.quick, "import": host.import_ms()}
    if gpu:
        result["cold"] = host.cold_start()
        if args.op in ("decode", "all"):
            result["decode"] = decode.run(args.quick)
        if args.op in ("gates", "all"):
            result["gates"] = gates.run(args.quick, result.get("decode", {}).get("copy_GBs"))
        if args.op in ("prefill", "all"):
            result["prefill"] = prefill.run(args.quick, result.get("decode", result.get("gates", {})).get("copy_GBs"))
    else:
        print("no GPU: only what runs on the CPU is measured", flush=True)
    if not args.no_cpu and args.op in ("decode", "all"):
        result["cpu"] = decode_cpu.run(args.quick)
    if not args.no_cpu and args.op in ("prefill", "all"):
        result["cpu_prefill"] = prefill_cpu.run(args.quick)

    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "bench.json").write_text(json.dumps(result, indent=2) + "\n")
    text = report.markdown(result)
    if "gates" in result:
        text += "\n" + gates.markdown(result["gates"]) + "\n"
    if "prefill" in result:
        text += "\n" + prefill.markdown(result["prefill"]) + "\n"
    if "cpu_prefill" in result:
        text += "\n" + prefill_cpu.markdown(result["cpu_prefill"]) + "\n"
    missing = report.plot(result, args.out / "bench.png")
    if not missing:
        text += "\n![share of the copy rate](bench.png)\n"
    (args.out / "bench.md").write_text(text)
    print(f"\nwritten: {args.out}/bench.md, bench.json" + (f"; no plot: {missing}" if missing else ", bench.png") + "\n")
    print(report.short(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
