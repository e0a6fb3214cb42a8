"""Decode on the GPU: every shape of decode_inputs beside the peers, on the share of the copy rate measured in this run."""

from __future__ import annotations

import traceback
from functools import partial

import torch

from benchmarks import decode_inputs, host, peers, timing
from benchmarks.cula_call import bind
from benchmarks.decode_inputs import HEADS, D, Inputs
from tests.numerics import cabi
from tests.reference import recurrence


def options(x: Inputs) -> dict:
    """What a call of x's operator needs beside rows and state, by the names of cula.h."""
    if x.op == "kda":
        return dict(gate=x.gate, gate_kind="raw", A_log=x.A_log, dt_bias=x.dt_bias, beta=x.beta, beta_kind="logit",
                    l2norm=True, lower_bound=decode_inputs.LOWER_BOUND)
    if x.op == "gdn":
        return dict(gate=x.gate, gate_kind="raw", A_log=x.A_log, dt_bias=x.dt_bias, beta=x.beta, beta_kind="logit", l2norm=True)
    return dict(gate=x.gate, gate_kind="log_channel" if x.op == "gla" else "const_head")


def cula_call(x: Inputs, layout: str = "vk"):
    kw = options(x)
    return bind(x.op, x.q, x.k, x.v, out=x.out, state=x.state, scale=x.scale, layout=layout, **kw)


def cabi_call(x: Inputs, layout: str = "vk") -> cabi.Call:
    kw = options(x)
    tensors = {name: kw.pop(name) for name in ("gate", "A_log", "dt_bias", "beta") if name in kw}
    return cabi.Call(x.op, dict(q=x.q, k=x.k, v=x.v, out=x.out, state=x.state, **tensors), scale=x.scale, layout=layout, **kw)


def accuracy(op: str, state: str, layout: str = "vk", device: str = "cuda") -> dict:
    """Relative RMSE of one call (N = 8) against the float64 recurrence."""
    x = decode_inputs.make(op, 8, HEADS[op][0], state, seed=3, device=device)
    x.out.fill_(float("nan"))
    kw = options(x)
    f64 = {name: t.double().cpu().numpy() for name, t in kw.items() if isinstance(t, torch.Tensor)}
    rest = {name: value for name, value in kw.items() if name not in f64}
    for name in ("gate", "beta"):
        if name in f64 and f64[name].ndim > 1:
            f64[name] = f64[name][:, 0]
    q, k, v = (t.double().cpu().numpy()[:, 0] for t in (x.q, x.k, x.v))
    want = recurrence.decode(op, q, k, v, state=x.state.double().cpu().numpy(), layout=layout, scale=x.scale, **f64, **rest)
    cula_call(x, layout)()
    got = (x.out.double().cpu()[:, 0], x.state.double().cpu())
    rel = [((g - torch.from_numpy(w)).norm() / torch.from_numpy(w).norm()).item() for g, w in zip(got, (want.out, want.state))]
    return {"op": op, "state": state, "layout": layout, "out": rel[0], "state_error": rel[1]}


def measure(make_call, op, n, heads, state, with_host: bool = True) -> dict:
    """Time of one library on one shape; {'error': ...} if it fails."""
    try:
        r = timing.rotations(n * heads[1] * D * D * (4 if state == "fp32" else 2))
        inputs = [decode_inputs.make(op, n, heads, state, seed) for seed in range(r)]
        calls = [make_call(x) for x in inputs]
        result = timing.graph_us(calls)
        result["GBs"] = inputs[0].bytes / result["us"] / 1e3
        result["bytes"] = inputs[0].bytes
        if with_host:
            result["host_us"] = timing.host_us(calls)
        return result
    except ImportError:
        raise
    except Exception as error:  # a peer's failure is a result, and must not end the run
        return {"error": f"{type(error).__name__}: {error}"[:300], "trace": traceback.format_exc()[-1500:]}
    finally:
        torch.cuda.empty_cache()


def peer_rows(op, n, heads, state) -> list[dict]:
    """Every peer for this shape: measured where installed, recorded otherwise."""
    rows = {}
    for row in peers.recorded():
        if (row.op, row.n, row.heads, row.state) == (op, n, heads, state):
            rows[row.lib] = {"lib": row.lib, "us": row.us, "host_us": row.host_us, "source": "PEERS.md"}
    for lib, make_call in peers.LIVE.get((op, state), {}).items():
        try:
            with torch.no_grad():
                rows[lib] = {"lib": lib, "source": "measured", **measure(make_call, op, n, heads, state)}
        except ImportError:
            continue
    return list(rows.values())


def run(quick: bool, layouts: tuple[str, ...] = ("vk", "kv")) -> dict:
    copy = timing.copy_rate()
    print(f"copy {copy:.0f} GB/s", flush=True)
    rows = []
    for op, heads_list in HEADS.items():
        for heads in heads_list:
            for state in ("fp32", "bf16"):
                for n in decode_inputs.QUICK_BATCHES if quick else decode_inputs.BATCHES:
                    peers_here = peer_rows(op, n, heads, state)
                    for layout in layouts if not quick else layouts[:1]:
                        row = {"op": op, "state": state, "layout": layout, "heads": heads, "n": n,
                               **measure(partial(cula_call, layout=layout), op, n, heads, state), "peers": peers_here}
                        if "us" in row:
                            row["share"] = row["GBs"] / copy
                            print(f"{op} {state} {layout} {heads[0]}/{heads[1]} N={n}: {row['us']:.2f} us, "
                                  f"{row['share']:.1%} of copy, host {row['host_us']:.1f} us", flush=True)
                        else:
                            print(f"{op} {state} {layout} {heads} N={n}: {row['error']}", flush=True)
                        rows.append(row)
    nine = [decode_inputs.make("kda", 1, (64, 64), "fp32", seed) for seed in range(4)]
    return {"copy_GBs": copy, "rows": rows,
            "accuracy": [accuracy(op, state, layout) for op in HEADS for state in ("fp32", "bf16") for layout in layouts],
            "host": {"python_us": timing.host_us([cula_call(x) for x in nine]),
                     "cpp_us": host.cpp_host_us([cabi_call(x) for x in nine])}}
