"""The GPU plan of kda_prefill over random problems: kernels, grids, every parameter, the workspace.

What is expected is written down here a second time, from cula.h, params_*.def and the README's "Host plan", so that plan.cpp cannot
be wrong on its own. Numbers that are compiled into the kernels are read from their sources.
"""

import ctypes
import itertools
import random
import re

import pytest

from tests.capi import abi, standin
from tests.capi.abi import OK, tensor
from tests.capi.calls import prefill
from tests.capi.test_decode_plan import CODE, address, f32, name_of, strides_of
from tests.capi.test_decode_rules import with_

BASE = 0x100000
RECORD, CARRY = 29184, 2 * 128 * 128 * 4
SMEM = standin.PREFILL_SMEM
SMS = {"sm90": 132, "sm120": 188}  # without a device: aot/archs.py
PREP_BLOCKS = {"sm90": (3, 2), "sm120": (1, 1)}  # of a multiprocessor: alone, beside a state block
GPU_ARCHS = ("sm90", "sm100", "sm103", "sm120")


def ceil(a, b):
    return -(-a // b)


def random_problem(rng):
    h, group = rng.choice([1, 2, 3, 4, 8, 16, 32, 64]), rng.choice([1, 1, 1, 2, 4])
    hv = h * group
    cu = rng.choice([None, "i32", "i64"])
    packed = cu is not None and rng.random() < 0.5
    n = rng.choice([1, 1, 1, 2, 3, 8, rng.randint(1, 40)])
    t = rng.choice([1, 31, 32, 33, 64, 512, 8192, 32768, rng.randint(1, 5000)])
    io, state, layout = rng.choice(["bf16", "fp16"]), rng.choice(["fp32", "bf16"]), rng.choice(["vk", "kv"])
    gate = rng.choice(["LOG_CHANNEL", "RAW"])
    fields = dict(l2norm=rng.randint(0, 1), beta=rng.choice(list(abi.BETAS)), variant=rng.choice([0, 0, 1, 2, 3]), segments=rng.choice([0, 0, 1, 2, 5, 64]))
    fields |= dict(exact=rng.randint(0, 1))
    if rng.random() < 0.3:
        fields.update(has_scale=1, scale=rng.choice([0.0, 1.0, -0.5]))
    if gate == "RAW" and rng.random() < 0.5:
        fields["lower_bound"] = -5.0
    call = prefill(n, t, h, hv, io=io, state=state, layout=layout, gate=gate, gate_dtype=rng.choice(["bf16", "fp16", "fp32"]), cu=cu, packed=packed,
                   slots=n + rng.randint(0, 3), **fields)
    lead = [t] if packed else [1 if cu else n, t]
    for name in ("q", "k", "v", "out", "gate", "beta"):  # padded heads, tokens and batches, an offset that the alignment allows
        if rng.random() < 0.5:
            continue
        x = call.tensors[name]
        dtype, unit = name_of(x), {"v": 8, "out": 8, "beta": 1}.get(name, 4)
        tail = [h if name in "qk" else hv, *([] if name == "beta" else [128])]
        head = 128 + unit * rng.randint(0, 5) if name != "beta" else rng.randint(1, 3)
        token = tail[0] * head + unit * rng.randint(0, 5)
        batch = t * token + unit * rng.randint(0, 5)
        strides = [*([] if packed else [batch]), token, head, *([] if name == "beta" else [1])]
        with_(call, **{name: tensor([*lead, *tail], dtype, strides, byte_offset=unit * abi.ITEMSIZE[dtype] * rng.randint(0, 3))})
    if gate == "RAW":
        for name, shape in (("A_log", [hv]), ("dt_bias", [hv, 128])):
            with_(call, **{name: rng.choice([None, tensor(shape, rng.choice(["fp32", "bf16", "fp16"]))])})
    gap = rng.choice([0, 8, 1024])
    strides = [hv * (128 * 128 + gap) + rng.choice([0, 16, 4096]), 128 * 128 + gap, 128, 1]
    for name in ("state", "state_out"):
        if rng.random() < 0.4:
            with_(call, **{name: tensor([n + rng.randint(0, 9), hv, 128, 128], state, strides)})
        if rng.random() < 0.2:
            with_(call, **{name: None})
    if call.tensors["state_out"] is not None and rng.random() < 0.6:
        with_(call, write_index=tensor([n], rng.choice(["i32", "i64"])))
    if call.tensors["state"] is not None and (call.tensors["state_out"] is None or "write_index" in call.tensors) and rng.random() < 0.6:
        with_(call, read_index=tensor([n], rng.choice(["i32", "i64"])))
    if rng.random() < 0.3:
        call.args.checkpoint_interval = rng.choice([32, 64, 1024, 2**20])
        columns = t // call.args.checkpoint_interval + rng.randint(0, 2)
        with_(call, checkpoints=tensor([rng.randint(1, 99), hv, 128, 128], state, strides, data=1 << 52),
              checkpoint_index=tensor([n, columns], rng.choice(["i32", "i64"]), data=1 << 53))
    pools = [x for name in ("state", "state_out", "checkpoints") if (x := call.tensors.get(name)) is not None]
    if pools and rng.random() < 0.3:
        call.args.has_null_slot, call.args.null_slot = 1, rng.choice([0, -1, 5, 2**40])
    return call, (n, t, h, hv), (io, state if pools else "fp32", layout)


def segments_of(chains, chunks, sms):
    """Where walking every chunk twice is still shorter than once; then the least of the times with and without warm-up together."""
    exact = {p: 2 * ceil(chunks, p) + 5 * (p - 2) + 8 for p in range(2, min(64, (sms - 4) // (2 * chains), chunks) + 1)}
    return min((p for p in exact if exact[p] < chunks), key=lambda p: (exact[p] + ceil(chunks, p), p), default=1)


def expected(call, dims, kinds, sms, arch):
    """[(kernel, blocks, threads, overlaps, parameters)], bytes of the workspace."""
    n, t, h, hv = dims
    io, state, layout = kinds
    x, a = call.tensors, call.args
    cu = x.get("cu_seqlens")
    index = lambda name: {None: 0, "i32": 1, "i64": 2}[name_of(x.get(name))]
    chunks = n * ceil(t, 32) if cu is None else t // 32 + n
    chained, mean = a.variant == 3, ceil(t if cu is None else t // n, 32)
    segments = a.segments or (min(max(ceil(mean, 32), 1), 64) if chained else segments_of(n * hv, mean, sms))
    overlap = {0: segments > 1 or 2 * n * hv <= sms, 1: False, 2: True, 3: True}[a.variant]
    groups = 1 if chained else ceil(hv, max(sms // 2, 1))
    words = (chunks + 2 * n * (1 + segments * chained)) * hv
    records, flags = chunks * hv * RECORD, ceil(words * 4, 128) * 128
    size = records + flags + (n * hv * segments * CARRY // (1 + chained) if segments > 1 else 0)
    at = {"b": 0, "t": 1, "h": 2}

    def strides(name):
        s = strides_of(x[name])
        s = [0, *s] if x["q"].ndim == 3 else s
        return {f"{name}_{axis}": s[i] for axis, i in at.items()}

    shared = dict(hv=hv, head_group=ceil(hv, groups), sequences=n, chunks=chunks, tokens=t, records=BASE, flags=BASE + records, cu_seqlens=address(cu))
    shared["mode.cu_dtype"] = index("cu_seqlens")
    prep = {**shared, **{key: value for name in ("q", "k", "gate", "beta") for key, value in strides(name).items()}}
    prep |= {name.lower(): address(x.get(name)) for name in ("q", "k", "gate", "A_log", "dt_bias", "beta")}
    prep |= dict(group=hv // h, segments=segments if n == 1 and not chained else 1, flag_words=words, cut=1 if a.exact else segments, scale=a.scale if a.has_scale else f32(128**-0.5), lower_bound=a.lower_bound)
    prep |= {"mode.gate_raw": int(a.gate_kind == 3), "mode.beta_kind": a.beta_kind, "mode.l2norm": a.l2norm}
    prep |= {f"mode.{name.lower()}_dtype": CODE[name_of(x.get(name))] for name in ("gate", "A_log", "dt_bias", "beta")}
    main = {**shared, **strides("v"), **strides("out"), "carry": BASE + records + flags, "v": address(x["v"]), "out": address(x["out"]), "segments": segments}
    for name, pool, slot, head, slots in (("state", "state_in", "in_slot", "in_h", "in_slots"), ("state_out", "state_out", "out_slot", "out_state_h", "out_slots"),
                                          ("checkpoints", "checkpoints", "checkpoint_slot", "checkpoint_h", "checkpoint_slots")):
        given = x.get(name)
        main[pool] = address(given)
        main[slot], main[head] = strides_of(given)[:2] if given is not None else (0, 0)
        main[slots] = given.shape[0] if given is not None else 0
    main |= dict(read_index=address(x.get("read_index")), write_index=address(x.get("write_index")), null_slot=a.null_slot if a.has_null_slot else -(2**63))
    main |= {"mode.read_dtype": index("read_index"), "mode.write_dtype": index("write_index"), "mode.checkpoint_dtype": index("checkpoint_index"), "mode.chained": int(chained)}
    kept = x.get("checkpoint_index")
    main |= dict(checkpoint_index=address(kept) if kept and kept.shape[1] else 0, checkpoint_columns=kept.shape[1] if kept else 0, checkpoint_chunks=a.checkpoint_interval // 32)
    gpu = f"kda_prefill.{arch}.{io}"
    pools = f"{gpu}.s{state}.k128.v128.{layout}"
    launches = [(f"{gpu}.k128.v128.{'prep_gf32' if name_of(x['gate']) == 'fp32' else 'prep'}", min(chunks * hv, sms * PREP_BLOCKS[arch][overlap]), 256, False, prep)]
    if segments > 1 and not chained:
        between = dict(carry=BASE + records + flags, segments=segments)
        between |= {key: shared[key] for key in ("flags", "cu_seqlens", "tokens", "hv", "chunks", "mode.cu_dtype")}
        launches.append((f"{pools}.scan", 4 * n * hv * (segments - 1), 128, overlap, main))
        launches.append((f"kda_prefill.{arch}.fp32.k128.v128.carry", 16 * n * hv, 128, overlap, between))
    launches.append((f"{pools}.state{'_checkpoints' if kept else ''}", 2 * n * hv * segments, 128, overlap, main))
    return launches, size


def test_random_problems(lib):
    rng = random.Random(8)
    seen = set()
    for _ in range(4000):
        call, dims, kinds = random_problem(rng)
        arch, sms = rng.choice(["sm90", "sm120"]), rng.choice([0, 1, 16, 114, 132])
        want, size = expected(call, dims, kinds, sms or SMS[arch], arch)
        status, r = call.query(lib, arch, sms)
        assert status == OK, abi.last_error(lib)
        assert (r.workspace_bytes, r.workspace_align, r.launch_count) == (size, 128, len(want))
        status, b = call.bind(lib, arch, sms, workspace=BASE, bytes=size)
        assert status == OK and (b.count, b.device_type, b.device_id) == (len(want), 2, 0)
        assert [abi.kernel_id(lib, launch.kernel) for launch in b.launch[: b.count]] == [kernel for kernel, *_ in want]
        for launch, (kernel, blocks, threads, overlap, params) in zip(b.launch, want):
            got = abi.launch_params(kernel, launch)
            assert set(got) == {*params, "modes"}
            assert {name: got[name] for name in params} == params
            c = launch.config
            assert (list(c.grid), list(c.block), c.dynamic_smem) == ([blocks, 1, 1], [threads, 1, 1], SMEM[arch][kernel.split(".")[-1]])
            assert c.stream == 0x1234 and 1 <= blocks < 2**31
            assert [(x.id, x.value.i32[0]) for x in launch.attributes[: c.attribute_count]] == ([(6, 1)] if overlap else [])
        seen.add((arch, len(want), want[-1][3]))
    assert seen == set(itertools.product(("sm90", "sm120"), (2, 4), (False, True)))


def workspace(lib, **kw):
    status, r = prefill(**kw).query(lib)
    assert status == OK, abi.last_error(lib)
    return r.workspace_bytes


def test_workspace_grows_with_what_is_asked(lib):
    """Monotone in tokens, sequences, heads and segments: who keeps the largest one may use it for all smaller calls."""
    for cu in (None, "i32"):
        for name, values in (("t", range(1, 300, 7)), ("b", range(1, 20)), ("hv", range(2, 40, 2)), ("segments", range(1, 65))):
            sizes = [workspace(lib, cu=cu, **{"segments": 1, **{name: value}}) for value in values]
            assert sizes == sorted(sizes) and sizes[0] < sizes[-1]


def test_every_record_of_every_split_has_its_place(lib):
    """Chunk numbers of sequences packed by cu_seqlens are disjoint and below the bound that the workspace has room for."""
    rng = random.Random(9)
    for _ in range(500):
        lens = [rng.choice([0, 0, 1, 31, 32, 33, 64, rng.randint(0, 300)]) for _ in range(rng.randint(1, 12))]
        extra = rng.randint(0, 70)
        t = sum(lens) + extra
        bound = workspace(lib, b=len(lens), t=t, h=1, hv=1, cu="i32", segments=1) // (RECORD + 4)
        used, start = set(), 0
        for s, length in enumerate(lens):
            numbers = {start // 32 + s + i for i in range(ceil(length, 32))}
            assert not numbers & used
            used |= numbers
            start += length
        assert max(used, default=-1) < bound


# (heads, sequences, tokens): segments, side by side; the table of the README
CHOICES = {
    (64, 1, 8192): (1, True), (64, 2, 8192): (1, False), (96, 1, 8192): (1, False), (66, 1, 8192): (1, True), (67, 1, 8192): (1, False),
    (16, 1, 8192): (4, True), (8, 1, 8192): (8, True), (8, 1, 32768): (8, True), (4, 1, 32768): (16, True), (32, 1, 8192): (1, True),
    (8, 1, 512): (1, True), (1, 1, 1): (1, True), (1, 132, 64): (1, False), (8, 1, 1): (1, True),
}  # fmt: skip


@pytest.mark.parametrize("problem", CHOICES)
def test_choices(lib, problem):
    heads, n, tokens = problem
    segments, overlap = CHOICES[problem]
    status, b = prefill(n, tokens, heads, heads).bind(lib, "sm90", 132, workspace=BASE, bytes=1 << 50)
    assert status == OK
    last = b.launch[b.count - 1]
    assert (abi.launch_params("kda_prefill.state", last)["segments"], last.config.attribute_count) == (segments, int(overlap))


def test_no_more_segments_than_chunks_are_chosen(lib):
    for tokens in range(1, 3000, 13):
        status, b = prefill(1, tokens, 1, 1).bind(lib, "sm90", 132, workspace=BASE, bytes=1 << 40)
        assert status == OK and abi.launch_params("kda_prefill.state", b.launch[b.count - 1])["segments"] <= ceil(tokens, 32)


def test_padding_sequences_do_not_change_the_tokens_that_are_planned_for(lib):
    """Engines pad cu_seqlens with empty sequences: only the grid grows."""
    status, b = prefill(40, 500, 4, 4, cu="i32").bind(lib, "sm90", 132, workspace=BASE, bytes=1 << 40)
    p = abi.launch_params("kda_prefill.prep", b.launch[0])
    assert status == OK and (p["chunks"], p["sequences"], p["tokens"]) == (500 // 32 + 40, 40, 500)


def test_states_of_no_token_are_copied_by_one_launch(lib):
    status, b = prefill(3, 0, 2, 4, segments=7).bind(lib)
    assert (status, b.count) == (OK, 1)
    p = abi.launch_params("kda_prefill.state", b.launch[0])
    assert (p["segments"], p["chunks"], p["tokens"], p["in_slots"], p["out_slots"]) == (1, 0, 0, 3, 3)
    assert list(b.launch[0].config.grid) == [2 * 4 * 3, 1, 1] and b.launch[0].config.attribute_count == 0


def test_every_combination_of_the_matrix_finds_its_kernels(lib):
    archs = ("sm90", "sm120")
    for arch, io, state, layout, gate in itertools.product(archs, ("bf16", "fp16"), ("fp32", "bf16"), ("vk", "kv"), ("bf16", "fp16", "fp32")):
        status, r = prefill(io=io, state=state, layout=layout, gate_dtype=gate, segments=2).query(lib, arch)
        names = [abi.kernel_id(lib, r.kernels[i]).removeprefix(f"kda_prefill.{arch}.") for i in range(r.launch_count)]
        pools = f"{io}.s{state}.k128.v128.{layout}"
        assert names == [f"{io}.k128.v128.prep{'_gf32' if gate == 'fp32' else ''}", f"{pools}.scan", "fp32.k128.v128.carry", f"{pools}.state"]


def test_numbers_are_those_of_the_kernels():
    """What plan.cpp, matrix.py and this file repeat from the kernels' sources."""
    from aot.matrix import expand_all

    chunk = standin.ROOT / "aot/ops/chunk"
    text = {name: (chunk / name).read_text() for name in ("plan.cpp", "kda_carry.cu", "prep_layout.cuh", "record.h", "state_parts.py")}
    constant = lambda name, key: int(re.search(rf"\b{key} = (\d+)", text[name]).group(1))
    for plan, name, key in (("kPrepThreads", "prep_layout.cuh", "kThreads"), ("kCarryThreads", "kda_carry.cu", "kCarryThreads"), ("kStateThreads", "state_parts.py", "THREADS")):
        assert constant("plan.cpp", plan) == constant(name, key)
    rows, dim = constant("kda_carry.cu", "kCarryRows"), constant("record.h", "kDim")
    assert constant("plan.cpp", "kCarryBlocks") == dim // rows
    assert (constant("record.h", "kWarm"), constant("record.h", "kForgotten")) == (2, 32)
    assert "WARM, FORGOTTEN = 2, 32\n" in text["state_parts.py"]
    prep = int(re.search(r"kSmemBytes == (\d+)", text["prep_layout.cuh"])[1])
    stated = {"prep": prep, "prep_gf32": prep, "carry": int(re.search(r"kCarrySmemBytes == (\d+)", text["kda_carry.cu"])[1])}
    assert RECORD == int(re.search(r"kRecordBytes == (\d+)", text["record.h"])[1])
    specs = [spec for spec in expand_all().specs if spec.op == "kda_prefill" and spec.toolchain == "cutlass"]
    for arch in GPU_ARCHS:
        mine = [spec for spec in specs if spec.arch == arch]
        assert {spec.variant: spec.dynamic_smem for spec in mine} == stated
        assert {spec.variant: spec.block[0] for spec in mine} == {"prep": 256, "prep_gf32": 256, "carry": 128}
    assert all(stated[name] == SMEM[arch][name] for arch in SMEM for name in stated)


def test_shared_memory_of_the_state_kernel():
    parts = pytest.importorskip("aot.ops.chunk.state_parts", reason="needs the CuTe DSL")
    from aot.ops.chunk.compile import FORMS

    assert (parts.THREADS, parts.REC_BYTES) == (128, RECORD) and set(FORMS) == set(GPU_ARCHS)
    for arch in SMEM:
        assert SMEM[arch]["scan"] == SMEM[arch]["state"] == parts.smem_bytes(FORMS[arch].depth)


@pytest.mark.parametrize("arch, resident", [("sm90", 228), ("sm100", 228), ("sm103", 228), ("sm120", 100)])
def test_blocks_that_the_plan_puts_on_a_multiprocessor_fit_it(arch, resident):
    """Shared memory of a multiprocessor in KB, of which every block takes one for itself: the plan's prep blocks, and one state block."""
    parts = pytest.importorskip("aot.ops.chunk.state_parts", reason="needs the CuTe DSL")
    from aot.archs import ARCHS
    from aot.matrix import expand_all
    from aot.ops.chunk.compile import FORMS

    smem = {spec.variant: spec.dynamic_smem for spec in expand_all().specs if spec.op == "kda_prefill" and spec.arch == arch}
    smem["state"] = smem["scan"] = parts.smem_bytes(FORMS[arch].depth)
    assert all(value <= ARCHS[arch].smem_limit for value in smem.values())
    fit = lambda free: free // (smem["prep"] + 1024)
    room = resident * 1024
    beside = fit(room - smem["state"] - 1024)
    assert (fit(room), beside or 1) == PREP_BLOCKS["sm120" if arch == "sm120" else "sm90"]


def test_arguments_fit_the_fixed_arrays():
    assert ctypes.sizeof(abi.PrefillArgs) <= 512 and len(abi.PREFILL_TENSORS) <= 16
