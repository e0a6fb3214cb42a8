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
CULA_DEV void prefix(float (&sum)[4], const Gates& p, float a_log, const Lane& l, uint8_t* smem, int valid, bool bf16, float lower_bound) {
  const float a = expf(a_log);
  const float outer = kForm == kSafe ? lower_bound * kLog2e : -a * kLog2e, scale = -a * kLog2e;
  float shift[4];
#pragma unroll
  for (int e = 0; e < 4; ++e) { sum[e] = 0.f; shift[e] = kForm == kSafe ? scale * p.dt_bias[e] : p.dt_bias[e]; }
#pragma unroll
  for (int t = 0; t < kGroup; ++t) {
    float x[4];
    unpack_gate(x, p.gate[t], bf16);
    if (t < valid) {
#pragma unroll
      for (int e = 0; e < 4; ++e) sum[e] += decay_log2<kForm>(x[e], scale, shift[e], outer);
    }
    store_prefix(smem, at(l.base, t), sum);
  }
}

}  // namespace cula::kda
