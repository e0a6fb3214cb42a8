"""kda_prefill on the GPU: every shape beside its byte floor, the forced variants of the plan, and the peers.

The public call in a CUDA graph of one call, the L2 overwritten before each replay. The floor counts q, k, v, gate, beta, out and both states once
(A_log and dt_bias, a few KB, left out). `python -m benchmarks.prefill` runs these rows alone.
"""

from __future__ import annotations

import argparse
import json
import time
import traceback
from dataclasses import dataclass
from functools import partial

import torch

import cula
from benchmarks import peers, timing
from benchmarks.report import best, table
from tests.gpu import prefill as problems

SIX = (1300, 547, 2048, 963, 271, 3063)
MAX_SEGMENTS = 64
# Seconds that flash-linear-attention may take in one run: it compiles for each number of heads, a minute or more with an empty cache.
FLA_BUDGET_S = 20.0


@dataclass(frozen=True)
class Case:
    heads: int
    shape: str  # as PEERS.md names it
    lens: tuple[int, ...]
    fixed: bool
    gates: str


SHAPES = (
    *((64, str(t), (t,), False) for t in (512, 1024, 4096, 8192, 16384, 32768)),
    (64, "2 x 8192", (8192, 8192), True),
    (64, "8 packed x 1024", (1024,) * 8, False),
    (64, "6 sequences", SIX, False),
    *((h, "8192", (8192,), False) for h in (96, 16, 12, 8)),
    *((h, "32768", (32768,), False) for h in (8, 4)),
)
QUICK = {(64, "512"), (64, "8192"), (8, "8192")}


def cases(quick: bool) -> list[Case]:
    """One sequence is given as a row without cu_seqlens, as an engine without batching would."""
    return [Case(heads, shape, lens, fixed or len(lens) == 1, gates) for heads, shape, lens, fixed in SHAPES
            if not quick or (heads, shape) in QUICK for gates in ("random", "slow")]


def arguments(case: Case, device: str = "cuda") -> dict:
    p = problems.make(list(case.lens), case.heads, gate="safe" if case.gates == "random" else "slow", fixed=case.fixed, device=device)
    return problems.arguments(p, state=p.h0, state_out=torch.empty_like(p.h0))


def least_bytes(a: dict) -> int:
    return sum(a[name].numel() * a[name].element_size() for name in ("q", "k", "v", "gate", "beta", "out", "state", "state_out"))


def chosen_segments(workspace_of, automatic: int) -> int | None:
    """The segments whose workspace is the automatic plan's: it grows with each one. None if no number gives it."""
    return next((s for s in range(1, MAX_SEGMENTS + 1) if workspace_of(s) == automatic), None)


def forced(segments: int) -> list[dict]:
    """Both orders of the launches at the plan's number of segments; the chained segments of its choice; the numbers around it, side by side."""
    around = sorted({s for s in (1, segments - 1, segments + 1, 2 * segments) if 1 <= s <= MAX_SEGMENTS and s != segments})
    both = [dict(variant=v, segments=segments) for v in ("overlap", "serial")]
    return both + [dict(variant="chain", segments=0)] + [dict(variant="overlap", segments=s) for s in around]


def timed(make_call) -> dict:
    """Time of one call; {'error': ...} if it fails, so that a failure does not end the run."""
    try:
        with torch.no_grad():
            return timing.graph_us([make_call()])
    except ImportError:
        raise
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:300], "trace": traceback.format_exc()[-1500:]}


def workspace(a: dict, **options) -> int:
    return cula.query(cula.kda.kda_prefill, **a, **options).workspace_bytes


def measure(case: Case, copy: float, fla_left_s: float) -> tuple[dict, float]:
    """The row of one case, and the seconds that FLA took."""
    a = arguments(case)
    call = partial(cula.kda.kda_prefill, **a)
    row = vars(case) | timed(lambda: call) | {"bytes": least_bytes(a), "floor_us": least_bytes(a) / copy / 1e3, "variants": []}
    if "us" in row:
        automatic = workspace(a)
        row["workspace_over_q"] = automatic / (a["q"].numel() * a["q"].element_size())
        row["segments"] = chosen_segments(lambda s: workspace(a, segments=s), automatic)
        row["variants"] = [options | timed(lambda o=options: partial(call, **o)) for options in forced(row["segments"] or 1)]
        with torch.no_grad():
            row["host_us"] = timing.host_us([call], n=10)
    row["peers"] = [{"lib": r.lib, "us": r.ms * 1e3, "source": "PEERS.md"} for r in peers.recorded_prefill()
                    if (r.heads, r.shape, r.gates) == (case.heads, case.shape, case.gates)]
    start = time.perf_counter()
    try:
        live = timed(lambda: peers.fla_prefill(a)) if fla_left_s > 0 else {"error": "not timed: the run's time for FLA is spent"}
        row["peers"] = [p for p in row["peers"] if p["lib"] != "fla" or "us" not in live]
        row["peers"].append({"lib": "fla", "source": "measured", **live})
    except ImportError:
        pass
    del a, call
    torch.cuda.empty_cache()
    return row, time.perf_counter() - start


def accuracy(device: str = "cuda") -> dict:
    """Relative RMSE against float64 of the case that PEERS.md gives the peers' figures of: 512 tokens, 2 heads, dt_bias from -4 to -1."""
    p = problems.make([512], 2, gate="safe", seed=1, device=device)
    p.gate = (p.gate.float() * 0.5).to(p.gate.dtype)
    p.raw = {"A_log": p.raw["A_log"] * 0.5, "dt_bias": -4 + 3 * p.raw["dt_bias"]}
    a = problems.arguments(p, state=p.h0, state_out=torch.full_like(p.h0, float("nan")))
    cula.kda.kda_prefill(**a)
    out, states = problems.reference(p)
    return {"out": problems.error(a["out"][0], out[0]), "state": problems.error(a["state_out"], states)}


def run(quick: bool, copy: float | None = None) -> dict:
    """copy: GB/s as timing.copy_rate() gives it, measured here if it is not given."""
    copy = copy or timing.copy_rate()
    rows, left = [], FLA_BUDGET_S
    for case in cases(quick):
        row, spent = measure(case, copy, left)
        left -= spent
        rows.append(row)
        print(line(row), flush=True)
    return {"copy_GBs": copy, "rows": rows, "accuracy": accuracy()}


def miss(row: dict) -> float | None:
    """By how much of the best forced variant's time the automatic plan is slower; negative: faster."""
    fastest = best(row["variants"])
    return row["us"] / fastest["us"] - 1 if fastest else None


def line(r: dict) -> str:
    name = f"kda_prefill H={r['heads']} {r['shape']} {r['gates']}"
    if "error" in r:
        return f"{name}: {r['error']}"
    auto = f", auto {miss(r):+.1%} of the best variant" if r["variants"] and best(r["variants"]) else ""
    return f"{name}: {r['us']:.1f} us, floor {r['floor_us']:.1f}{auto}, host {r['host_us']:.1f} us"


def markdown(result: dict) -> str:
    body, forced_rows = [], []
    for r in result["rows"]:
        head, peer = [r["heads"], r["shape"], r["gates"]], best(r["peers"])
        other = f"{peer['us'] / 1e3:.3f} {peer['lib']} ({peer['source']})" if peer else "-"
        if "error" in r:
            body.append([*head, "failed", r["error"][:60], "", "", "", "", "", other])
            continue
        fastest = best(r["variants"])
        named = f"{fastest['variant']} {fastest['segments']}: {fastest['us'] / 1e3:.3f}" if fastest else "-"
        body.append([*head, f"{r['us'] / 1e3:.3f}", f"{r['floor_us'] / 1e3:.3f}", r["segments"] or "?", named,
                     f"{miss(r):+.1%}" if fastest else "-", f"{r['workspace_over_q']:.2f}", f"{r['host_us']:.1f}", other])
        forced_rows += [[*head, t["variant"], t["segments"], f"{t['us'] / 1e3:.3f}" if "us" in t else t["error"][:60]] for t in r["variants"]]
    failed = [[r["heads"], r["shape"], r["gates"], p["lib"], p["error"][:80]] for r in result["rows"] for p in r["peers"] if "error" in p]
    a = result["accuracy"]
    parts = [f"## KDA prefill, copy {result['copy_GBs']:.0f} GB/s",
             table(["H", "tokens", "gates", "ms", "floor ms", "segments", "best variant, ms", "auto misses by", "workspace / q", "host us", "best peer, ms"],
                   body),
             f"Relative RMSE against float64, 512 tokens, 2 heads: out {a['out']:.2e}, state {a['state']:.2e}.",
             "### Forced variants", table(["H", "tokens", "gates", "variant", "segments", "ms"], forced_rows)]
    if failed:
        parts += ["### Peers without a time", table(["H", "tokens", "gates", "peer", "why"], failed)]
    return "\n\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three shapes only")
    parser.add_argument("--json", action="store_true", help="print JSON instead of Markdown")
    args = parser.parse_args()
    result = run(args.quick)
    print(json.dumps(result, indent=2) if args.json else markdown(result))


if __name__ == "__main__":
    main()
