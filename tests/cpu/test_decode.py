"""The decode kernels of every ISA level against the float64 recurrence, called directly with parameter arrays.

Cases are drawn at random, each from its own seed (its number): operands at odd offsets and strides in guarded memory, padding
rows full of NaN, slots that are not named by any row full of NaN, poisoned outputs.
"""

from __future__ import annotations

import mmap

import numpy as np
import pytest

from tests.cpu import native
from tests.cpu.native import ABSENT, BETA_KIND, BF16, DTYPES, FP32, Params, address, assert_close, operand, picker
from tests.reference import recurrence

DEF = "aot/ops/decode/params.def"
GATES = {"kda": ("none", "log_channel", "raw", "raw_bound"), "gdn": ("none", "log_head", "raw"), "gla": ("none", "log_channel"),
         "lightning": ("none", "log_head", "const_head")}
GATE_KIND = {"none": 0, "log_head": 1, "log_channel": 2, "raw": 3, "const_head": 4}
CASES = 80


class Case:
    """One random problem: operands, the expectation, run() and check()."""

    def __init__(self, seed, **fixed):
        rng = self.rng = np.random.default_rng(seed)
        pick = picker(rng, fixed)
        self.op = pick("op", *GATES)
        self.io, self.state_code = pick("io", *DTYPES), pick("state", FP32, BF16)
        self.layout = pick("layout", "vk", "kv")
        self.K, self.V = pick("K", 64, 128, 256), pick("V", 64, 128, 192, 256, 320, 448, 512)
        self.H, group = pick("heads", (1, 1), (2, 1), (1, 4), (3, 2), (1, 3))
        self.HV, self.N = self.H * group, pick("N", 1, 2, 3, 5, 9)
        self.delta = recurrence.DELTA_RULE[self.op]
        self.gate_form = pick("gate", *GATES[self.op])
        self.l2norm, self.scale = pick("l2norm", 0, 1), float(np.float32(pick("scale", self.K**-0.5, 1.0, 0.0, -0.3)))
        self.beta_kind = pick("beta", *BETA_KIND)
        self.pool = pick("pool", "in_place", "in_place", "out_of_place", "write_only", "none")
        self.index = pick("index", "none", "read", "both") if self.pool != "none" else "none"
        self.null_slot = pick("null", None, 0)
        self.make_rows(pick)
        self.make_gate(pick)
        self.make_pools(pick)
        self.expect()

    def rows(self, pick, heads, dim, code):
        """[N,heads,dim] with gaps and an odd start, or compact."""
        gap, offset = pick("gap", 0, 3, 16), pick("offset", 0, 1, 5, 7)
        head = dim + gap
        return operand((self.N, heads, dim), code, (heads * head + 2 * gap, head, 1), offset)

    def make_rows(self, pick):
        rng = self.rng
        self.q, self.k = (self.rows(pick, self.H, self.K, self.io) for _ in range(2))
        self.v, self.out = (self.rows(pick, self.HV, self.V, self.io) for _ in range(2))
        self.q.set(rng.standard_normal(self.q.view.shape))
        self.k.set(rng.standard_normal(self.k.view.shape) * (1 if self.l2norm else self.K**-0.5))
        self.v.set(rng.standard_normal(self.v.view.shape))
        self.beta = None
        if self.delta:
            code, stride = pick("beta_dtype", *DTYPES), pick("beta_stride", 1, 3)
            self.beta = operand((self.N, self.HV), code, (self.HV * stride + 1, stride), 1)
            value = self.beta_kind == "value"
            self.beta.set(rng.uniform(0, 1, self.beta.view.shape) if value else 2 * rng.standard_normal(self.beta.view.shape))

    def make_gate(self, pick):
        rng, raw = self.rng, self.gate_form.startswith("raw")
        self.gate = self.a_log = self.dt_bias = None
        self.kind = "raw" if raw else self.gate_form
        self.lower_bound = -5.0 if self.gate_form == "raw_bound" else 0.0
        self.channels = self.op in ("kda", "gla")
        if self.kind == "none":
            return
        if self.kind == "const_head":
            self.gate = operand((self.HV,), FP32, (pick("const_stride", 1, 2),), 1)
            self.gate.set(rng.uniform(0, 1, self.HV))
            return
        dim = self.K if self.channels else 1
        self.gate = self.rows(pick, self.HV, dim, pick("gate_dtype", *DTYPES))
        x = rng.standard_normal(self.gate.view.shape)
        strong = rng.random(x.shape) < 0.02
        self.gate.set(2 * x - 1 if raw else np.where(strong, -90 * np.abs(x), -np.abs(x)))
        code = pick("param_dtype", *DTYPES)
        if raw and pick("A", 0, 1, 1):
            self.a_log = operand((self.HV,), code, None, 1)
            self.a_log.set(rng.standard_normal(self.HV) * 0.5)
        if raw and pick("bias", 0, 1, 1):
            self.dt_bias = operand((self.HV, dim), code, None, 1)
            self.dt_bias.set(rng.standard_normal((self.HV, dim)) * 0.5)

    def make_pools(self, pick):
        rng, n = self.rng, self.N
        slots = 2 * n + 3
        tile = (self.V, self.K) if self.layout == "vk" else (self.K, self.V)

        def pool():
            head = self.K * self.V + pick("head_gap", 0, 64)
            x = operand((slots, self.HV, *tile), self.state_code, (self.HV * head + pick("slot_gap", 0, 192), head, tile[1], 1))
            x.set(rng.standard_normal(x.view.shape) * 0.5)
            return x

        self.state = pool() if self.pool in ("in_place", "out_of_place") else None
        self.state_out = {"in_place": self.state, "none": None}.get(self.pool) if self.pool in ("in_place", "none") else pool()
        free = rng.permutation(np.arange(1, slots))
        read, write = free[:n].copy(), free[n : 2 * n].copy()
        beyond = (slots, slots + 7, 2**31 - 1)
        same = rng.random(n) < 0.4
        write[same] = read[same]
        for i in range(n):
            kind = rng.integers(8)
            if kind == 0 or kind == 2:
                read[i] = -1 - i
            if kind == 1 or kind == 2:
                write[i] = -3
            if kind == 3:
                read[i], write[i] = beyond[i % 3], beyond[(i + 1) % 3]
            if kind == 4 and self.null_slot is not None:
                read[i] = write[i] = self.null_slot
        self.read = self.write = None
        for name, values, wanted in (("read", read, self.index != "none"), ("write", write, self.index == "both")):
            if wanted:
                x = operand((n,), FP32, (pick("index_stride", 1, 4),), 1, dtype=pick(f"{name}_type", np.int32, np.int64))
                x.view[...] = values
                x.before = x.storage.copy()
                setattr(self, name, x)

    def expect(self):
        f = lambda x: None if x is None else x.values  # noqa: E731
        gate = f(self.gate)
        if gate is not None and self.kind != "const_head" and not self.channels:
            gate = gate[..., 0]
        index = [None if x is None else x.view.tolist() for x in (self.read, self.write)]
        with np.errstate(all="ignore"):
            self.want = recurrence.decode(
                self.op, f(self.q), f(self.k), f(self.v), gate=gate, gate_kind=self.kind, A_log=f(self.a_log), dt_bias=f(self.dt_bias),
                lower_bound=self.lower_bound, beta=f(self.beta), beta_kind=self.beta_kind, l2norm=bool(self.l2norm), scale=self.scale,
                state=f(self.state), state_out=None if self.state_out is self.state else f(self.state_out), layout=self.layout,
                read_index=index[0], write_index=index[1], null_slot=self.null_slot)
        # What must not matter: rows that are padding, slots that no row reads.
        slots = 0 if self.state_out is None else len(self.state_out.view)
        live = lambda s, pool: pool is not None and 0 <= s < slots and s != self.null_slot  # noqa: E731
        used, padding = set(), []
        for n in range(self.N):
            r = n if index[0] is None else index[0][n]
            w = r if index[1] is None else index[1][n]
            if live(r, self.state):
                used.add(r)
            elif self.state_out is not None and not live(w, self.state_out):
                padding.append(n)
        if self.state is not None:
            for s in set(range(slots)) - used:
                self.state.view[s] = native.round_to(np.nan, self.state_code)
            self.state.before = self.state.storage.copy()
        for x in (self.q, self.k, self.v, self.gate if self.kind != "const_head" else None, self.beta):
            if x is not None:
                x.view[padding] = native.round_to(np.nan, x.code)
                x.before = x.storage.copy()

    def params(self) -> Params:
        code = lambda x: ABSENT if x is None else x.code  # noqa: E731
        index_code = lambda x: 0 if x is None else 1 if x.view.dtype == np.int32 else 2  # noqa: E731
        modes = dict(
            gate_kind=GATE_KIND[self.kind], gate_dtype=code(self.gate), a_log_dtype=code(self.a_log), dt_bias_dtype=code(self.dt_bias),
            beta_kind=BETA_KIND[self.beta_kind] if self.delta else 0, beta_dtype=code(self.beta), read_dtype=index_code(self.read),
            write_dtype=index_code(self.write), l2norm=self.l2norm, no_state=self.state is None, delta=self.delta,
            channel_gate=self.channels)  # fmt: skip
        stride = lambda x, i: 0 if x is None else x.strides[i]  # noqa: E731
        values = dict(n=self.N, hv=self.HV, group=self.HV // self.H, head_dim_k=self.K, head_dim_v=self.V, scale=self.scale,
                      lower_bound=self.lower_bound, null_slot=-(2**63) if self.null_slot is None else self.null_slot)  # fmt: skip
        for name in ("q", "k", "v", "out"):
            x = getattr(self, name)
            values |= {name: address(x), f"{name}_n": x.strides[0], f"{name}_h": x.strides[1]}
        const = self.kind == "const_head"
        values |= dict(gate=address(self.gate), gate_n=0 if const else stride(self.gate, 0), gate_h=stride(self.gate, 0 if const else 1))
        values |= dict(a_log=address(self.a_log), dt_bias=address(self.dt_bias), beta=address(self.beta))
        values |= dict(beta_n=stride(self.beta, 0), beta_h=stride(self.beta, 1))
        for pool, names in ((self.state, ("state_in", "in_slot", "in_h", "in_slots")),
                            (self.state_out, ("state_out", "out_slot", "out_state_h", "out_slots"))):
            slots = 0 if pool is None else len(pool.view)
            values |= dict(zip(names, (address(pool), stride(pool, 0), stride(pool, 1), slots)))
        for name, x in (("read", self.read), ("write", self.write)):
            values |= {f"{name}_index": address(x), f"{name}_stride": stride(x, 0)}
        return Params(DEF, modes, **values)

    def run(self, level, threads=1, item_bytes=native.GRAIN_BYTES) -> None:
        p = self.params()
        native.decode(level, self.io, self.state_code, self.layout == "kv", p.array, self.N * self.HV, item_bytes, threads)

    def check(self) -> None:
        for name in ("q", "k", "v", "gate", "a_log", "dt_bias", "beta", "read", "write"):
            x = getattr(self, name)
            assert x is None or not x.changed_outside(), f"{name} was written"
        assert not self.out.changed_outside(np.s_[:]), "out: written outside of its elements"
        assert_close("out", self.out.view, self.want.out, self.io)
        if self.state_out is None:
            return
        if self.state is not self.state_out and self.state is not None:
            assert not self.state.changed_outside(), "state was written"
        assert not self.state_out.changed_outside(self.want.written), "state_out: something changed that no row writes"
        if len(self.want.written):
            assert_close("state", self.state_out.view[self.want.written], self.want.state[self.want.written], self.state_code)


@pytest.mark.parametrize("seed", range(CASES))
@pytest.mark.parametrize("level", range(-1, len(native.LEVEL_NAMES)))
def test_random(level, seed):
    if level not in (-1, *native.levels()):
        pytest.skip(f"this machine has no {native.LEVEL_NAMES[level]}")
    case = Case([level + 1, seed])
    case.run(level, threads=1 + seed % 4)
    case.check()


@pytest.mark.parametrize("layout", ("vk", "kv"))
@pytest.mark.parametrize("state", (FP32, BF16))
@pytest.mark.parametrize("io", DTYPES)
@pytest.mark.parametrize("op", GATES)
def test_kernels(op, io, state, layout):
    """Each kernel of the matrix by its own name, with every K, in place."""
    for K in (64, 128, 256):
        case = Case([K], op=op, io=io, state=state, layout=layout, K=K, V=128, N=5, pool="in_place", index="both", null=None)
        case.run(-1, threads=2)
        case.check()


@pytest.mark.parametrize("level", range(len(native.LEVEL_NAMES)))
def test_in_place_equals_out_of_place(level):
    if level not in native.levels():
        pytest.skip(f"this machine has no {native.LEVEL_NAMES[level]}")
    for seed in range(12):
        fixed = dict(N=3, index="none", null=None, state=(FP32, BF16)[seed % 2], layout=("vk", "kv")[seed // 2 % 2], head_gap=0, slot_gap=0)
        a, b = Case([seed], pool="in_place", **fixed), Case([seed], pool="in_place", **fixed)
        b.state_out = operand(b.state.view.shape, b.state_code)
        b.state_out.set(np.zeros(b.state.view.shape))
        a.run(level)
        b.run(level, threads=4)
        assert a.out.view.tobytes() == b.out.view.tobytes()
        assert a.state.view[:3].tobytes() == b.state_out.view[:3].tobytes()


@pytest.mark.parametrize("level", range(len(native.LEVEL_NAMES)))
@pytest.mark.parametrize("layout", ("vk", "kv"))
@pytest.mark.parametrize("state", (FP32, BF16))
def test_nan_stays_nan(level, state, layout):
    """A NaN with all bits set, the one that rounding to bf16 would turn into zero, from each operand reaches what it must."""
    if level not in native.levels():
        pytest.skip(f"this machine has no {native.LEVEL_NAMES[level]}")
    fixed = dict(op="kda", io=FP32, state=state, layout=layout, K=64, V=64, N=1, heads=(1, 1), pool="in_place", index="none", null=None,
                 gate="log_channel", gate_dtype=FP32, beta="value", beta_dtype=FP32, l2norm=0, scale=1.0)  # fmt: skip
    for name, at, out_all, state_mask in (
        ("q", (0, 0, 7), True, lambda k, v: k < 0), ("k", (0, 0, 7), True, lambda k, v: k >= 0),
        ("v", (0, 0, 9), False, lambda k, v: v == 9), ("gate", (0, 0, 7), True, lambda k, v: k >= 0),
        ("beta", (0, 0), True, lambda k, v: k >= 0)):  # fmt: skip
        for start in ("pool", "zero"):
            if start == "zero" and name == "gate":
                continue  # the decay of nothing
            case = Case([5], **fixed)
            if start == "zero":
                case.state, case.pool = None, "write_only"
            x = getattr(case, name).view
            x[at] = np.frombuffer(b"\xff\xff\xff\xff", np.float32)[0]
            case.run(level)
            o = np.isnan(case.out.values[0, 0])
            assert o.all() if out_all else (o == (np.arange(64) == 9)).all(), (name, start)
            got = np.isnan(case.state_out.values[0, 0])
            k, v = np.ogrid[:64, :64]
            want = np.broadcast_to(state_mask(k, v), (64, 64))
            # a NaN key: of a state row k only, unless the delta rule has spread it
            if name == "k" and start == "zero":
                want = np.broadcast_to(k == 7, (64, 64))
            assert np.array_equal(got, want.T if layout == "vk" else want), (name, start)


def test_threads_do_not_change_bits():
    for seed in range(6):
        outs = []
        for threads, grain in ((1, 1), (2, 1), (64, 1), (0, 2)):  # items of a range
            case = Case([seed], N=33, heads=(3, 2), V=64, K=64)
            case.run(-1, threads, native.GRAIN_BYTES // grain)
            outs.append([x.view.tobytes() for x in (case.out, case.state_out) if x is not None])
        assert all(o == outs[0] for o in outs)


@pytest.mark.parametrize("layout", ("vk", "kv"))
def test_slots_beyond_32_bits(layout):
    """Slots 3 * 2^30 elements apart, more than 2^32 bytes and 2^31 elements: the bits of the compact pool."""
    fixed = dict(op="gdn", state=FP32, layout=layout, K=64, V=64, N=3, heads=(1, 2), pool="in_place", index="read", null=None,
                 head_gap=0, slot_gap=0)  # fmt: skip
    a, b = Case([1], **fixed), Case([1], **fixed)
    slots, stride = len(b.state.view), 3 << 30
    MAP_NORESERVE = 0x4000  # only the pages of the states are ever touched
    memory = mmap.mmap(-1, slots * stride * 4, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    wide = np.ndarray(b.state.view.shape, np.float32, memory, 0, (stride * 4, *b.state.view.strides[1:]))
    wide[...] = b.state.view
    b.state.view = wide
    a.run(-1)
    b.run(-1)
    assert a.out.view.tobytes() == b.out.view.tobytes()
    assert a.state.view.tobytes() == wide.tobytes()
