// Host time of cula_run, called from compiled code the way an engine does: built by host.py with the system compiler.
#include <chrono>
#include <cstdint>

#include "cula.h"

// Microseconds a call over n calls that rotate through `args`; negative: the failing status. The caller synchronises.
extern "C" double cula_bench_host_us(int32_t op, const void* const* args, int32_t args_count, int32_t n, void* stream) {
  const auto start = std::chrono::steady_clock::now();
  for (int32_t i = 0; i < n; ++i) {
    const cula_status status = cula_run(op, args[i % args_count], nullptr, 0, stream);
    if (status != CULA_OK) return -status;
  }
  const std::chrono::duration<double, std::micro> spent = std::chrono::steady_clock::now() - start;
  return spent.count() / n;
}
