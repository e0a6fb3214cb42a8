"""The loop of the state kernel by mma.sync (m16n8k16, bf16), for archs without wgmma. Each warp has 16 value rows by 128 key
channels of S^T: the fragment of wgmma is four of mma.sync, so that the prologue, the record and the outputs are the same.

Products that the next chunk waits for go first: R, U, S; those of O fill their latency. The record of chunk c + depth - 1 is asked
for when chunk c begins, in the stage of chunk c - 1: with two stages that is the earliest there is.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32
from cutlass.cute.nvgpu import warp

from aot.ops.chunk import state_operands as at
from aot.ops.chunk.state_parts import (
    CHUNK,
    DIM,
    REC_DECAY,
    REC_KD,
    REC_KR,
    REC_P,
    REC_QD,
    REC_T,
    ROWS,
    STAGE_BYTES,
    Loop,
    await_record,
    bring_record,
    bring_values,
    checkpoint,
    pointer,
)  # fmt: skip


def tiled_mmas():
    """Of 64 value rows by the chunk's tokens, and by the state's key channels: the same here."""
    mma = cute.make_tiled_mma(warp.MmaF16BF16Op(BFloat16, Float32, (16, 8, 16)), cute.make_layout((ROWS // 16, 1, 1)), permutation_mnk=(ROWS, 16, 16))
    return mma, mma


@cute.jit
def as_operand(acc: cute.Tensor):
    """bf16 copy of an accumulator ((2,2),1,N/8), relabelled as the A operand ((2,2,2),1,N/16): no data moves between threads."""
    copy = cute.make_rmem_tensor(acc.layout, BFloat16)
    copy.store(acc.load().to(BFloat16))
    return cute.make_tensor(copy.iterator, cute.make_layout(((2, 2, 2), 1, cute.size(acc) // 8), stride=((1, 2, 4), 0, 8)))


@cute.jit
def product(
    acc: cute.Tensor, a: cute.Tensor, mma, k: cutlass.Constexpr, columns: cutlass.Constexpr, matrix: Int32, lane: Int32, step: cutlass.Constexpr,
    transpose: cutlass.Constexpr,
):  # fmt: skip
    """acc += a B for 16 of B's columns and step k of 16. matrix: its address; lane, step: of state_operands.py."""
    flip, add = step(k, columns)
    b = cute.make_rmem_tensor(cute.make_layout(((2, 2), 2)), BFloat16)
    source = cute.make_tensor(pointer(BFloat16, matrix + (lane ^ flip) + add, cute.AddressSpace.smem), cute.make_layout(8))
    load = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(transpose=transpose, num_matrices=4), BFloat16)
    cute.copy(load, source, cute.make_tensor(b.iterator, cute.make_layout(8)))
    tiles = cute.make_tensor(acc.iterator + columns * 8, cute.make_layout(((2, 2), 1, 2), stride=((1, 2), 0, 4)))
    cute.gemm(mma, tiles, a[(None, None, k)], b, tiles)


@cute.jit
def run(x: Loop, mma, update_mma, thread, io: cutlass.Constexpr, scan: cutlass.Constexpr, depth: cutlass.Constexpr):
    """All chunks of the chain. Leaves S, and O of the last chunk; returns the address of that chunk's output."""
    count, lane, stages, bars = x.count, x.lane, x.stages, x.bars
    S, R, U, O, v_next, o_prev, o_rows = x.S, x.R, x.U, x.O, x.v_next, x.o_prev, x.o_rows
    load_v, store_o = x.load_v, x.store_o
    ready, records, v, v_left, g_out = x.ready, x.records, x.v, x.v_left, x.g_out
    lane_kd, lane_kr, lane_p = at.tokens_by_channels(lane), at.channels_by_tokens(lane), at.queries_by_keys(lane)
    decay = cute.make_rmem_tensor(cute.make_layout(4), Float32)
    if cutlass.const_expr(x.checkpoints is not None):
        until, number = x.checkpoints.left, x.checkpoints.next
    s = Int32(0)
    phase = Int32(0)
    for c in cutlass.range(count, unroll=1):
        s_far = s - 1 if s > 0 else Int32(depth - 1)  # the stage of chunk c - 1, and of c + depth - 1
        if c + (depth - 1) < count:
            bring_values(s_far, x.v_to, v, x.v_16, v_left)
            if x.warp_id == 0:
                ready = await_record(ready, c + (depth - 1), count, x.flags)
                phase_far = phase ^ 1 if s == 0 else phase  # that chunk is as many fills of its stage behind as this one, or one less
                bring_record(s_far, phase_far, stages, bars, records, depth, "mma")
        else:
            cute.arch.cp_async_commit_group()  # the loop counts groups
        v += 2 * x.v_16
        v_left -= CHUNK
        records += x.record_step

        record = stages.toint() + s * STAGE_BYTES
        S_op = as_operand(S)
        R.store(v_next.load().to(Float32))
        if cutlass.const_expr(not scan):
            o_prev.store(O.load().to(io))
            cute.copy(store_o, store_o.retile(o_prev), store_o.partition_D(x.s_out))
            O.fill(0.0)
        for k in cutlass.range_constexpr(DIM // 16):
            for n in cutlass.range_constexpr(CHUNK // 16):
                product(R, S_op, mma, k, n, record + REC_KD, lane_kd, at.tokens_by_channels_step, False)
            if cutlass.const_expr(not scan):
                for n in cutlass.range_constexpr(CHUNK // 16):
                    product(O, S_op, mma, k, n, record + REC_QD, lane_kd, at.tokens_by_channels_step, False)
        for i in cutlass.range_constexpr(DIM // 16):  # columns 16 i + {0, 8} + 2 (lane % 4) + {0, 1} of both its rows
            cute.autovec_copy(
                cute.make_tensor(pointer(Float32, record + (lane % 4 * 16) + (REC_DECAY + i * 64), cute.AddressSpace.smem), cute.make_layout(4)), decay
            )
            for e in cutlass.range_constexpr(8):
                S[8 * i + e] = S[8 * i + e] * decay[e // 4 * 2 + e % 2]
        R_op = as_operand(R)
        U.fill(0.0)
        for k in cutlass.range_constexpr(CHUNK // 16):
            for n in cutlass.range_constexpr(CHUNK // 16):
                product(U, R_op, mma, k, n, record + REC_T, lane_p, at.queries_by_keys_step, False)
        if cutlass.const_expr(not scan):
            # Under U: the last chunk's output from its tile to memory.
            cute.arch.sync_warp()
            cute.autovec_copy(x.s_rows, o_rows)
            if c > x.warm:
                for j in cutlass.range_constexpr(2):
                    cute.autovec_copy(o_rows[(None, j)], cute.make_tensor(pointer(io, g_out + j * x.out_16), cute.make_layout(8)))
                g_out += 2 * x.out_16
        U_op = as_operand(U)
        for k in cutlass.range_constexpr(CHUNK // 16):
            for n in cutlass.range_constexpr(DIM // 16):
                product(S, U_op, mma, k, n, record + REC_KR, lane_kr, at.channels_by_tokens_step, True)
        if cutlass.const_expr(not scan):
            for k in cutlass.range_constexpr(CHUNK // 16):
                for n in cutlass.range_constexpr(CHUNK // 16):
                    product(O, U_op, mma, k, n, record + REC_P, lane_p, at.queries_by_keys_step, False)
        if cutlass.const_expr(x.checkpoints is not None):
            until, number = checkpoint(until, number, c, x.warm, S, update_mma.get_slice(thread), x.checkpoints)
        used = s
        s += 1
        if s == depth:
            s = Int32(0)
            phase = phase ^ 1
        # Every lane's reads of the stage are done before one lane says so.
        cute.arch.cp_async_wait_group(depth - 2)
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(bars + depth + used)
        if c + 1 < count:
            cute.copy(load_v, load_v.partition_S(x.s_v[(None, None, s)]), load_v.retile(v_next))
            cute.arch.mbarrier_wait(bars + s, phase)
    return g_out
