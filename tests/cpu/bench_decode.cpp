// Speed of the CPU decode kernels against this machine's memory: KDA with per-channel log gate, in place, by state dtype, layout,
// ISA level and threads. Build and run: python -m tests.cpu.build FOLDER bench && FOLDER/bench
//
// "copy" is the best of a plain and a non-temporal copy over all threads, read plus written bytes a second; decode counts the
// state read plus written. Buffers of 1 GB, far beyond any cache; median of the passes.
#include <immintrin.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "aot/common/cpu/cpu_count.h"
#include "aot/common/cpu/isa.h"
#include "aot/common/cpu/parallel.h"
#include "aot/ops/decode/cpu_decode.h"

namespace {

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

template <class F>
double median_seconds(int passes, F&& f) {
  f();
  std::vector<double> t;
  for (int i = 0; i < passes; ++i) {
    const double start = now();
    f();
    t.push_back(now() - start);
  }
  std::sort(t.begin(), t.end());
  return t[t.size() / 2];
}

struct Copy {
  const char* from;
  char* to;
};
constexpr int64_t kBlock = 64 << 10;

__attribute__((target("avx2"))) void copy_plain(void* ctx, int64_t begin, int64_t end) {
  const Copy& c = *static_cast<Copy*>(ctx);
  for (int64_t i = begin; i < end; ++i)
    for (int64_t j = 0; j < kBlock; j += 32)
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(c.to + i * kBlock + j),
                          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(c.from + i * kBlock + j)));
}
__attribute__((target("avx2"))) void copy_streaming(void* ctx, int64_t begin, int64_t end) {
  const Copy& c = *static_cast<Copy*>(ctx);
  for (int64_t i = begin; i < end; ++i)
    for (int64_t j = 0; j < kBlock; j += 32)
      _mm256_stream_si256(reinterpret_cast<__m256i*>(c.to + i * kBlock + j),
                          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(c.from + i * kBlock + j)));
}
// What decode does to memory: read, change, write back the same line.
__attribute__((target("avx2"))) void update_in_place(void* ctx, int64_t begin, int64_t end) {
  const Copy& c = *static_cast<Copy*>(ctx);
  for (int64_t i = begin; i < end; ++i)
    for (int64_t j = 0; j < kBlock; j += 32) {
      auto* p = reinterpret_cast<__m256i*>(c.to + i * kBlock + j);
      _mm256_storeu_si256(p, _mm256_add_epi32(_mm256_loadu_si256(p), _mm256_set1_epi32(1)));
    }
}

struct Work {
  cula::CpuKernel kernel;
  void* const* params;
};
void run(void* ctx, int64_t begin, int64_t end) {
  const Work& w = *static_cast<Work*>(ctx);
  w.kernel(w.params, begin, end);
}

constexpr int64_t kPool = 1ll << 30;
char* g_state;

void bench(const cula::cpu::StateTable& table, const char* isa, int state, int layout, int threads, int n, double copy) {
  constexpr int kHeads = 64, kDim = 128;
  const int64_t head_bytes = int64_t(kDim) * kDim * (state == 0 ? 4 : 2);
  // Rows move through the pool from call to call, so that no call finds its states in a cache.
  const int64_t slots = kPool / (kHeads * head_bytes);
  std::vector<uint16_t> q(n * kHeads * kDim, 0x3c00), k = q, v = q, out = q;
  std::vector<float> gate(n * kHeads * kDim, -0.1f), beta(n * kHeads, 0.5f);
  for (size_t i = 0; i < q.size(); ++i) q[i] = k[i] = v[i] = uint16_t(0x3d00 + (i * 2654435761u >> 25) + (i % 3 ? 0x8000 : 0));
  std::vector<int32_t> index(n);
  cula::cpu::DecodeParams p{};
  p.q = reinterpret_cast<char*>(q.data()), p.k = reinterpret_cast<char*>(k.data()), p.v = reinterpret_cast<char*>(v.data());
  p.out = reinterpret_cast<char*>(out.data()), p.gate = reinterpret_cast<char*>(gate.data());
  p.beta = reinterpret_cast<char*>(beta.data()), p.state_in = p.state_out = g_state;
  p.read_index = reinterpret_cast<char*>(index.data());
  p.q_n = p.k_n = p.v_n = p.out_n = p.gate_n = kHeads * kDim;
  p.q_h = p.k_h = p.v_h = p.out_h = p.gate_h = kDim;
  p.beta_n = kHeads, p.beta_h = 1;
  p.in_h = p.out_state_h = kDim * kDim, p.in_slot = p.out_slot = int64_t(kHeads) * kDim * kDim;
  p.in_slots = p.out_slots = slots, p.null_slot = INT64_MIN, p.read_stride = p.write_stride = 1;
  p.n = n, p.hv = kHeads, p.group = 1, p.head_dim_k = p.head_dim_v = kDim, p.scale = 0.088f;
  p.modes = 2 | 3 << 5 | 3 << 7 | 1 << 13 | 1 << 17 | 1 << 20 | 1 << 21;
  void* params[64];
  int count = 0;
#define CULA_PARAM(kind, name) params[count++] = &p.name;
#define CULA_MODE(name, shift, bits)
#include "aot/ops/decode/params.def"
  Work w{table[1][state][layout], params};
  int64_t first = 0;
  const int passes = std::max<int>(10, 4000 / n);
  const double t = median_seconds(passes, [&] {
    for (int i = 0; i < n; ++i) index[i] = int32_t((first + i) % slots);
    first += n;
    cula::parallel_for(int64_t(n) * kHeads, 2 * head_bytes, threads, run, &w);
  });
  const double bytes = 2.0 * n * kHeads * head_bytes;
  std::printf("%-7s state %s %s  threads %d  N %4d  %9.1f us  %6.1f GB/s  %5.1f %% of copy\n", isa, state ? "bf16" : "fp32",
              layout ? "kv" : "vk", threads, n, t * 1e6, bytes / t * 1e-9, 100 * bytes / t / copy);
}

}  // namespace

int main(int argc, char** argv) {
  const bool all = argc > 1 && !std::strcmp(argv[1], "all");
  const int threads = cula::cpu::default_threads();
  g_state = static_cast<char*>(std::aligned_alloc(4096, kPool));
  char* other = static_cast<char*>(std::aligned_alloc(4096, kPool));
  std::memset(g_state, 0, kPool);
  std::memset(other, 0, kPool);
  double copy = 0;
  for (int t : {1, threads}) {
    Copy c{other, g_state};
    const auto speed = [&](cula::ParallelFn f) {
      return 2.0 * kPool / median_seconds(5, [&] { cula::parallel_for(kPool / kBlock, cula::kGrainBytes, t, f, &c); });
    };
    const double plain = speed(copy_plain), streaming = speed(copy_streaming), in_place = speed(update_in_place);
    copy = std::max(plain, streaming);
    std::printf("threads %d: copy plain %.1f, non-temporal %.1f, in-place update %.1f GB/s\n", t, plain * 1e-9, streaming * 1e-9,
                in_place * 1e-9);
  }
  std::memset(g_state, 0, kPool);
  const struct {
    const char* name;
    const cula::cpu::StateTable& table;
    cula::cpu::Isa level;
  } levels[] = {{"avx512", cula::cpu::avx512::kDecode, cula::cpu::Isa::avx512},
                {"avx2", cula::cpu::avx2::kDecode, cula::cpu::Isa::avx2},
                {"base", cula::cpu::base::kDecode, cula::cpu::Isa::base}};
  for (const auto& l : levels) {
    if (l.level > cula::cpu::best_isa()) continue;
    for (int state : {0, 1}) {
      // bf16 halves of float32 zeros are zeros too; after the first pass the pool holds numbers of this dtype
      std::memset(g_state, 0, kPool);
      for (int layout : {0, 1})
        for (int n : all ? std::vector<int>{1, 2, 8, 32, 128} : std::vector<int>{32, 128}) {
          bench(l.table, l.name, state, layout, threads, n, copy);
          if (all) bench(l.table, l.name, state, layout, 1, n, copy);
        }
    }
  }
}
