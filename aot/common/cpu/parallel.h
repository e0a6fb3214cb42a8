// The thread pool of the CPU arch.
//
// parallel_for runs fn(ctx, begin, end) over disjoint ranges that cover [0, items) and returns when all are done. The calling
// thread works too, so a busy pool costs speed, never progress: calls from many threads at once and calls from inside fn are
// fine, and no lock is held while fn runs. fn must not throw.
//
//   item_bytes  cost of an item, as the bytes of memory that stream in the same time; at most 1 counts as 1
//   threads     most threads to use, the caller included; 0: default_threads() (cpu_count.h), which also is the upper limit
//
// A range is at least kGrainBytes or one item. Up to three of them run on the caller alone unless they cost more than kSoloBytes.
//
// The threads are created by the first call that wants them, named cula-cpu, with all signals blocked. After fork() the child
// makes its own on first use. They end when the library is unloaded or the process exits; calls after that run on the caller.
#pragma once

#include <cstdint>

namespace cula {

using ParallelFn = void (*)(void* ctx, int64_t begin, int64_t end);

// About 5 us of a core's bandwidth (25 GB/s), the time that it takes to wake a sleeping thread.
constexpr int64_t kGrainBytes = 128 << 10;
// Waking a thread costs the caller up to 10 us (two cores of a virtual machine): of 80 us, half of which it may save, not of 20.
constexpr int64_t kSoloBytes = 2 << 20;

void parallel_for(int64_t items, int64_t item_bytes, int32_t threads, ParallelFn fn, void* ctx) noexcept;

}  // namespace cula
