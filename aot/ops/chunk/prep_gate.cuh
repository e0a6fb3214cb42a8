// Gate activation and prefix sums.
#pragma once
#include "prep_work.cuh"

namespace cula::kda {

CULA_DEV float softplus(float x) {
  if (x > 20.f) return x;
  const float e = ex2(x * kLog2e);
  // log(1 + e) loses the low bits of a small e: its series instead, to e^5
  return e < 0.03125f ? e * (1.f - e * (0.5f - e * (0.33333333f - e * 0.25f))) : lg2(1.f + e) * kLn2;
}

// log2 decay of one element. scale, shift: folded constants of the head and channel.
enum GateForm { kLog, kSoftplus, kSafe };
template <int kForm>
CULA_DEV float decay_log2(float x, float scale, float shift, float outer) {
  if (kForm == kLog) return x * kLog2e;
  if (kForm == kSoftplus) return outer * softplus(x + shift);
  return outer * rcp(1.f + ex2(scale * x + shift));
}

// Inclusive prefix sums of log2 decay over a group; tokens that do not exist do not decay.
template <int kForm>
CULA_DEV void prefix(float (&g)[kGroup][4], const Gates& in, const HeadGate& head, int valid, bool bf16, float lower_bound) {
  const float a = ex2(kLog2e * head.a_log);
  const float outer = kForm == kSafe ? lower_bound * kLog2e : -a * kLog2e, scale = -a * kLog2e;
  float sum[4], shift[4];
#pragma unroll
  for (int e = 0; e < 4; ++e) { sum[e] = 0.f; shift[e] = kForm == kSafe ? scale * head.dt_bias[e] : head.dt_bias[e]; }
#pragma unroll
  for (int t = 0; t < kGroup; ++t) {
    float x[4];
    unpack_gate(x, in.gate[t], bf16);
    // The bounded form is finite and can be multiplied by 0, the log gate was loaded as 0: no predicate on every element
    const float here = t < valid ? outer : 0.f;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (kForm != kSoftplus || t < valid) sum[e] += decay_log2<kForm>(x[e], scale, shift[e], kForm == kSafe ? here : outer);
      g[t][e] = sum[e];
    }
  }
}

// The factors of k and q of a warp's 4 tokens: lane 4 m has token m's for k, lane 16 + 4 m that for q (and the 3 lanes after it).
CULA_DEV float norm_factors(const Tokens& in, int lane, bool l2norm, float scale) {
  const float outer = lane & 16 ? scale : 1.f;
  if (!l2norm) return outer;
  float s[2 * kGroup];
#pragma unroll
  for (int t = 0; t < kGroup; ++t) {
    float k[4], q[4];
    unpack_quad(k, in.k[t], 1.f);
    unpack_quad(q, in.q[t], 1.f);
    s[t] = (k[0] * k[0] + k[1] * k[1]) + (k[2] * k[2] + k[3] * k[3]);
    s[kGroup + t] = (q[0] * q[0] + q[1] * q[1]) + (q[2] * q[2] + q[3] * q[3]);
  }
  // Each exchange halves the set of sums a lane still carries: 9 shuffles for 8 sums over 32 lanes
#pragma unroll
  for (int half = kGroup, bit = 16; half; half >>= 1, bit >>= 1)
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const bool upper = lane & bit;
      s[i] = (upper ? s[i + half] : s[i]) + __shfl_xor_sync(~0u, upper ? s[i] : s[i + half], bit);
    }
  s[0] += __shfl_xor_sync(~0u, s[0], 2);
  s[0] += __shfl_xor_sync(~0u, s[0], 1);
  return rsqrtf(s[0] + 1e-6f) * outer;
}
// Normalised values of token t.
CULA_DEV void normalised(float (&k)[4], float (&q)[4], const Tokens& in, int t, float factors) {
  unpack_quad(k, in.k[t], __shfl_sync(~0u, factors, 4 * t));
  unpack_quad(q, in.q[t], __shfl_sync(~0u, factors, 16 + 4 * t));
}

}  // namespace cula::kda
