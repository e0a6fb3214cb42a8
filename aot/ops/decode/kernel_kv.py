"""Decode kernel for states [slots,HV,K,V] (V contiguous): one block owns a tile of value columns of one (row n, value head).

The sums over K run down the columns here. A tile is 8 pieces of 16 bytes wide, one full 128-byte line of each of the K state
rows, and a thread holds one piece of each of `rows` consecutive rows: sums go over its own rows, then over the 4 threads of a
warp that share its columns, then over the warps through shared memory. The maths is that of kernel_vk.

grid (V / columns, HV, rows).
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from aot.ops.decode import operands, ptx

PIECES = 8  # of 16 bytes, side by side in a tile


class Shape:
    def __init__(self, config):
        self.warps = config.threads // 32
        self.elements = 16 // config.state_bytes
        self.columns = PIECES * self.elements
        self.rows = config.k * PIECES // config.threads  # of one thread


@cute.jit
def load_state(config: cutlass.Constexpr, shape: cutlass.Constexpr, address: Int64, row_bytes: Int64, reads):
    words = cute.make_rmem_tensor((shape.rows * 4,), Uint32)
    if reads:
        for i in cutlass.range_constexpr(shape.rows):
            part = ptx.load_words(address + i * row_bytes, 4)
            for j in cutlass.range_constexpr(4):
                words[i * 4 + j] = part[j]
    else:
        words.fill(0)
    return words


@cute.jit
def store_state(config: cutlass.Constexpr, shape: cutlass.Constexpr, address: Int64, row_bytes: Int64, s: cute.Tensor, writes):
    if writes:
        for i in cutlass.range_constexpr(shape.rows):
            part = ptx.pack([s[i * shape.elements + j] for j in range(shape.elements)], config.state_code)
            ptx.store_words(address + i * row_bytes, part)


@cute.jit
def write_part(shared: cute.Tensor, at: Int32, values: cutlass.Constexpr, speaks):
    if speaks:
        for i in cutlass.range_constexpr(len(values)):
            shared[at + i] = values[i]


def block_sums(shape, shared, base, sums, warp, lane):
    """Sums of values over the threads of the block that share their columns, in all of them."""
    for offset in (PIECES, 2 * PIECES):
        sums = [value + cute.arch.shuffle_sync_bfly(value, offset) for value in sums]
    width = len(sums)
    write_part(shared, base + (warp * PIECES + lane % PIECES) * width, sums, lane < PIECES)
    cute.arch.sync_threads()
    total = [Float32(0.0)] * width
    for w in range(shape.warps):
        part = operands.read_shared(shared, base + (w * PIECES + lane % PIECES) * width, width)
        total = [t + part[i] for i, t in enumerate(total)]
    return total


def update_tile(config, shape, p, shared, slot, place, thread):
    """Updates the tile's columns; returns the outputs of the thread's columns. slot: of operands.slots; place: row, head,
    first column of the thread."""
    read, write, reads, writes, _ = slot
    row, head, column = place
    io, st = config.io_bytes, config.state_bytes
    lane, warp = thread % 32, cute.arch.make_warp_uniform(thread // 32)
    first = thread // PIECES * shape.rows
    row_bytes = Int64(p.head_dim_v) * st
    inside = first * row_bytes + column * st
    raw = operands.load_operands(config, p, row, head, thread)
    v_base = p.v + (row * p.v_n + head * p.v_h + column) * io
    v_raw = [ptx.load_scalar(v_base, Int64(j), config.io_code) for j in range(shape.elements)]
    words = load_state(config, shape, p.state_in + (read * p.in_slot + head * p.in_h) * st + inside, row_bytes, reads)
    operands.loads_issued()
    x = operands.share_operands(config, p, raw, shared, thread)
    k, q, decay = operands.read_channels(config, shared, x, first, shape.rows)

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
    total = block_sums(shape, shared, operands.Shared(config).size, d + o if config.delta else o, warp, lane)
    u = [ptx.to_float(word, config.io_code) for word in v_raw]
    if config.delta:
        u = [x.beta * (u[j] - total[j]) for j in range(shape.elements)]
    o = [ptx.fma(u[j], x.kq, total[j - shape.elements]) for j in range(shape.elements)]
    for i in range(shape.rows):
        for j in range(shape.elements):
            s[i * shape.elements + j] = ptx.fma(u[j], k[i], s[i * shape.elements + j])
    store_state(config, shape, p.state_out + (write * p.out_slot + head * p.out_state_h) * st + inside, row_bytes, s, writes)
    return o


@cute.jit
def row_head(config: cutlass.Constexpr, p: cutlass.Constexpr, shared: cute.Tensor, row: Int64, head: Int64, tile: Int32, thread: Int32):
    """One tile of value columns of one row and head."""
    shape = Shape(config)
    slot = operands.slots(p, row)
    column = tile * shape.columns + thread % PIECES * shape.elements
    o = cute.make_rmem_tensor((shape.elements,), Float32)
    o.fill(0.0)  # what a padded row gives; its state is not touched
    if slot[4]:
        values = update_tile(config, shape, p, shared, slot, (row, head, column), thread)
        for j in cutlass.range_constexpr(len(values)):
            o[j] = values[j]
    if thread < PIECES:
        address = p.out + (row * p.out_n + head * p.out_h + column) * config.io_bytes
        for j in cutlass.range_constexpr(shape.elements):
            ptx.store_scalar(address + j * config.io_bytes, o[j], config.io_code)
