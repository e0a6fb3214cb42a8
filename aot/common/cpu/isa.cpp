#include "isa.h"

#include <atomic>

namespace cula::cpu {
namespace {

Isa detect() noexcept {
#if defined(__x86_64__)
  __builtin_cpu_init();  // a static constructor of another file may be the first caller
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !__builtin_cpu_supports("f16c")) return Isa::base;
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq"))
    return Isa::avx512;
  return Isa::avx2;
#else
  return Isa::base;
#endif
}

}  // namespace

Isa best_isa() noexcept {
  // Racing first callers store the same value.
  static std::atomic<int32_t> cached{-1};
  int32_t level = cached.load(std::memory_order_relaxed);
  if (level < 0) {
    level = static_cast<int32_t>(detect());
    cached.store(level, std::memory_order_relaxed);
  }
  return static_cast<Isa>(level);
}

}  // namespace cula::cpu
