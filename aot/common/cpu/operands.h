// Operands of a token as float32: what the kernels of several families read in the same way. For cpu_isa_*.cpp only (see isa.h).
//
// P is the parameter struct of a kernel (params.inc); members that a function uses have one meaning in every .def.
#pragma once

#include "simd.h"
#include "vmath.h"

namespace cula::cpu::CULA_ISA {
namespace {

constexpr int kAbsent = 3;                          // dtype code
constexpr int kBetaValue = 0, kBetaLogitTwice = 2;  // cula_beta_kind

CULA_INLINE VF load(const float* p) { return load_raw<VF>(p); }
CULA_INLINE void store(float* p, VF x) { store_raw(p, x); }

CULA_INLINE int64_t bytes_of(int code) { return code == 0 ? 4 : 2; }

// 0 if it is absent.
CULA_INLINE float load_scalar(const char* base, int64_t index, int code) {
  float x = 0.0f;
  if (code != kAbsent) with_dtype(code, [&](auto t) { x = load_part<decltype(t)>(base + index * decltype(t)::kBytes, 1)[0]; });
  return x;
}

// index code of the .def files
CULA_INLINE int64_t load_index(const char* base, int64_t at, int code, int64_t absent) {
  if (code == 1) return load_raw<int32_t>(base + at * 4);
  if (code == 2) return load_raw<int64_t>(base + at * 8);
  return absent;
}

CULA_INLINE bool live_slot(int64_t slot, int64_t slots, int64_t null_slot) { return slot >= 0 && slot < slots && slot != null_slot; }

// count elements, a multiple of W.
CULA_INLINE void load_channels(float* to, const char* base, int64_t index, int code, int count) {
  with_dtype(code, [&](auto t) {
    using T = decltype(t);
    for (int i = 0; i < count; i += W) store(to + i, T::load(base + (index + i) * T::kBytes));
  });
}

// q and k of a token: normed if p asks for it, q scaled too. Returns k . q of these.
template <class Io, class P>
CULA_INLINE float load_qk(const P& p, const char* q, const char* k, float* to_q, float* to_k) {
  const int K = p.head_dim_k;
  // In float64: o of what starts from zero is u times k . q alone, and that may cancel.
  VD qq{}, kk{}, kq{};
  for (int i = 0; i < K; i += W) {
    const VF x = Io::load(q + i * Io::kBytes), y = Io::load(k + i * Io::kBytes);
    store(to_q + i, x);
    store(to_k + i, y);
    add_products(x, x, qq);
    add_products(y, y, kk);
    add_products(x, y, kq);
  }
  double q_scale = p.scale, k_scale = 1.0;
  if (p.l2norm) {
    q_scale /= __builtin_sqrt(sum(qq) + 1e-6);
    k_scale /= __builtin_sqrt(sum(kk) + 1e-6);
  }
  for (int i = 0; i < K; i += W) {
    store(to_q + i, load(to_q + i) * static_cast<float>(q_scale));
    store(to_k + i, load(to_k + i) * static_cast<float>(k_scale));
  }
  return static_cast<float>(sum(kq) * q_scale * k_scale);
}

// base, index: of the beta, in elements.
template <class P>
CULA_INLINE float load_beta(const P& p, const char* base, int64_t index) {
  const float beta = load_scalar(base, index, p.beta_dtype);
  return p.beta_kind == kBetaValue ? beta : sigmoid(splat(beta))[0] * (p.beta_kind == kBetaLogitTwice ? 2.0f : 1.0f);
}

// exp(A_log) of a raw gate.
template <class P>
CULA_INLINE VF load_rate(const P& p, int64_t head) {
  return p.a_log_dtype != kAbsent ? exp(splat(load_scalar(p.a_log, head, p.a_log_dtype))) : splat(1.0f);
}

// dt_bias of the channels of a head.
template <class P>
CULA_INLINE void load_bias(const P& p, int64_t head, float* bias) {
  const int K = p.head_dim_k;
  if (p.dt_bias_dtype != kAbsent) return load_channels(bias, p.dt_bias, head * K, p.dt_bias_dtype, K);
  for (int i = 0; i < K; i += W) store(bias + i, VF{});
}

}  // namespace
}  // namespace cula::cpu::CULA_ISA

// Initialises a StateTable (tables.h) with kernel<Io, S, kVk>.
#define CULA_STATE_LAYOUTS(kernel, Io) {{kernel<Io, F32, true>, kernel<Io, F32, false>}, {kernel<Io, BF16, true>, kernel<Io, BF16, false>}}
#define CULA_STATE_TABLE(kernel) {CULA_STATE_LAYOUTS(kernel, F32), CULA_STATE_LAYOUTS(kernel, BF16), CULA_STATE_LAYOUTS(kernel, F16)}
