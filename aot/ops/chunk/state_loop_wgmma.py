"""The loop of the state kernel by wgmma, for sm_90a: S, R and U as register operands (state.py).

The order inside is the one that ptxas compiles without injected waits: every group is complete when the loop
closes, and a never-taken branch (`basic_block_end`) keeps the output of the previous chunk in the shadow of the products.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

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
    staged,
)  # fmt: skip


def row_mma(columns, b_major):
    """64 value rows from registers times a shared-memory operand. Made inside the kernel: as an argument of the kernel it
    would be one more parameter."""
    op = warpgroup.MmaF16BF16Op(BFloat16, Float32, (ROWS, columns, 16), warpgroup.OperandSource.RMEM, OperandMajorMode.K, b_major)
    return cute.make_tiled_mma(op)


def tiled_mmas():
    """Of 64 value rows by the chunk's tokens, and by the state's key channels."""
    return row_mma(CHUNK, OperandMajorMode.K), row_mma(DIM, OperandMajorMode.MN)


@cute.jit
def as_operand(acc: cute.Tensor):
    """bf16 copy of an accumulator, relabelled as the A operand of the next product: no data moves between threads."""
    c = acc.layout
    atom = (2, 2, 2)
    steps = cute.size(c, mode=[0]) // cute.size(atom)
    layout = cute.make_layout(
        (atom, c.shape[1], (c.shape[2], steps)),
        stride=(c.stride[0], c.stride[1], (c.stride[2], cute.size(atom, mode=[2]) * c.stride[0][2])),
    )
    operand = cute.make_rmem_tensor_like(layout, BFloat16)
    cute.make_tensor(operand.iterator, c).store(acc.load().to(BFloat16))
    return operand


def basic_block_end(zero):
    """A branch that is never taken (zero is 0): ptxas moves no work across it."""
    cute.arch.inline_ptx(
        "{ .reg .pred p; setp.eq.u32 p, {$r0}, 0; @p bra D; L: nanosleep.u32 64; bra L; D: }", read_only_args=[zero]
    )


@cute.jit
def run(x: Loop, tokens_mma, update_mma, thread, io: cutlass.Constexpr, scan: cutlass.Constexpr, depth: cutlass.Constexpr):
    """All chunks of the chain. Leaves S, and O of the last chunk; returns the address of that chunk's output."""
    count, lane, stages, bars = x.count, x.lane, x.stages, x.bars
    S, R, U, O, v_next, o_prev, o_rows = x.S, x.R, x.U, x.O, x.v_next, x.o_prev, x.o_rows
    load_v, store_o = x.load_v, x.store_o
    ready, records, v, v_left, g_out = x.ready, x.records, x.v, x.v_left, x.g_out
    kinds = warpgroup.SmemLayoutAtomKind
    s_kd = staged(stages, REC_KD, BFloat16, kinds.K_SW128, (CHUNK, DIM), depth)
    s_qd = staged(stages, REC_QD, BFloat16, kinds.K_SW128, (CHUNK, DIM), depth)
    s_kr = staged(stages, REC_KR, BFloat16, kinds.MN_SW128, (DIM, CHUNK), depth)
    s_p = staged(stages, REC_P, BFloat16, kinds.K_SW64, (CHUNK, CHUNK), depth)
    s_t = staged(stages, REC_T, BFloat16, kinds.K_SW64, (CHUNK, CHUNK), depth)
    mma = tokens_mma.get_slice(thread)
    mma_kr = update_mma.get_slice(thread)
    f_kd = tokens_mma.make_fragment_B(mma.partition_B(s_kd))
    f_qd = tokens_mma.make_fragment_B(mma.partition_B(s_qd))
    f_p = tokens_mma.make_fragment_B(mma.partition_B(s_p))
    f_t = tokens_mma.make_fragment_B(mma.partition_B(s_t))
    f_kr = update_mma.make_fragment_B(mma_kr.partition_B(s_kr))
    decay = cute.make_rmem_tensor(cute.make_layout((4, DIM // 16)), Float32)
    zeros = [x.modes & (1 << bit) for bit in (26, 27, 28, 29, 30)]  # five values: branches on one would be merged
    if cutlass.const_expr(x.checkpoints is not None):
        until, number = x.checkpoints.left, x.checkpoints.next
    s = Int32(0)
    phase = Int32(0)
    for c in cutlass.range(count, unroll=1):
        warpgroup.wait_group(0)
        S_op = as_operand(S)
        R.store(v_next.load().to(Float32))
        warpgroup.fence()
        tokens_mma.set(warpgroup.Field.ACCUMULATE, True)
        for k in cutlass.range_constexpr(DIM // 16):
            cute.gemm(tokens_mma, R, S_op[(None, None, k)], f_kd[(None, None, k, s)], R)
        warpgroup.commit_group()
        basic_block_end(zeros[0])
        if cutlass.const_expr(not scan):
            o_prev.store(O.load().to(io))
        stage_decay = stages.toint() + (s * STAGE_BYTES + REC_DECAY + lane % 4 * 16)
        for i in cutlass.range_constexpr(DIM // 16):
            cute.autovec_copy(
                cute.make_tensor(pointer(Float32, stage_decay + i * 64, cute.AddressSpace.smem), cute.make_layout(4)), decay[(None, i)]
            )
        if cutlass.const_expr(not scan):
            warpgroup.fence()
            tokens_mma.set(warpgroup.Field.ACCUMULATE, False)
            for k in cutlass.range_constexpr(DIM // 16):
                cute.gemm(tokens_mma, O, S_op[(None, None, k)], f_qd[(None, None, k, s)], O)
                tokens_mma.set(warpgroup.Field.ACCUMULATE, True)
            warpgroup.commit_group()
        for i in cutlass.range_constexpr(DIM // 16):  # columns 16 i + {0, 8} + 2 (lane % 4) + {0, 1} of both its rows
            for e in cutlass.range_constexpr(8):
                S[8 * i + e] = S[8 * i + e] * decay[e // 4 * 2 + e % 2, i]
        warpgroup.wait_group(0 if scan else 1)
        R_op = as_operand(R)
        warpgroup.fence()
        tokens_mma.set(warpgroup.Field.ACCUMULATE, False)
        for k in cutlass.range_constexpr(CHUNK // 16):
            cute.gemm(tokens_mma, U, R_op[(None, None, k)], f_t[(None, None, k, s)], U)
            tokens_mma.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.commit_group()
        basic_block_end(zeros[1])
        # Under U: the last chunk's output to its tile.
        if cutlass.const_expr(not scan):
            cute.copy(store_o, store_o.retile(o_prev), store_o.partition_D(x.s_out))
        basic_block_end(zeros[2])
        warpgroup.wait_group(0)
        U_op = as_operand(U)
        warpgroup.fence()
        update_mma.set(warpgroup.Field.ACCUMULATE, True)
        for k in cutlass.range_constexpr(CHUNK // 16):
            cute.gemm(update_mma, S, U_op[(None, None, k)], f_kr[(None, None, k, s)], S)
        warpgroup.commit_group()
        if cutlass.const_expr(not scan):
            for k in cutlass.range_constexpr(CHUNK // 16):
                cute.gemm(tokens_mma, O, U_op[(None, None, k)], f_p[(None, None, k, s)], O)
            warpgroup.commit_group()
        basic_block_end(zeros[3])
        # Under the update: v of chunk c + 1, copies for chunk c + 2, the output to memory.
        if cutlass.const_expr(not scan):
            cute.arch.sync_warp()
            cute.autovec_copy(x.s_rows, o_rows)
        if cutlass.const_expr(not scan):
            if c > x.warm:
                for j in cutlass.range_constexpr(2):
                    cute.autovec_copy(o_rows[(None, j)], cute.make_tensor(pointer(io, g_out + j * x.out_16), cute.make_layout(8)))
                g_out += 2 * x.out_16
        s_far = s - 1 if s > 0 else Int32(depth - 1)  # the stage of chunk c - 1, and of c + 2
        if c + 2 < count:
            bring_values(s_far, x.v_to, v, x.v_16, v_left)
            if x.warp_id == 0:
                ready = await_record(ready, c + 2, count, x.flags)
                phase_far = phase ^ 1 if s == 0 else phase  # chunk c + 2 is as many fills of its stage behind as this one, or one less
                bring_record(s_far, phase_far, stages, bars, records, depth, "wgmma")
        else:
            cute.arch.cp_async_commit_group()
        v += 2 * x.v_16
        v_left -= CHUNK
        records += x.record_step
        used = s
        s += 1
        if s == depth:
            s = Int32(0)
            phase = phase ^ 1
        cute.arch.cp_async_wait_group(1)
        cute.arch.sync_warp()
        if c + 1 < count:
            cute.copy(load_v, load_v.partition_S(x.s_v[(None, None, s)]), load_v.retile(v_next))
            cute.arch.mbarrier_wait(bars + s, phase)
        warpgroup.wait_group(0)
        if cutlass.const_expr(x.checkpoints is not None):
            until, number = checkpoint(until, number, c, x.warm, S, mma_kr, x.checkpoints)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(bars + depth + used)
    return g_out
