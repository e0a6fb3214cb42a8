// (I + L)^-1 of a 32 x 32 unit lower triangle: two 16 x 16 leaves and the block between them.
#pragma once
#include "prep_scores.cuh"

namespace cula::kda {

// c = sign * A B for 16x16 float32 matrices in shared memory. Each operand is split in two tf32 parts: float32 accuracy,
// which keeps the inverse right for correlated keys (error near 1 with half-precision series). The parts have sums of their
// own: one warp waits for this, and a chain of six products is three times one of two.
CULA_DEV void matmul16(float (&c)[2][4], const float* a, const float* b, float sign, int lane) {
  const int g = lane >> 2, t = lane & 3;
  float small[2][4], middle[2][4];
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) c[n][e] = small[n][e] = middle[n][e] = 0.f;
#pragma unroll
  for (int ks = 0; ks < 2; ++ks) {
    float hi[4], lo[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float x = sign * a[(g + (e & 1) * 8) * kPitch + ks * 8 + t + (e >> 1) * 4];
      hi[e] = __uint_as_float(__float_as_uint(x) & 0xffffe000u);
      lo[e] = x - hi[e];
    }
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      float bh[2], bl[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float x = b[(ks * 8 + t + e * 4) * kPitch + n * 8 + g];
        bh[e] = __uint_as_float(__float_as_uint(x) & 0xffffe000u);
        bl[e] = x - bh[e];
      }
      mma_tf32(small[n], lo, bh[0], bh[1]);
      mma_tf32(middle[n], hi, bl[0], bl[1]);
      mma_tf32(c[n], hi, bh[0], bh[1]);
    }
  }
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) c[n][e] += small[n][e] + middle[n][e];
}

// x = (I + L)^-1 by forward substitution in float32: lane j makes column j (lanes 16 to 31 repeat it and do not store).
CULA_DEV void invert_leaf(const float* L, float* X, uint8_t* T, int at, const float* beta, int lane) {
  const int j = lane & 15;
  float x[kSub];
#pragma unroll
  for (int i = 0; i < kSub; ++i) {
    float s[4] = {i == j ? 1.f : 0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int m = 0; m < i; m += 4) {
      const float4 l = *reinterpret_cast<const float4*>(L + i * kPitch + m);
      s[0] -= l.x * x[m];
      if (m + 1 < i) s[1] -= l.y * x[m + 1];
      if (m + 2 < i) s[2] -= l.z * x[m + 2];
      if (m + 3 < i) s[3] -= l.w * x[m + 3];
    }
    x[i] = (s[0] + s[1]) + (s[2] + s[3]);
  }
  if (lane < kSub) {
    const float b = beta[at + j];
#pragma unroll
    for (int i = 0; i < kSub; ++i) {
      X[i * kPitch + j] = x[i];
      *reinterpret_cast<uint16_t*>(T + score_offset(at + i, at + j)) = static_cast<uint16_t>(pack_bf16(x[i] * b, 0.f));
    }
  }
}

// log2 of how much less of the state before the chunk is left after it, a lower bound, 0 if there is none: for one warp, when
// the record is complete in shared memory. S_end = M S_start + ..., M = diag(2^G_C) - Kr^T T Kd, and by the triangle inequality
//   ||M|| <= max_c 2^{G_C,c} + sum_ij |Kr_i| |T_ij| |Kd_j|.
// The largest total decay of a channel alone is no bound: the products mix channels. One bit covers the roundings.
CULA_DEV_COLD uint32_t forgotten(const uint8_t* smem, float* norms, int lane) {
  float kd = 0.f, kr = 0.f;  // of token `lane`
#pragma unroll 1
  for (int unit = 0; unit < kDim / 8; ++unit) {
    const uint32_t* a = reinterpret_cast<const uint32_t*>(smem + kRecKd + tile_offset(kHalf32, lane, unit));
    const uint32_t* b = reinterpret_cast<const uint32_t*>(smem + kRecKr + kr_offset(lane, unit));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 x = unpack_bf16(a[i]), y = unpack_bf16(b[i]);
      kd += x.x * x.x + x.y * x.y;
      kr += y.x * y.x + y.y * y.y;
    }
  }
  norms[lane] = sqrtf(kd);
  __syncwarp();
  float sum = 0.f;
#pragma unroll 1
  for (int j = 0; j < kChunk; j += 2) {
    const float2 t = unpack_bf16(*reinterpret_cast<const uint32_t*>(smem + kRecT + score_offset(lane, j)));
    sum += fabsf(t.x) * norms[j] + fabsf(t.y) * norms[j + 1];
  }
  sum *= sqrtf(kr);
  const float4 d = *reinterpret_cast<const float4*>(smem + kRecDecay + lane * 16);
  float most = fmaxf(fmaxf(d.x, d.y), fmaxf(d.z, d.w));
#pragma unroll
  for (int bit = 16; bit; bit >>= 1) {
    sum += __shfl_xor_sync(~0u, sum, bit);
    most = fmaxf(most, __shfl_xor_sync(~0u, most, bit));
  }
  const float bound = sum + most;
  return bound < 0.5f ? static_cast<uint32_t>(fminf(-lg2(bound) - 1.f, 1000.f)) : 0u;  // a NaN forgets nothing
}

}  // namespace cula::kda
