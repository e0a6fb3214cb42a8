// The names of prep_device.cuh on a CPU: a block's threads are fibers, warp-wide instructions meet at a warp barrier. For
// tests of arithmetic and addressing only. Orders in which threads run are permuted from item to item, so a missing barrier
// usually shows, but this is no race detector.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#define __global__
#define __device__
#define __launch_bounds__(...)
#define __align__(n) alignas(n)
#define __shared__
#define CULA_DEV static inline
#define CULA_DEV_COLD static inline

struct float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct uint2 { uint32_t x, y; };
static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
struct __nv_bfloat16 { uint16_t v; };
struct __half { uint16_t v; };
static inline float __uint_as_float(uint32_t x) { float f; memcpy(&f, &x, 4); return f; }
static inline uint32_t __float_as_uint(float f) { uint32_t x; memcpy(&x, &f, 4); return x; }
static inline float __bfloat162float(__nv_bfloat16 b) { return __uint_as_float(uint32_t(b.v) << 16); }
static inline float __half2float(__half h) { _Float16 x; memcpy(&x, &h, 2); return float(x); }
using std::fminf;
using std::fmaxf;
static inline float rsqrtf(float x) { return 1.f / std::sqrt(x); }

namespace cula::emu {
struct Dim { int x = 0; };
constexpr int kMaxThreads = 256;
inline int threads = kMaxThreads;  // of the block that runs
struct Fiber { ucontext_t ctx; std::vector<char> stack; bool done = false; };
struct Meet { int count = 0, gen = 0, any = 0, result = 0; };
struct Bulk { void* dst; const void* src; int bytes; };
struct Async { void* dst; const void* src; bool valid; };
inline Fiber fibers[kMaxThreads];
inline ucontext_t scheduler;
inline int current;
inline Meet block_meet, warp_meet[kMaxThreads / 32];
inline uint32_t lanes[kMaxThreads / 32][32][16];  // exchange area of warp-wide instructions
inline std::vector<std::vector<Async>> async_copies[kMaxThreads];
inline std::vector<Bulk> bulk_copies[kMaxThreads];
inline Dim block_idx, grid_dim;
inline void yield() { swapcontext(&fibers[current].ctx, &scheduler); }
inline void meet(Meet& m, int n) {
  const int gen = m.gen;
  if (++m.count == n) { m.count = 0; m.result = m.any; m.any = 0; ++m.gen; }
  else while (m.gen == gen) yield();
}
inline void warp_sync() { meet(warp_meet[current / 32], 32); }
struct ThreadIdx { int x_() const { return current; } };
inline void (*entry)(void*);
inline void* entry_arg;
inline void trampoline() { entry(entry_arg); fibers[current].done = true; yield(); }
inline void run_block(void (*f)(void*), void* arg, int block_threads, std::mt19937& rng) {
  threads = block_threads;
  entry = f; entry_arg = arg;
  std::vector<int> order(threads);
  for (int i = 0; i < threads; ++i) {
    order[i] = i;
    Fiber& b = fibers[i];
    b.done = false; b.stack.resize(64 << 10);
    async_copies[i].assign(1, {});
    getcontext(&b.ctx);
    b.ctx.uc_stack.ss_sp = b.stack.data(); b.ctx.uc_stack.ss_size = b.stack.size(); b.ctx.uc_link = nullptr;
    makecontext(&b.ctx, trampoline, 0);
  }
  for (int left = threads; left > 0;) {
    std::shuffle(order.begin(), order.end(), rng);
    int ran = 0;
    for (int i : order) if (!fibers[i].done) { current = i; swapcontext(&scheduler, &fibers[i].ctx); ++ran; if (fibers[i].done) --left; }
    if (!ran) { fprintf(stderr, "deadlock\n"); abort(); }
  }
}
}  // namespace cula::emu

#define threadIdx (::cula::emu::Dim{::cula::emu::current})
#define blockIdx (::cula::emu::block_idx)
#define gridDim (::cula::emu::grid_dim)
static inline void __syncthreads() { cula::emu::meet(cula::emu::block_meet, cula::emu::threads); }
static inline int __syncthreads_or(int v) { cula::emu::block_meet.any |= v != 0; __syncthreads(); return cula::emu::block_meet.result; }
namespace cula::emu {
inline Meet named_meet[16];
inline void arrive(Meet& m, int n) {
  if (++m.count == n) { m.count = 0; ++m.gen; }
}
inline void wait(Meet& m, int n) {
  const int gen = m.gen;
  arrive(m, n);
  while (m.gen == gen) yield();
}
}  // namespace cula::emu
static inline void __syncwarp() { cula::emu::warp_sync(); }
static inline void __threadfence() {}
static inline int __shfl_sync(unsigned, int v, int src) {
  using namespace cula::emu;
  lanes[current / 32][current % 32][0] = uint32_t(v); warp_sync();
  const int r = int(lanes[current / 32][src][0]); warp_sync();
  return r;
}
template <typename T>
static inline T exchange(T v, int from) {
  using namespace cula::emu;
  static_assert(sizeof(T) == 4, "");
  memcpy(&lanes[current / 32][current % 32][0], &v, 4); warp_sync();
  T r; memcpy(&r, &lanes[current / 32][from & 31][0], 4); warp_sync();
  return r;
}
static inline float __shfl_sync(unsigned, float v, int src) { return exchange(v, src); }
static inline float __shfl_xor_sync(unsigned, float v, int mask) { return exchange(v, (cula::emu::current % 32) ^ mask); }

namespace cula::dev {
using namespace cula::emu;
CULA_DEV int opaque(int x) { return x; }
CULA_DEV void no_hoisting() {}
CULA_DEV float ftz(float x) { return std::fabs(x) < 1.17549435e-38f ? std::copysign(0.f, x) : x; }
CULA_DEV float ex2(float x) { return ftz(std::exp2(ftz(x))); }
CULA_DEV float lg2(float x) { return std::log2(ftz(x)); }
CULA_DEV float rcp(float x) { return ftz(1.f / x); }
CULA_DEV uint32_t bf16_bits(float f) {
  const uint32_t x = __float_as_uint(f);
  if (std::isnan(f)) return 0x7fffu;
  return (x + 0x7fffu + ((x >> 16) & 1u)) >> 16;
}
CULA_DEV uint32_t pack_bf16(float a, float b) { return bf16_bits(a) | bf16_bits(b) << 16; }
CULA_DEV float2 unpack_bf16(uint32_t x) { return {__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u)}; }
CULA_DEV float2 unpack_fp16(uint32_t x) { return {__half2float(__half{uint16_t(x)}), __half2float(__half{uint16_t(x >> 16)})}; }
CULA_DEV float2 unpack_any(uint32_t x, bool fp16) { return fp16 ? unpack_fp16(x) : unpack_bf16(x); }

CULA_DEV void ldmatrix_x4(uint32_t (&r)[4], const void* row) {
  const int w = current / 32, l = current % 32;
  if (reinterpret_cast<uintptr_t>(row) % 16) { fprintf(stderr, "ldmatrix: misaligned row\n"); abort(); }
  memcpy(lanes[w][l], row, 16); warp_sync();
  for (int m = 0; m < 4; ++m) r[m] = lanes[w][m * 8 + l / 4][l % 4];
  warp_sync();
}
CULA_DEV void mma16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, bool fp16) {
  const int w = current / 32, l = current % 32;
  for (int i = 0; i < 4; ++i) lanes[w][l][i] = a[i];
  lanes[w][l][4] = b0; lanes[w][l][5] = b1; warp_sync();
  for (int e = 0; e < 4; ++e) {
    const int row = l / 4 + (e / 2) * 8, col = (l % 4) * 2 + e % 2;
    float s = 0.f;
    for (int k = 0; k < 16; ++k) {
      const uint32_t x = lanes[w][(row % 8) * 4 + (k % 8) / 2][row / 8 + 2 * (k / 8)], y = lanes[w][col * 4 + (k % 8) / 2][4 + k / 8];
      const float2 fx = unpack_any(x, fp16), fy = unpack_any(y, fp16);
      s += (k % 2 ? fx.y : fx.x) * (k % 2 ? fy.y : fy.x);
    }
    c[e] += s;
  }
  warp_sync();
}
CULA_DEV void mma_bf16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) { mma16(c, a, b0, b1, false); }
CULA_DEV void mma_fp16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) { mma16(c, a, b0, b1, true); }
CULA_DEV void mma_tf32(float (&c)[4], const float (&a)[4], float b0, float b1) {
  const int w = current / 32, l = current % 32;
  const auto cut = [](float x) { return __float_as_uint(x) & 0xffffe000u; };
  for (int i = 0; i < 4; ++i) lanes[w][l][i] = cut(a[i]);
  lanes[w][l][4] = cut(b0); lanes[w][l][5] = cut(b1); warp_sync();
  for (int e = 0; e < 4; ++e) {
    const int row = l / 4 + (e / 2) * 8, col = (l % 4) * 2 + e % 2;
    float s = 0.f;
    for (int k = 0; k < 8; ++k)
      s += __uint_as_float(lanes[w][(row % 8) * 4 + k % 4][row / 8 + 2 * (k / 4)]) * __uint_as_float(lanes[w][col * 4 + k % 4][4 + k / 4]);
    c[e] += s;
  }
  warp_sync();
}

// Copies happen at the wait, and the bulk store reads its source then: too early a reuse of either buffer shows.
CULA_DEV void cp_async16(void* dst, const void* src, bool valid) { async_copies[current].back().push_back({dst, src, valid}); memset(dst, 0xff, 16); }
CULA_DEV void cp_async_commit() { async_copies[current].emplace_back(); }
template <int kPending>
CULA_DEV void cp_async_wait() {  // the last group is open
  auto& groups = async_copies[current];
  while (groups.size() > kPending + 1) {
    for (const Async& c : groups[0]) { if (c.valid) memcpy(c.dst, c.src, 16); else memset(c.dst, 0, 16); }
    groups.erase(groups.begin());
  }
}
CULA_DEV uint32_t load_acquire(const uint32_t* p) { return *p; }
CULA_DEV uint32_t load_u16(const void* p) { uint16_t r; memcpy(&r, p, 2); return r; }
CULA_DEV uint32_t load_u32(const void* p) { uint32_t r; memcpy(&r, p, 4); return r; }
CULA_DEV uint2 load_u32x2(const void* p) { uint2 r; memcpy(&r, p, 8); return r; }
CULA_DEV float4 load_f32x4(const void* p) { float4 r; memcpy(&r, p, 16); return r; }
CULA_DEV void bulk_wait_all();
CULA_DEV void bulk_wait_read() { bulk_wait_all(); }
CULA_DEV void bulk_store(void* dst, const void* src, int bytes) { bulk_copies[current].push_back({dst, src, bytes}); }
CULA_DEV void bulk_wait_all() {
  for (const Bulk& c : bulk_copies[current]) memcpy(c.dst, c.src, c.bytes);
  bulk_copies[current].clear();
}
CULA_DEV void bulk_wait_all_but_last() {
  auto& copies = bulk_copies[current];
  while (copies.size() > 1) { memcpy(copies[0].dst, copies[0].src, copies[0].bytes); copies.erase(copies.begin()); }
}
template <int kNumber, int kCount>
CULA_DEV void barrier_arrive() { arrive(named_meet[kNumber], kCount); }
template <int kNumber, int kCount>
CULA_DEV void barrier_sync() { wait(named_meet[kNumber], kCount); }
CULA_DEV void fence_async_smem() {}
CULA_DEV void store_release(uint32_t* p, uint32_t v) { *p = v; }
CULA_DEV void griddepcontrol_wait() {}
CULA_DEV void launch_dependents() {}
}  // namespace cula::dev
