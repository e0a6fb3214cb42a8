// The thread pool of the CPU arch.
//
// parallel_for runs fn(ctx, begin, end) over disjoint ranges that cover [0, items) and returns when all are done. The calling
// thread works too, so a busy pool costs speed, never progress: calls from many threads at once and calls from inside fn are
// fine, and no lock is held while fn runs. fn must not throw.
//
//   grain    smallest range worth handing to another thread, see grain_for_bytes; up to three grains run on the caller alone
//   threads  most threads to use, the caller included; 0: default_threads() (cpu_count.h), which also is the upper limit
//
// The threads are created by the first call that wants them, named cula-cpu, with all signals blocked. After fork() the child
// makes its own on first use. They end when the library is unloaded or the process exits; calls after that run on the caller.
#pragma once

#include <cstdint>

namespace cula {

using ParallelFn = void (*)(void* ctx, int64_t begin, int64_t end);

void parallel_for(int64_t items, int64_t grain, int32_t threads, ParallelFn fn, void* ctx) noexcept;

// Grain of work that streams this many bytes of memory an item: about 5 us of a core's bandwidth (128 KB at 25 GB/s), the
// time that it takes to wake a sleeping thread.
constexpr int64_t grain_for_bytes(int64_t bytes_per_item) noexcept {
  constexpr int64_t kBytes = 128 << 10;
  return bytes_per_item <= 0 || bytes_per_item >= kBytes ? 1 : kBytes / bytes_per_item;
}

}  // namespace cula
