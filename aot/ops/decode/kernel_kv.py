"""Decode kernel for states [slots,HV,K,V] (V contiguous): one block owns a tile of value columns of one (row n, value head).

The sums over K run down the columns here. A tile is 8 pieces of 16 bytes wide, one full 128-byte line of each of the K state
rows, and a thread holds one piece of K/16 of them: sums go over its own rows, then over the 4 threads of a warp that share
its columns, then over the warps through 2 KB of shared memory. The maths is that of kernel_vk.

Every warp makes the row's k, q and decay for itself, 4 channels a lane, and hands them round with shuffles: channel
4 * L + e stands in lane L, so a thread's rows are chosen with e known at compile time.

grid (rows, HV, V / columns); block `warps` warps.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from aot.ops.decode import operands, ptx

PIECES = 8  # of 16 bytes, side by side in a tile


class Shape:
    def __init__(self, config):
        self.warps = 8 if config.k == 256 else 4  # 16 rows of 8 elements in a thread would take more registers than there are
        self.elements = 16 // config.state_bytes
        self.columns = PIECES * self.elements
        self.rows = config.k // (self.warps * 32 // PIECES)  # of one thread
        self.lanes = min(32, config.k // 4)  # that hold different channels
        self.runs = config.k // (self.lanes * 4)  # of 4 channels in one lane

    def source(self, i, warp, lane):
        """Where row i of a thread finds its operands: run, lane and element; the row itself is the channel there."""
        quads = self.rows // 4 // self.runs  # channel quads of one run that a thread needs
        run, quad, element = i // 4 // quads, i // 4 % quads, i % 4
        return run, (warp * 4 + lane // PIECES) * quads + quad, element


@cute.jit
def load_state(config: cutlass.Constexpr, shape: cutlass.Constexpr, address: Int64, row_bytes: Int64, rows: cutlass.Constexpr, reads):
    words = cute.make_rmem_tensor((shape.rows * 4,), Uint32)
    if reads:
        for i in cutlass.range_constexpr(shape.rows):
            part = ptx.load_words(address + rows[i] * row_bytes, 4, config.load_hint)
            for j in cutlass.range_constexpr(4):
                words[i * 4 + j] = part[j]
    else:
        words.fill(0)
    return words


@cute.jit
def store_state(
    config: cutlass.Constexpr, shape: cutlass.Constexpr, address: Int64, row_bytes: Int64, rows: cutlass.Constexpr, s: cute.Tensor, writes
):  # fmt: skip
    if writes:
        for i in cutlass.range_constexpr(shape.rows):
            part = ptx.pack([s[i * shape.elements + j] for j in range(shape.elements)], config.state_code)
            ptx.store_words(address + rows[i] * row_bytes, part, config.store_hint)


@cute.jit
def store_output(config: cutlass.Constexpr, wide: Int32, address: Int64, values: cutlass.Constexpr):
    if wide != 0:
        words = ptx.pack(values, config.io_code)
        step = min(len(words), 4)
        for i in cutlass.range_constexpr(len(words) // step):
            ptx.store_words(address + i * step * 4, words[i * step : (i + 1) * step])
    else:
        for i in cutlass.range_constexpr(len(values)):
            ptx.store_scalar(address + i * config.io_bytes, values[i], config.io_code)


def block_sums(shape, shared, sums, warp, lane):
    """Sums of 2 * elements values over the threads of the block that share their columns, in all of them."""
    for offset in (PIECES, 2 * PIECES):
        sums = [value + cute.arch.shuffle_sync_bfly(value, offset) for value in sums]
    piece = lane % PIECES
    width = len(sums)
    slot = cute.make_tensor(shared + (warp * PIECES + piece) * width, cute.make_layout(width))
    part = cute.make_rmem_tensor((width,), Float32)
    for i in range(width):
        part[i] = sums[i]
    write_part(slot, part, lane)
    cute.arch.sync_threads()
    total = [Float32(0.0)] * width
    for w in range(shape.warps):
        other = cute.make_tensor(shared + (w * PIECES + piece) * width, cute.make_layout(width))
        loaded = cute.make_rmem_tensor((width,), Float32)
        cute.autovec_copy(other, loaded)
        total = [t + loaded[i] for i, t in enumerate(total)]
    return total


@cute.jit
def write_part(slot: cute.Tensor, part: cute.Tensor, lane: Int32):
    if lane < PIECES:
        cute.autovec_copy(part, slot)


def update_tile(config, shape, p, shared, slot, place, warp, lane):
    """Updates the tile's columns; returns the outputs of the thread's columns. slot: of operands.slots; place: row, head,
    first column of the thread."""
    read, write, reads, writes = slot
    row, head, column = place
    io, st = config.io_bytes, config.state_bytes
    channels = [run * 128 + lane % shape.lanes * 4 for run in range(shape.runs)]
    raw = operands.load_operands(config, p, row, head, channels, 4)
    v_raw = operands.load_row(config, shape.elements, p.wide, p.v + (row * p.v_n + head * p.v_h + column) * io)
    row_bytes = Int64(p.head_dim_v) * st
    sources = [shape.source(i, warp, lane) for i in range(shape.rows)]
    rows = [Int64(run * 128 + source * 4 + element) for run, source, element in sources]
    in_address = p.state_in + (read * p.in_slot + head * p.in_h + column) * st
    out_address = p.state_out + (write * p.out_slot + head * p.out_state_h + column) * st
    words = load_state(config, shape, in_address, row_bytes, rows, reads)
    cute.arch.sync_warp()  # as in kernel_vk
    x = operands.finish_operands(config, p, raw, 4, lambda value: ptx.sum_lanes(value, shape.lanes))

    k, q, decay = [], [], []
    for run, source, element in sources:
        k.append(cute.arch.shuffle_sync(x.k[run * 4 + element], source))
        q.append(cute.arch.shuffle_sync(x.q[run * 4 + element], source))
        at = x.decay[run * 4 + element]
        decay.append(cute.arch.shuffle_sync(at, source) if config.per_channel else at)

    s = cute.make_rmem_tensor((shape.rows * shape.elements,), Float32)
    d = [Float32(0.0)] * shape.elements
    o = [Float32(0.0)] * shape.elements
    for i in range(shape.rows):
        values = ptx.unpack([words[i * 4 + j] for j in range(4)], config.state_code)
        for j in range(shape.elements):
            decayed = values[j] * decay[i]
            s[i * shape.elements + j] = decayed
            d[j] = ptx.fma(decayed, k[i], d[j]) if config.delta else d[j]
            o[j] = ptx.fma(decayed, q[i], o[j])
    total = block_sums(shape, shared, d + o if config.delta else o, warp, lane)
    u = ptx.unpack([v_raw[i] for i in range(shape.elements * io // 4)], config.io_code)
    if config.delta:
        u = [x.beta * (u[j] - total[j]) for j in range(shape.elements)]
    o = [ptx.fma(u[j], x.kq, total[j - shape.elements]) for j in range(shape.elements)]
    for i in range(shape.rows):
        for j in range(shape.elements):
            s[i * shape.elements + j] = ptx.fma(u[j], k[i], s[i * shape.elements + j])
    store_state(config, shape, out_address, row_bytes, rows, s, writes)
    return o


@cute.jit
def row_head(
    config: cutlass.Constexpr, p: cutlass.Constexpr, shared: cutlass.Constexpr, row: Int32, head: Int32, tile: Int32, warp: Int32, lane: Int32
):  # fmt: skip
    """One tile of value columns of one row and head."""
    shape = Shape(config)
    slot = operands.slots(p, Int64(row))
    column = tile * shape.columns + lane % PIECES * shape.elements
    o = cute.make_rmem_tensor((shape.elements,), Float32)
    o.fill(0.0)  # what a padded row gives; its state is not touched
    if slot[2] | slot[3]:
        values = update_tile(config, shape, p, shared, slot, (Int64(row), Int64(head), column), warp, lane)
        for j in cutlass.range_constexpr(len(values)):
            o[j] = values[j]
    if (warp == 0) & (lane < PIECES):
        address = p.out + (Int64(row) * p.out_n + Int64(head) * p.out_h + column) * config.io_bytes
        store_output(config, p.wide, address, [o[j] for j in range(shape.elements)])
