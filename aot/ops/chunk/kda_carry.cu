// KDA prefill with segments: the states between them. The scan form of the kernel leaves, per (sequence, head, segment s),
// B_s in slot 0 and M_s^T in slot 1, float32 [128,128] (state.py). B_0 is the state after segment 0 already, and so is the B of a
// segment that starts from its warm-up chunks; this kernel turns the others into the state after segment s, in place and in
// order: B_s += B_{s-1} M_s^T. A segment whose successor starts from warm-up chunks needs nothing.
//
// A block takes 8 rows of one chain: 16 blocks a chain, so 8 heads fill an SM each. M_s^T comes in quarters, three ahead.
// Float32 throughout: the product is a hundredth of the work, and its error would go into every token.
#ifdef CULA_EMULATE
#include "dev/emulate.h"
#else
#include "prep_device.cuh"
#endif
#include "record.h"

namespace cula::kda {
using namespace cula::dev;

constexpr int kCarryRows = 8, kCarryThreads = 128, kCarryParts = 4;
constexpr int kCarryTile = kDim * kDim, kCarryPart = kCarryTile / kCarryParts;  // floats
// Four quarters, the rows of the state, the segments to do. Beside two blocks of the prep kernel it must leave room: 72 KB.
constexpr int kCarrySmemBytes = (kCarryTile + kCarryRows * kDim) * 4 + 512;
static_assert(kCarrySmemBytes == 70144, "the plan's figure");

struct CarryArgs {
  float* carry;
  const uint32_t* flags;
  const void* cu;
  int64_t tokens;
  int hv, chunks, segments, cu_code;
};

CULA_DEV int64_t cu_at(const CarryArgs& a, int64_t i) {
  return a.cu_code == 1 ? static_cast<int64_t>(static_cast<const int32_t*>(a.cu)[i]) : static_cast<const int64_t*>(a.cu)[i];
}

// As warm_chunks in state.py: whether the segment that begins at chunk `chunk` starts from its warm-up chunks.
CULA_DEV bool starts_warm(const uint32_t* flags, int chunk, int count) {
  if (chunk >= count) return false;
  uint32_t sum = 0;
  for (int i = 1; i <= kWarm && i <= chunk && sum < kForgotten; ++i) {
    uint32_t flag;
    while ((flag = load_acquire(flags + chunk - i)) == 0) {}
    sum += flag - 1;
  }
  return sum >= kForgotten;
}

CULA_DEV void carry(const CarryArgs& a, float* smem) {
  const int k = threadIdx.x, chain = blockIdx.x / (kDim / kCarryRows), part = blockIdx.x % (kDim / kCarryRows);
  float* const slots = a.carry + static_cast<int64_t>(chain) * a.segments * 2 * kCarryTile;
  float* const S = smem + kCarryTile;  // [8][128]: the state's rows
  int* const todo = reinterpret_cast<int*>(S + kCarryRows * kDim);  // [64], and how many
  uint8_t* const warm = reinterpret_cast<uint8_t*>(todo + kMaxSegments + 1);
  const int sequence = chain / a.hv, head = chain - sequence * a.hv;
  int64_t first = sequence * ((a.tokens + kChunk - 1) / kChunk), length = a.tokens;
  if (a.cu_code) {
    const int64_t start = cu_at(a, sequence);
    length = cu_at(a, sequence + 1) - start;
    first = start / kChunk + sequence;
  }
  const int count = static_cast<int>((length + kChunk - 1) / kChunk), per_segment = (count + a.segments - 1) / a.segments;
  const uint32_t* const flags = a.flags + static_cast<int64_t>(head) * a.chunks + first;
  if (k < a.segments) warm[k] = k > 0 && starts_warm(flags, k * per_segment, count);
  __syncthreads();
  if (k == 0) {
    int n = 0;
    for (int s = 1; s < a.segments - 1; ++s)
      if (!warm[s] && !warm[s + 1]) todo[n++] = s;
    todo[kMaxSegments] = n;
  }
  __syncthreads();
  const int steps = todo[kMaxSegments];
  if (steps > 0) {
    griddepcontrol_wait();
    const auto fetch = [&](int q) {  // quarter q of the M to come; none left: an empty group, which the waits count
      if (q < steps * kCarryParts) {
        const float* from = slots + (2 * static_cast<int64_t>(todo[q / kCarryParts]) + 1) * kCarryTile + q % kCarryParts * kCarryPart;
        float* to = smem + q % kCarryParts * kCarryPart;
#pragma unroll
        for (int i = k * 4; i < kCarryPart; i += kCarryThreads * 4) cp_async16(to + i, from + i, true);
      }
      cp_async_commit();
    };
    const int row0 = part * kCarryRows * kDim + k;
#pragma unroll
    for (int q = 0; q < kCarryParts - 1; ++q) fetch(q);
    int after = -1;  // the segment whose state S has
    for (int step = 0; step < steps; ++step) {
      const int s = todo[step];
      float* const B = slots + 2 * static_cast<int64_t>(s) * kCarryTile + row0;
      float acc[kCarryRows];
#pragma unroll
      for (int v = 0; v < kCarryRows; ++v) acc[v] = B[v * kDim];
      if (after != s - 1) {  // the scan form made it
        const float* const before = B - 2 * kCarryTile;
#pragma unroll
        for (int v = 0; v < kCarryRows; ++v) S[v * kDim + k] = before[v * kDim];
      }
      for (int p = 0; p < kCarryParts; ++p) {
        cp_async_wait<kCarryParts - 2>();
        __syncthreads();  // the quarter is there, and S; the quarter before it has been read
        fetch(step * kCarryParts + p + kCarryParts - 1);
        const float *M = smem + p * kCarryPart + k, *x = S + p * (kDim / kCarryParts);
#pragma unroll 2
        for (int r = 0; r < kDim / kCarryParts; r += 4) {
          float m[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) m[i] = M[(r + i) * kDim];
#pragma unroll
          for (int v = 0; v < kCarryRows; ++v) {
            const float4 y = *reinterpret_cast<const float4*>(x + v * kDim + r);
            acc[v] += y.x * m[0];
            acc[v] += y.y * m[1];
            acc[v] += y.z * m[2];
            acc[v] += y.w * m[3];
          }
        }
      }
      __syncthreads();  // every thread has read S
#pragma unroll
      for (int v = 0; v < kCarryRows; ++v) B[v * kDim] = S[v * kDim + k] = acc[v];
      after = s;
    }
  }
  if (blockIdx.x == 0) {  // as in state.py
    launch_dependents();
    griddepcontrol_wait();
  }
}

}  // namespace cula::kda

#ifndef CULA_EMULATE
extern "C" __global__ void __launch_bounds__(cula::kda::kCarryThreads, 1)
cula_kda_carry(void* carry, const void* flags, const void* cu_seqlens, int64_t tokens, int32_t hv, int32_t chunks, int32_t segments, int32_t modes) {
  extern __shared__ __align__(1024) uint8_t smem[];
  cula::kda::carry({static_cast<float*>(carry), static_cast<const uint32_t*>(flags), cu_seqlens, tokens, hv, chunks, segments, modes & 3},
                   reinterpret_cast<float*>(smem));
}
#endif
