// Instruction-set levels of the CPU kernels.
//
// A source named cpu_isa_*.cpp is compiled once per level with -DCULA_ISA=<level> and the flags below, and defines its kernels
// in namespace cula::cpu::<level>. The cpu_*.cpp beside it picks a level at run time. Elsewhere than on x86-64 only `base` exists.
//
//   base    x86-64: -msse2 (the default); others: the compiler's default (NEON on aarch64)
//   avx2    -mavx2 -mfma -mf16c
//   avx512  -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx2 -mfma -mf16c
//
// A level source must not emit a function that another file could emit too (no inline function of the standard library, none
// outside its namespace): the linker keeps one copy of such a function, and if that is the AVX-512 one, older machines die on it.
#pragma once

#include <cstdint>

namespace cula::cpu {

enum class Isa : int32_t { base = 0, avx2 = 1, avx512 = 2 };

#if defined(__x86_64__)
constexpr int kIsaCount = 3;
#else
constexpr int kIsaCount = 1;
#endif

// The best level that this machine and its operating system support. Never changes; thread-safe.
Isa best_isa() noexcept;

}  // namespace cula::cpu
