"""The mma.sync loop's operands without a GPU: every lane's ldmatrix address on an image of a record, and the products of the
fragments that come of it.

The addresses are the kernel's own (state_operands.py evaluated for 32 lanes), the image is written by dev/records.py, which
states the layout on its own, and ldmatrix and mma below are written from the PTX manual's fragment figures.
"""

import numpy as np
import pytest

from aot.ops.chunk import state_operands as at
from aot.ops.chunk.dev import records

pytestmark = pytest.mark.filterwarnings("ignore:This static loop has")  # of the trace over 128 threads
LANES = np.arange(32)
CHUNK, DIM, ROWS = 32, 128, 64
KD, QD, KR, P, T = 0, 8192, 16384, 24576, 26624  # RECORD.md


# ------------------------------------------------------------------------------------------ the instructions, from the PTX manual


def ldmatrix_x4(shared, addresses, transpose):
    """[register, lane, half] of 16-bit values: matrix m's row r is the 16 bytes at the address of lane 8 m + r."""
    assert (addresses % 16 == 0).all() and (addresses >= 0).all() and (addresses + 16 <= shared.size * 2).all()
    tiles = shared[addresses[:, None] // 2 + np.arange(8)].reshape(4, 8, 8)
    row, pair = LANES // 4, 2 * (LANES % 4)
    if transpose:
        return np.stack([tiles[:, pair, row], tiles[:, pair + 1, row]], -1)
    return np.stack([tiles[:, row, pair], tiles[:, row, pair + 1]], -1)


def mma(c, a, b):
    """m16n8k16: c [lane, 4], a [lane, 8], b [lane, 4] of one warp; float64, so that only the addressing is compared."""
    group, pair = LANES // 4, 2 * (LANES % 4)
    i = np.arange(8)
    A, B, C = np.full((16, 16), np.nan), np.full((16, 8), np.nan), np.full((16, 8), np.nan)
    a_row, a_column = group[:, None] + 8 * (i // 2 % 2), pair[:, None] + i % 2 + 8 * (i // 4)
    b_row, b_column = pair[:, None] + i[:4] % 2 + 8 * (i[:4] // 2), np.repeat(group[:, None], 4, 1)
    c_row, c_column = group[:, None] + 8 * (i[:4] // 2), pair[:, None] + i[:4] % 2
    A[a_row, a_column], B[b_row, b_column], C[c_row, c_column] = a, b, c
    assert not (np.isnan(A).any() or np.isnan(B).any() or np.isnan(C).any())
    return (C + A @ B)[c_row, c_column]


# ------------------------------------------------------------------------------------------------ registers of a block of 4 warps


def accumulator(columns):
    """(row, column) of [warp, lane, value]: value e of 8-column tile n is 4 n + e, as the kernel counts S, R, U and O."""
    warp, lane, value = np.ogrid[:4, :32, : columns // 2]
    row = 16 * warp + lane // 4 + 8 * (value // 2 % 2)
    return np.broadcast_arrays(row, value // 4 * 8 + 2 * (lane % 4) + value % 2)


def distribute(matrix):
    return matrix[accumulator(matrix.shape[1])]


def collect(registers):
    matrix = np.full((ROWS, registers.shape[2] * 2), np.nan)
    matrix[accumulator(matrix.shape[1])] = registers
    return matrix


def product(acc, operand, shared, matrix, lane_offset, step, steps, transpose=False):
    """As `product` of state_loop_mma.py, for all steps of k and all columns. operand: an accumulator, relabelled."""
    acc = acc.copy()
    for warp in range(4):
        for k in range(steps):
            for columns in range(acc.shape[2] // 8):
                flip, add = step(k, columns)
                b = ldmatrix_x4(shared, matrix + (lane_offset ^ flip) + add, transpose)
                for j in range(2):
                    tile = slice(4 * (2 * columns + j), 4 * (2 * columns + j) + 4)
                    fragment = np.concatenate([b[2 * j], b[2 * j + 1]], -1)
                    acc[warp, :, tile] = mma(acc[warp, :, tile], operand[warp, :, 8 * k : 8 * k + 8], fragment)
    return acc


def image(rng):
    """A record of small integers, in the place of bf16: [bytes / 2] float64, NaN where nothing lies; and its matrices."""
    shared = np.full(records.RECORD_BYTES // 2, np.nan)
    draw = lambda *shape: rng.integers(-8, 9, shape).astype(float)
    parts = dict(Kd=draw(CHUNK, DIM), Qd=draw(CHUNK, DIM), Kr=draw(CHUNK, DIM), P=draw(CHUNK, CHUNK), T=draw(CHUNK, CHUNK))
    for at_byte, name, places in ((KD, "Kd", records.K_MAJOR), (QD, "Qd", records.K_MAJOR), (KR, "Kr", records.MN_MAJOR), (P, "P", records.SCORE), (T, "T", records.SCORE)):
        shared[at_byte // 2 + places] = -parts[name] if name == "Kd" else parts[name]
    return shared, parts


def test_a_chunk_of_the_recurrence():
    """R, U, O and S of one chunk through fragments and swizzled addresses, exactly: the values are integers."""
    rng = np.random.default_rng(0)
    shared, m = image(rng)
    S, V = rng.integers(-4, 5, (ROWS, DIM)).astype(float), rng.integers(-4, 5, (ROWS, CHUNK)).astype(float)
    decay = rng.integers(1, 4, DIM).astype(float)
    kd, kr, score = at.tokens_by_channels(LANES), at.channels_by_tokens(LANES), at.queries_by_keys(LANES)

    s = distribute(S)
    r = product(distribute(V), s, shared, KD, kd, at.tokens_by_channels_step, DIM // 16)
    o = product(np.zeros((4, 32, 16)), s, shared, QD, kd, at.tokens_by_channels_step, DIM // 16)
    stored = np.empty(DIM)
    stored[records.DECAY] = decay
    for i in range(DIM // 16):  # as the kernel: 4 floats at lane % 4 * 16 + i * 64 bytes
        four = stored[i * 16 + LANES[:, None] % 4 * 4 + np.arange(4)]
        for e in range(8):
            s[:, :, 8 * i + e] *= four[:, e // 4 * 2 + e % 2]
    u = product(np.zeros((4, 32, 16)), r, shared, T, score, at.queries_by_keys_step, CHUNK // 16)
    s = product(s, u, shared, KR, kr, at.channels_by_tokens_step, CHUNK // 16, transpose=True)
    o = product(o, u, shared, P, score, at.queries_by_keys_step, CHUNK // 16)

    R = V - S @ m["Kd"].T
    U = R @ m["T"].T
    assert np.array_equal(collect(r), R) and np.array_equal(collect(u), U)
    assert np.array_equal(collect(o), S @ m["Qd"].T + U @ m["P"].T)
    assert np.array_equal(collect(s), S * decay + U @ m["Kr"])


@pytest.mark.parametrize("lane_offset, step, columns, steps", [
    (at.tokens_by_channels, at.tokens_by_channels_step, CHUNK, DIM), (at.channels_by_tokens, at.channels_by_tokens_step, DIM, CHUNK),
    (at.queries_by_keys, at.queries_by_keys_step, CHUNK, CHUNK),
])  # fmt: skip
def test_reads_cover_the_matrix_once_without_bank_conflicts(lane_offset, step, columns, steps):
    seen = []
    for k in range(steps // 16):
        for n in range(columns // 16):
            flip, add = step(k, n)
            addresses = (lane_offset(LANES) ^ flip) + add
            assert all(len(set(phase // 16 % 8)) == 8 for phase in addresses.reshape(4, 8)), "8 rows of a matrix in 8 different 16-byte banks"
            seen += addresses.tolist()
    assert sorted(seen) == list(range(0, columns * steps * 2, 16))


# --------------------------------------------------------------------- what the loop takes from the DSL: v, outputs, states


@pytest.fixture(scope="module")
def fragments():
    """Per thread, the coordinates that the kernel's partitions and tiled copies give it: plain numbers, no device needed."""
    pytest.importorskip("cutlass", reason="needs the CuTe DSL")
    import cutlass
    import cutlass.cute as cute
    from cutlass import BFloat16
    from cutlass.cute.nvgpu import warp

    from aot.ops.chunk import state_loop_mma

    found = {}

    @cute.jit
    def trace():
        tokens, update = state_loop_mma.tiled_mmas()
        read = cute.make_tiled_copy_C(cute.make_copy_atom(warp.LdMatrix8x8x16bOp(transpose=True, num_matrices=4), BFloat16), tokens)
        write = cute.make_tiled_copy_C(cute.make_copy_atom(warp.StMatrix8x8x16bOp(transpose=True, num_matrices=4), BFloat16), tokens)
        for thread in cutlass.range_constexpr(128):
            for name, mma, columns in (("tokens", tokens, CHUNK), ("state", update, DIM)):
                c = mma.get_slice(thread).partition_C(cute.make_identity_tensor((ROWS, columns)))
                found.setdefault(name, []).append([c[i] for i in range(cute.size(c))])
            rows = cute.make_identity_tensor((ROWS, CHUNK))
            source, target = read.get_slice(thread).partition_S(rows), write.get_slice(thread).partition_D(rows)
            found.setdefault("read", []).append([source[i] for i in range(cute.size(source))])
            found.setdefault("write", []).append([target[i] for i in range(cute.size(target))])
            acc = tokens.get_slice(thread).partition_C(rows)
            for name, copy in (("read registers", read), ("write registers", write)):
                own = copy.get_slice(thread).retile(acc)
                found.setdefault(name, []).append([own[i] for i in range(cute.size(own))])

    cute.compile(trace)
    return {name: np.array(values) for name, values in found.items()}


@pytest.mark.parametrize("name, columns", [("tokens", CHUNK), ("state", DIM)])
def test_accumulators_are_wgmmas(fragments, name, columns):
    """Thread, value -> row and column as of m64nNk16: the order of the record's decay, of states and of outputs rests on it."""
    row, column = accumulator(columns)
    assert np.array_equal(fragments[name], np.stack([row, column], -1).reshape(128, columns // 2, 2))


@pytest.mark.parametrize("name", ["read", "write"])
def test_values_and_outputs_move_to_the_threads_that_hold_them(fragments, name):
    """ldmatrix.trans and stmatrix.trans, x4: lane 8 m + r has the address of row r of matrix m, here a token's 8 value rows, and
    register m of lane l is values 2 (l % 4), 2 (l % 4) + 1 of the rows in column l / 4."""
    addresses = fragments[name].reshape(4, 4, 8, 2, 8, 2)  # warp, matrix, row of it, half of the chunk, 8 value rows, coordinate
    registers = fragments[f"{name} registers"].reshape(4, 32, 2, 4, 2, 2)  # warp, lane, half, matrix, its two values, coordinate
    for lane in LANES:
        for value in range(2):
            want = addresses[:, :, 2 * (lane % 4) + value, :, lane // 4].transpose(0, 2, 1, 3)
            assert np.array_equal(registers[:, lane, :, :, value], want)
    assert len({tuple(x) for x in addresses.reshape(-1, 2)}) == ROWS * CHUNK
