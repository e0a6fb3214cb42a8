"""Decode kernel for states [slots,HV,V,K] (K contiguous): one block owns a group of state rows of one (row n, value head).

A state row (the K channels of one value dimension) lies over the lanes of a warp in 16-byte pieces, so that a warp reads and
writes whole 512-byte runs. With S' = diag(exp g) S, both dot products of a row use S':
    d = S'^T k, p = S'^T q^,  u = beta (v - d),  S = S' + k u^T,  o = p + u (k . q^)
so one pass over registers does both and their sums are exchanged together.

Blocks are small (32 rows, 16 KB of float32 state at K = 128), follow memory order and run few at a time: see README.md for
what else was tried and what it gave.

grid (V / (WARPS * rows_per_step * steps), HV, rows); block WARPS warps.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from aot.ops.decode import operands, ptx

WARPS = 4


class Shape:
    """How K channels lie over a warp. elements: of a 16-byte piece; lanes: that share a state row; pieces: of a row in one
    lane; rows: of one step that a lane has pieces of; rows_per_load: that one load instruction of the warp covers."""

    def __init__(self, config):
        self.elements = 16 // config.state_bytes
        self.lanes = min(32, config.k // self.elements)
        self.pieces = config.k // (self.lanes * self.elements)
        self.channels = self.elements * self.pieces  # of one lane
        self.rows = config.loads // self.pieces
        self.rows_per_load = 32 // self.lanes
        self.rows_per_step = self.rows * self.rows_per_load
        self.row_bytes = config.k * config.state_bytes
        # After the warp sum, each of `sums` values of a group of lanes stands in `copies` lanes.
        self.sums = self.rows * (2 if config.delta else 1)
        self.copies = self.lanes // self.sums


@cute.jit
def load_state(config: cutlass.Constexpr, shape: cutlass.Constexpr, address: Int64, reads):
    """The lane's pieces of one step, as words [row][piece][word]; zero where the row starts from nothing."""
    words = cute.make_rmem_tensor((shape.rows * shape.pieces * 4,), Uint32)
    if reads:
        for i in cutlass.range_constexpr(shape.rows * shape.pieces):
            row, piece = i // shape.pieces, i % shape.pieces
            part = ptx.load_words(address + (row * shape.rows_per_load * shape.row_bytes + piece * shape.lanes * 16), 4)
            for j in cutlass.range_constexpr(4):
                words[i * 4 + j] = part[j]
    else:
        words.fill(0)
    return words


@cute.jit
def store_state(config: cutlass.Constexpr, shape: cutlass.Constexpr, address: Int64, s: cute.Tensor, writes):
    if writes:
        for i in cutlass.range_constexpr(shape.rows * shape.pieces):
            row, piece = i // shape.pieces, i % shape.pieces
            part = ptx.pack([s[i * shape.elements + j] for j in range(shape.elements)], config.state_code)
            ptx.store_words(address + (row * shape.rows_per_load * shape.row_bytes + piece * shape.lanes * 16), part)


def update_rows(config, shape, lane, words, v, x):
    """One step: returns the new state of the lane's pieces and the output of the value row that the lane owns.
    v: of that row; x: k, q (scaled), decay by channel, kq = k . q, beta."""
    s = cute.make_rmem_tensor((shape.rows * shape.channels,), Float32)
    sums = []
    for i in range(shape.rows):
        d, p = Float32(0.0), Float32(0.0)
        values = ptx.unpack([words[i * shape.pieces * 4 + j] for j in range(shape.pieces * 4)], config.state_code)
        for c in range(shape.channels):
            decayed = values[c] * x.decay[c]
            s[i * shape.channels + c] = decayed
            d = ptx.fma(decayed, x.k[c], d) if config.delta else d
            p = ptx.fma(decayed, x.q[c], p)
        sums += [d, p] if config.delta else [p]

    total = ptx.sum_transposed(sums, lane, shape.lanes)
    per_row = 2 if config.delta else 1
    first = lane - lane % shape.lanes
    u = x.beta * (v - total) if config.delta else v  # counts in the lanes of d only, from where it is handed out
    us = [cute.arch.shuffle_sync(u, first + i * per_row * shape.copies) for i in range(shape.rows)]
    if config.delta:
        u = cute.arch.shuffle_sync(u, lane & ~shape.copies)
    for i in range(shape.rows):
        for c in range(shape.channels):
            s[i * shape.channels + c] = ptx.fma(us[i], x.k[c], s[i * shape.channels + c])
    return s, ptx.fma(u, x.kq, total)


@cute.jit
def row_head(config: cutlass.Constexpr, p: cutlass.Constexpr, shared: cute.Tensor, row: Int64, head: Int64, tile: Int32, thread: Int32):
    """One block's state rows of one row and head."""
    shape = Shape(config)
    io, st = config.io_bytes, config.state_bytes
    lane, warp = thread % 32, cute.arch.make_warp_uniform(thread // 32)
    read, write, reads, writes, live = operands.slots(p, row)
    first = (tile * WARPS + warp) * p.steps * shape.rows_per_step

    # The value row whose sums end in this lane, and whether this is the lane of those that writes its output.
    index = lane % shape.lanes // shape.copies
    owner = lane % shape.copies == 0
    if cutlass.const_expr(config.delta):
        owner = owner & (index % 2 == 1)
        index = index // 2
    value_row = first + index * shape.rows_per_load + lane // shape.lanes
    v_address = p.v + (row * p.v_n + head * p.v_h + value_row) * io
    o_address = p.out + (row * p.out_n + head * p.out_h + value_row) * io

    if live:
        # All first loads, then all conversions: see ptx.
        piece = (Int64(first + lane // shape.lanes) * config.k + lane % shape.lanes * shape.elements) * st
        in_address = p.state_in + (read * p.in_slot + head * p.in_h) * st + piece
        out_address = p.state_out + (write * p.out_slot + head * p.out_state_h) * st + piece
        raw = operands.load_operands(config, p, row, head, thread)
        v_word = ptx.load_scalar(v_address, Int64(0), config.io_code)
        words = load_state(config, shape, in_address, reads)
        operands.loads_issued()
        x = operands.share_operands(config, p, raw, shared, thread)
        x.k, x.q, decay = [], [], []
        for c in cutlass.range_constexpr(shape.pieces):
            at = (c * shape.lanes + lane % shape.lanes) * shape.elements
            k, q, a = operands.read_channels(config, shared, x, at, shape.elements)
            x.k, x.q, decay = x.k + k, x.q + q, decay + a
        x.decay = decay

        step_bytes = shape.rows_per_step * shape.row_bytes
        for step in cutlass.range(p.steps, unroll=1):
            s, o = update_rows(config, shape, lane, words, ptx.to_float(v_word, config.io_code), x)
            store_state(config, shape, out_address, s, writes)
            if owner:
                ptx.store_scalar(o_address, o, config.io_code)
            more = step + 1 < p.steps
            in_address, out_address = in_address + step_bytes, out_address + step_bytes
            v_address, o_address = v_address + shape.rows_per_step * io, o_address + shape.rows_per_step * io
            words.store(load_state(config, shape, in_address, reads & more).load())
            v_word = ptx.load_scalar(v_address, Int64(0), cutlass.select_(more, Int32(config.io_code), Int32(ptx.ABSENT)))
    else:
        for _ in cutlass.range(p.steps, unroll=1):  # a padded row: zeros, and no state is touched
            if owner:
                ptx.store_scalar(o_address, Float32(0.0), config.io_code)
            o_address = o_address + shape.rows_per_step * io
