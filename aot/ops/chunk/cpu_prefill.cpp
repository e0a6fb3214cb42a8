// The prefill kernels of the CPU arch under the names of the kernel table: each calls the best ISA level of the machine.
#include "aot/ops/chunk/cpu_prefill.h"

#include "aot/common/cpu/isa.h"

namespace cula::cpu {
namespace {

const PrefillTable& prefill_table() noexcept {
#if defined(__x86_64__)
  switch (best_isa()) {
    case Isa::avx512:
      return avx512::kPrefill;
    case Isa::avx2:
      return avx2::kPrefill;
    case Isa::base:
      break;
  }
#endif
  return base::kPrefill;
}

}  // namespace
}  // namespace cula::cpu

// Work items as in params_cpu.def; thread-safe over disjoint ranges of items.
#define CULA_PREFILL(io, io_code, state, state_code)                                                       \
  extern "C" void cula_cpu_prefill_##io##_s##state##_vk(void* const* params, int64_t begin, int64_t end) { \
    cula::cpu::prefill_table()[io_code][state_code][0](params, begin, end);                                \
  }                                                                                                        \
  extern "C" void cula_cpu_prefill_##io##_s##state##_kv(void* const* params, int64_t begin, int64_t end) { \
    cula::cpu::prefill_table()[io_code][state_code][1](params, begin, end);                                \
  }

CULA_PREFILL(fp32, 0, fp32, 0)
CULA_PREFILL(fp32, 0, bf16, 1)
CULA_PREFILL(bf16, 1, fp32, 0)
CULA_PREFILL(bf16, 1, bf16, 1)
CULA_PREFILL(fp16, 2, fp32, 0)
CULA_PREFILL(fp16, 2, bf16, 1)
