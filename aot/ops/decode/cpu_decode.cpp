// The decode kernels of the CPU arch under the names of the kernel table: each calls the best ISA level of the machine.
#include "aot/ops/decode/cpu_decode.h"

#include "aot/common/cpu/isa.h"

namespace cula::cpu {
namespace {

const DecodeTable& decode_table() noexcept {
#if defined(__x86_64__)
  switch (best_isa()) {
    case Isa::avx512:
      return avx512::kDecode;
    case Isa::avx2:
      return avx2::kDecode;
    case Isa::base:
      break;
  }
#endif
  return base::kDecode;
}

}  // namespace
}  // namespace cula::cpu

// Work item = row * HV + head; thread-safe over disjoint ranges of items.
#define CULA_DECODE(io, io_code, state, state_code)                                                  \
  extern "C" void cula_cpu_decode_##io##_s##state##_vk(void* const* params, int64_t begin, int64_t end) { \
    cula::cpu::decode_table()[io_code][state_code][0](params, begin, end);                           \
  }                                                                                                  \
  extern "C" void cula_cpu_decode_##io##_s##state##_kv(void* const* params, int64_t begin, int64_t end) { \
    cula::cpu::decode_table()[io_code][state_code][1](params, begin, end);                           \
  }

CULA_DECODE(fp32, 0, fp32, 0)
CULA_DECODE(fp32, 0, bf16, 1)
CULA_DECODE(bf16, 1, fp32, 0)
CULA_DECODE(bf16, 1, bf16, 1)
CULA_DECODE(fp16, 2, fp32, 0)
CULA_DECODE(fp16, 2, bf16, 1)
