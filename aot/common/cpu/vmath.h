// exp, softplus, sigmoid and the gate formulas on float32 vectors. For cpu_isa_*.cpp only (see isa.h). Errors are measured by
// tests/cpu/test_math.py; results below 2^-126 are rounded to subnormals, NaN stays NaN.
#pragma once

#include "simd.h"

#if defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace cula::cpu::CULA_ISA {

// An unevaluated sum hi + lo. Far below zero softplus(y) and sigmoid(y) are exp(y), where an error in y is a relative error of
// the result: rounding x + bias alone would cost |y| / 2 ulp.
struct Pair {
  VF hi, lo;
};

// a * b - p for p = a * b. Not left to contraction, which sees p - p.
CULA_INLINE VF product_error(VF a, VF b, VF p) {
#if defined(__AVX512F__)
  return (VF)_mm512_fmsub_ps((__m512)a, (__m512)b, (__m512)p);
#elif defined(__FMA__)
  return (VF)_mm256_fmsub_ps((__m256)a, (__m256)b, (__m256)p);
#elif defined(__aarch64__)
  return (VF)vfmaq_f32(-(float32x4_t)p, (float32x4_t)a, (float32x4_t)b);
#else
  (void)a, (void)b, (void)p;
  return VF{};
#endif
}

CULA_INLINE Pair add(VF a, VF b) {
  const VF s = a + b;
  const VF bb = s - a;
  const VF e = (a - (s - bb)) + (b - bb);
  return {s, select(e == e, e, VF{})};  // e is NaN for an infinite sum
}

// Without FMA (x86-64 base) the rounding of the product stays, half an ulp.
CULA_INLINE Pair multiply(VF a, Pair b) {
  const VF p = a * b.hi;
  const VF e = product_error(a, b.hi, p) + a * b.lo;
  return {p, select(e == e, e, VF{})};
}

CULA_INLINE VF exp(Pair x) {
  VF a = x.hi;
  a = select(a < -104.0f, splat(-104.0f), a);  // 0 from here on
  a = select(a > 90.0f, splat(90.0f), a);      // infinity
  const VF shifted = a * 0x1.715476p+0f + 0x1.8p+23f;  // adding 1.5 * 2^23 rounds to an integer, in the low bits
  const VF n = shifted - 0x1.8p+23f;
  const VI i = (VI)shifted - 0x4b400000;
  // ln 2 in a part so short that n times it is exact, and the rest
  const VF r = (a - n * 0x1.63p-1f) + (n * 0x1.bd0106p-13f + x.lo);
  VF q = r * (1.0f / 5040) + (1.0f / 720);
  q = q * r + (1.0f / 120);
  q = q * r + (1.0f / 24);
  q = q * r + (1.0f / 6);
  q = q * r + 0.5f;
  const VF e = 1.0f + (r + (r * r) * q);
  // 2^i in two factors: neither 2^-150 nor 2^130 is a float32
  const VI half = i >> 1;
  return e * (VF)((half + 127) << 23) * (VF)((i - half + 127) << 23);
}

CULA_INLINE VF exp(VF x) { return exp(Pair{x, VF{}}); }

// exp(-|y|)
CULA_INLINE VF exp_minus_abs(Pair y) {
  const VU flip = ~(VU)y.hi & 0x80000000u;
  return exp(Pair{-abs(y.hi), (VF)((VU)y.lo ^ flip)});
}

// log(1 + t) for t in [0,1]: 2 atanh(t / (2 + t)), whose argument is at most 1/3; the series is cut at 1.4e-9.
CULA_INLINE VF log1p(VF t) {
  const VF s = t / (t + 2.0f);
  const VF z = s * s;
  VF q = z * (2.0f / 15) + (2.0f / 13);
  q = q * z + (2.0f / 11);
  q = q * z + (2.0f / 9);
  q = q * z + (2.0f / 7);
  q = q * z + (2.0f / 5);
  q = q * z + (2.0f / 3);
  return s * 2.0f + (s * z) * q;
}

// log(1 + exp y). Above 17 this is y in float32, so the threshold of 20 in the definition needs no branch.
CULA_INLINE VF softplus(Pair y) {
  const VF positive = select(y.hi > 0.0f, y.hi, VF{});
  return positive + log1p(exp_minus_abs(y));
}

// 1 / (1 + exp -y)
CULA_INLINE VF sigmoid(Pair y) {
  const VF t = exp_minus_abs(y);
  const VF r = 1.0f / (t + 1.0f);
  return select(y.hi < 0.0f, t * r, r);
}

CULA_INLINE VF sigmoid(VF y) { return sigmoid(Pair{y, VF{}}); }

// The log decay of a raw gate (cula_gate_args): rate = exp(A_log); lower_bound 0 is the softplus form.
CULA_INLINE VF raw_gate(VF x, VF bias, VF rate, float lower_bound) {
  const Pair y = add(x, bias);
  return lower_bound != 0.0f ? sigmoid(multiply(rate, y)) * lower_bound : softplus(y) * -rate;
}

}  // namespace cula::cpu::CULA_ISA
