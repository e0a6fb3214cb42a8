"""kda_gate, gdn_gate and l2norm: every shape beside its byte floor at the copy rate measured in this run, and beside
flash-linear-attention's kernels where they are installed.

The floor counts each tensor once (A_log and dt_bias, a few KB, left out). `python -m benchmarks.gates` runs these rows alone.
"""

from __future__ import annotations

import argparse
import json
import traceback
from dataclasses import dataclass

import torch

from benchmarks import timing
from benchmarks.report import table

DTYPE = {"fp32": torch.float32, "bf16": torch.bfloat16}
LOWER_BOUND = -5.0
K = 128


@dataclass(frozen=True)
class Row:
    op: str         # kda_gate, gdn_gate, l2norm
    form: str       # softplus, bound, softplus+beta; in place, out
    tokens: int
    heads: int
    io: str
    result: str


# Prefill of 8,192 tokens (the size that kernels are compared at), a short one, and a decode batch.
TOKENS = (1, 64, 1024, 8192)
QUICK_TOKENS = (8192,)
SHAPES = (
    ("kda_gate", "softplus", 64, "bf16", "fp32"),
    ("kda_gate", "bound", 64, "bf16", "fp32"),
    ("kda_gate", "bound", 64, "bf16", "bf16"),
    ("kda_gate", "bound", 64, "fp32", "fp32"),
    ("kda_gate", "bound", 8, "bf16", "fp32"),
    ("gdn_gate", "softplus+beta", 64, "bf16", "fp32"),
    ("gdn_gate", "softplus+beta", 16, "bf16", "fp32"),
    ("l2norm", "out", 64, "bf16", "bf16"),
    ("l2norm", "in place", 64, "bf16", "bf16"),
    ("l2norm", "out", 64, "fp32", "fp32"),
    ("l2norm", "out", 8, "bf16", "bf16"),
)


def rows(quick: bool) -> list[Row]:
    return [Row(op, form, tokens, heads, io, result) for op, form, heads, io, result in SHAPES for tokens in (QUICK_TOKENS if quick else TOKENS)]


class Inputs:
    """Tensors of one call."""

    def __init__(self, row: Row, seed: int, device: str = "cuda"):
        generator = torch.Generator(device=device).manual_seed(seed)
        shape = (row.tokens, row.heads) if row.op == "gdn_gate" else (row.tokens, row.heads, K)

        def normal(*size):
            return torch.randn(*size, device=device, generator=generator)

        self.row = row
        self.x = normal(*shape).to(DTYPE[row.io])
        self.out = self.x if row.form == "in place" else torch.empty(shape, device=device, dtype=DTYPE[row.result])
        self.A_log = torch.rand(row.heads, device=device, generator=generator)
        self.dt_bias = torch.rand(shape[1:], device=device, generator=generator)
        self.beta = self.beta_out = None
        if row.form.endswith("beta"):
            self.beta, self.beta_out = normal(*shape[:2]).to(DTYPE[row.io]), torch.empty(shape[:2], device=device, dtype=DTYPE[row.result])

    @property
    def bytes(self) -> int:
        moved = [self.x, self.out, self.beta, self.beta_out]
        return sum(t.numel() * t.element_size() for t in moved if t is not None)


def cula_call(i: Inputs):
    import cula

    if i.row.op == "l2norm":
        return lambda: cula.norm.l2norm(i.x, out=i.out)
    if i.row.op == "gdn_gate":
        return lambda: cula.gdn.gdn_gate(i.x, i.A_log, i.dt_bias, beta=i.beta, out=i.out, beta_out=i.beta_out)
    bound = LOWER_BOUND if i.row.form == "bound" else None
    return lambda: cula.kda.kda_gate(i.x, i.A_log, i.dt_bias, lower_bound=bound, out=i.out)


def fla_call(i: Inputs):
    """FLA allocates its result; there is no in-place form."""
    if i.row.op == "l2norm":
        from fla.modules.norm.l2norm import l2norm_fwd

        return lambda: l2norm_fwd(i.x[None], output_dtype=DTYPE[i.row.result])
    if i.row.op == "gdn_gate":
        from fla.ops.gated_delta_rule.gate import fused_gdn_gate

        return lambda: (fused_gdn_gate(i.x[None], i.A_log, i.dt_bias), i.beta.sigmoid())
    from fla.ops.kda.gate import fused_kda_gate

    bound = LOWER_BOUND if i.row.form == "bound" else None
    return lambda: fused_kda_gate(i.x[None], i.A_log, i.dt_bias.view(-1), lower_bound=bound, output_dtype=DTYPE[i.row.result])


def reference(i: Inputs) -> torch.Tensor:
    x = i.x.double()
    if i.row.op == "l2norm":
        return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    a, y = i.A_log.double().exp(), x + i.dt_bias.double()
    if i.row.op == "kda_gate":
        a = a[:, None]
    return LOWER_BOUND * torch.sigmoid(a * y) if i.row.form == "bound" else -a * torch.nn.functional.softplus(y, threshold=1e9)


def accuracy(row: Row, device: str = "cuda") -> float:
    """Relative RMSE of one call against float64."""
    i = Inputs(row, seed=7, device=device)
    want = reference(i)
    if i.out is not i.x:
        i.out.fill_(float("nan"))
    cula_call(i)()
    return ((i.out.double() - want).norm() / want.norm()).item()


def measure(make_call, row: Row) -> dict:
    try:
        probe = Inputs(row, 0)
        inputs = [probe] + [Inputs(row, seed) for seed in range(1, timing.rotations(probe.bytes))]
        with torch.no_grad():
            calls = [make_call(i) for i in inputs]
            result = timing.graph_us(calls)
            result["host_us"] = timing.host_us(calls)
        return result | {"bytes": probe.bytes, "GBs": probe.bytes / result["us"] / 1e3}
    except ImportError:
        raise
    except Exception as error:  # a failure is a result, and must not end the run
        return {"error": f"{type(error).__name__}: {error}"[:300], "trace": traceback.format_exc()[-1500:]}
    finally:
        torch.cuda.empty_cache()


def run(quick: bool, copy: float | None = None) -> dict:
    """copy: GB/s as timing.copy_rate() gives it, measured here if it is not given."""
    copy = copy or timing.copy_rate()
    results = []
    for row in rows(quick):
        result = vars(row) | measure(cula_call, row)
        if "us" in result:
            result["floor_us"] = result["bytes"] / copy / 1e3
            result["share"] = result["GBs"] / copy
            result["error_rms"] = accuracy(row)
        try:
            result["fla"] = measure(fla_call, row)
        except ImportError:
            result["fla"] = None
        print(line(result), flush=True)
        results.append(result)
    return {"copy_GBs": copy, "rows": results}


def line(r: dict) -> str:
    name = f"{r['op']} {r['form']} T={r['tokens']} HV={r['heads']} {r['io']} -> {r['result']}"
    if "error" in r:
        return f"{name}: {r['error']}"
    return f"{name}: {r['us']:.2f} us, {r['share']:.1%} of copy, error {r['error_rms']:.1e}, host {r['host_us']:.1f} us"


def markdown(result: dict) -> str:
    body = []
    for r in result["rows"]:
        head = [r["op"], r["form"], r["tokens"], r["heads"], f"{r['io']} -> {r['result']}"]
        fla = r["fla"]
        peer = "-" if fla is None else f"{fla['us']:.2f}" if "us" in fla else f"failed: {fla['error'][:40]}"
        if "error" in r:
            body.append([*head, "failed", r["error"][:60], "", "", "", peer])
        else:
            body.append([*head, f"{r['us']:.2f}", f"{r['floor_us']:.2f}", f"{r['share']:.1%}", f"{r['error_rms']:.1e}", f"{r['host_us']:.1f}", peer])
    title = f"## Gates and norm, copy {result['copy_GBs']:.0f} GB/s"
    return f"{title}\n\n" + table(["op", "form", "T", "HV", "dtypes", "us", "floor us", "share of copy", "error", "host us", "FLA us"], body)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="T = 8192 only")
    parser.add_argument("--json", action="store_true", help="print JSON instead of Markdown")
    args = parser.parse_args()
    result = run(args.quick)
    print(json.dumps(result, indent=2) if args.json else markdown(result))


if __name__ == "__main__":
    main()
