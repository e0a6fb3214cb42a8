"""The record's byte image, for tests: decode one into float64 matrices. The layout is RECORD.md's; nothing here is shared
with the kernels, so that a test compares two independent statements of it."""
import numpy as np

CHUNK, DIM, RECORD_BYTES = 32, 128, 29184


def bf16_to_f64(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def _swizzle(offset, bits):
    return offset ^ (((offset >> 6) & ((1 << bits) - 1)) << 3)


_t, _c = np.meshgrid(np.arange(CHUNK), np.arange(DIM), indexing="ij")
K_MAJOR = _swizzle(_c // 64 * 2048 + _t * 64 + _c % 64, 3)                               # (token, channel)
MN_MAJOR = _swizzle(_c // 64 * 512 + _c % 64 + _t // 8 * 1024 + _t % 8 * 64, 3)          # (token, channel)
_i, _j = np.meshgrid(np.arange(CHUNK), np.arange(CHUNK), indexing="ij")
SCORE = _swizzle(_i * 32 + _j, 2)                                                        # (query, key)
_ch = np.arange(DIM)
DECAY = _ch // 16 * 16 + _ch % 8 // 2 * 4 + _ch // 8 % 2 * 2 + _ch % 2                   # channel -> float index


def decode(record):
    """record: uint8 [RECORD_BYTES] -> dict of float64 arrays; Kd with its sign put right."""
    h = record.view(np.uint16)
    part = lambda at, n: bf16_to_f64(h[at // 2 : at // 2 + n])
    return dict(Kd=-part(0, 4096)[K_MAJOR], Qd=part(8192, 4096)[K_MAJOR], Kr=part(16384, 4096)[MN_MAJOR], P=part(24576, 1024)[SCORE],
                T=part(26624, 1024)[SCORE], decay=record[28672:29184].view(np.float32).astype(np.float64)[DECAY])
