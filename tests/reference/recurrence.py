"""The recurrences in float64, as the formulas are written in cula.h. Nothing here is fast.

Reading order: step (one token of some rows), log_decay and activate_beta (the gate and beta forms), decode (rows, slots and
pools around it), sequence (many tokens, for the comparison with other references).

Arrays are numpy; every input is converted to float64, so values of a narrower dtype enter exactly. Shapes: N rows, H
query/key heads, HV value heads (HV % H == 0), K key dim, V value dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

DELTA_RULE = {"kda": True, "gdn": True, "gla": False, "lightning": False}
L2NORM_EPS = 1e-6
BLOCK_ELEMENTS = 1 << 20  # state elements of the rows that are taken at a time; bounds the memory, changes no value


def step(S, q, k, v, decay, beta, delta_rule):
    """One token of n rows. S [n,HV,K,V], q, k [n,HV,K] (q already scaled), v [n,HV,V], decay [n,HV,K], beta [n,HV].
    Returns o [n,HV,V] and the new S."""
    S = decay[..., None] * S
    if delta_rule:
        v = beta[..., None] * (v - np.einsum("nhkv,nhk->nhv", S, k))
    S = S + k[..., None] * v[..., None, :]
    return np.einsum("nhkv,nhk->nhv", S, q), S


def sigmoid(x):
    return 0.5 * (1.0 + np.tanh(0.5 * x))  # no overflow on either side


def softplus(x):
    return np.where(x > 20.0, x, np.log1p(np.exp(np.minimum(x, 20.0))))


def l2_normalise(x):
    return x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + L2NORM_EPS)


def log_decay(kind, gate, hv, k, A_log=None, dt_bias=None, lower_bound=0.0):
    """g, in a shape that broadcasts to [n,HV,K]. gate: [n,HV] or [n,HV,K]; lambda [HV] for const_head."""
    if kind == "none":
        return np.zeros((1, hv, k))
    gate = np.asarray(gate, np.float64)
    if kind == "const_head":
        with np.errstate(divide="ignore"):
            return np.log(gate)[None, :, None]
    per_head = gate.ndim == 2
    if kind == "raw":
        rate = np.ones(hv) if A_log is None else np.exp(np.asarray(A_log, np.float64).reshape(hv))
        bias = 0.0 if dt_bias is None else np.asarray(dt_bias, np.float64).reshape(gate.shape[1:])
        rate = rate if per_head else rate[:, None]
        gate = lower_bound * sigmoid(rate * (gate + bias)) if lower_bound < 0 else -rate * softplus(gate + bias)
    elif kind not in ("log_head", "log_channel"):
        raise ValueError(kind)
    return gate[..., None] if per_head else gate


def activate_beta(kind, beta):
    beta = np.asarray(beta, np.float64)
    return {"value": lambda b: b, "logit": sigmoid, "logit_twice": lambda b: 2.0 * sigmoid(b)}[kind](beta)


@dataclass
class Decoded:
    out: np.ndarray  # [N,HV,V]
    state: np.ndarray | None  # state_out after the call, in the layout of the input pool; None without a pool
    written: np.ndarray  # slots of state_out that the call stores to, sorted
    addends: np.ndarray  # [N,HV,V]: root of the sum over K of the squared terms of out, what its rounding errors scale with


def decode(op, q, k, v, *, gate=None, gate_kind="none", A_log=None, dt_bias=None, lower_bound=0.0, beta=None,
           beta_kind="value", l2norm=False, scale=None, state=None, state_out=None, layout="vk", read_index=None,
           write_index=None, null_slot=None):
    """One token for each of N rows: q, k [N,H,K], v [N,HV,V]; pools [slots,HV,V,K] (vk) or [slots,HV,K,V] (kv)."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    n_rows, h, kdim = q.shape
    hv, vdim = v.shape[1:]
    scale = kdim**-0.5 if scale is None else float(scale)
    pool_in = None if state is None else np.asarray(state, np.float64)
    pool_out = None
    if state_out is not None:
        pool_out = np.array(state_out, np.float64)
    elif pool_in is not None:
        pool_out = pool_in.copy()
    out, addends, written = np.zeros((n_rows, hv, vdim)), np.zeros((n_rows, hv, vdim)), []

    def slot(index, n, pool):
        """The slot that row n uses in `pool`, or None: no pool, negative, null or past the end."""
        if pool is None:
            return None
        s = n if index is None else int(index[n])
        return None if s < 0 or s >= len(pool) or (null_slot is not None and s == null_slot) else s

    reads = [slot(read_index, n, pool_in) for n in range(n_rows)]
    writes = [slot(read_index if write_index is None else write_index, n, pool_out) for n in range(n_rows)]
    # A row with neither is padding, where there is a pool at all: zero output, nothing stored.
    live = [n for n in range(n_rows) if pool_out is None or reads[n] is not None or writes[n] is not None]
    block = max(1, BLOCK_ELEMENTS // (hv * kdim * vdim))
    for rows in (live[i : i + block] for i in range(0, len(live), block)):
        S = np.zeros((len(rows), hv, kdim, vdim))
        for i, n in enumerate(rows):
            if reads[n] is not None:
                S[i] = pool_in[reads[n]].swapaxes(-1, -2) if layout == "vk" else pool_in[reads[n]]
        qn, kn = (np.repeat(l2_normalise(x[rows]) if l2norm else x[rows], hv // h, axis=1) for x in (q, k))
        g = log_decay(gate_kind, gate if gate is None or gate_kind == "const_head" else np.asarray(gate)[rows], hv, kdim, A_log,
                      dt_bias, lower_bound)
        b = activate_beta(beta_kind, np.asarray(beta)[rows]) if DELTA_RULE[op] else None
        out[rows], S = step(S, scale * qn, kn, v[rows], np.exp(np.broadcast_to(g, kn.shape)), b, DELTA_RULE[op])
        addends[rows] = np.sqrt(np.einsum("nhkv,nhk->nhv", S * S, (scale * qn) ** 2))
        for i, n in enumerate(rows):
            if writes[n] is not None:
                pool_out[writes[n]] = S[i].swapaxes(-1, -2) if layout == "vk" else S[i]
                written.append(writes[n])
    return Decoded(out, pool_out, np.unique(np.array(written, np.int64)), addends)


def sequence(op, q, k, v, g, beta=None, scale=None, initial_state=None):
    """T tokens of one sequence: q, k [T,H,K], v [T,HV,V], log decay g [T,HV] or [T,HV,K], beta [T,HV] after activation,
    initial_state [HV,K,V]. Returns o [T,HV,V] and the final state [HV,K,V]."""
    kind = "log_channel" if np.ndim(g) == 3 else "log_head"
    state = np.zeros((1, v.shape[1], q.shape[-1], v.shape[-1])) if initial_state is None else initial_state[None]
    outs = []
    for t in range(len(q)):
        d = decode(op, q[t : t + 1], k[t : t + 1], v[t : t + 1], gate=g[t : t + 1], gate_kind=kind,
                   beta=None if beta is None else beta[t : t + 1], scale=scale, state=state, layout="kv")
        state = d.state
        outs.append(d.out[0])
    return np.stack(outs), state[0]
