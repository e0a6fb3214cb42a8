"""Where a lane finds its row of the record's matrices for ldmatrix (.x4), in bytes: the mma.sync loop's B operands.

Plain integer arithmetic, for the kernel's Int32 as for NumPy arrays: tests/numerics/test_state_operands.py evaluates these same functions for
every lane on an image of a record and compares the products of the fragments with the products of the matrices.

Lanes 8 m to 8 m + 7 point at the rows of matrix m. Matrices 0 and 1 are k values 0 to 7 and 8 to 15 of the operand's first 8
columns, 2 and 3 those of the next 8: the four registers are the B fragments of two m16n8k16 in a row. The swizzles are those
of RECORD.md: with rows of 128 bytes, bits 4 to 6 are the unit of 16 bytes xor the row; a step along the row then is one xor
with a constant, and everything else is added.
"""


def _row(lane):
    return lane & 7


def _matrix(lane):
    return lane >> 3


def tokens_by_channels(lane):
    """-Kd, Qd (K-major, 128-byte swizzle) as (column: token, k: channel); also v as (column: token, value row)."""
    row, matrix = _row(lane), _matrix(lane)
    return ((matrix >> 1) << 10) + (row << 7) + (((matrix & 1) ^ row) << 4)


def channels_by_tokens(lane):
    """Kr (MN-major, 128-byte swizzle), by ldmatrix.trans, as (column: channel, k: token)."""
    row, matrix = _row(lane), _matrix(lane)
    return ((matrix & 1) << 11) + (row << 7) + (((matrix >> 1) ^ row) << 4)


def queries_by_keys(lane):
    """P, T (K-major, 64-byte swizzle) as (column: query, k: key)."""
    row, matrix = _row(lane), _matrix(lane)
    return ((matrix >> 1) << 9) + (row << 6) + (((matrix & 1) ^ (row >> 1)) << 4)


# A step of 16 in k, and of 16 columns: (what is xored to the lane's address, what is added).


def tokens_by_channels_step(k, columns):
    return (k % 4) << 5, k // 4 * 4096 + columns * 2048


def channels_by_tokens_step(k, columns):
    return (columns % 4) << 5, columns // 4 * 1024 + k * 4096


def queries_by_keys_step(k, columns):
    return k << 5, columns * 1024
