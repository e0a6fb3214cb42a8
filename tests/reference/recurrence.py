"""The recurrences in float64, one row at a time, as the formulas are written in cula.h. Nothing here is fast.

Reading order: step (one token of one row), log_decay and activate_beta (the gate and beta forms), decode (rows, slots and
pools around it), sequence (many tokens, for the comparison with other references).

Arrays are numpy; every input is converted to float64, so values of a narrower dtype enter exactly. Shapes: N rows, H
query/key heads, HV value heads (HV % H == 0), K key dim, V value dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

DELTA_RULE = {"kda": True, "gdn": True, "gla": False, "lightning": False}
L2NORM_EPS = 1e-6


def step(S, q, k, v, decay, beta, delta_rule):
    """One token. S [HV,K,V], q, k [HV,K] (q already scaled), v [HV,V], decay [HV,K], beta [HV]. Returns o [HV,V], new S."""
    S = decay[:, :, None] * S
    if delta_rule:
        v = beta[:, None] * (v - np.einsum("hkv,hk->hv", S, k))
    S = S + k[:, :, None] * v[:, None, :]
    return np.einsum("hkv,hk->hv", S, q), S


def sigmoid(x):
    return 0.5 * (1.0 + np.tanh(0.5 * x))  # no overflow on either side


def softplus(x):
    return np.where(x > 20.0, x, np.log1p(np.exp(np.minimum(x, 20.0))))


def l2_normalise(x):
    return x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + L2NORM_EPS)


def log_decay(kind, gate, hv, k, A_log=None, dt_bias=None, lower_bound=0.0):
    """g of one token, broadcast to [HV,K]. `gate` is the row's slice of the gate tensor (or lambda [HV] for const_head)."""
    if kind == "none":
        return np.zeros((hv, k))
    gate = np.asarray(gate, np.float64)
    if kind == "const_head":
        with np.errstate(divide="ignore"):
            return np.broadcast_to(np.log(gate)[:, None], (hv, k))
    per_head = gate.ndim == 1
    if kind == "raw":
        rate = np.ones(hv) if A_log is None else np.exp(np.asarray(A_log, np.float64).reshape(hv))
        bias = np.zeros(gate.shape) if dt_bias is None else np.asarray(dt_bias, np.float64).reshape(gate.shape)
        rate = rate if per_head else rate[:, None]
        gate = lower_bound * sigmoid(rate * (gate + bias)) if lower_bound < 0 else -rate * softplus(gate + bias)
    elif kind not in ("log_head", "log_channel"):
        raise ValueError(kind)
    return np.broadcast_to(gate[:, None] if per_head else gate, (hv, k))


def activate_beta(kind, beta):
    beta = np.asarray(beta, np.float64)
    return {"value": lambda b: b, "logit": sigmoid, "logit_twice": lambda b: 2.0 * sigmoid(b)}[kind](beta)


@dataclass
class Decoded:
    out: np.ndarray  # [N,HV,V]
    state: np.ndarray | None  # state_out after the call, in the layout of the input pool; None without a pool
    written: np.ndarray  # slots of state_out that the call stores to, sorted


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
    out, written = np.zeros((n_rows, hv, vdim)), []

    def slot(index, n, pool):
        """The slot that row n uses in `pool`, or None: no pool, negative, null or past the end."""
        if pool is None:
            return None
        s = n if index is None else int(index[n])
        return None if s < 0 or s >= len(pool) or (null_slot is not None and s == null_slot) else s

    for n in range(n_rows):
        read = slot(read_index, n, pool_in)
        write = slot(read_index if write_index is None else write_index, n, pool_out)
        if pool_out is not None and read is None and write is None:
            continue  # padding: zero output, nothing stored
        S = np.zeros((hv, kdim, vdim)) if read is None else pool_in[read]
        if read is not None and layout == "vk":
            S = S.swapaxes(-1, -2)
        qn, kn = (np.repeat(l2_normalise(x) if l2norm else x, hv // h, axis=0) for x in (q[n], k[n]))
        g = log_decay(gate_kind, gate if gate is None or gate_kind == "const_head" else gate[n], hv, kdim, A_log, dt_bias,
                      lower_bound)
        b = activate_beta(beta_kind, beta[n]) if DELTA_RULE[op] else None
        out[n], S = step(S, scale * qn, kn, v[n], np.exp(g), b, DELTA_RULE[op])
        if write is not None:
            pool_out[write] = S.swapaxes(-1, -2) if layout == "vk" else S
            written.append(write)
    return Decoded(out, pool_out, np.unique(np.array(written, np.int64)))


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
