"""Builds one decode case: operands in guarded memory, poisoned outputs, the float64 expectation, and the checks.

Every operand is a strided view into a longer storage whose other elements hold a canary (a NaN pattern for floats, a huge
number for indices): a kernel that reads a gap returns NaN, and one that writes a gap changes bits. After the call every bit
that the operator does not own is compared: inputs, gaps, slots that are only read, slots that no row names.

Reading order: Memory and Operand, Problem (built from a Case), Problem.check.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field

import numpy as np
import torch

from tests.numerics.cases import Case
from tests.numerics.compare import assert_close
from tests.reference import recurrence

DTYPE = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
CANARY = {torch.bfloat16: 0x7FA5, torch.float16: 0x7DA5, torch.float32: 0x7FA5A5A5, torch.int32: 0x5A5A5A5A,
          torch.int64: 0x5A5A5A5A5A5A5A5A}
TAIL = 24  # canary elements past the last one of a storage


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(BITS[x.element_size()])


def compact(shape) -> list[int]:
    strides = [1] * len(shape)
    for i in range(len(shape) - 2, -1, -1):
        strides[i] = strides[i + 1] * max(shape[i + 1], 1)
    return strides


class Memory:
    """One storage: `cpu` keeps what it held before the call, `dev` is what the call gets."""

    def __init__(self, elements: int, dtype: torch.dtype):
        self.cpu = torch.empty(elements + TAIL, dtype=dtype)
        bits(self.cpu).fill_(CANARY[dtype])
        self.dev: torch.Tensor | None = None

    def upload(self, device: str) -> None:
        self.dev = self.cpu.clone() if device == "cpu" else self.cpu.to(device)


@dataclass
class Operand:
    memory: Memory
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0

    @property
    def cpu(self) -> torch.Tensor:
        return self.memory.cpu.as_strided(self.shape, self.strides, self.offset)

    @property
    def dev(self) -> torch.Tensor:
        return self.memory.dev.as_strided(self.shape, self.strides, self.offset)

    @property
    def f64(self) -> np.ndarray:
        return self.cpu.double().numpy()


def operand(shape, dtype, strides=None, offset=0) -> Operand:
    strides = compact(shape) if strides is None else strides
    last = offset + sum((e - 1) * s for e, s in zip(shape, strides) if e > 1) + 1
    return Operand(Memory(last, dtype), tuple(shape), tuple(strides), offset)


def noise(shape, generator) -> torch.Tensor:
    """Normal numbers; long tensors repeat a block whose length is prime, which costs a tenth."""
    count, block = int(np.prod(shape)), 1_000_003
    if count <= block:
        return torch.randn(shape, generator=generator)
    base = torch.randn(block, generator=generator)
    return base.repeat(-(-count // block))[:count].view(shape)


@dataclass
class Problem:
    case: Case
    device: str
    op_args: dict[str, Operand] = field(default_factory=dict)  # by the names of cula_decode_args
    options: dict = field(default_factory=dict)                # everything that is no tensor
    memories: list[Memory] = field(default_factory=list)
    want: recurrence.Decoded | None = None

    def tensor(self, name: str) -> torch.Tensor | None:
        return self.op_args[name].dev if name in self.op_args else None


# --------------------------------------------------------------------------------------------------------- operands

def row_strides(case: Case, heads: int, dim: int) -> tuple[int, int]:
    """Row and head stride of an operand [N,heads,dim]; dim 1 stands for [N,heads]."""
    if case.rows in ("gap_wide", "mixed_gap"):
        head = dim if dim == 1 else dim + 16
        return (heads * head + 31) // 16 * 16, head
    if case.rows == "gap_odd":
        head = dim + 3 if dim > 1 else 3
        return heads * head + 5, head
    return heads * dim, dim


def add_rows(p: Problem, name: str, heads: int, dim: int, dtype, generator, spread=1.0, shift=0.0) -> None:
    """A row operand that is not part of a fused row, filled with spread * normal + shift."""
    c = p.case
    shape = (c.n, heads, dim) if dim > 1 else (c.n, heads)
    strides = row_strides(c, heads, dim)
    strides = (*strides, 1) if dim > 1 else strides
    shape, strides = with_unit(c, shape, strides)
    x = operand(shape, dtype, strides, c.offset)
    x.cpu.copy_(noise(shape, generator) * spread + shift)
    p.op_args[name] = x


def with_unit(case: Case, shape, strides):
    """[N,...] as [N,1,...] or [1,N,...]; the stride of the unit dimension means nothing, so it is made absurd."""
    if case.rows == "n1hk":
        return (shape[0], 1, *shape[1:]), (strides[0], 12345, *strides[1:])
    if case.rows == "1nhk":
        return (1, *shape), (7, *strides)
    return shape, strides


def add_fused(p: Problem, parts: list[tuple], dtype, generator) -> None:
    """Row operands as views into one row a token; parts: (name, heads, dim, spread, shift)."""
    c = p.case
    width = sum(heads * dim for _, heads, dim, *_ in parts)
    memory, start = Memory(c.offset + c.n * width, dtype), c.offset
    for name, heads, dim, spread, shift in parts:
        shape, strides = ((c.n, heads, dim), (width, dim, 1)) if dim > 1 else ((c.n, heads), (width, 1))
        x = Operand(memory, shape, strides, start)
        x.cpu.copy_(noise(shape, generator) * spread + shift)
        p.op_args[name] = x
        start += heads * dim


def add_mixed(p: Problem, h, hv, io, generator, k_spread) -> None:
    c = p.case
    sizes = (h * c.k, h * c.k, hv * c.v)
    width = sum(sizes)
    row = width + 13 if c.rows == "mixed_gap" else width
    x = operand((c.n, width), io, (row, 1), c.offset)
    x.cpu.copy_(noise((c.n, width), generator))
    x.cpu[:, sizes[0] : sizes[0] + sizes[1]] *= k_spread
    p.op_args["mixed_qkv"] = x


def split_rows(p: Problem) -> dict[str, np.ndarray]:
    """q, k [N,H,K] and v [N,HV,V] in float64, whatever form they were passed in."""
    c, (h, hv) = p.case, p.case.heads
    if "mixed_qkv" in p.op_args:
        parts = np.split(p.op_args["mixed_qkv"].f64, [h * c.k, 2 * h * c.k], axis=1)
    else:
        parts = [p.op_args[name].f64 for name in ("q", "k", "v")]
    return {name: x.reshape(c.n, heads, dim)
            for name, x, heads, dim in zip("qkv", parts, (h, h, hv), (c.k, c.k, c.v))}


# ------------------------------------------------------------------------------------------------------------- slots

def slot_indices(case: Case, slots: int, generator):
    """read, write (lists or None), null_slot. Seven kinds of row in turn, so that seven rows see all of them."""
    n, kind = case.n, case.index
    if kind == "none":
        return None, None, None
    # Slot 0 is the null slot where there is one, so it is not handed out.
    free = (torch.randperm(slots - 1, generator=generator) + 1).tolist()
    read, other, write = free[:n], free[n:], []
    null = 0 if kind == "rw_i64_null" else None
    if kind == "read_i32":
        return read, None, None
    beyond = (slots, slots + 1, 2**31 - 1, 2**31 - 7)
    for i in range(n):
        separate = kind.startswith("rw")
        # A write slot of its own, or the read slot.
        write.append(other[i] if separate and i % 7 != 1 else read[i])
        if kind == "read_i64_pad":
            if i % 3 == 2:
                read[i] = write[i] = -1 - i
            continue
        if i % 7 == 2:
            read[i] = -1
        elif i % 7 == 3:
            read[i], write[i] = -1, -2**31 if i % 2 else -1
        elif i % 7 == 4:
            write[i] = -5
        elif i % 7 == 5 and kind != "rw_i32_pad":
            read[i], write[i] = (0, 0) if null == 0 else (beyond[i % 4], beyond[(i + 1) % 4])
        elif i % 7 == 6 and kind != "rw_i32_pad":
            read[i] = 0 if null == 0 else beyond[i % 4]
    return read, write if kind.startswith("rw") else None, null


def add_indices(p: Problem, read, write, null) -> None:
    kind = p.case.index
    narrow = {"read_index": kind not in ("read_i64_pad", "rw_i64_null"),
              "write_index": kind in ("read_i32", "rw_i32_pad", "rw_oob")}
    for name, values in (("read_index", read), ("write_index", write)):
        if values is None:
            continue
        dtype = torch.int32 if narrow[name] else torch.int64
        x = operand((p.case.n,), dtype, (5 if kind == "rw_column" else 1,), p.case.offset)
        x.cpu.copy_(torch.tensor(values, dtype=dtype))
        p.op_args[name] = x
    if null is not None:
        p.options["null_slot"] = null


def add_pool(p: Problem, name: str, slots: int, generator, gap: int, head_gap: int) -> None:
    """A pool with `gap` elements between slots and `head_gap` between heads; both keep 16-byte alignment."""
    c, hv = p.case, p.case.heads[1]
    tile = (c.v, c.k) if c.layout == "vk" else (c.k, c.v)
    head = c.k * c.v + head_gap
    x = operand((slots, hv, *tile), DTYPE[c.state], (hv * head + gap, head, tile[1], 1))
    x.cpu.copy_(noise(x.shape, generator) * 0.5)
    p.op_args[name] = x


# ------------------------------------------------------------------------------------------------------------- build

def build(case: Case, device: str, mutate=None) -> Problem:
    """The problem of a case. mutate(problem) may change operands (their .cpu views) before they are uploaded."""
    c, (h, hv) = case, case.heads
    generator = torch.Generator().manual_seed(zlib.crc32(c.id.encode()))
    p, io = Problem(c, device), DTYPE[c.io]
    # Keys of unit length on average where no norm makes them so: |k| = sqrt(K) would amplify the state a hundredfold.
    k_spread = 1.0 if c.l2norm else c.k**-0.5
    raw, delta = c.gate.startswith("raw"), recurrence.DELTA_RULE[c.op]
    gate_dim = c.k if c.op in ("kda", "gla") else 1
    gate_spread, gate_shift = (1.0, -1.0) if raw else (0.2, -0.8)
    extra = []
    if c.gate not in ("none", "const_head"):
        extra.append(("gate", hv, gate_dim, c.gate_dtype, gate_spread, gate_shift))
    if delta:
        extra.append(("beta", hv, 1, c.beta_dtype, *((0.2, 0.6) if c.beta == "value" else (1.5, 0.0))))
    if c.rows.startswith("mixed"):
        add_mixed(p, h, hv, io, generator, k_spread)
    elif c.rows == "fused_views":
        fused = [x for x in extra if x[3] == c.io]
        extra = [x for x in extra if x[3] != c.io]
        add_fused(p, [("q", h, c.k, 1.0, 0.0), ("k", h, c.k, k_spread, 0.0), ("v", hv, c.v, 1.0, 0.0),
                      *((name, heads, dim, spread, shift) for name, heads, dim, _, spread, shift in fused)], io, generator)
    else:
        for name, heads, dim, spread in (("q", h, c.k, 1.0), ("k", h, c.k, k_spread), ("v", hv, c.v, 1.0)):
            add_rows(p, name, heads, dim, io, generator, spread)
    for name, heads, dim, dtype, spread, shift in extra:
        add_rows(p, name, heads, dim, DTYPE[dtype], generator, spread, shift)
    if "gate" in p.op_args and not raw:
        p.op_args["gate"].cpu.clamp_(max=0)  # a log decay is never positive
    if c.gate == "const_head":
        p.op_args["gate"] = x = operand((hv,), torch.float32, offset=c.offset)
        x.cpu.copy_(torch.rand(hv, generator=generator) * 0.9 + 0.1)
    if raw:
        if not c.gate.endswith("noA"):
            shape = (hv,) if c.offset % 2 else (1, 1, hv, 1)
            p.op_args["A_log"] = x = operand(shape, DTYPE[c.param_dtype], offset=c.offset)
            x.cpu.copy_(torch.randn(shape, generator=generator) * 0.5)
        if c.gate != "raw_nobias":
            shape = (hv, gate_dim) if c.offset % 2 else (hv * gate_dim,)
            p.op_args["dt_bias"] = x = operand(shape, DTYPE[c.param_dtype], offset=c.offset)
            x.cpu.copy_(torch.randn(shape, generator=generator) * 0.5)
    add_rows(p, "out", hv, c.v, io, generator)
    bits(p.op_args["out"].memory.cpu).fill_(CANARY[io])  # poison: an element that is not written stays NaN
    p.options.update(gate_kind=c.gate.split("_")[0] if raw else c.gate, beta_kind=c.beta, l2norm=c.l2norm, scale=c.scale,
                     layout=c.layout, lower_bound=-4.0 if "bound" in c.gate else 0.0)

    if c.pool != "none":
        slots = 1 + c.n * (2 if c.index.startswith("rw") else 1) + 2
        gap, head_gap = {"slot_gap": (64, 0), "head_gap": (32, 64)}.get(c.pool, (0, 0))
        if c.pool != "write_only":
            add_pool(p, "state", slots, generator, gap, head_gap)
        if c.pool in ("write_only", "out_of_place"):
            add_pool(p, "state_out", slots, generator, 16, 0)
        read, write, null = slot_indices(c, slots, generator)
        if c.pool == "write_only":  # there is no slot to read: only stores are named
            read, write = None, read if write is None else write
        add_indices(p, read, write, null)
        if "state" in p.op_args:
            # What is not read must not matter: NaN in every slot that no row reads, the null slot included.
            reads = set(range(c.n)) if read is None else {s for s in read if 0 <= s < slots and s != null}
            unread = torch.tensor(sorted(set(range(slots)) - reads))
            p.op_args["state"].cpu[unread] = float("nan")
    if mutate is not None:
        mutate(p)
    expect(p)
    for m in {id(x.memory): x.memory for x in p.op_args.values()}.values():
        m.upload(device)
        p.memories.append(m)
    return p


def expect(p: Problem) -> None:
    """Computes the expectation, then puts NaN into every operand of the rows that are padding."""
    c, a, hv = p.case, p.op_args, p.case.heads[1]
    f64 = {name: a[name].f64 for name in ("A_log", "dt_bias", "state", "state_out") if name in a}
    for name, tail in (("gate", (hv, c.k) if c.op in ("kda", "gla") else (hv,)), ("beta", (hv,))):
        if name in a:
            f64[name] = a[name].f64.reshape((hv,) if c.gate == "const_head" and name == "gate" else (c.n, *tail))
    for name in ("read_index", "write_index"):
        if name in a:
            f64[name] = a[name].cpu.tolist()
    p.want = recurrence.decode(c.op, **split_rows(p), **f64, **p.options)
    if "read_index" in a or "write_index" in a:
        slots = len((a.get("state") or a["state_out"]).cpu)
        padding = [n for n in range(c.n) if not any(
            0 <= s < slots and s != p.options.get("null_slot") for s in _row_slots(a, n))]
        for name in ("q", "k", "v", "mixed_qkv", "gate", "beta"):
            if name in a and not (name == "gate" and c.gate == "const_head"):
                x = a[name].cpu
                (x[0] if c.rows == "1nhk" else x)[padding] = float("nan")


def _row_slots(a, n):
    reads = a["read_index"].cpu[n].item() if "read_index" in a else n
    writes = a["write_index"].cpu[n].item() if "write_index" in a else reads
    return (reads if "state" in a else -1, writes)


# ------------------------------------------------------------------------------------------------------------- check

def check(p: Problem) -> dict[str, float]:
    """Values of what the call owns, bits of everything else. Returns relative RMSEs, for reports."""
    c, a = p.case, p.op_args
    written = torch.from_numpy(p.want.written)
    pool = "state_out" if "state_out" in a else "state"
    owned = {id(a["out"].memory): (a["out"], slice(None))}
    if pool in a:
        owned[id(a[pool].memory)] = (a[pool], written)
    for m in p.memories:
        after = m.dev.cpu()
        if id(m) in owned:
            x, where = owned[id(m)]
            after = after.clone() if p.device == "cpu" else after
            view = after.as_strided(x.shape, x.strides, x.offset)
            view[where] = x.cpu[where]
        changed = bits(after) != bits(m.cpu)
        if changed.any():
            names = [name for name, x in a.items() if x.memory is m]
            raise AssertionError(f"{'/'.join(names)}: {int(changed.sum())} elements changed that the call does not own, "
                                 f"first at storage offset {int(changed.nonzero()[0])}")
    rmse = {"out": assert_close("out", a["out"].dev.reshape(c.n, c.heads[1], c.v), torch.from_numpy(p.want.out),
                                addends=p.want.addends)}
    if pool in a and len(written):
        got = a[pool].dev[written.to(p.device)]
        rmse["state"] = assert_close("state", got, torch.from_numpy(p.want.state[p.want.written]))
    return rmse
