// What the CPU prefill kernels of all ISA levels share: the parameters, and the table of kernels that each level defines.
#pragma once

#include <cstdint>

#include "aot/capi/src/kernel_table.h"

namespace cula::cpu {

// The parameters of params_cpu.def as values, the modes unpacked.
struct PrefillParams {
  using ptr = char*;
  using i64 = int64_t;
  using i32 = int32_t;
  using f32 = float;
#define CULA_PARAM(kind, name) kind name;
#define CULA_MODE(name, shift, bits) int32_t name;
#include "aot/ops/chunk/params_cpu.def"
#undef CULA_PARAM
#undef CULA_MODE
};

// params: one pointer to each parameter, in the order of params_cpu.def.
static inline PrefillParams read_prefill_params(void* const* params) {
  PrefillParams p;
#define CULA_PARAM(kind, name) __builtin_memcpy(&p.name, *params++, sizeof p.name);
#define CULA_MODE(name, shift, bits) p.name = (p.modes >> shift) & ((1 << bits) - 1);
#include "aot/ops/chunk/params_cpu.def"
#undef CULA_PARAM
#undef CULA_MODE
  return p;
}

// [io][state][layout]: io and state by DType (state: f32, bf16), layout by cula_state_layout.
using PrefillTable = CpuKernel[3][2][2];

namespace base {
extern const PrefillTable kPrefill;
}
namespace avx2 {
extern const PrefillTable kPrefill;
}
namespace avx512 {
extern const PrefillTable kPrefill;
}

}  // namespace cula::cpu
