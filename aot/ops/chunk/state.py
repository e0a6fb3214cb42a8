"""KDA prefill, second kernel (CuTe DSL): records, v, initial state -> out, final state.

A block owns 64 value rows of one (sequence, value head). S^T (value row, key channel) stays in the float32 accumulators of
four warps from the first chunk to the last; per chunk of 32 tokens

    R = V^T - S^T Kd^T      U = R T^T      O^T = S^T Qd^T + U P^T      S^T <- S^T diag(2^G_C) + U Kr

with S, R and U as register operands and the record's matrices as shared-memory operands. Warp 0 also waits for the prep
kernel's flags and brings records by one bulk copy each, one or two chunks ahead; every warp brings its own 16 columns of v by
16-byte copies that leave out tokens that do not exist. A fifth warp for that would cost the residency: the four quarters of
an SM have 512 registers a lane each, of which two prep blocks take 256, so a quarter holds one state warp and not two.

With few heads a sequence is cut into segments (intra-card context parallelism). Where the last chunks before a segment forget
what came before them (record.h: kForgotten; the prep kernel proves it chunk by chunk), the segment starts from them, with S = 0
and without outputs. Otherwise it starts from the exact state: the `scan` form of the kernel runs the segment before without
outputs, from S = 0 with the tokens' values, which gives B, and from S = I without them, which gives M^T; segment 0 starts from
the initial state and a segment that may start from its warm-up chunks from those, and then B is the state after it.
kda_carry.cu turns the other B into the state after the segment, S_{s+1} = S_s M_s^T + B_s (all transposed). Or (chained) there is no
scan, and a segment waits for the state that the block of the segment before hands on: no parallelism within a chain where nothing is
forgotten, but no second wave of whole chains either.

All three kernels decide by the same flags. A scan block that has nothing to do leaves at once, so that the main form, which
waits for it by programmatic launch, starts while the prep kernel still runs. Then nobody has waited for the prep kernel when
the main form ends: block 0 of each kernel stays until the kernel before it is complete.

The loop over the chunks has two forms with the same registers, by wgmma (state_loop_wgmma.py) and by mma.sync
(state_loop_mma.py); everything before and after it is here.
"""

import re
import subprocess
import tempfile
from pathlib import Path

import cutlass
import cutlass.cute as cute
import cutlass.memory
from cuda.bindings import driver
from cutlass import Float32, Int32, Int64, Uint32
from cutlass.cute.nvgpu import warp, warpgroup
from cutlass.cute.runtime import make_fake_stream

from aot.common.dsl import load_index
from aot.ops.chunk import state_loop_mma, state_loop_wgmma
from aot.ops.chunk.state_parts import (
    CHUNK,
    DIM,
    DTYPES,
    OUT_PITCH,
    PARAMS,
    REC_BYTES,
    REGISTERS,
    ROWS,
    STAGE_BYTES,
    STAGE_V,
    THREADS,
    TYPES,
    Checkpoints,
    Loop,
    await_record,
    bring_record,
    bring_values,
    load_acquire,
    pointer,
    smem_bytes,
    staged,
    store_release,
    store_state,
    warm_chunks,
)  # fmt: skip

LOOPS = {"wgmma": state_loop_wgmma, "mma": state_loop_mma}


@cute.kernel
def kda_state(
    records: Int64, flags: Int64, carry: Int64, v: Int64, out: Int64, cu_seqlens: Int64, state_in: Int64, state_out: Int64,
    read_index: Int64, write_index: Int64, v_b: Int64, v_t: Int64, v_h: Int64, out_b: Int64, out_t: Int64, out_h: Int64,
    in_slot: Int64, in_h: Int64, out_slot: Int64, out_state_h: Int64, in_slots: Int64, out_slots: Int64, null_slot: Int64,
    tokens: Int64, hv: Int32, head_group: Int32, sequences: Int32, chunks: Int32, segments: Int32, checkpoints: Int64, checkpoint_index: Int64,
    checkpoint_slot: Int64, checkpoint_h: Int64, checkpoint_slots: Int64, checkpoint_columns: Int64, checkpoint_chunks: Int64, modes: Int32,
    io: cutlass.Constexpr, state_dtype: cutlass.Constexpr, layout: cutlass.Constexpr, scan: cutlass.Constexpr,
    form: cutlass.Constexpr, depth: cutlass.Constexpr, checkpointed: cutlass.Constexpr,
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
    number = sequence * hv + head
    started = flags + ((Int64(chunks) * hv + number * 2) * 4 + half * 4)
    chained = (modes >> 8) & 1
    # This segment's word of those that follow; two a segment
    handed = flags + ((Int64(chunks) * hv + Int64(sequences) * hv * 2 + (number * segments + segment) * 2) * 4 + half * 4)
    flags += (Int64(head) * Int64(chunks) + first_chunk) * 4
    flags_of_sequence = flags
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
    # The segment's B (slot 0) and M (slot 1), both [128,128] float32, row = value or key row of S^T. Chained: the state after it alone
    segment_bytes = Int64(DIM * DIM * 4) * (2 - chained)
    carry += (number * Int64(segments) + Int64(segment)) * segment_bytes

    smem = cutlass.memory.SmemAllocator()
    stages = smem.allocate(depth * STAGE_BYTES, 1024)
    s_out = smem.allocate_tensor(io, cute.make_layout(((16, 4), CHUNK), stride=((1, CHUNK * OUT_PITCH), OUT_PITCH)), byte_alignment=128)
    bars = smem.allocate_array(Int64, 2 * depth)  # full: the bulk copy; empty: the 4 warps
    s_v = staged(stages, STAGE_V, io, warpgroup.SmemLayoutAtomKind.MN_SW128, (ROWS, CHUNK), depth)
    if warp_id == 0:
        with cute.arch.elect_one():
            for i in cutlass.range_constexpr(depth):
                cute.arch.mbarrier_init(bars + i, 1)
                cute.arch.mbarrier_init(bars + depth + i, 4)
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
    for c in cutlass.range_constexpr(depth - 1):
        if c < count:
            bring_values(c, v_to, v, v_16, v_left)
            if warp_id == 0:
                ready = await_record(ready, Int32(c), count, flags)
                bring_record(Int32(c), Int32(1), stages, bars, records, depth, form)
        else:
            cute.arch.cp_async_commit_group()  # the loop counts groups
        v += 2 * v_16
        v_left -= CHUNK
        records += record_step
    loop = LOOPS[form]
    tokens_mma, update_mma = loop.tiled_mmas()
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
        if chained != 0:
            after = Uint32(0)
            while after == 0:
                after = load_acquire(handed - 8)
        else:
            # Complete, with everything that went before it, once the carry kernel is.
            cute.arch.griddepcontrol_wait()
        src = mma_kr.partition_C(cute.make_tensor(pointer(Float32, carry - segment_bytes + Int64(half) * (ROWS * DIM * 4)), l_carry))
        cute.autovec_copy(src, S)  # the state after the segment before

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
    if count > 0:
        cute.arch.mbarrier_wait(bars, 0)
        cute.arch.cp_async_wait_group(depth - 2)
        cute.arch.sync_warp()
        cute.copy(load_v, load_v.partition_S(s_v[(None, None, 0)]), load_v.retile(v_next))
    stores = None
    if cutlass.const_expr(checkpointed):
        before = Int64(skip - warm)  # chunks of the sequence before the block's first
        size = state_dtype.width // 8
        stores = Checkpoints(
            checkpoints + (Int64(head) * checkpoint_h + half_offset) * size, checkpoint_slot * size, checkpoint_slots, checkpoint_index,
            (modes >> 6) & 3, sequence * checkpoint_columns, before // checkpoint_chunks, checkpoint_columns, checkpoint_chunks,
            checkpoint_chunks - before % checkpoint_chunks, null_slot, length32, state_dtype, layout,
        )  # fmt: skip
    x = Loop(
        count, warm, ready, flags, records, record_step, v, v_16, v_left, v_to, g_out, out_16, warp_id, lane, modes,
        stages, bars, s_v, s_out, s_rows, load_v, store_o, S, R, U, O, v_next, o_prev, o_rows, stores,
    )  # fmt: skip
    g_out = loop.run(x, tokens_mma, update_mma, thread, io, scan, depth)
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
        if chained != 0 and segment < segments - 1:
            if warm_chunks((segment + 1) * per_segment, in_sequence, flags_of_sequence) == 0:
                dst = mma_kr.partition_C(cute.make_tensor(pointer(Float32, carry + Int64(half) * (ROWS * DIM * 4)), l_carry))
                cute.autovec_copy(S, dst)
                cute.arch.sync_threads()
                if thread == 0:
                    store_release(handed, Uint32(1))
        if segment == segments - 1:
            slot = load_index(write_index, sequence, (modes >> 4) & 3, sequence)
            if slot >= 0 and slot < out_slots and slot != null_slot:
                if segments > 1:
                    read = Uint32(0)
                    while read == 0:
                        read = load_acquire(started)
                address = state_out + (slot * out_slot + Int64(head) * out_state_h + half_offset) * (state_dtype.width // 8)
                store_state(S, mma_kr, address, state_dtype, layout)
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


def compile_state(io, state, layout, ptxas, scan=False, target="sm_90a", form="wgmma", depth=3, checkpointed=False):
    """One kernel: cubin, entry symbol, block, dynamic shared memory, the assembler's report and its input. io: bf16, fp16; state: fp32,
    bf16; layout: vk, kv. scan: the form without outputs; checkpointed: that with checkpoints. ptxas: path of the assembler. form: of LOOPS; depth: stages of records."""
    if depth < 2 or form == "wgmma" and depth != 3:
        raise ValueError(f"the loop by {form} has no order for {depth} stages; wgmma has 3, mma 2 or more")
    smem = smem_bytes(depth)

    @cute.jit
    def host(value: Int64, stream: driver.CUstream):
        # Values do not matter: only the code is kept. They are run-time values so that nothing of them is compiled in.
        arguments = [TYPES[kind](value) for _, kind in PARAMS]
        kda_state(*arguments, DTYPES[io], DTYPES[state], layout, scan, form, depth, checkpointed).launch(
            grid=(1, 1, 1), block=(THREADS, 1, 1), smem=smem, stream=stream, preferred_smem_carveout=0
        )

    compiled = cute.compile(host, Int64(0), make_fake_stream(), options=f"--gpu-arch {target} --keep-cubin --keep-ptx")
    (entry,) = re.findall(r"\.entry\s+(\w+)", compiled.__ptx__)
    cubin, report = assemble(compiled.__ptx__, REGISTERS, ptxas, target)
    return dict(cubin=cubin, entry=entry, block=(THREADS, 1, 1), max_dynamic_smem=smem, report=report, ptx=compiled.__ptx__)
