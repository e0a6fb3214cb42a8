// Runs a CUDA kernel of the project on the CPU: the kernel's source, compiled by the host compiler, block after block. The lanes of
// a warp are coroutines (ucontext), switched at shuffles; there is no shared memory and no __syncthreads.
#pragma once

#include <ucontext.h>

#include <cstdint>
#include <cstdlib>
#include <functional>
#include <vector>

#define __global__
#define __launch_bounds__(...)

// CUTLASS names these in templates that nothing here uses.
template <class... Args>
int __dp4a(Args...);
template <class... Args>
unsigned __byte_perm(Args...);
template <class T>
T __hfma2(T, T, T);

struct Index {
  unsigned x = 0, y = 0, z = 0;
};
inline Index threadIdx, blockIdx, gridDim;

namespace emulate {

constexpr int kWarp = 32;
constexpr size_t kStack = 64 * 1024;

struct Warp {
  ucontext_t main, lane[kWarp];
  std::vector<char> stack = std::vector<char>(kWarp * kStack);
  bool done[kWarp];
  uint64_t slot[kWarp];
  int current = 0;
  std::function<void()> body;
};
inline Warp* warp = nullptr;
inline unsigned first_thread = 0;

inline void enter() {
  Warp& w = *warp;
  w.body();
  w.done[w.current] = true;
  swapcontext(&w.lane[w.current], &w.main);
}

// All lanes meet: each runs up to here before any goes on.
inline void meet() {
  Warp& w = *warp;
  const int me = w.current;
  swapcontext(&w.lane[me], &w.main);
}

inline void run_warp(Warp& w) {
  warp = &w;
  for (int l = 0; l < kWarp; ++l) {
    w.done[l] = false;
    getcontext(&w.lane[l]);
    w.lane[l].uc_stack.ss_sp = w.stack.data() + l * kStack;
    w.lane[l].uc_stack.ss_size = kStack;
    w.lane[l].uc_link = nullptr;
    makecontext(&w.lane[l], enter, 0);
  }
  for (int running = kWarp; running > 0;) {
    running = 0;
    for (int l = 0; l < kWarp; ++l) {
      if (w.done[l]) continue;
      w.current = l;
      threadIdx.x = first_thread + l;
      swapcontext(&w.main, &w.lane[l]);
      running += !w.done[l];
    }
    // a full-mask shuffle that some lanes never reach would hang or be wrong on the GPU
    if (running != 0 && running != kWarp) std::abort();
  }
}

template <class Kernel>
void launch(unsigned grid, unsigned block, Kernel kernel) {
  static thread_local Warp w;
  w.body = kernel;
  gridDim.x = grid;
  for (blockIdx.x = 0; blockIdx.x < grid; ++blockIdx.x)
    for (first_thread = 0; first_thread < block; first_thread += kWarp) run_warp(w);
}

template <class T>
T exchange(T value, int source) {
  Warp& w = *warp;
  static_assert(sizeof(T) <= 8);
  __builtin_memcpy(&w.slot[w.current], &value, sizeof(T));
  meet();
  T out;
  __builtin_memcpy(&out, &w.slot[source], sizeof(T));
  meet();  // nobody overwrites a slot before all have read
  return out;
}

}  // namespace emulate

template <class T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  return emulate::exchange(value, emulate::warp->current ^ mask);
}
template <class T>
T __shfl_sync(unsigned, T value, int lane) {
  return emulate::exchange(value, lane % 32);
}
