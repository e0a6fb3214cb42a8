// (I + L)^-1 of a 32 x 32 unit lower triangle: two 16 x 16 leaves and the block between them.
#pragma once
#include "prep_scores.cuh"

namespace cula::kda {

// c = sign * A B for 16x16 float32 matrices in shared memory. Each operand is split in two tf32 parts: float32 accuracy,
// which keeps the inverse right for correlated keys (error near 1 with half-precision series).
CULA_DEV void matmul16(float (&c)[2][4], const float* a, const float* b, float sign, int lane) {
  const int g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) c[n][e] = 0.f;
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
      mma_tf32(c[n], lo, bh[0], bh[1]);
      mma_tf32(c[n], hi, bl[0], bl[1]);
      mma_tf32(c[n], hi, bh[0], bh[1]);
    }
  }
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

}  // namespace cula::kda
