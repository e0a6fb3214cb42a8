"""The prefill kernels of every ISA level against the float64 recurrence, called directly with parameter arrays.

Cases are drawn at random, each from its own seed (its number): operands at odd offsets and strides in guarded memory, tokens of no sequence
and slots that nothing reads full of NaN, poisoned outputs. How close a right result is: test_prefill.py.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.cpu import native
from tests.cpu.native import ABSENT, BETA_KIND, BF16, DTYPES, FP32, PREFILL_FLOAT32, Params, address, assert_close, operand, picker
from tests.reference import recurrence

DEF = "aot/ops/chunk/params_cpu.def"
LENS = (0, 1, 2, 3, 15, 16, 17, 31, 32, 33, 50, 64, 70)
INTERVAL = 32
CASES = 40


class Case:
    """One random problem: operands, the expectation, run() and check()."""

    def __init__(self, seed, **fixed):
        rng = self.rng = np.random.default_rng(seed)
        pick = picker(rng, fixed)
        self.io, self.state_code, self.layout = pick("io", *DTYPES), pick("state", FP32, BF16), pick("layout", "vk", "kv")
        self.K, self.V = pick("K", 64, 128, 256), pick("V", 64, 128, 192, 320)
        self.columns = pick("columns", 64, 128)
        self.H, group = pick("heads", (1, 1), (2, 1), (1, 3), (2, 2))
        self.HV, self.N = self.H * group, pick("N", 1, 2, 4)
        self.cu_type = pick("cu", None, np.int32, np.int64)
        lens = rng.choice(LENS, self.N) if self.cu_type else np.full(self.N, rng.choice(LENS[1:]))
        self.lens = pick("lens", lens.tolist())
        before, after = (pick("around", 0, 5), 3) if self.cu_type else (0, 0)
        self.bounds = (before + np.cumsum([0, *self.lens])).tolist()
        self.B, self.T = (1, self.bounds[-1] + after) if self.cu_type else (self.N, self.lens[0])
        self.l2norm, self.scale = pick("l2norm", 0, 1), float(np.float32(pick("scale", self.K**-0.5, 1.0, -0.3)))
        self.beta_kind, self.gate_form = pick("beta", *BETA_KIND), pick("gate", "log", "raw", "raw_bound")
        self.null_slot = pick("null", None, 0)
        self.make_tokens(pick)
        self.make_pools(pick)
        self.expect()

    def tokens(self, pick, heads, dim, code):
        """[B,T,heads,dim] with gaps and an odd start, or compact."""
        gap = pick("gap", 0, 3, 16)
        token = heads * (dim + gap) + 2 * gap
        return operand((self.B, self.T, heads, dim), code, (self.T * token + gap, token, dim + gap, 1), pick("offset", 0, 1, 5))

    def of(self, x, n):
        """The tokens of sequence n of an array [B,T,...]."""
        return x[0, self.bounds[n] : self.bounds[n + 1]] if self.cu_type else x[n]

    def make_tokens(self, pick):
        rng = self.rng
        self.q, self.k = (self.tokens(pick, self.H, self.K, self.io) for _ in range(2))
        self.v, self.out = (self.tokens(pick, self.HV, self.V, self.io) for _ in range(2))
        self.gate = self.tokens(pick, self.HV, self.K, pick("gate_dtype", *DTYPES))
        self.beta = self.tokens(pick, self.HV, 1, pick("beta_dtype", *DTYPES))
        key = 1 if self.l2norm else self.K**-0.5
        x = rng.standard_normal(self.gate.view.shape)
        gate = 2 * x - 1 if self.gate_form != "log" else np.where(rng.random(x.shape) < 0.02, -90 * np.abs(x), -np.abs(x))
        beta = rng.standard_normal(self.beta.view.shape)
        for t, values in ((self.q, 1), (self.k, key), (self.v, 1), (self.gate, gate), (self.beta, rng.random(beta.shape) if self.beta_kind == "value" else beta)):
            t.set(values if isinstance(values, np.ndarray) else values * rng.standard_normal(t.view.shape))
            if self.cu_type:
                t.view[0, : self.bounds[0]] = t.view[0, self.bounds[-1] :] = native.round_to(np.nan, t.code)
                t.before = t.storage.copy()
        self.a_log = self.dt_bias = None
        if self.gate_form != "log" and pick("A", 0, 1, 1):
            self.a_log = operand((self.HV,), pick("param_dtype", *DTYPES), None, 1)
            self.a_log.set(rng.standard_normal(self.HV) * 0.5)
        if self.gate_form != "log" and pick("bias", 0, 1, 1):
            self.dt_bias = operand((self.HV, self.K), pick("param_dtype", *DTYPES), None, 1)
            self.dt_bias.set(rng.standard_normal((self.HV, self.K)) * 0.5)
        self.cu = None
        if self.cu_type:
            self.cu = operand((self.N + 1,), FP32, None, 1, dtype=self.cu_type)
            self.cu.view[...] = self.bounds
            self.cu.before = self.cu.storage.copy()

    def make_pools(self, pick):
        rng, n = self.rng, self.N
        slots = 2 * n + 3
        tile = (self.V, self.K) if self.layout == "vk" else (self.K, self.V)

        def pool(slots):
            head = self.K * self.V + pick("head_gap", 0, 64)
            x = operand((slots, self.HV, *tile), self.state_code, (self.HV * head + pick("slot_gap", 0, 192), head, tile[1], 1))
            x.set(rng.standard_normal(x.view.shape) * 0.5)
            return x

        kind = pick("pool", "in_place", "out_of_place", "read_only", "write_only", "none")
        self.state = pool(slots) if kind in ("in_place", "out_of_place", "read_only") else None
        self.state_out = self.state if kind == "in_place" else pool(slots) if kind in ("out_of_place", "write_only") else None
        free = rng.permutation(np.arange(1, slots))
        indexed = pick("index", 0, 1)
        read, write = (free[:n].copy(), free[n : 2 * n].copy()) if indexed else (np.arange(n), np.arange(n))
        for i in range(n if indexed else 0):
            void = (-1 - i, slots + 7 * i, self.null_slot if self.null_slot is not None else -5)[rng.integers(3)]
            if rng.random() < 0.2:
                read[i] = void
            if rng.random() < 0.2:
                write[i] = void
            elif rng.random() < 0.4 and 0 < read[i] < slots:
                write[i] = read[i]
        self.reads, self.writes = read.tolist(), write.tolist()
        self.read = self.index_operand(read, pick) if indexed and self.state is not None else None
        self.write = self.index_operand(write, pick) if indexed and self.state_out is not None else None
        self.checkpoints = self.checkpoint_index = None
        self.saves = {}
        if pick("checkpoints", 0, 1):
            columns = max(1, max(self.lens) // INTERVAL)
            self.checkpoints = pool(n * columns + 2)
            index = rng.permutation(np.arange(1, n * columns + 2))[: n * columns].reshape(n, columns)
            index[rng.random(index.shape) < 0.3] = -1
            self.checkpoint_index = self.index_operand(index, pick)
            self.saves = {(i, (j + 1) * INTERVAL): int(slot) for (i, j), slot in np.ndenumerate(index) if slot >= 0 and (j + 1) * INTERVAL <= self.lens[i]}

    def index_operand(self, values, pick):
        x = operand(values.shape, FP32, None, 1, dtype=pick("index_type", np.int32, np.int64))
        x.view[...] = values
        x.before = x.storage.copy()
        return x

    def slot(self, index, n, pool):
        """The slot of sequence n in `pool`, or None."""
        live = pool is not None and 0 <= index[n] < len(pool.view) and index[n] != self.null_slot
        return index[n] if live else None

    def expect(self):
        f = lambda x: None if x is None else x.values  # noqa: E731
        flip = lambda S: S.swapaxes(-1, -2) if self.layout == "vk" else S  # noqa: E731
        self.want = np.full(self.out.view.shape, np.nan)
        self.states, self.saved, used = {}, {}, set()
        for n, length in enumerate(self.lens):
            read = self.slot(self.reads, n, self.state)
            used.add(read)
            S = np.zeros((1, self.HV, self.K, self.V)) if read is None else flip(self.state.values[read])[None]
            q, k, v, gate, beta = (self.of(f(x), n) for x in (self.q, self.k, self.v, self.gate, self.beta))
            if self.l2norm:
                q, k = recurrence.l2_normalise(q), recurrence.l2_normalise(k)
            q, k = (np.repeat(x, self.HV // self.H, axis=1) for x in (q * self.scale, k))
            g = recurrence.log_decay("log_channel" if self.gate_form == "log" else "raw", gate, self.HV, self.K, f(self.a_log), f(self.dt_bias),
                                     -5.0 if self.gate_form == "raw_bound" else 0.0)
            beta = recurrence.activate_beta(self.beta_kind, beta[..., 0])
            for t in range(length):
                at = np.s_[t : t + 1]
                self.of(self.want, n)[at], S = recurrence.step(S, q[at], k[at], v[at], np.exp(g[at]), beta[at], True)
                if (slot := self.saves.get((n, t + 1))) is not None:
                    self.saved[slot] = flip(S[0])
            if (write := self.slot(self.writes, n, self.state_out)) is not None:
                self.states[write] = flip(S[0])
        if self.state is not None:  # what no sequence reads must not matter
            for s in set(range(len(self.state.view))) - used:
                self.state.view[s] = native.round_to(np.nan, self.state_code)
            self.state.before = self.state.storage.copy()

    def params(self) -> Params:
        code = lambda x: ABSENT if x is None else x.code  # noqa: E731
        index_code = lambda x: 0 if x is None else 1 if x.view.dtype == np.int32 else 2  # noqa: E731
        modes = dict(
            gate_raw=self.gate_form != "log", gate_dtype=code(self.gate), a_log_dtype=code(self.a_log), dt_bias_dtype=code(self.dt_bias),
            beta_kind=BETA_KIND[self.beta_kind], beta_dtype=code(self.beta), l2norm=self.l2norm, cu_dtype=index_code(self.cu),
            read_dtype=index_code(self.read), write_dtype=index_code(self.write), checkpoint_dtype=index_code(self.checkpoint_index))  # fmt: skip
        self.blocks = -(-self.V // self.columns)
        values = dict(
            tokens=self.T, sequences=self.N, group=self.HV // self.H, head_dim_k=self.K, head_dim_v=self.V, columns=self.columns, blocks=self.blocks,
            scale=self.scale, lower_bound=-5.0 if self.gate_form == "raw_bound" else 0.0, null_slot=-(2**63) if self.null_slot is None else self.null_slot,
            a_log=address(self.a_log), dt_bias=address(self.dt_bias), cu_seqlens=address(self.cu), read_index=address(self.read),
            write_index=address(self.write), checkpoint_index=address(self.checkpoint_index),
            checkpoint_interval=INTERVAL if self.checkpoints else 0, checkpoint_columns=self.checkpoint_index.view.shape[1] if self.checkpoints else 0)  # fmt: skip
        for name in ("q", "k", "v", "out", "gate", "beta"):
            x = getattr(self, name)
            values |= {name: address(x), **dict(zip((f"{name}_b", f"{name}_t", f"{name}_h"), x.strides))}
        for pool, names in ((self.state, ("state_in", "in_slot", "in_h", "in_slots")), (self.state_out, ("state_out", "out_slot", "out_state_h", "out_slots")),
                            (self.checkpoints, ("checkpoints", "checkpoint_slot", "checkpoint_h", "checkpoint_slots"))):
            values |= dict(zip(names, (0, 0, 0, 0) if pool is None else (address(pool), *pool.strides[:2], len(pool.view))))
        return Params(DEF, modes, **values)

    def run(self, level, threads=1) -> None:
        p = self.params()
        native.prefill(level, self.io, self.state_code, self.layout == "kv", p.array, self.HV * self.N * self.blocks, native.GRAIN_BYTES, threads)

    def check(self) -> None:
        for name in ("q", "k", "v", "gate", "beta", "a_log", "dt_bias", "cu", "read", "write", "checkpoint_index"):
            x = getattr(self, name)
            assert x is None or not x.changed_outside(), f"{name} was written"
        tokens = np.s_[:, self.bounds[0] : self.bounds[-1]] if self.cu_type else np.s_[:]
        assert not self.out.changed_outside(tokens), "out: written outside of the sequences"
        assert_close("out", self.out.view[tokens], self.want[tokens], self.io, PREFILL_FLOAT32)
        if self.state is not self.state_out and self.state is not None:
            assert not self.state.changed_outside(), "state was written"
        for name, pool, want in (("state_out", self.state_out, self.states), ("checkpoints", self.checkpoints, self.saved)):
            if pool is None:
                continue
            slots = sorted(want)
            assert not pool.changed_outside(slots), f"{name}: something changed that nothing stores"
            if slots:
                assert_close(name, pool.view[slots], np.stack([want[s] for s in slots]), self.state_code, PREFILL_FLOAT32)


@pytest.mark.parametrize("seed", range(CASES))
@pytest.mark.parametrize("level", range(-1, len(native.LEVEL_NAMES)))
def test_random(level, seed):
    if level not in (-1, *native.levels()):
        pytest.skip(f"this machine has no {native.LEVEL_NAMES[level]}")
    case = Case([level + 1, seed])
    case.run(level, threads=1 + seed % 3)
    case.check()


@pytest.mark.parametrize("level", range(len(native.LEVEL_NAMES)))
@pytest.mark.parametrize("layout", ("vk", "kv"))
@pytest.mark.parametrize("state", (FP32, BF16))
@pytest.mark.parametrize("io", DTYPES)
def test_kernels(level, io, state, layout):
    """Each kernel of each level with every K, in place; its bits do not depend on the width of the items."""
    if level not in native.levels():
        pytest.skip(f"this machine has no {native.LEVEL_NAMES[level]}")
    for K in (64, 128, 256):
        bits = []
        for columns in (64, 128):
            case = Case([K], io=io, state=state, layout=layout, K=K, V=192, heads=(1, 2), N=2, lens=[37, 16], cu=np.int32, pool="in_place", columns=columns,
                        checkpoints=0)
            case.run(level, threads=2)
            case.check()
            bits.append((case.out.view.tobytes(), case.state.view.tobytes()))
        assert bits[0] == bits[1]
