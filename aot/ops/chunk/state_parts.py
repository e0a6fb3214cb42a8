"""What both forms of the state kernel's loop share: sizes, the record's offsets, transport of records and values (state.py)."""

import re
from dataclasses import dataclass
from pathlib import Path

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, Int64, Uint32
from cutlass.cute.nvgpu import cpasync, warpgroup

from aot.common.dsl import load_index

_TEXT = Path(__file__).with_name("params_state.def").read_text()
PARAMS = [(name, kind) for kind, name in re.findall(r"^CULA_PARAM\((\w+), (\w+)\)", _TEXT, re.M)]
TYPES = {"ptr": Int64, "i64": Int64, "i32": Int32, "f32": Float32}
DTYPES = {"bf16": BFloat16, "fp16": Float16, "fp32": Float32}

CHUNK, DIM, ROWS = 32, 128, 64
THREADS = 128
REGISTERS = 224  # a quarter of an SM has 512 a lane; two prep blocks of 256 threads take 4 times 72
OUT_PITCH = 24  # values of one token in a warp's output tile: 16, padded so that stmatrix has no bank conflict
# Byte offsets inside a record, and what a segment's warm-up chunks must forget: record.h
WARM, FORGOTTEN = 2, 32
REC_KD, REC_QD, REC_KR, REC_P, REC_T, REC_DECAY, REC_BYTES = 0, 8192, 16384, 24576, 26624, 28672, 29184
STAGE_V = REC_BYTES + 512  # v [32,64] behind the record, 1024-byte aligned as the 128-byte swizzle wants it
STAGE_BYTES = STAGE_V + CHUNK * ROWS * 2
OUT_BYTES = 4 * CHUNK * OUT_PITCH * 2


def smem_bytes(stages):
    """Dynamic shared memory of a launch; the last 128 bytes hold the barriers."""
    return stages * STAGE_BYTES + OUT_BYTES + 128


def pointer(dtype, address, space=cute.AddressSpace.gmem, align=16):
    return cute.make_ptr(dtype, address, space, assumed_align=align)


@cute.jit
def warm_chunks(chunk: Int32, count: Int32, flags: Int64):
    """How many chunks before chunk `chunk` of a sequence of `count` (first flag at `flags`) a segment that begins there may start
    from with S = 0; 0: it needs the exact state."""
    forgotten = Int32(0)
    chunks = Int32(0)
    for i in cutlass.range_constexpr(WARM):
        at = chunk - 1 - i
        if chunk < count and at >= 0 and forgotten < FORGOTTEN:
            flag = Uint32(0)
            while flag == 0:
                flag = load_acquire(flags + Int64(at) * 4)
            forgotten += Int32(flag) - 1
            chunks = Int32(i + 1)
    if forgotten < FORGOTTEN:
        chunks = Int32(0)
    return chunks


def load_acquire(address):
    return cute.arch.inline_ptx("ld.acquire.gpu.global.u32 {$w0}, [{$r0}];", write_only_types=[Uint32], read_only_args=[address])


def store_release(address, value):
    cute.arch.inline_ptx("st.release.gpu.global.u32 [{$r0}], {$r1};", read_only_args=[address, value])


@cute.jit
def store_state(S: cute.Tensor, slice_c, address: Int64, dtype: cutlass.Constexpr, layout: cutlass.Constexpr):
    """The block's rows of S^T to a slot of a pool. slice_c: the thread's part of the products with S; address: of the block's first element."""
    rows = cute.make_layout((ROWS, DIM), stride=(DIM, 1) if layout == "vk" else (1, DIM))
    dst = slice_c.partition_C(cute.make_tensor(pointer(dtype, address), rows))
    stored = cute.make_rmem_tensor(S.layout, dtype)
    stored.store(S.load().to(dtype))
    cute.autovec_copy(stored, dst)


def copy16(shared, address, size):
    """16 bytes to shared memory, the first `size` (0 or 16) from global memory, the rest zero."""
    cute.arch.inline_ptx("cp.async.cg.shared.global [{$r0}], [{$r1}], 16, {$r2};", read_only_args=[shared, address, size])


@cute.jit
def staged(base, at, dtype, kind, shape, count):
    """The swizzled tile `shape` at byte `at` of each of `count` stages."""
    tile = cute.tile_to_shape(warpgroup.make_smem_layout_atom(kind, dtype), shape, (0, 1))
    outer = cute.append(tile.outer, cute.make_layout(count, stride=STAGE_BYTES // 2))
    return cute.make_tensor(cute.recast_ptr(base + at, tile.inner, dtype=dtype), outer)


@cute.jit
def await_record(ready: Int32, c: Int32, count: Int32, flags: Int64):
    """Warp 0: waits for the flag of chunk c. Returns how many leading chunks are known to be ready: up to 32 flags at a look,
    because a look and its fence cost 400 cycles, half of a chunk. flags: address of the sequence's first flag."""
    lane = cute.arch.lane_idx()
    while ready <= c:
        flag = Uint32(1)
        if ready + lane < count:
            flag = load_acquire(flags + Int64(ready + lane) * 4)
        missing = ~cute.arch.vote_ballot_sync(flag != 0)
        ready += Int32(cute.arch.clz(cute.arch.brev(missing)))  # 32 for none
        cute.arch.sync_warp()
        # The records went to memory through the async proxy of another SM and come through that of this one.
        cute.arch.inline_ptx("fence.proxy.async.global;")
    return ready


@cute.jit
def bring_record(s: Int32, phase: Int32, stages, bars, record: Int64, count: cutlass.Constexpr, form: cutlass.Constexpr):
    """One lane of warp 0: the record at `record` into stage s of `count` once its readers have left it (`phase`)."""
    bulk = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), BFloat16)
    src = cute.make_tensor(pointer(BFloat16, record), cute.make_layout(REC_BYTES // 2))
    to = cute.make_tensor(cute.recast_ptr(stages + s * STAGE_BYTES, dtype=BFloat16), cute.make_layout(REC_BYTES // 2))
    with cute.arch.elect_one():
        cute.arch.mbarrier_wait(bars + count + s, phase)
        cute.arch.mbarrier_arrive_and_expect_tx(bars + s, REC_BYTES)
        if cutlass.const_expr(form == "wgmma"):
            cute.copy(bulk, src, to, mbar_ptr=bars + s)  # measured with this one; the other gives the loop another schedule
        else:
            # The atom's shared::cluster makes sm_120a code ask whose address it is and call a function for others.
            cute.arch.inline_ptx(
                "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [{$r0}], [{$r1}], {$r2}, [{$r3}];",
                read_only_args=[(stages + s * STAGE_BYTES).toint(), record, Int32(REC_BYTES), (bars + s).toint()],
            )


def bring_values(s, to, src, src_16, left):
    """A warp's 16 values of 32 tokens: two units of 16 bytes a token, which only this warp reads. A lane brings one unit of
    tokens t and t + 16. to, src: the lane's addresses for stage 0 and for token t; src_16: the step to token t + 16 in bytes;
    left: how many tokens from t on exist."""
    to = to + s * STAGE_BYTES
    copy16(to, src, cutlass.select_(left > 0, Int32(16), Int32(0)))
    copy16(to + 16 * 128, src + src_16, cutlass.select_(left > 16, Int32(16), Int32(0)))
    cute.arch.cp_async_commit_group()


@dataclass(frozen=True)
class Checkpoints:
    """Where the form with checkpoints stores a chain's states: every `chunks` chunks the next of the `columns` indices from `index` on."""

    pool: Int64  # address of the block's rows in slot 0
    slot: Int64  # bytes from slot to slot
    slots: Int64
    index: Int64  # address of element [0, 0]
    code: Int32
    at: Int64  # element of the chain's first index, the number of the next, and how many there are
    next: Int64
    columns: Int64
    chunks: Int64
    left: Int64  # chunks until the next
    null_slot: Int64
    length: Int32  # tokens of the block's chunks: a state after tokens that do not exist is none
    dtype: object
    layout: str


@cute.jit
def checkpoint(left: Int64, next_: Int64, c: Int32, warm: Int32, S: cute.Tensor, slice_c, p):
    """After chunk c: stores S if it is time. Returns the chunks until the next checkpoint, and its number."""
    left -= 1
    if left == 0:
        left = p.chunks
        if c >= warm and next_ < p.columns and (c + 1) * CHUNK <= p.length:
            slot = load_index(p.index, p.at + next_, p.code, Int64(0))
            if slot >= 0 and slot < p.slots and slot != p.null_slot:
                store_state(S, slice_c, p.pool + slot * p.slot, p.dtype, p.layout)
        next_ += 1
    return left, next_


@dataclass(frozen=True)
class Loop:
    """What the prologue hands to a loop over the chunks of a chain. Tensors S, R, U, O, v_next, o_prev, o_rows are registers."""

    count: Int32  # chunks, of which the first `warm` have no output
    warm: Int32
    ready: Int32  # leading chunks whose flags were seen
    flags: Int64  # address of the first chunk's
    records: Int64  # address of the next record to bring, and from one to the next
    record_step: Int64
    v: Int64  # address of the lane's 16 bytes of the next values to bring; to 16 tokens further; tokens left; where in stage 0
    v_16: Int64
    v_left: Int32
    v_to: Int32
    g_out: Int64  # address of the lane's 16 bytes of the first chunk's output; to 16 tokens further
    out_16: Int64
    warp_id: Int32
    lane: Int32
    modes: Int32
    stages: object  # shared memory: the stages, the barriers (full, then empty), the values, the output tile and the lane's rows of it
    bars: object
    s_v: object
    s_out: object
    s_rows: object
    load_v: object
    store_o: object
    S: object
    R: object
    U: object
    O: object
    v_next: object
    o_prev: object
    o_rows: object
    checkpoints: object  # Checkpoints, or None in the forms without
