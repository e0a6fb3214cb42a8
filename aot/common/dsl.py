"""What CuTe DSL kernels of several families call."""

import cutlass.cute as cute
from cutlass import Int64


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
