"""The decode plan: kernel, grid, shared memory and every parameter, over thousands of problems, with no GPU.

The expectation is written from cula.h and params.def: `expected` computes every parameter from the call's tensors alone, and the
grid is checked for what it must do (cover the work exactly, stay in limits) as well as for the launch rule.
"""

import ctypes
import itertools
import random
import struct

import pytest

from tests.capi import abi, standin
from tests.capi.abi import CPU, OK, tensor
from tests.capi.calls import CHANNEL_OPS, DELTA_OPS, decode
from tests.capi.test_decode_rules import with_

CODE = {"fp32": 0, "bf16": 1, "fp16": 2, None: 3}
IO_NAME = {v: k for k, v in abi.DTYPES.items()}


def name_of(t) -> str | None:
    return IO_NAME[(t.code, t.bits)] if t is not None else None


def address(t) -> int:
    """Of the first element; 0 where there is none."""
    return (t.data or 0) + t.byte_offset if t is not None and all(t.shape[: t.ndim]) else 0


def strides_of(t) -> list[int]:
    """Elements; 0 where the extent is 1."""
    strides = t.strides[: t.ndim] if t.strides else abi.compact(t.shape[: t.ndim])
    return [s if n > 1 else 0 for s, n in zip(strides, t.shape[: t.ndim])]


def row_strides(t, tail) -> list[int]:
    """Of the row and of the dimensions behind it, for [N,...], [N,1,...] and [1,N,...]."""
    s = strides_of(t)
    row = 0 if t.ndim == tail + 1 or t.shape[1] == 1 else 1
    return [s[row], *s[t.ndim - tail :]]


def f32(x: float) -> float:
    return struct.unpack("f", struct.pack("f", x))[0]


def expected(call, n, h, hv, k, v) -> dict:
    x, a = call.tensors, call.args
    p = {}
    if "mixed_qkv" in x:
        row, base, size = row_strides(x["mixed_qkv"], 1)[0], address(x["mixed_qkv"]), abi.ITEMSIZE[name_of(x["mixed_qkv"])]
        p.update(q=base, k=base + h * k * size, v=base + 2 * h * k * size, q_n=row, k_n=row, v_n=row)
        p.update(q_h=k if h > 1 else 0, k_h=k if h > 1 else 0, v_h=v if hv > 1 else 0)
    else:
        for name in "qkv":
            p[name], (p[f"{name}_n"], p[f"{name}_h"], _) = address(x[name]), row_strides(x[name], 2)
    p["out"], (p["out_n"], p["out_h"], _) = address(x["out"]), row_strides(x["out"], 2)
    gate = x.get("gate")
    p["gate"], p["gate_n"], p["gate_h"] = address(gate), 0, 0
    if gate is not None and a.gate_kind == abi.GATES["CONST_HEAD"]:
        p["gate_h"] = strides_of(gate)[0]
    elif gate is not None:
        p["gate_n"], p["gate_h"] = row_strides(gate, 2 if call.op in CHANNEL_OPS else 1)[:2]
    beta = x.get("beta")
    p["beta"], (p["beta_n"], p["beta_h"]) = address(beta), row_strides(beta, 1) if beta is not None else (0, 0)
    p["a_log"], p["dt_bias"] = address(x.get("A_log")), address(x.get("dt_bias"))
    state = x.get("state")
    written = x.get("state_out") if x.get("state_out") is not None else state
    for pool, at, slot, head, slots in ((state, "state_in", "in_slot", "in_h", "in_slots"), (written, "state_out", "out_slot", "out_state_h", "out_slots")):
        p[at] = address(pool)
        p[slot], p[head] = strides_of(pool)[:2] if pool is not None else (0, 0)
        p[slots] = pool.shape[0] if pool is not None else 0
    for side in ("read", "write"):
        index = x.get(f"{side}_index")
        p[f"{side}_index"], p[f"{side}_stride"] = address(index), strides_of(index)[0] if index is not None else 0
        p[f"mode.{side}_dtype"] = {None: 0, "i32": 1, "i64": 2}[name_of(index)]
    p["null_slot"] = a.null_slot if a.has_null_slot else -(2**63)
    p.update(n=n, hv=hv, group=hv // h, head_dim_k=k, head_dim_v=v)
    p["scale"], p["lower_bound"] = a.scale if a.has_scale else f32(k**-0.5), a.lower_bound
    p["group_inverse"] = -(-(2**32) // (hv // h))
    p.update({"mode.gate_kind": a.gate_kind, "mode.beta_kind": a.beta_kind, "mode.l2norm": a.l2norm, "mode.no_state": int(state is None),
              "mode.delta": int(call.op in DELTA_OPS), "mode.channel_gate": int(call.op in CHANNEL_OPS)})
    for mode, name in (("gate_dtype", "gate"), ("a_log_dtype", "A_log"), ("dt_bias_dtype", "dt_bias"), ("beta_dtype", "beta")):
        p[f"mode.{mode}"] = CODE[name_of(x.get(name))]
    return p


def rule(arch, layout, state, k, v, n, hv, sms):
    """The launch rule of params.def: tile, steps, threads, dynamic shared memory."""
    if layout == "kv":
        return (32 if state == "fp32" else 64), 1, (256 if k == 256 else 128), 0
    tile = 4 * {64: 16, 128: 8, 256: 4}[k]
    steps = 2 if state == "bf16" and v % (2 * tile) == 0 and n * hv * (v // (2 * tile)) >= 3 * sms else 1
    few = n * hv * (v // (tile * steps)) <= 2 * sms
    smem = 110 * 1024 if arch == "sm90" and few else 0
    return tile * steps, steps, 128, smem


def random_problem(rng):
    op = rng.choice(list(standin.DECODE_OPS))
    n = rng.choice([1, 2, 3, 7, 8, 33, 64, 128, 257, 1024, 4096, rng.randint(1, 5000)])
    h, group = rng.choice([1, 2, 3, 4, 5, 8, 16]), rng.choice([1, 2, 3, 4, 8])
    hv, k, v = h * group, rng.choice([64, 128, 256]), rng.choice(range(64, 513, 64))
    io, state, layout = rng.choice(["bf16", "fp16", "fp32"]), rng.choice(["fp32", "bf16"]), rng.choice(["vk", "kv"])
    gates = {"kda_decode": ["NONE", "LOG_CHANNEL", "RAW"], "gdn_decode": ["NONE", "LOG_HEAD", "RAW"], "gla_decode": ["NONE", "LOG_CHANNEL"],
             "lightning_decode": ["NONE", "LOG_HEAD", "CONST_HEAD"]}[op]
    gate = rng.choice(gates)
    mixed, pools = rng.random() < 0.3, rng.random() < 0.9
    if mixed and not pools and (op not in CHANNEL_OPS or gate == "NONE"):
        pools = True
    fields = dict(l2norm=rng.randint(0, 1), beta=rng.choice(list(abi.BETAS)) if op in DELTA_OPS else "VALUE")
    if rng.random() < 0.3:
        fields.update(has_scale=1, scale=rng.choice([0.0, 1.0, -0.5]))
    if rng.random() < 0.3 and pools:
        fields.update(has_null_slot=1, null_slot=rng.choice([0, -1, 5, 2**40]))
    if gate == "RAW" and op == "kda_decode" and rng.random() < 0.5:
        fields["lower_bound"] = -5.0
    call = decode(op, n, h, hv, k, v, io, state, layout, gate, rng.choice(["fp32", "bf16", "fp16"]), rows=rng.choice(["n", "n1", "1n"]), mixed=mixed,
                  pools=pools, slots=n + rng.randint(0, 3), **fields)
    lead = {"n": [n], "n1": [n, 1], "1n": [1, n]}
    for name in ("q", "k", "v", "out", "gate", "beta"):  # padded rows and heads, an element offset
        t = call.tensors.get(name)
        if t is None or rng.random() < 0.5 or gate == "CONST_HEAD" and name == "gate":
            continue
        dtype = name_of(t)
        tail = {"q": [h, k], "k": [h, k], "v": [hv, v], "out": [hv, v], "beta": [hv]}.get(name, [hv, k] if op in CHANNEL_OPS else [hv])
        head = (tail[1] if len(tail) == 2 else 1) + rng.randint(0, 9)
        row = tail[0] * head + rng.randint(0, 9)
        inner = [head, 1] if len(tail) == 2 else [head]
        form = rng.choice(list(lead))
        with_(call, **{name: tensor([*lead[form], *tail], dtype, [*{"n": [row], "n1": [row, 77], "1n": [99, row]}[form], *inner],
                                    byte_offset=abi.ITEMSIZE[dtype] * rng.randint(0, 7))})
    if pools:
        tile = [v, k] if layout == "vk" else [k, v]
        gap = rng.choice([0, 8, 1024])
        strides = [hv * (k * v + gap) + rng.choice([0, 16, 4096]), k * v + gap, tile[1], 1]
        slots = n + rng.randint(0, 9)
        if rng.random() < 0.5:
            with_(call, state=tensor([slots, hv, *tile], state, strides))
        if rng.random() < 0.3:
            with_(call, state_out=tensor([slots, hv, *tile], state, strides))
            if rng.random() < 0.3:
                with_(call, state=None)
        if call.tensors["state"] is not None and rng.random() < 0.6:
            with_(call, read_index=tensor([n], rng.choice(["i32", "i64"]), [rng.choice([1, 5])]))
        if rng.random() < 0.4:
            with_(call, write_index=tensor([n], rng.choice(["i32", "i64"]), [rng.choice([1, 5])]))
    return call, (n, h, hv, k, v), (io, state if pools else "fp32", layout)


@pytest.mark.parametrize("arch", ["sm90", "sm120"])
def test_random_problems(lib, arch):
    rng = random.Random(arch)
    for _ in range(2000):
        call, (n, h, hv, k, v), (io, state, layout) = random_problem(rng)
        sms = rng.choice([0, 1, 16, 132, 148])
        status, b = call.bind(lib, arch, sms)
        assert status == OK, abi.last_error(lib)
        assert (b.count, b.device_type, b.device_id) == (1, 2, 0)
        launch = b.launch[0]
        assert abi.kernel_id(lib, launch.kernel) == f"{call.op}.{arch}.{io}.s{state}.k{k}.{layout}"
        got = abi.launch_params(call.op, launch)
        want = expected(call, n, h, hv, k, v)
        tile, steps, threads, smem = rule(arch, layout, state, k, v, n, hv, sms or {"sm90": 132, "sm120": 188}[arch])
        want["steps"] = steps
        assert set(got) == {*want, "modes"}
        assert {name: got[name] for name in want} == want
        c = launch.config
        assert (list(c.grid), list(c.block), c.dynamic_smem) == ([v // tile, hv, n], [threads, 1, 1], smem)
        assert c.grid[0] * tile == v and c.stream == 0x1234
        pdl = launch.attributes[0]
        assert (c.attribute_count, c.attributes, pdl.id, pdl.value.i32[0]) == (1, ctypes.addressof(pdl), 6, 1)
        assert bytes(pdl.value)[4:] == bytes(60)


def test_every_combination_of_the_matrix_finds_its_kernel(lib):
    for op, io, state, k, layout, arch in itertools.product(standin.DECODE_OPS, standin.IO, standin.STATE, (64, 128, 256), standin.LAYOUT, standin.ARCHS):
        device = (CPU, 0) if arch == "cpu" else (abi.GPU, 0)
        status, r = decode(op, io=io, state=state, k=k, v=64, layout=layout, device=device).query(lib, arch)
        assert status == OK and r.launch_count == 1
        assert abi.kernel_id(lib, r.kernels[0]) == f"{op}.{arch}.{io}.s{state}.k{k}.{layout}"
        assert (r.workspace_bytes, r.workspace_align) == (0, 1)


def test_group_inverse_divides_every_head(lib):
    """head * inverse >> 32 is head / group for all heads that a grid can have."""
    for group in range(1, 400):
        inverse = -(-(2**32) // group)
        heads = [x for q in (1, 2, 3, 65535 // group) for x in (q * group - 1, q * group, q * group + 1) if 0 <= x < 65536] + [65535]
        assert all(x * inverse >> 32 == x // group for x in heads)
        status, b = decode("gdn_decode", n=1, h=1, hv=group, k=64, v=64).bind(lib)
        assert status == OK and abi.launch_params("gdn_decode", b.launch[0])["group_inverse"] == inverse


@pytest.mark.parametrize("read, write, null", list(itertools.product([False, True], [False, True], [None, 0, 65535, 70000, 200000, -7])))
def test_more_rows_than_a_grid_has(lib, read, write, null):
    """N above 65,535: several launches. Each row must reach the addresses that it reaches in one launch, also through the slot
    that the kernel takes from its own row number where there is no index."""
    n, hv, k = 150000, 2, 64
    fields = {} if null is None else dict(has_null_slot=1, null_slot=null)
    call = decode("gdn_decode", n=n, h=1, hv=hv, k=k, v=64, slots=n + 5, **fields)
    if read:
        with_(call, read_index=tensor([n], "i32", [3]))
    if write:
        with_(call, write_index=tensor([n], "i64"))
    status, b = call.bind(lib)
    if write and not read and null is not None:
        assert (status, abi.last_error(lib)) == (abi.UNSUPPORTED, "gdn_decode: more than 65535 rows with write_index and null_slot need read_index too")
        return
    assert status == OK and b.count == 3
    whole = expected(call, n, 1, hv, k, 64)
    first = 0
    for launch in b.launch[: b.count]:
        p = abi.launch_params("gdn_decode", launch)
        rows = launch.config.grid[2]
        assert p["n"] == rows <= 65535 and list(launch.config.grid[:2]) == [64 // 64, hv]
        for name, step, size in (("q", "q_n", 2), ("k", "k_n", 2), ("v", "v_n", 2), ("out", "out_n", 2), ("gate", "gate_n", 4), ("beta", "beta_n", 4)):
            assert p[step] == whole[step] and p[name] == whole[name] + first * whole[step] * size
        for row in (0, 1, rows // 2, rows - 1):  # as operands.slots computes it
            for side, pool, slots, slot_stride in (("read", "state_in", "in_slots", "in_slot"), ("write", "state_out", "out_slots", "out_slot")):
                index, size = p[f"{side}_index"], {0: 0, 1: 4, 2: 8}[p[f"mode.{side}_dtype"]]
                if side == "write" and not write and read:
                    continue  # the same as the read, whose pool is not shifted
                if index:
                    assert index + row * p[f"{side}_stride"] * size == whole[f"{side}_index"] + (first + row) * whole[f"{side}_stride"] * size
                    assert (p[pool], p[slots], p["null_slot"]) == (whole[pool], whole[slots], whole["null_slot"])
                else:
                    assert p[pool] + row * p[slot_stride] * 4 == whole[pool] + (first + row) * whole[slot_stride] * 4
                    assert (row < p[slots]) == (first + row < whole[slots])
                    assert (row == p["null_slot"]) == (first + row == whole["null_slot"])
        first += rows
    assert first == n


def test_tiles_are_those_of_the_kernels():
    """The numbers that the plan repeats from the kernels' Python."""
    kernel_vk = pytest.importorskip("aot.ops.decode.kernel_vk", reason="needs the CuTe DSL")
    from aot.ops.decode import kernel_kv, operands

    for op, io, state, k in itertools.product(standin.DECODE_OPS, standin.IO, standin.STATE, (64, 128, 256)):
        config = operands.Config(op, io, state, k, "vk")
        tile, _, threads, _ = rule("sm100", "vk", state, k, 512, 1, 1, 1000)
        assert (tile, threads) == (kernel_vk.WARPS * kernel_vk.Shape(config).rows_per_step, config.threads)
        config = operands.Config(op, io, state, k, "kv")
        tile, _, threads, _ = rule("sm100", "kv", state, k, 512, 1, 1, 1000)
        assert (tile, threads) == (kernel_kv.Shape(config).columns, config.threads)


def test_two_step_rule_and_shared_memory_at_their_edges(lib):
    """bf16, K 128, V 128: a tile of two steps is 64 rows, so a row and head has 2 blocks."""
    def launch(n, sms, arch="sm90", state="bf16"):
        status, b = decode("gdn_decode", n=n, h=1, hv=1, k=128, v=128, state=state).bind(lib, arch, sms)
        assert status == OK
        return b.launch[0].config.grid[0], abi.launch_params("gdn_decode", b.launch[0])["steps"], b.launch[0].config.dynamic_smem

    assert launch(15, 10) == (2, 2, 0)               # 30 blocks, 3 an SM
    assert launch(14, 10) == (4, 1, 0)               # 28: one step, 56 blocks
    assert launch(5, 10) == (4, 1, 110 * 1024)       # 20 blocks: 2 an SM
    assert launch(6, 10) == (4, 1, 0)
    assert launch(5, 10, "sm120") == (4, 1, 0)
    assert launch(5, 10, state="fp32") == (4, 1, 110 * 1024)
    assert launch(6, 10, state="fp32") == (4, 1, 0)
    assert launch(6, 10, "sm120", state="fp32") == (4, 1, 0)


def test_shared_memory_stays_within_what_the_kernel_was_prepared_for(lib):
    for state, layout, n in itertools.product(("fp32", "bf16"), ("vk", "kv"), (1, 500)):
        _, b = decode(n=n, state=state, layout=layout).bind(lib)
        desc = abi.sized(abi.KernelDesc)
        lib.cula_kernel_info(b.launch[0].kernel, ctypes.byref(desc))
        assert b.launch[0].config.dynamic_smem <= desc.max_dynamic_smem
