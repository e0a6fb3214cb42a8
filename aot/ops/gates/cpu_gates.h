// What the CPU gate and norm kernels of all ISA levels share: the parameters, and the tables of kernels that each level defines.
#pragma once

#include <cstdint>

#include "aot/capi/src/kernel_table.h"

namespace cula::cpu {

// The parameters of params_gate.def and params_l2norm.def as values, the modes unpacked; read from one pointer to each, in order.
struct GateParams {
  using ptr = char*;
  using i64 = int64_t;
  using i32 = int32_t;
  using f32 = float;
#define CULA_PARAM(kind, name) kind name;
#define CULA_MODE(name, shift, bits) int32_t name;
#include "aot/ops/gates/params_gate.def"
#undef CULA_PARAM
#undef CULA_MODE
};

struct NormParams {
  using ptr = char*;
  using i64 = int64_t;
  using i32 = int32_t;
  using f32 = float;
#define CULA_PARAM(kind, name) kind name;
#define CULA_MODE(name, shift, bits) int32_t name;
#include "aot/ops/gates/params_l2norm.def"
#undef CULA_PARAM
#undef CULA_MODE
};

#define CULA_PARAM(kind, name) __builtin_memcpy(&p.name, *params++, sizeof p.name);
#define CULA_MODE(name, shift, bits) p.name = (p.modes >> shift) & ((1 << bits) - 1);
static inline GateParams read_gate_params(void* const* params) {
  GateParams p;
#include "aot/ops/gates/params_gate.def"
  return p;
}
static inline NormParams read_norm_params(void* const* params) {
  NormParams p;
#include "aot/ops/gates/params_l2norm.def"
  return p;
}
#undef CULA_PARAM
#undef CULA_MODE

struct GateTable {
  CpuKernel kda_gate[3], gdn_gate[3], l2norm[3];  // by the DType of x
};

namespace base {
extern const GateTable kGates;
}
namespace avx2 {
extern const GateTable kGates;
}
namespace avx512 {
extern const GateTable kGates;
}

}  // namespace cula::cpu
