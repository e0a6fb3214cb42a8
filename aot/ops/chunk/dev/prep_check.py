"""Checks the prep kernel without a GPU: kda_prep.cu compiled for the CPU (emulate.h), its records decoded and compared with
the formulas and, through a float64 chunk recurrence, with the token recurrence.   python3 prep_check.py [filter]"""
import ctypes
import os
import subprocess
import sys

import numpy as np

from records import CHUNK, DIM, RECORD_BYTES, bf16_to_f64, decode

HERE = os.path.dirname(os.path.abspath(__file__))
LOG2E = 1.4426950408889634
CODE = {"f32": 0, "bf16": 1, "fp16": 2, None: 3}


def to_bits(x, dtype):
    """float64 array -> array of the dtype's storage, and its float64 value"""
    x = np.asarray(x, dtype=np.float32)
    if dtype == "f32":
        return x.copy(), x.astype(np.float64)
    if dtype == "fp16":
        h = x.astype(np.float16)
        return h.view(np.uint16).copy(), h.astype(np.float64)
    u = np.ascontiguousarray(x).view(np.uint32)
    b = ((u + 0x7FFF + ((u >> 16) & 1)) >> 16).astype(np.uint16)
    return b, bf16_to_f64(b)


def library(io, gate_f32, build):
    so = os.path.join(build, f"emulate_{io}_{'f32' if gate_f32 else '16'}.so")
    flags = ["-DCULA_EMULATE"] + (["-DCULA_IO_FP16"] if io == "fp16" else []) + (["-DCULA_GATE_F32"] if gate_f32 else [])
    subprocess.run(["g++", "-std=c++17", "-O2", "-shared", "-fPIC", *flags, os.path.join(HERE, "emulate_prep.cpp"), "-o", so], check=True)
    return ctypes.CDLL(so)


def case(name, rng, lens=(70,), H=1, HV=2, io="bf16", gate="safe", gate_dtype="bf16", beta="logit", beta_dtype="bf16", l2norm=True, fixed=False,
         keys="random", cu_dtype=np.int32, scale=None, extra=0, head_group=0, segments=1, cut=1):
    N, T = len(lens), sum(lens) + extra
    n = lambda *s: rng.standard_normal(s)
    k = n(T, H, DIM)
    if keys == "identical":
        k = np.broadcast_to(n(1, H, DIM), k.shape).copy()
    if keys == "correlated":
        k = 0.9**0.5 * n(1, H, DIM) + 0.1**0.5 * k
    if keys == "scaled":
        k *= 0.05
    q, v, g, b = n(T, H, DIM), n(T, HV, DIM), n(T, HV, DIM), n(T, HV)
    a_log, dt = rng.random(HV), rng.random((HV, DIM))
    if gate == "slow":
        a_log[:], dt[:] = 0, -8
    if gate == "bound":
        g = np.where(rng.random(g.shape) < 0.8, 30.0, g)
    if gate == "softplus16":
        a_log[:] = np.log(16)
    if gate in ("log-20", "log-50"):
        g = np.where(rng.random(g.shape) < 0.3, -0.1, float(gate[3:]))
    if gate == "log0":
        g[:] = 0
    if gate == "logmix":
        g = -np.exp(2 * g - 4)
    if beta in ("0", "1", "2"):
        b[:] = float(beta)
    return dict(locals())


def run(c, build):
    lens, H, HV, io = c["lens"], c["H"], c["HV"], c["io"]
    N, T = c["N"], c["T"]
    raw, lib = c["gate"] in ("safe", "bound", "slow", "softplus", "softplus16"), library(io, c["gate_dtype"] == "f32", build)
    lower = -5.0 if c["gate"] in ("safe", "bound", "slow") else 0.0
    kind = {"logit": 1, "twice": 2}.get(c["beta"], 0)
    qb, q = to_bits(c["q"], io); kb, k = to_bits(c["k"], io); vb, v = to_bits(c["v"], io)
    gb, g = to_bits(c["g"], c["gate_dtype"]); bb, b = to_bits(c["b"], c["beta_dtype"])
    ab, a_log = to_bits(c["a_log"], "f32"); db, dt = to_bits(c["dt"], "f32")
    cu = np.concatenate([[0], np.cumsum(lens)]).astype(c["cu_dtype"])
    scale = DIM**-0.5 if c["scale"] is None else c["scale"]
    if c["fixed"]:
        L = lens[0]; chunks = N * -(-L // CHUNK); bt, tokens, starts = L, L, [i * L for i in range(N)]; cu_code = 0
        first = [s * -(-L // CHUNK) for s in range(N)]
    else:
        chunks = T // CHUNK + N; bt, tokens, starts = 0, T, cu[:-1]; cu_code = 1 if cu.dtype == np.int32 else 2
        first = [int(cu[s]) // CHUNK + s for s in range(N)]
    rec = np.full(chunks * HV * RECORD_BYTES, 0xFF, np.uint8); flags = np.full((chunks + 2 * N) * HV, 7, np.uint32)
    modes = raw | CODE[c["gate_dtype"]] << 1 | 0 << 3 | 0 << 5 | kind << 7 | CODE[c["beta_dtype"]] << 9 | bool(c["l2norm"]) << 11 | cu_code << 12
    ptr = (ctypes.c_void_p * 9)(*[x.ctypes.data for x in (qb, kb, gb, ab, db, bb, cu, rec, flags)])
    strides = (ctypes.c_int64 * 13)(bt * H * DIM, H * DIM, DIM, bt * H * DIM, H * DIM, DIM, bt * HV * DIM, HV * DIM, DIM, bt * HV, HV, 1, tokens)
    nums = (ctypes.c_int32 * 9)(HV, HV // H, c["head_group"] or HV, N, chunks, c["segments"], c["cut"], (chunks + 2 * N) * HV, modes)
    lib.emulate_prep(ptr, strides, nums, ctypes.c_float(scale), ctypes.c_float(lower), 3)
    rec = rec.reshape(chunks, HV, RECORD_BYTES); started = flags[chunks * HV :]; flags = flags[: chunks * HV].reshape(HV, chunks)
    # float64 reference of the inputs' activation
    if c["l2norm"]:
        q = q / np.sqrt((q * q).sum(-1, keepdims=True) + 1e-6); k = k / np.sqrt((k * k).sum(-1, keepdims=True) + 1e-6)
    q = q * scale
    A = np.exp(a_log)[None, :, None]
    if raw:
        x = g + dt[None]
        g = lower / (1 + np.exp(-A * x)) if lower else -A * np.logaddexp(0, x)
    if kind:
        b = kind / (1 + np.exp(-b))
    worst = {}
    ms = lambda x: float(np.sqrt((x * x).mean())) if x.size else 0.0
    num = {"o": 0.0, "S": 0.0}; den = {"o": 1e-300, "S": 1e-300}; seen = np.zeros((HV, chunks), bool)
    for s in range(N):
        for hv in range(HV):
            h = hv // (HV // H); S = 0.5 * np.random.default_rng(s * 7 + hv).standard_normal((DIM, DIM)); Sx = S.copy()
            for l in range(-(-lens[s] // CHUNK)):
                t0 = starts[s] + l * CHUNK; n = min(CHUNK, lens[s] - l * CHUNK); x = first[s] + l
                seen[hv, x] = True
                per = -(-(-(-lens[s] // CHUNK)) // c["cut"])
                warm = c["cut"] > 1 and per - l % per <= 2
                assert flags[hv, x] >= 1 if warm else flags[hv, x] == 1, "flag"
                r = decode(rec[x, hv])
                for key, m in r.items():
                    assert np.isfinite(m).all(), f"{key} not finite"
                K, Q, V, B, G = k[t0 : t0 + n, h], q[t0 : t0 + n, h], v[t0 : t0 + n, hv], b[t0 : t0 + n, hv], np.cumsum(g[t0 : t0 + n, hv], 0)
                D = np.exp(np.minimum(G[:, None] - G[None], 0))
                Akk = np.einsum("ic,jc,ijc->ij", K, K, D); P = np.tril(np.einsum("ic,jc,ijc->ij", Q, K, D))
                Tm = np.linalg.inv(np.eye(n) + np.tril(B[:, None] * Akk, -1)) * B[None]
                ref = dict(Kd=K * np.exp(G), Qd=Q * np.exp(G), Kr=K * np.exp(G[-1] - G), P=P, T=Tm, decay=np.exp(G[-1]))
                if warm:  # the bound holds, and is not idle
                    M = np.diag(ref["decay"]) - ref["Kr"].T @ Tm @ ref["Kd"]
                    bits, true = int(flags[hv, x]) - 1, -np.log2(np.linalg.norm(M, 2) + 1e-300)
                    assert bits == 0 or bits <= true, f"a chunk forgets {true:.1f} bits, its flag says {bits}"
                    worst["idle"] = max(worst.get("idle", 0.0), min(true, 40) - bits)
                for key, m in ref.items():
                    full = np.zeros(r[key].shape); full[tuple(slice(0, d) for d in m.shape)] = m
                    worst[key] = max(worst.get(key, 0), ms(r[key] - full) / max(ms(full), 1e-12) if key != "decay" else float(np.abs(r[key] - full).max()))
                Vp = np.zeros((CHUNK, DIM)); Vp[:n] = V
                U = r["T"] @ (Vp - r["Kd"] @ Sx); o = (r["Qd"] @ Sx + r["P"] @ U)[:n]; Sx = r["decay"][:, None] * Sx + r["Kr"].T @ U
                for t in range(n):
                    S = np.exp(g[t0 + t, hv])[:, None] * S; u = B[t] * (V[t] - K[t] @ S); S = S + np.outer(K[t], u); e = Q[t] @ S
                    num["o"] += ((o[t] - e) ** 2).sum(); den["o"] += (e * e).sum()
            num["S"] += ((Sx - S) ** 2).sum(); den["S"] += (S * S).sum()
    assert (started == 0).all(), "started"
    assert (flags[~seen] == 0).all(), "a flag of a chunk that does not exist is set"
    assert (rec.transpose(1, 0, 2)[~seen] == 0xFF).all(), "a record of a chunk that does not exist is written"
    worst.update({x: (num[x] / den[x]) ** 0.5 for x in num})
    return worst


def cases(rng):
    C = lambda name, **kw: case(name, rng, **kw)
    yield C("base")
    yield C("tails", lens=(1, 2, 15, 16, 17, 31, 32, 33, 0, 63, 0, 0, 65), HV=1)
    yield C("tails int64, unused capacity", lens=(0, 5, 40), HV=1, cu_dtype=np.int64, extra=50)
    yield C("fixed batch", lens=(45, 45), fixed=True)
    yield C("group 4, 3 heads at a time", H=2, HV=8, lens=(33,), head_group=3)
    yield C("3 segments", lens=(150,), segments=3)
    yield C("cut in 3", lens=(300,), segments=3, cut=3, cu_dtype=np.int64, HV=3, H=3); yield C("cut in 4, fixed", lens=(290,), segments=4, cut=4, fixed=True)
    yield C("cut in 3, 4 sequences", lens=(150, 0, 33, 290), cut=3, gate="softplus"); yield C("cut in 2, slow", lens=(150,), cut=2, gate="slow")
    yield C("cut in 9, log -20", lens=(200,), cut=9, segments=9, gate="log-20"); yield C("cut in 3, identical keys", lens=(200,), cut=3, keys="identical", beta="2")
    yield C("gates at their bound", gate="bound")
    yield C("fp16", io="fp16"); yield C("fp16 gate", io="fp16", gate_dtype="fp16", beta_dtype="fp16")
    yield C("f32 gate", gate_dtype="f32", beta_dtype="f32")
    yield C("slow", gate="slow", gate_dtype="f32"); yield C("softplus", gate="softplus"); yield C("softplus A=16", gate="softplus16")
    yield C("log gates", gate="logmix", gate_dtype="f32"); yield C("log -20", gate="log-20"); yield C("log -50", gate="log-50")
    yield C("log 0", gate="log0", lens=(64,)); yield C("log 0 identical keys beta 1", gate="log0", lens=(64,), keys="identical", beta="1")
    yield C("correlated beta 1", keys="correlated", gate="slow", beta="1", lens=(96,))
    yield C("beta 0", beta="0"); yield C("beta 2", beta="2", beta_dtype="f32"); yield C("beta twice", beta="twice")
    yield C("not normalised", l2norm=False, keys="scaled", scale=1.0, gate="logmix")


def run_carry(build, segments=7, hv=2, lens=(8 * CHUNK * 7, 2 * CHUNK, 50 * CHUNK - 5)):
    """kda_carry.cu: largest difference from float64, relative to the largest value. Chains whose segments start warm here and there."""
    rng = np.random.default_rng(5)
    x = rng.standard_normal((len(lens), hv, segments, 2, DIM, DIM)).astype(np.float32)
    x[:, :, :, 1] *= 0.1
    want = x.astype(np.float64)
    cu = np.concatenate([[0], np.cumsum(lens)]).astype(np.int64)
    chunks = int(cu[-1]) // CHUNK + len(lens)
    flags = np.ones((hv, chunks), np.uint32)
    done = 0
    for n, length in enumerate(lens):
        count = -(-length // CHUNK)
        per = -(-count // segments)
        for h in range(hv):
            warm = [s > 0 and s * per < count and h == 1 and bool(rng.integers(2)) for s in range(segments)]
            for s in range(segments):
                if warm[s]:
                    at = int(cu[n]) // CHUNK + n + s * per
                    flags[h, at - 1] += 12 + 30 * (s % 2)
                    flags[h, at - 2] += 20
            for s in range(1, segments - 1):
                if not warm[s] and not warm[s + 1]:
                    want[n, h, s, 0] += want[n, h, s - 1, 0] @ want[n, h, s, 1]
                    done += 1
    assert 0 < done < len(lens) * hv * (segments - 2)
    library("bf16", False, build).emulate_carry(ctypes.c_void_p(x.ctypes.data), ctypes.c_void_p(flags.ctypes.data), ctypes.c_void_p(cu.ctypes.data),
                                                ctypes.c_int64(int(cu[-1])), hv, chunks, segments, 2, len(lens) * hv)  # fmt: skip
    return float(np.abs(x - want).max() / np.abs(want).max())


if __name__ == "__main__":
    build = os.environ.get("BUILD", "/tmp"); rng = np.random.default_rng(int(os.environ.get("SEED", "0"))); bad = 0
    e = run_carry(build)
    bad += not e < 1e-6
    print("ok  " if e < 1e-6 else "FAIL", f"carry {e:.1e}")
    for c in cases(rng):
        if len(sys.argv) > 1 and sys.argv[1] not in c["name"]:
            continue
        try:
            w = run(c, build)
            ok = w["o"] < 6e-3 and w["S"] < 6e-3 and all(w[x] < 6e-3 for x in ("Kd", "Qd", "Kr", "T")) and w["P"] < 1.2e-2  # one score can cancel
            if c["beta"] == "0": ok = w["o"] < 6e-3
        except AssertionError as e:
            w, ok = {"error": str(e)}, False
        bad += not ok
        print("ok  " if ok else "FAIL", f"{c['name']:32s}", " ".join(f"{k} {x:.1e}" if isinstance(x, float) else f"{k} {x}" for k, x in w.items()), flush=True)
    sys.exit(bad > 0)
