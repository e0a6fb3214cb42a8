// Tables of the kernels of a family: each ISA level defines one, and the functions of the kernel table pick from the best.
#pragma once

#include "aot/capi/src/kernel_table.h"
#include "aot/common/cpu/isa.h"

namespace cula::cpu {

// Kernels by [io][state][layout]: io and state by DType (state: f32, bf16), layout by cula_state_layout.
using StateTable = CpuKernel[3][2][2];

}  // namespace cula::cpu

// Declares the table of each level; in namespace cula::cpu.
#define CULA_LEVEL_TABLES(Type, name) \
  namespace base {                    \
  extern const Type name;             \
  }                                   \
  namespace avx2 {                    \
  extern const Type name;             \
  }                                   \
  namespace avx512 {                  \
  extern const Type name;             \
  }

// Their addresses by Isa, to initialise an array with.
#if defined(__x86_64__)
#define CULA_LEVELS(name) {&::cula::cpu::base::name, &::cula::cpu::avx2::name, &::cula::cpu::avx512::name}
#else
#define CULA_LEVELS(name) {&::cula::cpu::base::name}
#endif

// Defines cula::cpu::best(), the table of this machine.
#define CULA_BEST_TABLE(Type, name)                            \
  namespace cula::cpu {                                        \
  namespace {                                                  \
  const Type& best() noexcept {                                \
    static constexpr const Type* kLevels[] = CULA_LEVELS(name); \
    return *kLevels[static_cast<int>(best_isa())];             \
  }                                                            \
  }                                                            \
  }

// The functions of a StateTable under their names in the kernel table: cula_cpu_<op>_<io>_s<state>_<layout>.
#define CULA_STATE_KERNEL(op, io, io_code, state, state_code, layout, layout_code)                               \
  extern "C" void cula_cpu_##op##_##io##_s##state##_##layout(void* const* params, int64_t begin, int64_t end) { \
    cula::cpu::best()[io_code][state_code][layout_code](params, begin, end);                                    \
  }
#define CULA_STATE_KERNELS_OF(op, io, io_code)          \
  CULA_STATE_KERNEL(op, io, io_code, fp32, 0, vk, 0)    \
  CULA_STATE_KERNEL(op, io, io_code, fp32, 0, kv, 1)    \
  CULA_STATE_KERNEL(op, io, io_code, bf16, 1, vk, 0)    \
  CULA_STATE_KERNEL(op, io, io_code, bf16, 1, kv, 1)
#define CULA_STATE_KERNELS(op) \
  CULA_STATE_KERNELS_OF(op, fp32, 0) CULA_STATE_KERNELS_OF(op, bf16, 1) CULA_STATE_KERNELS_OF(op, fp16, 2)
