"""Decode calls of cula.jax with their float64 references: one list for the CPU and the GPU.

The cases cover every pair of values of the axes. Slots that no row reads are NaN, so that a read of one shows.
"""

from __future__ import annotations

import dataclasses
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import torch

import cula.jax
from tests.numerics.compare import assert_close
from tests.numerics.covering import covering, pairs
from tests.reference import recurrence

N, SLOTS, NULL = 3, 7, 5
DTYPE = {"fp32": jnp.float32, "bf16": jnp.bfloat16, "fp16": jnp.float16}
AXES = dict(
    op=("kda", "gdn", "gla", "lightning"), how=("plain", "donate", "jit", "jit donate"), io=tuple(DTYPE), state=("fp32", "bf16", None),
    layout=("vk", "kv"), gate=("none", "log", "raw", "bound", "decay"), gate_dtype=tuple(DTYPE), beta=("value", "logit", "logit_twice"),
    l2norm=(False, True), scale=(None, 0.5), index=(None, "int32", "int64", "apart"), null=(False, True), pools=("one", "two", "write only"),
    rows=("nhk", "n1hk", "1nhk", "mixed"), heads=((4, 4), (2, 6)), k=(64, 128, 256), v=(64, 192),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Case:
    op: str
    how: str
    io: str
    state: str | None
    layout: str
    gate: str
    gate_dtype: str
    beta: str
    l2norm: bool
    scale: float | None
    index: str | None
    null: bool
    pools: str
    rows: str
    heads: tuple[int, int]
    k: int
    v: int

    @property
    def id(self) -> str:
        return "-".join(str(value).replace(" ", "_") for value in dataclasses.astuple(self))


GATES = {"kda": ("none", "log", "raw", "bound"), "gdn": ("none", "log", "raw"), "gla": ("none", "log"), "lightning": ("none", "log", "decay")}


def feasible(row: dict) -> bool:
    def fits(op):
        return row.get("gate", "none") in GATES[op] and (op in ("kda", "gdn") or row.get("beta", "value") == "value")

    if not any(fits(op) for op in ([row["op"]] if "op" in row else AXES["op"])):
        return False
    if "state" in row and row["state"] is None:  # no pool, so nothing about pools
        return not (row.get("index") or row.get("null") or row.get("pools", "one") != "one" or row.get("rows") == "mixed"
                    or "donate" in row.get("how", ""))
    return not (row.get("null") and "index" in row and row["index"] is None)


def cases() -> list[Case]:
    return [Case(**row) for row in covering(AXES, pairs(AXES), feasible, seed=5)]


def f64(x) -> np.ndarray:
    return np.asarray(x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, np.float64)


def as_torch(x) -> torch.Tensor:
    """For assert_close, which rounds by torch's dtypes."""
    kept = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}[x.dtype.name]
    return torch.from_numpy(np.asarray(x.astype(jnp.float32)).copy()).to(kept)


def indices(c: Case) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Slots read and written: one row starts from nothing, and stores nothing where one index is for both."""
    if c.index is None:
        return None, None
    kind = np.int64 if c.index == "int64" else np.int32
    read = np.array([4, NULL if c.null else -1, 0], kind)
    return read, np.array([1, 6, NULL if c.null else SLOTS + 3], kind) if c.index == "apart" else None


def run(c: Case) -> None:
    rng = np.random.default_rng(zlib.crc32(c.id.encode()))
    h, hv = c.heads
    channel = c.op in ("kda", "gla")
    lead = {"nhk": (N,), "n1hk": (N, 1), "1nhk": (1, N), "mixed": (N,)}[c.rows]
    new = lambda shape, dtype, scale=1.0: jnp.asarray(rng.standard_normal(shape) * scale, DTYPE[dtype])  # noqa: E731

    q, k, v = new((*lead, h, c.k), c.io), new((*lead, h, c.k), c.io), new((*lead, hv, c.v), c.io)
    arrays, options, want = {}, dict(l2norm=c.l2norm, scale=c.scale, state_layout=c.layout), dict(l2norm=c.l2norm, scale=c.scale, layout=c.layout)
    if c.rows == "mixed":
        arrays["mixed_qkv"] = jnp.concatenate([x.reshape(N, -1) for x in (q, k, v)], axis=-1)
    else:
        arrays.update(q=q, k=k, v=v)
    if c.gate == "decay":
        arrays["decay"] = jnp.asarray(rng.random(hv) * 0.9 + 0.1, jnp.float32)
        want.update(gate=f64(arrays["decay"]), gate_kind="const_head")
    elif c.gate != "none":
        g = new((*lead, hv, c.k) if channel else (*lead, hv), c.gate_dtype)
        raw = c.gate != "log"
        arrays["gate"] = g if raw else -abs(g)
        options["gate_kind"] = "raw" if raw else "log"
        want.update(gate=f64(arrays["gate"]).reshape((N, hv, c.k) if channel else (N, hv)),
                    gate_kind="raw" if raw else "log_channel" if channel else "log_head")
        if raw:
            arrays["A_log"], arrays["dt_bias"] = new(hv, "fp32", 0.5), new((hv, c.k) if channel else hv, "fp32", 0.5)
            want.update(A_log=f64(arrays["A_log"]), dt_bias=f64(arrays["dt_bias"]))
        if c.gate == "bound":
            options["lower_bound"] = want["lower_bound"] = -4.0
    if c.op in ("kda", "gdn"):
        arrays["beta"] = new((*lead, hv), c.gate_dtype) if c.beta != "value" else jnp.asarray(rng.random((*lead, hv)), DTYPE[c.gate_dtype])
        options["beta_kind"] = want["beta_kind"] = c.beta
        want["beta"] = f64(arrays["beta"]).reshape(N, hv)

    read, write = indices(c)
    pool = None
    if c.state:
        if c.null:
            options["null_slot"] = want["null_slot"] = NULL
        shape = (SLOTS, hv, c.v, c.k) if c.layout == "vk" else (SLOTS, hv, c.k, c.v)
        slots = np.full(shape, np.nan, np.float32)
        reads = range(N) if read is None else [s for s in read if 0 <= s < SLOTS and not (c.null and s == NULL)]
        slots[list(reads)] = rng.standard_normal((len(list(reads)), *shape[1:]))
        pool = "state" if c.pools == "one" else "state_out"
        if c.pools != "write only":
            arrays["state"] = jnp.asarray(slots, DTYPE[c.state])
            want["state"] = f64(arrays["state"])
        elif write is None:
            read, write = None, read  # nothing is read, so only slots to write are named
        else:
            read = None
        if pool == "state_out":
            arrays["state_out"] = new(shape, c.state)
            want["state_out"] = f64(arrays["state_out"])
        if read is not None:
            arrays["read_index"] = want["read_index"] = read
        if write is not None:
            arrays["write_index"] = want["write_index"] = write

    expected = recurrence.decode(c.op, f64(q).reshape(N, h, c.k), f64(k).reshape(N, h, c.k), f64(v).reshape(N, hv, c.v), **want)
    before = {name: np.asarray(x).copy() for name, x in arrays.items()}
    given = arrays[pool] if pool else None
    out, states = call(c, arrays, options, pool)

    assert out.shape == (*lead, hv, c.v) and out.dtype == DTYPE[c.io]
    assert_close("out", as_torch(out).reshape(N, hv, c.v), torch.from_numpy(expected.out))
    for name, x in arrays.items():
        if "donate" in c.how and x is given:
            assert x.is_deleted()
        else:
            assert np.array_equal(np.asarray(x).view(np.uint8), before[name].view(np.uint8)), f"{name} changed"
    if pool is None:
        assert states is None
        return
    assert states.dtype == given.dtype and states.shape == given.shape
    written = expected.written
    assert_close("states", as_torch(states)[written], torch.from_numpy(expected.state[written]))
    rest = np.setdiff1d(np.arange(SLOTS), written)
    assert np.array_equal(np.asarray(states)[rest].view(np.uint8), before[pool][rest].view(np.uint8)), "a slot changed that is not written"


def call(c: Case, arrays: dict, options: dict, pool: str | None):
    function = getattr(cula.jax, f"{c.op}_decode")
    if not c.how.startswith("jit"):
        return function(**arrays, **options, **({"donate": True} if c.how == "donate" else {}))
    others = {name: x for name, x in arrays.items() if name != pool}
    jitted = jax.jit(lambda updated, others: function(**others, **({pool: updated} if pool else {}), **options),
                     donate_argnums=0 if c.how == "jit donate" else ())
    return jitted(arrays.get(pool), others)
