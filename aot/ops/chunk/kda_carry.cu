// KDA prefill with segments: the states between them. The scan form of the state kernel leaves, per (sequence, head, segment s),
// B_s in slot 0 and M_s^T in slot 1, float32 [128,128] (state.py). B_0 is the state after segment 0 already; this kernel turns
// B_s into the state after segment s, in place and in order: B_s += B_{s-1} M_s^T.
//
// A block takes 8 rows of one chain: 16 blocks a chain, so 8 heads fill an SM each. M_s^T of the next step is on its way while
// this one is multiplied. Float32 throughout: the product is a hundredth of the work, and its error would go into every token.
#ifdef CULA_EMULATE
#include "dev/emulate.h"
#else
#include "prep_device.cuh"
#endif

namespace cula::kda {
using namespace cula::dev;

constexpr int kCarryDim = 128, kCarryRows = 8, kCarryThreads = 128;
constexpr int kCarryTile = kCarryDim * kCarryDim;  // floats
constexpr int kCarrySmemBytes = (2 * kCarryTile + kCarryRows * kCarryDim) * 4;
static_assert(kCarrySmemBytes == 135168, "the plan's figure");

CULA_DEV void carry(float* base, int segments, float* smem) {
  const int k = threadIdx.x, chain = blockIdx.x / (kCarryDim / kCarryRows), part = blockIdx.x % (kCarryDim / kCarryRows);
  float* const slots = base + static_cast<int64_t>(chain) * segments * 2 * kCarryTile;
  float* const S = smem + 2 * kCarryTile;  // [8][128]: the state's rows
  const auto fetch = [&](int s, float* to) {
    const float* from = slots + (2 * static_cast<int64_t>(s) + 1) * kCarryTile;
#pragma unroll 4
    for (int i = k * 4; i < kCarryTile; i += kCarryThreads * 4) cp_async16(to + i, from + i, true);
    cp_async_commit();
  };
  griddepcontrol_wait();
  const int row0 = part * kCarryRows * kCarryDim + k;
  if (segments > 2) fetch(1, smem + kCarryTile);
#pragma unroll
  for (int v = 0; v < kCarryRows; ++v) S[v * kCarryDim + k] = slots[row0 + v * kCarryDim];
  for (int s = 1; s < segments - 1; ++s) {
    float* const B = slots + 2 * static_cast<int64_t>(s) * kCarryTile + row0;
    float acc[kCarryRows];
#pragma unroll
    for (int v = 0; v < kCarryRows; ++v) acc[v] = B[v * kCarryDim];
    cp_async_wait_all();
    __syncthreads();
    if (s + 1 < segments - 1) fetch(s + 1, smem + ((s + 1) & 1) * kCarryTile);
    const float* M = smem + (s & 1) * kCarryTile + k;
#pragma unroll 2
    for (int r = 0; r < kCarryDim; r += 4) {
      float m[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) m[i] = M[(r + i) * kCarryDim];
#pragma unroll
      for (int v = 0; v < kCarryRows; ++v) {
        const float4 x = *reinterpret_cast<const float4*>(S + v * kCarryDim + r);
        acc[v] += x.x * m[0];
        acc[v] += x.y * m[1];
        acc[v] += x.z * m[2];
        acc[v] += x.w * m[3];
      }
    }
    __syncthreads();  // every thread has read S and this M
#pragma unroll
    for (int v = 0; v < kCarryRows; ++v) B[v * kCarryDim] = S[v * kCarryDim + k] = acc[v];
  }
}

}  // namespace cula::kda

#ifndef CULA_EMULATE
extern "C" __global__ void __launch_bounds__(cula::kda::kCarryThreads, 1) cula_kda_carry(void* carry, int32_t segments) {
  extern __shared__ __align__(1024) uint8_t smem[];
  cula::kda::carry(static_cast<float*>(carry), segments, reinterpret_cast<float*>(smem));
}
#endif
