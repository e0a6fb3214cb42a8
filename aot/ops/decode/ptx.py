"""Device helpers of the decode kernels: raw loads and stores by 64-bit address, conversions, warp sums.

Every address is an Int64 and every offset is computed in 64 bits: a pool of states passes 2^31 elements in practice.
Raw loads return bits and turning them into float32 is a separate step, so that all loads of a row can be in flight before
the first is waited for: at N = 1 each dependent trip to memory is about a sixth of the whole kernel.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Uint32

F32, BF16, FP16, ABSENT = 0, 1, 2, 3  # dtype codes of params.def
DTYPE_CODE = {"fp32": F32, "bf16": BF16, "fp16": FP16}
DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


def _words(count):
    """"{$w0}, {$w1}" in braces: the register list of a vector access."""
    return "{" + ", ".join("{$w%d}" % i for i in range(count)) + "}"


def load_words(address, count):
    """1, 2 or 4 aligned 32-bit words as a list of Uint32."""
    vector = "" if count == 1 else f".v{count}"
    registers = "{$w0}" if count == 1 else _words(count)
    out = cute.arch.inline_ptx(
        f"ld.global{vector}.b32 {registers}, [{{$r0}}];",
        write_only_types=[Uint32] * count,
        read_only_args=[address],
    )
    return [out] if count == 1 else list(out)


def store_words(address, words):
    count = len(words)
    vector = "" if count == 1 else f".v{count}"
    registers = "{$r1}" if count == 1 else "{" + ", ".join("{$r%d}" % (i + 1) for i in range(count)) + "}"
    cute.arch.inline_ptx(f"st.global{vector}.b32 [{{$r0}}], {registers};", read_only_args=[address, *words])


def store_half(address, word):
    cute.arch.inline_ptx(
        "{ .reg .b16 lo, hi; mov.b32 {lo, hi}, {$r1}; st.global.b16 [{$r0}], lo; }", read_only_args=[address, word]
    )


def load_scalar(base, index, code):
    """Bits of element `index` (Int64); code: a Python int or a run-time value, ABSENT giving 0. No branch: a branch would make
    the warp wait for this load before it issues the next one."""
    if isinstance(code, int):
        width, kind = (4, "b32") if code == F32 else (2, "u16")
        return cute.arch.inline_ptx(
            f"ld.global.{kind} {{$w0}}, [{{$r0}}];", write_only_types=[Uint32], read_only_args=[base + index * width]
        )
    return cute.arch.inline_ptx(
        """{ .reg .pred p32, p16; .reg .b64 a; .reg .b32 s;
        setp.eq.s32 p32, {$r2}, 0; setp.ne.s32 p16, {$r2}, 3; and.pred p16, p16, !p32;
        selp.b32 s, 2, 1, p32; shl.b64 a, {$r1}, s; add.s64 a, a, {$r0}; mov.b32 {$w0}, 0;
        @p32 ld.global.b32 {$w0}, [a]; @p16 ld.global.u16 {$w0}, [a]; }""",
        write_only_types=[Uint32],
        read_only_args=[base, index, code],
    )


def half_to_float(word, code):
    """Low 16 bits of `word` as float32; code BF16 or FP16, a Python int or a run-time value."""
    if isinstance(code, int):
        if code == BF16:
            return (word << 16).bitcast(Float32)
        return cute.arch.inline_ptx(
            "{ .reg .b16 lo, hi; mov.b32 {lo, hi}, {$r0}; cvt.f32.f16 {$w0}, lo; }",
            write_only_types=[Float32],
            read_only_args=[word],
        )
    return cute.arch.inline_ptx(
        """{ .reg .pred b; .reg .b16 lo, hi; .reg .b32 x; .reg .f32 y; mov.b32 {lo, hi}, {$r0}; cvt.f32.f16 y, lo;
        shl.b32 x, {$r0}, 16; setp.eq.s32 b, {$r1}, 1; mov.b32 {$w0}, y; @b mov.b32 {$w0}, x; }""",
        write_only_types=[Float32],
        read_only_args=[word, code],
    )


def to_float(word, code):
    """A word of load_scalar as float32; code a Python int or a run-time value."""
    if isinstance(code, int):
        return word.bitcast(Float32) if code == F32 else half_to_float(word, code)
    return select(code == F32, word.bitcast(Float32), half_to_float(word, code))


def unpack(words, code):
    """Packed words to floats in memory order; code a Python int."""
    if code == F32:
        return [w.bitcast(Float32) for w in words]
    floats = []
    for w in words:
        floats += [half_to_float(w, code), half_to_float(w >> 16, code)]
    return floats


def pack(floats, code):
    """Floats to packed words, rounded to nearest even; the inverse of unpack."""
    if code == F32:
        return [f.bitcast(Uint32) for f in floats]
    kind = "bf16x2" if code == BF16 else "f16x2"
    return [
        cute.arch.inline_ptx(
            f"cvt.rn.{kind}.f32 {{$w0}}, {{$r0}}, {{$r1}};", write_only_types=[Uint32], read_only_args=[hi, lo]
        )
        for lo, hi in zip(floats[0::2], floats[1::2])
    ]


def store_scalar(address, value, code):
    if code == F32:
        store_words(address, [value.bitcast(Uint32)])
    else:
        store_half(address, pack([value, value], code)[0])


def select(condition, a, b):
    return type(a)(cutlass.select_(condition, a, b))


def fma(a, b, c):
    return cute.math.fma(a, b, c)


def rsqrt(x):
    """1/sqrt(x) with one Newton step on the 22-bit approximation: the norm scales a whole row, so its error would be a bias
    of the state that no averaging removes."""
    r = cute.math.rsqrt(x)
    return select(r > Float32(0.0), r * fma(x * Float32(-0.5) * r, r, Float32(1.5)), r)  # x = inf: 0, where the step gives NaN


def sum_lanes(value, width):
    """Sum over aligned groups of `width` lanes, in every lane of the group."""
    offset = width // 2
    while offset:
        value = value + cute.arch.shuffle_sync_bfly(value, offset)
        offset //= 2
    return value


def sum_transposed(values, lane, width):
    """Sums of a power of two of per-lane values over groups of `width` lanes, value m left in the lanes l with
    (l % width) // (width / count) == m. Halving the set at each exchange costs count + log2(width / count) shuffles where a
    full butterfly for each value costs count * log2(width)."""
    values = list(values)
    offset = width // 2
    while len(values) > 1:
        half = len(values) // 2
        upper = (lane & offset) != 0
        values = [
            select(upper, values[i + half], values[i])
            + cute.arch.shuffle_sync_bfly(select(upper, values[i], values[i + half]), offset)
            for i in range(half)
        ]
        offset //= 2
    value = values[0]
    while offset:
        value = value + cute.arch.shuffle_sync_bfly(value, offset)
        offset //= 2
    return value


def reciprocal(x):
    """1/x for x in [1, 2]: the approximation and one Newton step. A float32 division compiles to a subroutine call."""
    r = cute.arch.rcp_approx(x)
    return fma(fma(-x, r, Float32(1.0)), r, r)


def sigmoid(x):
    """1 / (1 + exp -x), from exp(-|x|) so that neither sign overflows."""
    e = cute.math.exp(-cute.math.absf(x))
    r = reciprocal(Float32(1.0) + e)
    return select(x >= Float32(0.0), r, e * r)


def softplus(x):
    """log(1 + exp x); x itself above 20, where float32 cannot tell the two apart."""
    return select(x > Float32(20.0), x, cute.math.log1p(cute.math.exp(x)))
