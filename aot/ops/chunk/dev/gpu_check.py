"""KDA prefill on a GPU: correctness against a float64 recurrence, then times.
python3 gpu_check.py CUBIN_FOLDER [check] [time] [slow] [parts] [form=mma|mma2]     JSON under $OUT, a short table last

form: what archs without wgmma get, on this GPU (build.py FOLDER NVCC mma mma2 makes the cubins)."""
import json
import os
import sys
import time

import torch

from device import DIM, Prefill

dev = torch.device("cuda")
OUT = os.environ.get("OUT", "/tmp")
bf16, fp16, f32 = torch.bfloat16, torch.float16, torch.float32


def inputs(lens, H, HV, *, io=bf16, gate="safe", gate_dtype=bf16, beta="logit", beta_dtype=bf16, keys="random", fixed=False, seed=0, h0=0.5, params_dtype=f32, extra=0):
    gen = torch.Generator(device=dev).manual_seed(seed)
    r = lambda *s: torch.randn(*s, device=dev, generator=gen)
    B, T = (len(lens), lens[0]) if fixed else (1, sum(lens) + extra)
    q, k, v, g, b = r(B, T, H, DIM), r(B, T, H, DIM), r(B, T, HV, DIM), r(B, T, HV, DIM), r(B, T, HV)
    a_log, dt = torch.rand(HV, device=dev, generator=gen), torch.rand(HV, DIM, device=dev, generator=gen)
    if keys == "identical":
        k = r(1, 1, H, DIM).expand_as(k).clone()
    if keys == "correlated":
        k = 0.9**0.5 * r(1, 1, H, DIM) + 0.1**0.5 * k
    if keys == "scaled":
        k = k * 0.05
    if gate == "slow":
        a_log.zero_(); dt.fill_(-8)
    if gate == "bound":
        g = torch.where(torch.rand(g.shape, device=dev, generator=gen) < 0.8, 30.0, g)
    if gate == "softplus16":
        a_log.fill_(2.7725887)
    if gate == "acc":
        a_log *= 0.5; dt = -4 + 3 * torch.rand(HV, DIM, device=dev, generator=gen); g = g * 0.5
    if gate in ("log-20", "log-50"):
        g = torch.where(torch.rand(g.shape, device=dev, generator=gen) < 0.3, -0.1, float(gate[3:]))
    if gate == "log0":
        g.zero_()
    if gate == "mixed":  # log gates: spans of 100 tokens that forget fast, spans that do not, by head
        fast = (torch.arange(g.shape[1], device=dev)[:, None] // 100 + torch.arange(HV, device=dev)) % 3 < 2
        g = torch.where(fast[None, :, :, None], -1.5 * torch.rand(g.shape, device=dev, generator=gen), -1e-3)
    if gate == "logmix":
        g = -torch.exp(2 * g - 4)
    if beta in ("0", "1", "2"):
        b.fill_(float(beta))
    return dict(q=q.to(io), k=k.to(io), v=v.to(io), gate=g.to(gate_dtype), beta=b.to(beta_dtype), a_log=a_log.to(params_dtype), dt_bias=dt.to(params_dtype),
                h0=r(len(lens), HV, DIM, DIM) * h0, raw=not gate.startswith(("log", "mixed")), lower_bound=-5.0 if gate in ("safe", "bound", "slow", "acc") else 0.0,
                beta_kind={"logit": 1, "twice": 2}.get(beta, 0), lens=lens, fixed=fixed)  # fmt: skip


def reference(d, l2norm=True, scale=None):
    """float64 token recurrence of all sequences side by side; h0 and the result [N,HV,V,K]. -> list of o per sequence, states"""
    lens, HV = d["lens"], d["v"].shape[2]
    rep = HV // d["q"].shape[2]
    L, N = max(lens), len(lens)
    starts = [sum(lens[:i]) for i in range(N)]

    def rows(x):
        p = torch.zeros(N, max(L, 1), *x.shape[2:], dtype=torch.float64, device=dev)
        for i, n in enumerate(lens):
            p[i, :n] = x[i, :n].double() if d["fixed"] else x[0, starts[i] : starts[i] + n].double()
        return p

    q, k, v, g, b = (rows(d[x]) for x in ("q", "k", "v", "gate", "beta"))
    if l2norm:
        q = q / torch.sqrt((q * q).sum(-1, keepdim=True) + 1e-6)
        k = k / torch.sqrt((k * k).sum(-1, keepdim=True) + 1e-6)
    q = (q * (DIM**-0.5 if scale is None else scale)).repeat_interleave(rep, 2)
    k = k.repeat_interleave(rep, 2)
    if d["raw"]:
        A, x = d["a_log"].double().exp()[:, None], g + d["dt_bias"].double()
        g = d["lower_bound"] * torch.sigmoid(A * x) if d["lower_bound"] else -A * torch.nn.functional.softplus(x)
    if d["beta_kind"]:
        b = d["beta_kind"] * torch.sigmoid(b)
    S = d["h0"].double().transpose(-1, -2).clone()
    o = torch.zeros_like(v)
    live = torch.tensor(lens, device=dev)
    for t in range(L):
        m = (live > t)[:, None, None, None]
        X = S * torch.exp(g[:, t])[..., None]
        u = b[:, t][..., None] * (v[:, t] - torch.einsum("nhkv,nhk->nhv", X, k[:, t]))
        X = X + k[:, t][..., None] * u[:, :, None, :]
        o[:, t] = torch.einsum("nhkv,nhk->nhv", X, q[:, t])
        S = torch.where(m, X, S)
    return [o[i, :n] for i, n in enumerate(lens)], S.transpose(-1, -2)


def rel(a, b):
    a, b = a.double().flatten(), b.double().flatten()
    return float((a - b).norm() / b.norm().clamp_min(1e-300)) if a.numel() else 0.0


def call(op, d, *, layout="vk", state_dtype=f32, cu_dtype=torch.int32, fused_rows=False, pool=None, l2norm=True, scale=None, overlap=True, repeat=True, segments=1, exact=False, chained=False):
    """Runs with poisoned outputs; -> o [B,T,HV,V], final states [N,HV,V,K], bitwise equal on a second run"""
    lens, N = d["lens"], len(d["lens"])
    q, k, v = d["q"], d["k"], d["v"]
    B, T, HV = v.shape[:3]
    if fused_rows:
        H = q.shape[2]
        row = torch.cat([q.flatten(2), k.flatten(2), v.flatten(2)], -1).contiguous()
        q, k, v = row[..., : H * DIM].view(B, T, H, DIM), row[..., H * DIM : 2 * H * DIM].view(B, T, H, DIM), row[..., 2 * H * DIM :].view(B, T, HV, DIM)
    cu = None if d["fixed"] else torch.tensor([0] + [sum(lens[: i + 1]) for i in range(N)], dtype=cu_dtype, device=dev)
    put = (lambda s: s) if layout == "vk" else (lambda s: s.transpose(-1, -2))
    read = write = null = None
    if pool is None:
        s_in = put(d["h0"]).to(state_dtype).contiguous()
        s_out = torch.full_like(s_in, float("nan"))
    else:  # slots twice as many and shuffled, in place, padded slot stride
        slots = 2 * N + 1
        order = torch.randperm(slots, device=dev)[:N]
        page = torch.full((slots, HV * DIM * DIM + 512), 7.0, dtype=state_dtype, device=dev)
        s_in = s_out = page[:, : HV * DIM * DIM].view(slots, HV, DIM, DIM)
        s_in[order] = put(d["h0"]).to(state_dtype)
        read = order.to(pool).clone()
        write = read
    result = []
    for _ in range(2 if repeat else 1):
        out = torch.full((B, T, HV, DIM), float("nan"), dtype=v.dtype, device=dev)
        if pool is not None:
            s_in[order] = put(d["h0"]).to(state_dtype)
        p = op.plan(q, k, v, d["gate"], d["beta"], out, cu_seqlens=cu, a_log=d["a_log"] if d["raw"] else None, dt_bias=d["dt_bias"] if d["raw"] else None, raw=d["raw"],
                    lower_bound=d["lower_bound"], beta_kind=d["beta_kind"], l2norm=l2norm, scale=scale, state_in=s_in, state_out=s_out, read_index=read, write_index=write,
                    null_slot=null, layout=layout, overlap=overlap, segments=segments, exact=exact, chained=chained)  # fmt: skip
        p["run"]()
        torch.cuda.synchronize()
        states = s_out if pool is None else s_out[order]
        result.append((out, put(states).clone()))
        if pool is not None:
            others = torch.ones(slots, dtype=torch.bool, device=dev); others[order] = False
            assert (page[:, HV * DIM * DIM :] == 7).all() and (page[others] == 7).all(), "a slot or a gap that is not ours was written"
    same = all(torch.equal(torch.nan_to_num(a.float(), nan=9e9), torch.nan_to_num(b.float(), nan=9e9)) for a, b in zip(*result)) if repeat else True
    return *result[0], same


def checks(op):
    tails = list(range(0, 131)) + [0, 0]
    C = [
        ("tails 0..130", inputs(tails, 1, 2), {}),
        ("tails, no overlap", inputs(tails, 1, 2, seed=1), dict(overlap=False)),
        ("tails fp16, kv, int64", inputs(tails, 1, 2, io=fp16, seed=2), dict(layout="kv", cu_dtype=torch.int64)),
        ("bf16 state, kv", inputs([100, 0, 1, 77], 2, 4, seed=3), dict(layout="kv", state_dtype=bf16)),
        ("bf16 state, vk, fp16 io, f32 gate", inputs([100, 0, 1, 77], 2, 4, seed=3, io=fp16, gate_dtype=f32), dict(state_dtype=bf16)),
        ("fixed batch", inputs([100] * 3, 2, 2, fixed=True, seed=4), {}),
        ("group 4, fused rows", inputs([65, 130], 2, 8, seed=5), dict(fused_rows=True)),
        ("pool int32 in place", inputs([65, 0, 130, 1], 2, 2, seed=6), dict(pool=torch.int32)),
        ("pool int64 in place kv", inputs([65, 0, 130, 1], 2, 2, seed=7), dict(pool=torch.int64, layout="kv")),
        ("unused capacity", inputs([65, 30], 2, 2, seed=8, extra=100), {}),
        ("f32 gate and beta", inputs([200], 2, 2, gate_dtype=f32, beta_dtype=f32, seed=9), {}),
        ("fp16 gate, beta, A_log", inputs([200], 2, 2, io=fp16, gate_dtype=fp16, beta_dtype=fp16, params_dtype=fp16, seed=10), {}),
        ("peers' accuracy case", inputs([512], 2, 2, gate="acc", seed=1), {}),
        ("slow 2048", inputs([2048], 2, 2, gate="slow", gate_dtype=f32, seed=11), {}),
        ("slow bf16 2048", inputs([2048], 2, 2, gate="slow", seed=11), {}),
        ("softplus", inputs([300], 2, 2, gate="softplus", seed=12), {}),
        ("softplus A=16", inputs([300], 2, 2, gate="softplus16", seed=13), {}),
        ("log mix", inputs([300], 2, 2, gate="logmix", gate_dtype=f32, seed=14), {}),
        ("log -20", inputs([300], 2, 2, gate="log-20", seed=15), {}),
        ("log -50", inputs([300], 2, 2, gate="log-50", seed=16), {}),
        ("g = 0", inputs([300], 2, 2, gate="log0", seed=17), {}),
        ("identical keys, g 0, beta 1", inputs([300], 2, 2, gate="log0", keys="identical", beta="1", seed=18), {}),
        ("correlated keys, beta 1", inputs([300], 2, 2, gate="slow", keys="correlated", beta="1", seed=19), {}),
        ("beta 0", inputs([300], 2, 2, beta="0", seed=20), {}),
        ("beta 2", inputs([300], 2, 2, beta="2", seed=21), {}),
        ("beta twice", inputs([300], 2, 2, beta="twice", seed=22), {}),
        ("not normalised, scale 1", inputs([300], 2, 2, keys="scaled", gate="logmix", seed=23), dict(l2norm=False, scale=1.0)),
        ("scale 0", inputs([64], 2, 2, seed=24), dict(scale=0.0)),
        ("gates at their bound", inputs([300], 2, 2, gate="bound", seed=26), {}),
        ("3 segments, slow", inputs([1000], 2, 2, gate="slow", seed=27), dict(segments=3)),
        ("8 segments", inputs([1000], 2, 4, seed=28), dict(segments=8)),
        ("8 segments, slow f32, kv", inputs([2047], 2, 2, gate="slow", gate_dtype=f32, seed=29), dict(segments=8, layout="kv")),
        ("2 segments, ragged", inputs([100, 0, 1, 333, 64, 31], 2, 2, gate="slow", seed=30), dict(segments=2)),
        ("5 segments, ragged, no overlap", inputs([100, 0, 1, 333, 64, 31], 2, 2, gate="logmix", seed=31), dict(segments=5, overlap=False)),
        ("5 segments, pool, g = 0", inputs([300, 500], 2, 2, gate="log0", seed=32), dict(segments=5, pool=torch.int32)),
        ("8 segments, exact", inputs([1000], 2, 4, seed=28), dict(segments=8, exact=True)),
        ("8 segments, int64 cu, kv, pool", inputs([2047], 2, 2, seed=34), dict(segments=8, layout="kv", cu_dtype=torch.int64, pool=torch.int32)),
        ("64 segments, no overlap, pool", inputs([2200], 2, 2, seed=35), dict(segments=64, overlap=False, pool=torch.int64)),
        ("some cuts warm", inputs([4000], 2, 4, gate="mixed", gate_dtype=f32, seed=36), dict(segments=9)),
        ("some cuts warm, ragged", inputs([1000, 0, 31, 2000, 65, 700], 2, 4, gate="mixed", gate_dtype=f32, seed=37), dict(segments=6, pool=torch.int32)),
        ("some cuts warm, fixed", inputs([1100] * 3, 2, 4, gate="mixed", gate_dtype=f32, seed=38, fixed=True), dict(segments=6)),
        ("chained, 5 segments, slow, pool", inputs([1000, 0, 40], 2, 4, gate="slow", gate_dtype=f32, seed=39), dict(segments=5, chained=True, pool=torch.int32)),
        ("chained, some cuts warm", inputs([1000, 0, 31, 2000, 65, 700], 2, 4, gate="mixed", gate_dtype=f32, seed=37), dict(segments=6, chained=True)),
        ("chained, exact, 100 heads", inputs([600], 100, 100, seed=41), dict(segments=8, chained=True, exact=True)),
        ("slow 8192", inputs([8192], 2, 2, gate="slow", seed=33), {}),
        ("slow 8192, 6 segments", inputs([8192], 2, 2, gate="slow", seed=33), dict(segments=6)),
        ("70 heads, 2 groups", inputs([40, 70], 70, 70, seed=25), {}),
    ]
    rows, bad = [], 0
    for name, d, kw in C:
        t = time.time()
        try:
            o, S, same = call(op, d, **kw)
            ro, rS = reference(d, kw.get("l2norm", True), kw.get("scale"))
            lens, at = d["lens"], 0
            got = []
            for i, n in enumerate(lens):
                got.append(o[i] if d["fixed"] else o[0, at : at + n]); at += n
            e_o, e_s = rel(torch.cat(got), torch.cat(ro)), rel(S, rS)
            worst = max((rel(a, b) for a, b in zip(got, ro) if a.numel() and float(b.norm()) > 0), default=0.0)
            beyond = True if d["fixed"] else bool(torch.isnan(o[0, at:]).all())
            finite = bool(torch.isfinite(torch.cat(got)).all()) and bool(torch.isfinite(S).all())
            if kw.get("scale") == 0.0:
                e_o = float(torch.cat(got).abs().max()); worst = 0
            # bf16 operands: each rounding is 2^-9 relative, a few of them add up, more where keys repeat and beta is 1
            limit = 8e-3 if "correlated" in name else 5.5e-3
            ok = finite and same and beyond and e_o < limit and e_s < limit and worst < 2e-2
        except Exception as e:  # a failed launch poisons the context: say so and stop
            print(f"FAIL {name}: {e}", flush=True)
            return rows, bad + 1
        bad += not ok
        rows.append(dict(name=name, o=e_o, state=e_s, worst_sequence=worst, finite=finite, repeatable=same, untouched=beyond, ok=ok))
        print("ok  " if ok else "FAIL", f"{name:34s} o {e_o:.2e} state {e_s:.2e} worst sequence {worst:.2e}" + ("" if finite and same and beyond else f" finite {finite} repeat {same} untouched {beyond}"), f"{time.time() - t:.1f}s", flush=True)
    return rows, bad


def check_slots(op):
    """Slot rules: negative, null and out-of-range indices read zero and store nothing; a read slot that is not written stays."""
    d = inputs([40, 70, 33, 64, 20], 1, 2, seed=40)
    pool = torch.randn(6, 2, DIM, DIM, device=dev)
    read, write = [2, -1, 0, 5, 99], [1, 3, 0, -1, 4]
    before = pool.clone()
    zero = torch.zeros(2, DIM, DIM, device=dev)
    d["h0"] = torch.stack([before[r] if 0 < r < 6 else zero for r in read])
    out = torch.full_like(d["v"], float("nan"))
    t = lambda x, dt: torch.tensor(x, dtype=dt, device=dev)
    cu = t([0, 40, 110, 143, 207, 227], torch.int64)
    p = op.plan(d["q"], d["k"], d["v"], d["gate"], d["beta"], out, cu_seqlens=cu, a_log=d["a_log"], dt_bias=d["dt_bias"], lower_bound=-5.0, state_in=pool, state_out=pool,
                read_index=t(read, torch.int32), write_index=t(write, torch.int64), null_slot=0)  # fmt: skip
    p["run"]()
    torch.cuda.synchronize()
    o, S = reference(d)
    same = all(torch.equal(pool[i], before[i]) for i in (0, 2, 5))
    e_s = max(rel(pool[w], S[i]) for i, w in enumerate(write) if w > 0)
    e_o = rel(out[0], torch.cat(o))
    ok = same and e_s < 5.5e-3 and e_o < 5.5e-3
    print("ok  " if ok else "FAIL", f"slots: o {e_o:.2e} state {e_s:.2e} others untouched {same}", flush=True)
    return dict(name="slots", o=e_o, state=e_s, ok=ok)


SHAPES = [(64, [512]), (64, [1024]), (64, [4096]), (64, [8192]), (64, [16384]), (64, [32768]), (64, [8192] * 2), (64, [1300, 547, 2048, 963, 271, 3063]), (64, [1024] * 8),
          (96, [8192]), (16, [8192]), (12, [8192]), (8, [8192]), (8, [32768]), (4, [32768])]  # fmt: skip


def variants_of(H, lens, parts):
    """name -> (plan keywords, which launch)"""
    v = {"overlap": (dict(), "run"), "serial": (dict(overlap=False), "run")}
    v.update({f"chain{p}": (dict(segments=p, chained=True), "run") for p in (4, 8, 16) if H * len(lens) > 60})
    if parts:
        v.update(prep3=(dict(overlap=False), "prep"), prep2=(dict(), "prep"), state=(dict(overlap=False), "state"), overlap1=(dict(prep_blocks=1), "run"))
    if H <= 16 and len(lens) == 1:
        for p in (2, 3, 4, 5, 6, 8, 9, 10, 12, 16):
            if 2 * H * p <= 264:
                v[f"cp{p}"] = (dict(segments=p), "run")
                v[f"exact{p}"] = (dict(segments=p, exact=True), "run")
        if parts:
            v.update(scan3=(dict(segments=3, overlap=False), "scan"), state3=(dict(segments=3, overlap=False), "state"), scan5=(dict(segments=5, overlap=False), "scan"), carry5=(dict(segments=5, overlap=False), "carry"), state5=(dict(segments=5, overlap=False), "state"))
    return v


def times(op, gates, parts, shapes=SHAPES):
    flush = torch.empty(256 << 20, dtype=torch.uint8, device=dev)
    rows = []
    for H, lens in shapes:
        for gate in gates:
            d = inputs(lens, H, H, gate=gate, seed=3)
            T = sum(lens)
            out = torch.empty(1, T, H, DIM, dtype=bf16, device=dev)
            cu = torch.tensor([0] + [sum(lens[: i + 1]) for i in range(len(lens))], dtype=torch.int32, device=dev)
            s_out = torch.empty_like(d["h0"])
            row = dict(H=H, shape="x".join(map(str, lens)) if len(lens) < 3 else f"{len(lens)} seqs of {T}", gate=gate)
            for name, (kw, what) in variants_of(H, lens, parts and gate == gates[0]).items():
                p = op.plan(d["q"], d["k"], d["v"], d["gate"], d["beta"], out, cu_seqlens=cu, a_log=d["a_log"], dt_bias=d["dt_bias"], lower_bound=d["lower_bound"],
                            state_in=d["h0"], state_out=s_out, **kw)  # fmt: skip
                p["run"](); p["run"](); torch.cuda.synchronize()
                ts = []
                for _ in range(7 if T * H > 600000 else 9):
                    flush.fill_(1); torch.cuda._sleep(400000)
                    a, b = torch.cuda.Event(True), torch.cuda.Event(True)
                    a.record(); p[what](); b.record(); torch.cuda.synchronize()
                    ts.append(a.elapsed_time(b))
                row[name] = round(sorted(ts)[len(ts) // 2], 4)
                del p
            rows.append(row)
            print(json.dumps(row), flush=True)
            del d, out, s_out
            torch.cuda.empty_cache()
    return rows


if __name__ == "__main__":
    torch.zeros(1, device=dev)
    torch.cuda.synchronize()
    words = sys.argv[2:]
    form = next((word[5:] for word in words if word.startswith("form=")), "")
    what = [word for word in words if not word.startswith("form=")] or ["check", "time"]
    if unknown := set(what) - {"check", "time", "slow", "parts"}:
        sys.exit(f"gpu_check.py: unknown {', '.join(sorted(unknown))}")
    op = Prefill(sys.argv[1], form)
    result = {"device": torch.cuda.get_device_name(0), "sms": op.sms, "form": form or "wgmma"}
    bad = 0
    if "check" in what:
        result["checks"], bad = checks(op)
        result["checks"].append(check_slots(op))
        bad += not result["checks"][-1]["ok"]
    if "time" in what:
        result["times"] = times(op, ["safe"] + (["slow"] if "slow" in what else []), "parts" in what)
    result["kernels"] = {n: dict(registers=k.registers, local=k.local, occupancy=k.occupancy) for n, k in op.cache.items()}
    json.dump(result, open(os.path.join(OUT, f"kda_prefill_{form}.json".replace("_.", ".")), "w"), indent=1)
    print("kernels", result["kernels"])
    print("FAILED" if bad else "all checks passed", bad)
