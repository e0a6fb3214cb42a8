// kda_gate, gdn_gate and l2norm on the CPU, one ISA level (aot/common/cpu/isa.h).
//
// Rows are worked on in blocks of float32 that stay in L1: load (converting), compute, store (converting). Any dtype then costs
// one branch a block, and a result that is the same memory as its input is safe.
#include "aot/common/cpu/operands.h"
#include "aot/ops/gates/cpu_gates.h"

namespace cula::cpu::CULA_ISA {
namespace {

constexpr int kBlock = 256;
constexpr int kMaxNorm = 1024;

CULA_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// count elements from base[index * dtype]; what lies behind them up to a whole vector is zero.
template <class T>
CULA_INLINE void load_block(float* to, const char* base, int64_t index, int count) {
  const char* p = base + index * T::kBytes;
  int i = 0;
  for (; i + W <= count; i += W) store(to + i, T::load(p + i * T::kBytes));
  if (i < count) store(to + i, load_part<T>(p + i * T::kBytes, count - i));
}
template <class T>
CULA_INLINE void store_block(char* base, int64_t index, const float* from, int count) {
  char* p = base + index * T::kBytes;
  int i = 0;
  for (; i + W <= count; i += W) T::store(p + i * T::kBytes, load(from + i));
  if (i < count) store_part<T>(p + i * T::kBytes, load(from + i), count - i);
}
void load_block(float* to, const char* base, int64_t index, int count, int code) {
  with_dtype(code, [&](auto t) { load_block<decltype(t)>(to, base, index, count); });
}
void store_block(char* base, int64_t index, const float* from, int count, int code) {
  with_dtype(code, [&](auto t) { store_block<decltype(t)>(base, index, from, count); });
}

void fill(float* to, int count, float x) {
  for (int i = 0; i < count; i += W) store(to + i, splat(x));
}

// exp(A_log) of `count` heads from `head` on.
void load_rates(const GateParams& p, int64_t head, int count, float* rate) {
  if (p.a_log_dtype == kAbsent) return fill(rate, count, 1.0f);
  load_block(rate, p.a_log, head, count, p.a_log_dtype);
  for (int i = 0; i < count; i += W) store(rate + i, exp(load(rate + i)));
}

void activate_beta(const GateParams& p, int64_t batch, int64_t token, int64_t head, int count) {
  alignas(64) float beta[kBlock] = {};
  const int64_t from = batch * p.beta_b + token * p.beta_t + head * p.beta_h;
  const int64_t to = batch * p.beta_out_b + token * p.beta_out_t + head * p.beta_out_h;
  with_dtype(p.beta_dtype, [&](auto t) {
    using T = decltype(t);
    for (int i = 0; i < count; ++i) beta[i] = load_part<T>(p.beta + (from + i * p.beta_h) * T::kBytes, 1)[0];
  });
  const float factor = p.beta_kind == kBetaLogitTwice ? 2.0f : 1.0f;
  for (int i = 0; i < count; i += W) store(beta + i, sigmoid(load(beta + i)) * factor);
  with_dtype(p.beta_out_dtype, [&](auto t) {
    using T = decltype(t);
    for (int i = 0; i < count; ++i) store_part<T>(p.beta_out + (to + i * p.beta_out_h) * T::kBytes, splat(beta[i]), 1);
  });
}

// One block of log decays: x and g from these element indices on, bias from dt_bias[bias_at], rate one for all or one each.
template <class Io, bool kOneRate>
void gate_block(const GateParams& p, int64_t x_at, int64_t g_at, int64_t bias_at, const float* rate, int count) {
  alignas(64) float x[kBlock], bias[kBlock];
  load_block<Io>(x, p.x, x_at, count);
  if (p.dt_bias_dtype == kAbsent) {
    fill(bias, count, 0.0f);
  } else {
    load_block(bias, p.dt_bias, bias_at, count, p.dt_bias_dtype);
  }
  for (int i = 0; i < count; i += W)
    store(x + i, raw_gate(load(x + i), load(bias + i), kOneRate ? splat(*rate) : load(rate + i), p.lower_bound));
  store_block(p.g, g_at, x, count, p.g_dtype);
}

// Item (b * tokens + t) * hv + h: the channels of one token and head, and its beta.
template <class Io>
void kda_gate(void* const* params, int64_t begin, int64_t end) {
  GateParams p;
  read_params(params, p);
  alignas(64) float rate[kBlock];
  for (int64_t item = begin, next; item < end; item = next) {
    const int64_t row = item / p.hv, head = item % p.hv, batch = row / p.tokens, token = row % p.tokens;
    const int heads = static_cast<int>(least(least(end - item, p.hv - head), kBlock));  // of this token
    next = item + heads;
    load_rates(p, head, heads, rate);
    if (p.beta != nullptr) activate_beta(p, batch, token, head, heads);
    for (int64_t h = head; h < head + heads; ++h) {
      const int64_t x_at = batch * p.x_b + token * p.x_t + h * p.x_h, g_at = batch * p.g_b + token * p.g_t + h * p.g_h;
      for (int64_t c = 0; c < p.head_dim; c += kBlock) {
        const int count = static_cast<int>(least(p.head_dim - c, kBlock));
        gate_block<Io, true>(p, x_at + c, g_at + c, h * p.head_dim + c, rate + (h - head), count);
      }
    }
  }
}

// Item b * tokens + t: the heads of one token.
template <class Io>
void gdn_gate(void* const* params, int64_t begin, int64_t end) {
  GateParams p;
  read_params(params, p);
  alignas(64) float rate[kBlock];
  // The rates of at most a block of heads are the same for every item.
  if (p.hv <= kBlock) load_rates(p, 0, p.hv, rate);
  for (int64_t item = begin; item < end; ++item) {
    const int64_t batch = item / p.tokens, token = item % p.tokens;
    const int64_t x_at = batch * p.x_b + token * p.x_t, g_at = batch * p.g_b + token * p.g_t;
    for (int64_t h = 0; h < p.hv; h += kBlock) {
      const int count = static_cast<int>(least(p.hv - h, kBlock));
      if (p.hv > kBlock) load_rates(p, h, count, rate);
      if (p.beta != nullptr) activate_beta(p, batch, token, h, count);
      gate_block<Io, false>(p, x_at + h, g_at + h, h, rate, count);
    }
  }
}

// Item: a row, numbered as rstd.
template <class Io>
void l2norm(void* const* params, int64_t begin, int64_t end) {
  NormParams p;
  read_params(params, p);
  const int dim = p.head_dim;
  alignas(64) float x[kMaxNorm];
  int64_t l = begin % p.n_2, j = begin / p.n_2 % p.n_1, i = begin / p.n_2 / p.n_1;
  for (int64_t item = begin; item < end; ++item) {
    load_block<Io>(x, p.x, i * p.x_0 + j * p.x_1 + l * p.x_2, dim);
    VD square{};  // float64: squares of float32 values overflow float32
    for (int c = 0; c < dim; c += W) add_products(load(x + c), load(x + c), square);
    const float rstd = static_cast<float>(1.0 / __builtin_sqrt(sum(square) + static_cast<double>(p.eps)));
    for (int c = 0; c < dim; c += W) store(x + c, load(x + c) * rstd);
    store_block(p.y, i * p.y_0 + j * p.y_1 + l * p.y_2, x, dim, p.y_dtype);
    if (p.rstd != nullptr) store_raw(p.rstd + item * 4, rstd);
    if (++l == p.n_2) {
      l = 0;
      if (++j == p.n_1) j = 0, ++i;
    }
  }
}

}  // namespace

const GateTable kGates = {{kda_gate<F32>, kda_gate<BF16>, kda_gate<F16>},
                          {gdn_gate<F32>, gdn_gate<BF16>, gdn_gate<F16>},
                          {l2norm<F32>, l2norm<BF16>, l2norm<F16>}};

}  // namespace cula::cpu::CULA_ISA
