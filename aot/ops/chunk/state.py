"""KDA prefill, second kernel (CuTe DSL, sm_90a): records, v, initial state -> out, final state.

A block owns 64 value rows of one (sequence, value head). S^T (value row, key channel) stays in the float32 accumulators of
one warpgroup from the first chunk to the last; per chunk of 32 tokens

    R = V^T - S^T Kd^T      U = R T^T      O^T = S^T Qd^T + U P^T      S^T <- S^T diag(2^G_C) + U Kr

with S, R and U as wgmma register operands and the record's matrices as shared-memory operands. Warp 0 also waits for the prep
kernel's flags and brings records by one bulk copy each, two chunks ahead; every warp brings its own 16 columns of v by
16-byte copies that leave out tokens that do not exist. A fifth warp for that would cost the residency: the four quarters of
an SM have 512 registers a lane each, of which two prep blocks take 256, so a quarter holds one state warp and not two.

With few heads a sequence is cut into segments (intra-card context parallelism). Where the last chunks before a segment forget
what came before them (record.h: kForgotten; the prep kernel proves it chunk by chunk), the segment starts from them, with S = 0
and without outputs. Otherwise it starts from the exact state: the `scan` form of the kernel runs the segment before without
outputs, from S = 0 with the tokens' values, which gives B, and from S = I without them, which gives M^T; segment 0 starts from
the initial state and a segment that may start from its warm-up chunks from those, and then B is the state after it.
kda_carry.cu turns the other B into the state after the segment, S_{s+1} = S_s M_s^T + B_s (all transposed).

All three kernels decide by the same flags. A scan block that has nothing to do leaves at once, so that the main form, which
waits for it by programmatic launch, starts while the prep kernel still runs. Then nobody has waited for the prep kernel when
the main form ends: block 0 of each kernel stays until the kernel before it is complete.

The order inside the loop is the one that ptxas compiles without injected waits: every group is complete when the loop
closes, and a never-taken branch (`basic_block_end`) keeps the output of the previous chunk in the shadow of the products.
"""

import re
import subprocess
import tempfile
from pathlib import Path

import cutlass
import cutlass.cute as cute
import cutlass.memory
from cuda.bindings import driver
from cutlass import BFloat16, Float16, Float32, Int32, Int64, Uint32
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup
from cutlass.cute.runtime import make_fake_stream

_TEXT = Path(__file__).with_name("params_state.def").read_text()
PARAMS = [(name, kind) for kind, name in re.findall(r"^CULA_PARAM\((\w+), (\w+)\)", _TEXT, re.M)]
TYPES = {"ptr": Int64, "i64": Int64, "i32": Int32, "f32": Float32}
DTYPES = {"bf16": BFloat16, "fp16": Float16, "fp32": Float32}

CHUNK, DIM, ROWS = 32, 128, 64
STAGES = 3
THREADS = 128
REGISTERS = 224  # a quarter of an SM has 512 a lane; two prep blocks of 256 threads take 4 times 72
OUT_PITCH = 24  # values of one token in a warp's output tile: 16, padded so that stmatrix has no bank conflict
# Byte offsets inside a record: record.h
WARM, FORGOTTEN = 2, 32
REC_KD, REC_QD, REC_KR, REC_P, REC_T, REC_DECAY, REC_BYTES = 0, 8192, 16384, 24576, 26624, 28672, 29184
STAGE_V = REC_BYTES + 512  # v [32,64] behind the record, 1024-byte aligned as the 128-byte swizzle wants it
STAGE_BYTES = STAGE_V + CHUNK * ROWS * 2
OUT_BYTES = 4 * CHUNK * OUT_PITCH * 2
SMEM_BYTES = STAGES * STAGE_BYTES + OUT_BYTES + 128  # the last 128 hold the barriers


def pointer(dtype, address, space=cute.AddressSpace.gmem, align=16):
    return cute.make_ptr(dtype, address, space, assumed_align=align)


def row_mma(columns, b_major):
    """64 value rows from registers times a shared-memory operand. Made inside the kernel: as an argument of the kernel it
    would be one more parameter."""
    op = warpgroup.MmaF16BF16Op(BFloat16, Float32, (ROWS, columns, 16), warpgroup.OperandSource.RMEM, OperandMajorMode.K, b_major)
    return cute.make_tiled_mma(op)


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


def load_index(base, element, code, default):
    """Element of an int32 (code 1) or int64 (code 2) tensor as Int64; `default` without a tensor (code 0)."""
    return cute.arch.inline_ptx(
        """{ .reg .pred p32, p64; .reg .b64 a; .reg .b32 s;
        setp.eq.s32 p32, {$r2}, 1; setp.eq.s32 p64, {$r2}, 2;
        selp.b32 s, 3, 2, p64; shl.b64 a, {$r1}, s; add.s64 a, a, {$r0}; mov.b64 {$w0}, {$r3};
        @p32 ld.global.s32 {$w0}, [a]; @p64 ld.global.s64 {$w0}, [a]; }""",
        write_only_types=[Int64],
        read_only_args=[base, element, code, default],
    )


def basic_block_end(zero):
    """A branch that is never taken (zero is 0): ptxas moves no work across it."""
    cute.arch.inline_ptx(
        "{ .reg .pred p; setp.eq.u32 p, {$r0}, 0; @p bra D; L: nanosleep.u32 64; bra L; D: }", read_only_args=[zero]
    )


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


def copy16(shared, address, size):
    """16 bytes to shared memory, the first `size` (0 or 16) from global memory, the rest zero."""
    cute.arch.inline_ptx("cp.async.cg.shared.global [{$r0}], [{$r1}], 16, {$r2};", read_only_args=[shared, address, size])


@cute.jit
def staged(base, at, dtype, kind, shape):
    """The swizzled tile `shape` at byte `at` of every stage."""
    tile = cute.tile_to_shape(warpgroup.make_smem_layout_atom(kind, dtype), shape, (0, 1))
    outer = cute.append(tile.outer, cute.make_layout(STAGES, stride=STAGE_BYTES // 2))
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
def bring_record(s: Int32, phase: Int32, stages, bars, record: Int64):
    """One lane of warp 0: the record at `record` into stage s once its readers have left it (`phase`)."""
    bulk = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), BFloat16)
    src = cute.make_tensor(pointer(BFloat16, record), cute.make_layout(REC_BYTES // 2))
    to = cute.make_tensor(cute.recast_ptr(stages + s * STAGE_BYTES, dtype=BFloat16), cute.make_layout(REC_BYTES // 2))
    with cute.arch.elect_one():
        cute.arch.mbarrier_wait(bars + STAGES + s, phase)
        cute.arch.mbarrier_arrive_and_expect_tx(bars + s, REC_BYTES)
        cute.copy(bulk, src, to, mbar_ptr=bars + s)


def bring_values(s, to, src, src_16, left):
    """A warp's 16 values of 32 tokens: two units of 16 bytes a token, which only this warp reads. A lane brings one unit of
    tokens t and t + 16. to, src: the lane's addresses for stage 0 and for token t; src_16: the step to token t + 16 in bytes;
    left: how many tokens from t on exist."""
    to = to + s * STAGE_BYTES
    copy16(to, src, cutlass.select_(left > 0, Int32(16), Int32(0)))
    copy16(to + 16 * 128, src + src_16, cutlass.select_(left > 16, Int32(16), Int32(0)))
    cute.arch.cp_async_commit_group()


@cute.kernel
def kda_state(
    records: Int64, flags: Int64, carry: Int64, v: Int64, out: Int64, cu_seqlens: Int64, state_in: Int64, state_out: Int64,
    read_index: Int64, write_index: Int64, v_b: Int64, v_t: Int64, v_h: Int64, out_b: Int64, out_t: Int64, out_h: Int64,
    in_slot: Int64, in_h: Int64, out_slot: Int64, out_state_h: Int64, in_slots: Int64, out_slots: Int64, null_slot: Int64,
    tokens: Int64, hv: Int32, head_group: Int32, sequences: Int32, chunks: Int32, segments: Int32, modes: Int32,
    io: cutlass.Constexpr, state_dtype: cutlass.Constexpr, layout: cutlass.Constexpr, scan: cutlass.Constexpr,
):  # fmt: skip
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    warp_id = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    # Order of the blocks: half of the value rows (scan: and of the key rows), then as the prep kernel orders its records
    # head of the group, sequence, group of heads; segment.
    slabs = 4 if scan else 2
    slab = block % slabs
    half = slab % 2
    chain = block // slabs
    segment = chain // (hv * sequences)
    chain = chain - segment * (hv * sequences)
    group = chain // (sequences * head_group)
    rest = chain - group * (sequences * head_group)
    heads = cutlass.min(head_group, hv - group * head_group)
    head = group * head_group + rest % heads
    sequence = Int64(rest // heads)

    # Which tokens, which records.
    cu_code = modes & 3
    start = Int64(0)
    length = tokens
    row = sequence
    first_chunk = sequence * ((tokens + CHUNK - 1) // CHUNK)
    if cu_code != 0:
        start = load_index(cu_seqlens, sequence, cu_code, Int64(0))
        length = load_index(cu_seqlens, sequence + 1, cu_code, Int64(0)) - start
        row = Int64(0)
        first_chunk = start // CHUNK + sequence
    in_sequence = Int32((length + CHUNK - 1) // CHUNK)
    per_segment = (in_sequence + segments - 1) // segments
    skip = cutlass.min(in_sequence, segment * per_segment)  # chunks before this segment
    started = flags + ((Int64(chunks) * hv + (sequence * hv + head) * 2) * 4 + half * 4)
    flags += (Int64(head) * Int64(chunks) + first_chunk) * 4
    warm = Int32(0)  # chunks before the segment that this block goes through first
    if segment > 0:
        warm = warm_chunks(segment * per_segment, in_sequence, flags)
    count = cutlass.min(per_segment, in_sequence - skip) + warm
    needed = Int32(1)
    if cutlass.const_expr(scan):
        # Not M of segment 0 and of one that needs no state before it; nothing of one whose successor needs none
        if slab >= 2:
            if segment == 0 or warm > 0:
                needed = Int32(0)
        if warm_chunks((segment + 1) * per_segment, in_sequence, flags) > 0:
            needed = Int32(0)
        if needed == 0:
            count = Int32(0)
    own_start = start + Int64(skip * CHUNK)
    start = own_start - warm * CHUNK
    length = cutlass.min(length - Int64((skip - warm) * CHUNK), Int64(count * CHUNK))
    first_chunk += Int64(skip - warm)
    # The segment's B (slot 0) and M (slot 1), both [128,128] float32, row = value or key row of S^T
    carry += ((sequence * Int64(hv) + Int64(head)) * Int64(segments) + Int64(segment)) * (2 * DIM * DIM * 4)

    kinds = warpgroup.SmemLayoutAtomKind
    smem = cutlass.memory.SmemAllocator()
    stages = smem.allocate(STAGES * STAGE_BYTES, 1024)
    s_out = smem.allocate_tensor(io, cute.make_layout(((16, 4), CHUNK), stride=((1, CHUNK * OUT_PITCH), OUT_PITCH)), byte_alignment=128)
    bars = smem.allocate_array(Int64, 2 * STAGES)  # full: the bulk copy; empty: the 4 warps
    s_kd = staged(stages, REC_KD, BFloat16, kinds.K_SW128, (CHUNK, DIM))
    s_qd = staged(stages, REC_QD, BFloat16, kinds.K_SW128, (CHUNK, DIM))
    s_kr = staged(stages, REC_KR, BFloat16, kinds.MN_SW128, (DIM, CHUNK))
    s_p = staged(stages, REC_P, BFloat16, kinds.K_SW64, (CHUNK, CHUNK))
    s_t = staged(stages, REC_T, BFloat16, kinds.K_SW64, (CHUNK, CHUNK))
    s_v = staged(stages, STAGE_V, io, kinds.MN_SW128, (ROWS, CHUNK))
    if warp_id == 0:
        with cute.arch.elect_one():
            for i in cutlass.range_constexpr(STAGES):
                cute.arch.mbarrier_init(bars + i, 1)
                cute.arch.mbarrier_init(bars + STAGES + i, 4)
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()

    records += (first_chunk * Int64(hv) + Int64(head)) * REC_BYTES
    record_step = Int64(hv) * REC_BYTES
    flags += Int64(skip - warm) * 4
    length32 = Int32(length)
    lane = thread % 32
    token = lane // 2
    unit = warp_id * 2 + lane % 2  # of the 8 in a token's 64 values
    v += (row * v_b + (start + Int64(token)) * v_t + Int64(head) * v_h + Int64(half * ROWS)) * 2 + Int64(unit * 16)
    v_16 = v_t * (16 * 2)
    v_left = length32 - token
    if cutlass.const_expr(scan):
        if slab >= 2:
            v_left = Int32(0)  # all of v reads as zero
    v_to = stages.toint() + (STAGE_V + token * 128 + ((unit ^ (token & 7)) << 4))
    ready = Int32(0)
    for c in cutlass.range_constexpr(2):
        if c < count:
            bring_values(c, v_to, v, v_16, v_left)
            if warp_id == 0:
                ready = await_record(ready, Int32(c), count, flags)
                bring_record(Int32(c), Int32(1), stages, bars, records)
        else:
            cute.arch.cp_async_commit_group()  # the loop counts groups
        v += 2 * v_16
        v_left -= CHUNK
        records += record_step
    tokens_mma = row_mma(CHUNK, OperandMajorMode.K)
    update_mma = row_mma(DIM, OperandMajorMode.MN)
    mma = tokens_mma.get_slice(thread)
    mma_kr = update_mma.get_slice(thread)
    S = cute.make_rmem_tensor(mma_kr.partition_shape_C((ROWS, DIM)), Float32)
    l_state = cute.make_layout((ROWS, DIM), stride=(DIM, 1) if layout == "vk" else (1, DIM))
    half_offset = Int64(half) * (ROWS * DIM if layout == "vk" else ROWS)
    l_carry = cute.make_layout((ROWS, DIM), stride=(DIM, 1))
    S.fill(0.0)
    if segment == 0 and slab < 2:
        slot = load_index(read_index, sequence, (modes >> 2) & 3, sequence)
        if slot >= 0 and slot < in_slots and slot != null_slot:
            address = state_in + (slot * in_slot + Int64(head) * in_h + half_offset) * (state_dtype.width // 8)
            src = mma_kr.partition_C(cute.make_tensor(pointer(state_dtype, address), l_state))
            loaded = cute.make_rmem_tensor(S.layout, state_dtype)
            cute.autovec_copy(src, loaded)
            S.store(loaded.load().to(Float32))
        if cutlass.const_expr(not scan):
            if segments > 1:  # in place, the last segment writes over what has been read here
                cute.arch.sync_threads()
                if thread == 0:
                    store_release(started, Uint32(1))
    elif cutlass.const_expr(scan):
        if slab >= 2:
            identity = mma_kr.partition_C(cute.make_identity_tensor((ROWS, DIM)))
            for i in cutlass.range_constexpr(cute.size(S)):
                S[i] = Float32(1.0) if identity[i][0] + half * ROWS == identity[i][1] else Float32(0.0)
    elif warm == 0:
        # Complete, with everything that went before it, once the carry kernel is.
        cute.arch.griddepcontrol_wait()
        src = mma_kr.partition_C(cute.make_tensor(pointer(Float32, carry + (Int64(half) - 4) * (ROWS * DIM * 4)), l_carry))
        cute.autovec_copy(src, S)  # B of the segment before

    f_kd = tokens_mma.make_fragment_B(mma.partition_B(s_kd))
    f_qd = tokens_mma.make_fragment_B(mma.partition_B(s_qd))
    f_p = tokens_mma.make_fragment_B(mma.partition_B(s_p))
    f_t = tokens_mma.make_fragment_B(mma.partition_B(s_t))
    f_kr = update_mma.make_fragment_B(mma_kr.partition_B(s_kr))
    load_v = cute.make_tiled_copy_C(
        cute.make_copy_atom(warp.LdMatrix8x8x16bOp(transpose=True, num_matrices=4), io), tokens_mma
    ).get_slice(thread)
    store_o = cute.make_tiled_copy_C(
        cute.make_copy_atom(warp.StMatrix8x8x16bOp(transpose=True, num_matrices=4), io), tokens_mma
    ).get_slice(thread)
    acc_shape = mma.partition_shape_C((ROWS, CHUNK))
    R = cute.make_rmem_tensor(acc_shape, Float32)
    U = cute.make_rmem_tensor(acc_shape, Float32)
    O = cute.make_rmem_tensor(acc_shape, Float32)
    O.fill(0.0)
    v_next = cute.make_rmem_tensor(R.layout, io)
    o_prev = cute.make_rmem_tensor(O.layout, io)
    # A warp writes its 16 values of a token as 2 units of 16 bytes: lane 2 t + u has unit u of tokens t and t + 16.
    o_rows = cute.make_rmem_tensor(cute.make_layout((8, 2)), io)
    s_rows = cute.make_tensor(
        pointer(io, (s_out.iterator + (warp_id * CHUNK * OUT_PITCH + lane // 2 * OUT_PITCH + lane % 2 * 8)).toint(), cute.AddressSpace.smem),
        cute.make_layout((8, 2), stride=(1, 16 * OUT_PITCH)),
    )
    g_out = out + (row * out_b + (own_start + Int64(token)) * out_t + Int64(head) * out_h + Int64(half * ROWS + warp_id * 16 + lane % 2 * 8)) * 2
    out_16 = out_t * (16 * 2)
    zeros = [modes & (1 << bit) for bit in (26, 27, 28, 29, 30)]  # five values: branches on one would be merged

    decay = cute.make_rmem_tensor(cute.make_layout((4, DIM // 16)), Float32)
    if count > 0:
        cute.arch.mbarrier_wait(bars, 0)
        cute.arch.cp_async_wait_group(1)
        cute.arch.sync_warp()
        cute.copy(load_v, load_v.partition_S(s_v[(None, None, 0)]), load_v.retile(v_next))
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
            cute.copy(store_o, store_o.retile(o_prev), store_o.partition_D(s_out))
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
            cute.autovec_copy(s_rows, o_rows)
        if cutlass.const_expr(not scan):
            if c > warm:
                for j in cutlass.range_constexpr(2):
                    cute.autovec_copy(o_rows[(None, j)], cute.make_tensor(pointer(io, g_out + j * out_16), cute.make_layout(8)))
                g_out += 2 * out_16
        s_far = s - 1 if s > 0 else Int32(STAGES - 1)  # the stage of chunk c - 1, and of c + 2
        if c + 2 < count:
            bring_values(s_far, v_to, v, v_16, v_left)
            if warp_id == 0:
                ready = await_record(ready, c + 2, count, flags)
                phase_far = phase ^ 1 if s == 0 else phase  # chunk c + 2 is as many fills of its stage behind as this one, or one less
                bring_record(s_far, phase_far, stages, bars, records)
        else:
            cute.arch.cp_async_commit_group()
        v += 2 * v_16
        v_left -= CHUNK
        records += record_step
        used = s
        s += 1
        if s == STAGES:
            s = Int32(0)
            phase = phase ^ 1
        cute.arch.cp_async_wait_group(1)
        cute.arch.sync_warp()
        if c + 1 < count:
            cute.copy(load_v, load_v.partition_S(s_v[(None, None, s)]), load_v.retile(v_next))
            cute.arch.mbarrier_wait(bars + s, phase)
        warpgroup.wait_group(0)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(bars + STAGES + used)
    if cutlass.const_expr(scan):
        if needed != 0:
            dst = mma_kr.partition_C(cute.make_tensor(pointer(Float32, carry + Int64(slab) * (ROWS * DIM * 4)), l_carry))
            cute.autovec_copy(S, dst)
    else:
        if count > warm:
            left = length32 - (count - 1) * CHUNK
            o_prev.store(O.load().to(io))
            cute.copy(store_o, store_o.retile(o_prev), store_o.partition_D(s_out))
            cute.arch.sync_warp()
            cute.autovec_copy(s_rows, o_rows)
            for j in cutlass.range_constexpr(2):
                if token + 16 * j < left:
                    cute.autovec_copy(o_rows[(None, j)], cute.make_tensor(pointer(io, g_out + j * out_16), cute.make_layout(8)))
        if segment == segments - 1:
            slot = load_index(write_index, sequence, (modes >> 4) & 3, sequence)
            if slot >= 0 and slot < out_slots and slot != null_slot:
                if segments > 1:
                    read = Uint32(0)
                    while read == 0:
                        read = load_acquire(started)
                address = state_out + (slot * out_slot + Int64(head) * out_state_h + half_offset) * (state_dtype.width // 8)
                dst = mma_kr.partition_C(cute.make_tensor(pointer(state_dtype, address), l_state))
                stored = cute.make_rmem_tensor(S.layout, state_dtype)
                stored.store(S.load().to(state_dtype))
                cute.autovec_copy(stored, dst)
    # See above: the launch counts as finished when what went before it is.
    if block == 0:
        if cutlass.const_expr(scan):
            cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()


def assemble(ptx, registers, ptxas, target):
    """The cubin of `ptx` with a cap on registers. The DSL has no such cap, and without it ptxas takes a few more than the
    SM's quarter has beside two prep blocks: then the two kernels do not run on an SM at the same time."""
    capped, entries = re.subn(r"^(\.reqntid )", rf".maxnreg {registers}\n\1", ptx, flags=re.M)
    if entries != 1:
        raise ValueError(f"expected one .reqntid in the PTX, found {entries}")
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder, "state.ptx"), Path(folder, "state.cubin")
        source.write_text(capped)
        run = subprocess.run([ptxas, f"-arch={target}", "-O3", "-v", str(source), "-o", str(cubin)], capture_output=True, text=True)
        if run.returncode or "C75" in run.stderr:  # C75xx: wgmma serialised or waits injected
            raise RuntimeError(run.stderr)
        return cubin.read_bytes(), run.stderr


def compile_state(io, state, layout, ptxas, scan=False, target="sm_90a"):
    """One kernel: cubin, entry symbol, block, dynamic shared memory and the assembler's report. io: bf16, fp16; state: fp32,
    bf16; layout: vk, kv. scan: the form without outputs. ptxas: path of the assembler."""

    @cute.jit
    def host(value: Int64, stream: driver.CUstream):
        # Values do not matter: only the code is kept. They are run-time values so that nothing of them is compiled in.
        arguments = [TYPES[kind](value) for _, kind in PARAMS]
        kda_state(*arguments, DTYPES[io], DTYPES[state], layout, scan).launch(
            grid=(1, 1, 1), block=(THREADS, 1, 1), smem=SMEM_BYTES, stream=stream, preferred_smem_carveout=0
        )

    compiled = cute.compile(host, Int64(0), make_fake_stream(), options=f"--gpu-arch {target} --keep-cubin --keep-ptx")
    (entry,) = re.findall(r"\.entry\s+(\w+)", compiled.__ptx__)
    cubin, report = assemble(compiled.__ptx__, REGISTERS, ptxas, target)
    return dict(cubin=cubin, entry=entry, block=(THREADS, 1, 1), max_dynamic_smem=SMEM_BYTES, report=report)
