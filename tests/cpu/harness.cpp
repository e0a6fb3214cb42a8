// Entries into the CPU code for the Python tests, by ISA level (0 base, 1 avx2, 2 avx512; -1: the kernel table's own function).
#include <atomic>
#include <cstdint>

#include "aot/common/cpu/cpu_count.h"
#include "aot/common/cpu/isa.h"
#include "aot/common/cpu/parallel.h"
#include "aot/ops/chunk/cpu_prefill.h"
#include "aot/ops/decode/cpu_decode.h"
#include "aot/ops/gates/cpu_gates.h"
#include "tests/cpu/math_table.h"

using namespace cula::cpu;

// The names of a StateTable's kernels, in the order of its axes.
#define CULA_NAMES_OF(X, op, io) \
  X(cula_cpu_##op##_##io##_sfp32_vk) X(cula_cpu_##op##_##io##_sfp32_kv) X(cula_cpu_##op##_##io##_sbf16_vk) X(cula_cpu_##op##_##io##_sbf16_kv)
#define CULA_STATE_NAMES(X, op) CULA_NAMES_OF(X, op, fp32) CULA_NAMES_OF(X, op, bf16) CULA_NAMES_OF(X, op, fp16)
#define CULA_GATE_NAMES(X)                                                                                                \
  X(cula_cpu_kda_gate_fp32) X(cula_cpu_kda_gate_bf16) X(cula_cpu_kda_gate_fp16) X(cula_cpu_gdn_gate_fp32)                   \
  X(cula_cpu_gdn_gate_bf16) X(cula_cpu_gdn_gate_fp16) X(cula_cpu_l2norm_fp32) X(cula_cpu_l2norm_bf16) X(cula_cpu_l2norm_fp16)
#define CULA_DECLARE(name) extern "C" void name(void* const*, int64_t, int64_t);
#define CULA_ENTRY(name) name,
CULA_STATE_NAMES(CULA_DECLARE, decode)
CULA_STATE_NAMES(CULA_DECLARE, prefill)
CULA_GATE_NAMES(CULA_DECLARE)
static const cula::CpuKernel kDecodeNames[] = {CULA_STATE_NAMES(CULA_ENTRY, decode)};
static const cula::CpuKernel kPrefillNames[] = {CULA_STATE_NAMES(CULA_ENTRY, prefill)};
static const cula::CpuKernel kGateNames[] = {CULA_GATE_NAMES(CULA_ENTRY)};

static const StateTable* const kDecodes[] = CULA_LEVELS(kDecode);
static const StateTable* const kPrefills[] = CULA_LEVELS(kPrefill);
static const GateTable* const kGateTables[] = CULA_LEVELS(kGates);
static const MathTable* const kMaths[] = CULA_LEVELS(kMath);

namespace {

struct Call {
  cula::CpuKernel kernel;
  void* const* params;
};

void run(cula::CpuKernel kernel, void* const* params, int64_t items, int64_t item_bytes, int32_t threads) {
  Call call{kernel, params};
  cula::parallel_for(
      items, item_bytes, threads,
      [](void* ctx, int64_t begin, int64_t end) { static_cast<Call*>(ctx)->kernel(static_cast<Call*>(ctx)->params, begin, end); }, &call);
}

// Every item is counted; the threads that take part register themselves.
std::atomic<int64_t> g_calls{0};
struct Cover {
  explicit Cover(std::atomic<int32_t>* c) : counts(c) {}
  std::atomic<int32_t>* counts;
  const int64_t call = ++g_calls;
  std::atomic<int32_t> threads{0};
  int32_t spin = 0;
};

void cover(void* ctx, int64_t begin, int64_t end) {
  Cover& c = *static_cast<Cover*>(ctx);
  // Threads are told apart by a number, not by the address of the call: the next call has the same one.
  static thread_local int64_t seen = 0;
  if (seen != c.call) {
    seen = c.call;
    c.threads.fetch_add(1);
  }
  for (int64_t i = begin; i < end; ++i) {
    c.counts[i].fetch_add(1, std::memory_order_relaxed);
    for (volatile int32_t s = 0; s < c.spin;) s = s + 1;
  }
}

struct Nested {
  std::atomic<int32_t>* counts;  // [outer][inner]
  int64_t inner;
};

void nested_outer(void* ctx, int64_t begin, int64_t end) {
  Nested& n = *static_cast<Nested*>(ctx);
  for (int64_t i = begin; i < end; ++i) {
    Cover c(n.counts + i * n.inner);
    cula::parallel_for(n.inner, cula::kGrainBytes, 0, cover, &c);
  }
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT int32_t harness_best_isa() { return static_cast<int32_t>(best_isa()); }

// op: 0 decode, 1 prefill
EXPORT void harness_state(int op, int level, int io, int state, int layout, void* const* params, int64_t items, int64_t item_bytes, int32_t threads) {
  const cula::CpuKernel* names = op == 0 ? kDecodeNames : kPrefillNames;
  const StateTable* const* levels = op == 0 ? kDecodes : kPrefills;
  run(level < 0 ? names[4 * io + 2 * state + layout] : (*levels[level])[io][state][layout], params, items, item_bytes, threads);
}

// op: 0 kda_gate, 1 gdn_gate, 2 l2norm
EXPORT void harness_gate(int level, int op, int io, void* const* params, int64_t items, int64_t item_bytes, int32_t threads) {
  const auto pick = [&](const GateTable& t) { return op == 0 ? t.kda_gate[io] : op == 1 ? t.gdn_gate[io] : t.l2norm[io]; };
  run(level < 0 ? kGateNames[3 * op + io] : pick(*kGateTables[level]), params, items, item_bytes, threads);
}

EXPORT void harness_math(int level, int function, const float* x, const float* y, float parameter, float* out, int64_t n) {
  kMaths[level]->run(function, x, y, parameter, out, n);
}
EXPORT void harness_convert(int level, int code, const char* from, char* to, int64_t n, int narrow) {
  kMaths[level]->convert(code, from, to, n, narrow != 0);
}

// With subnormals flushed to zero and read as zero, as some frameworks set it. Widening only.
EXPORT void harness_convert_flushed(int level, int code, const char* from, char* to, int64_t n) {
#if defined(__x86_64__)
  const unsigned before = __builtin_ia32_stmxcsr();
  __builtin_ia32_ldmxcsr(before | 0x8040);
#endif
  kMaths[level]->convert(code, from, to, n, false);
#if defined(__x86_64__)
  __builtin_ia32_ldmxcsr(before);
#endif
}

// counts: zeroed, one an item. Returns how many threads took part.
EXPORT int32_t harness_cover(int64_t items, int64_t item_bytes, int32_t threads, int32_t spin, int32_t* counts) {
  Cover c(reinterpret_cast<std::atomic<int32_t>*>(counts));
  c.spin = spin;
  cula::parallel_for(items, item_bytes, threads, cover, &c);
  return c.threads.load();
}
EXPORT void harness_nested(int64_t outer, int64_t inner, int32_t* counts) {
  Nested n{reinterpret_cast<std::atomic<int32_t>*>(counts), inner};
  cula::parallel_for(outer, cula::kGrainBytes, 0, nested_outer, &n);
}

EXPORT int32_t harness_default_threads() { return default_threads(); }
EXPORT int32_t harness_quota(const char* text) { return quota_from_cpu_max(text); }
