// Scalar float32 functions of the gates: exp, softplus and sigmoid. Plain C++ on the host, so that their arithmetic is tested
// without a GPU (tests/gates_math): the only operations that differ there are the three of the GPU's special function unit.
//
// Two forms of each function:
//   precise  for float32 results: 2 ulp at every argument besides the error of the special functions, which can double it. That
//            holds where the result is tiny too: far below zero both are exp(y), an error in y is a relative error of the
//            result, so arguments come as a pair hi + lo.
//   fast     for results that are rounded to bf16 or fp16: (4 + 2 |y|) ulp of float32, in half of the instructions. With bf16 in and
//            out an H200 has 31 issue slots an element; beyond them not memory sets the time.
// Results below 2^-126 are flushed to zero.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define CULA_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define CULA_HOST_DEVICE inline
#endif

namespace cula::math {

// ------------------------------------------------------------------------- operations whose rounding must not be changed
// (nvcc contracts a * b + c and would break the error-free transformations below)

CULA_HOST_DEVICE float add(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fadd_rn(a, b);
#else
  return a + b;
#endif
}

CULA_HOST_DEVICE float mul(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

CULA_HOST_DEVICE float fma(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
  return __fmaf_rn(a, b, c);
#else
  return std::fma(a, b, c);
#endif
}

CULA_HOST_DEVICE uint32_t bits_of(float x) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(x);
#else
  uint32_t u;
  std::memcpy(&u, &x, 4);
  return u;
#endif
}

CULA_HOST_DEVICE float from_bits(uint32_t u) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(u);
#else
  float x;
  std::memcpy(&x, &u, 4);
  return x;
#endif
}

// The larger of two; NaN if either is (fmaxf would drop it, and a NaN in x would leave as a plausible gate).
CULA_HOST_DEVICE float max_nan(float a, float b) {
#if defined(__CUDA_ARCH__)
  float r;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
#else
  return std::isnan(a) || std::isnan(b) ? NAN : (a > b ? a : b);
#endif
}

// ------------------------------------------------------------------------------------------------- special function unit

#if !defined(__CUDACC__)
// The tests move every approximate result by this part, from -1 to 1, of the bound that the PTX manual gives.
inline float& approx_error() {
  static thread_local float part = 0.0f;
  return part;
}
inline float approximate(float exact, float bound) {
  const float r = exact * (1.0f + approx_error() * bound);
  return std::fabs(r) < 0x1p-126f ? std::copysign(0.0f, r) : r;
}
#elif !defined(__CUDA_ARCH__)
inline float approximate(float exact, float) { return exact; }
#endif

CULA_HOST_DEVICE float exp2_approx(float x) {  // relative error 2^-22
#if defined(__CUDA_ARCH__)
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
#else
  return approximate(std::exp2(x), 0x1p-22f);
#endif
}

CULA_HOST_DEVICE float reciprocal_approx(float x) {  // relative error 2^-23
#if defined(__CUDA_ARCH__)
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
#else
  return approximate(1.0f / x, 0x1p-23f);
#endif
}

CULA_HOST_DEVICE float rsqrt_approx(float x) {  // relative error 2^-22.9; subnormal x too
#if defined(__CUDA_ARCH__)
  float r;
  asm("rsqrt.approx.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
#else
  return approximate(1.0f / std::sqrt(x), 0x1.2p-23f);
#endif
}

// -------------------------------------------------------------------------------------------------------------- constants

constexpr float kLog2e = 0x1.715476p+0f;
constexpr float kLn2Hi = 0x1.62e430p-1f;   // ln 2 = kLn2Hi + kLn2Lo
constexpr float kLn2Lo = -0x1.05c610p-29f;

// An unevaluated sum hi + lo with |lo| <= ulp(hi) / 2.
struct Pair {
  float hi, lo;
};

// a + b without error (Knuth). For an infinite sum lo is NaN; the functions below take that for zero.
CULA_HOST_DEVICE Pair two_sum(float a, float b) {
  const float s = add(a, b);
  const float bb = add(s, -a);
  return {s, add(add(a, -add(s, -bb)), add(b, -bb))};
}

// a * b to about 2^-46.
CULA_HOST_DEVICE Pair multiply(Pair a, Pair b) {
  const float p = mul(a.hi, b.hi);
  return {p, fma(a.lo, b.hi, fma(a.hi, b.lo, fma(a.hi, b.hi, -p)))};
}

// -------------------------------------------------------------------------------------------------------------- functions

// exp(-|y|). NaN propagates.
CULA_HOST_DEVICE float exp_minus_abs(Pair y) {
  // -120 keeps the correction finite for infinite y; exp2 of -173 is already zero.
  const float a = max_nan(-std::fabs(y.hi), -120.0f);
  // ulp(120) / 2 in the argument of exp2 would be 3e-6 in the result: what rounding took from a * log2(e) comes back as c.
  const float p = mul(a, kLog2e);
  const float lo = from_bits(bits_of(y.lo) ^ (~bits_of(y.hi) & 0x80000000u));  // of -|y|
  const float c = add(fma(p, -kLn2Lo, fma(p, -kLn2Hi, a)), lo);
  const float e = exp2_approx(p);
  return fma(e, std::fmin(c, 1.0f), e);  // fmin: NaN of an infinite two_sum is dropped
}

// log(1 + t) / t on [0,1], relative error 3.3e-8: minimax in float32 coefficients with q(0) = 1, so that a small t comes out exact.
CULA_HOST_DEVICE float log1p_ratio(float t) {
  float q = 0x1.5fa0dap-8f;
  q = fma(q, t, -0x1.eca398p-6f);
  q = fma(q, t, 0x1.44707ap-4f);
  q = fma(q, t, -0x1.19af8ep-3f);
  q = fma(q, t, 0x1.884554p-3f);
  q = fma(q, t, -0x1.fd1368p-3f);
  q = fma(q, t, 0x1.5535dep-2f);
  q = fma(q, t, -0x1.ffff14p-2f);
  return fma(q, t, 1.0f);
}

// log(1 + exp y) = max(y, 0) + log(1 + exp -|y|): no overflow, no cancellation, exp(y) for y << 0, y for y >> 0.
CULA_HOST_DEVICE float softplus(Pair y) {
  const float t = exp_minus_abs(y);
  return fma(t, log1p_ratio(t), std::fmax(y.hi, 0.0f));
}

CULA_HOST_DEVICE float softplus_fast(float y) {
  const float t = exp2_approx(mul(-std::fabs(y), kLog2e));
  return fma(t, log1p_ratio(t), std::fmax(y, 0.0f));
}

// 1 / (1 + exp -y)
CULA_HOST_DEVICE float sigmoid(Pair y) {
  const float t = exp_minus_abs(y);
  const float r = reciprocal_approx(add(1.0f, t));
  return y.hi < 0.0f ? mul(t, r) : r;
}

CULA_HOST_DEVICE float sigmoid_fast(float y) {
  return reciprocal_approx(add(1.0f, exp2_approx(mul(y, -kLog2e))));
}

// x^-0.5 within 1 ulp: one Newton step. 0 for infinite x.
CULA_HOST_DEVICE float rsqrt(float x) {
  const float r = rsqrt_approx(x);
  const float refined = fma(mul(0.5f, r), fma(mul(-x, r), r, 1.0f), r);
  return r > 0.0f ? refined : r;  // infinite x: the step would be inf * 0; NaN stays NaN
}

// exp(a) to 2^-28, for a constant that multiplies many arguments of exp: sigmoid(exp(A) y) inherits |exp(A) y| times
// its relative error. Infinite above 88.7, 0 far below -87.3. NaN propagates.
CULA_HOST_DEVICE Pair exp_pair(float a) {
  a = a < -104.0f ? -104.0f : a > 90.0f ? 90.0f : a;
  constexpr float kRound = 0x1.8p+23f;                          // adding it rounds to an integer in the low bits
  constexpr float kHead = 0x1.63p-1f, kTail = -0x1.bd0106p-13f;  // ln 2; n * kHead is exact
  const float shifted = fma(a, kLog2e, kRound);
  const float n = add(shifted, -kRound);
  const uint32_t exponent = bits_of(shifted) - bits_of(kRound);  // n as an integer
  const float r_hi = fma(n, -kHead, a);
  const float r_lo = mul(n, -kTail);
  const float r = add(r_hi, r_lo);
  float q = 0x1.a01a02p-16f;  // 1/8!
  q = fma(q, r, 0x1.a01a02p-13f);
  q = fma(q, r, 0x1.6c16c2p-10f);
  q = fma(q, r, 0x1.111112p-7f);
  q = fma(q, r, 0x1.555556p-5f);
  q = fma(q, r, 0x1.555556p-3f);
  // exp r = 1 + r + r^2/2 + q r^3: the first three terms with their rounding errors
  const float r_error = add(r_lo, -add(r, -r_hi));
  const float square = mul(mul(0.5f, r), r), square_error = fma(mul(0.5f, r), r, -square);
  const float s1 = add(1.0f, r), e1 = add(r, -add(s1, -1.0f));
  const float s2 = add(s1, square), e2 = add(square, -add(s2, -s1));
  float rest = fma(mul(q, r), mul(r, r), fma(r, r_error, square_error));
  rest = add(rest, add(add(e1, e2), r_error));
  const float hi = add(s2, rest), lo = add(rest, -add(hi, -s2));
  // 2^n in two factors: n = 128 and -150 have none of their own
  const uint32_t half = static_cast<uint32_t>(static_cast<int32_t>(exponent) >> 1);
  const float f1 = from_bits((half + 127u) << 23), f2 = from_bits((exponent - half + 127u) << 23);
  return {mul(mul(hi, f1), f2), mul(mul(lo, f1), f2)};
}

}  // namespace cula::math
