// kda_gate and gdn_gate: raw gate -> log decay, beta logit -> beta, elementwise; formulas and grid rule in README.md.
//
// A thread keeps one column (batch entry, head, N adjacent channels) and walks down the tokens: A_log and dt_bias are read once, into
// registers, and no index is divided inside the loop. Four tokens are in flight a thread.
#pragma once

#include <type_traits>

#include "aot/common/cuda/grid_dependency.cuh"
#include "aot/common/cuda/index.cuh"
#include "aot/common/cuda/io.cuh"
#include "aot/common/cuda/math.cuh"
#include "aot/common/cuda/memory.cuh"

namespace cula::gates {

constexpr int kThreads = 256;
constexpr int kBlocks = 4;  // a multiprocessor, as the plan counts: up to 64 registers a thread

// Tokens in flight a thread: 32 bytes, more spills. 1024 threads hold 32 KB a multiprocessor, against the 13 KB that 4.3 TB/s times
// 0.8 us asks of each of 132.
template <class T, int N>
constexpr int kUnroll = N * int(sizeof(T)) >= 16 ? 2 : 4;

// Fields of the parameter `modes`.
struct GateModes {
  int bits;
#define CULA_PARAM(kind, name)
#define CULA_MODE(name, shift, width) \
  CUTLASS_DEVICE int name() const { return bits >> shift & ((1 << width) - 1); }
#include "aot/ops/gates/params_gate.def"
#undef CULA_PARAM
#undef CULA_MODE
};

// gdn has one head of `hv` channels.
struct Problem {
  const Io* x;
  void* g;
  const void* a_log;
  const void* dt_bias;
  int64_t x_batch, x_token, x_head, g_batch, g_token, g_head;
  int64_t batch, tokens;
  uint32_t heads, row;
  int g_dtype, a_log_dtype, dt_bias_dtype;
  float lower_bound;
};

struct Beta {
  const void* in;
  void* out;
  int64_t in_batch, in_token, in_head, out_batch, out_token, out_head;
  int64_t batch, tokens;
  uint32_t heads;
  int in_dtype, out_dtype;
  float factor;
};

// The share of a thread. A column is N adjacent channels of one head and batch entry. With enough threads, `lanes` of them share a
// column and each takes every lanes-th token; with too few, each takes every threads-th column, whole.
struct Walk {
  int64_t column;
  uint32_t lane, lanes;
  int32_t count;  // tokens; the grid rule keeps it small: elements of x that fit in memory / threads
};

CUTLASS_DEVICE Walk walk(uint32_t thread, uint32_t threads, int64_t columns, int64_t tokens) {
  Walk w{thread, 0, 1, 0};
  if (threads >= columns) {
    const uint32_t c = static_cast<uint32_t>(columns);
    w.lane = thread / c;
    w.lanes = threads / c;
    w.column = thread - w.lane * c;
  }
  const int64_t all = divide(tokens, w.lanes);
  w.count = static_cast<int32_t>(all + (w.lane < tokens - all * w.lanes));
  if (w.lane >= w.lanes) w.column = columns;  // the threads that are left over
  return w;
}

// Down one column: loads kUnroll tokens, then `finish(vector, q)` for each. q is a pointer or an index.
template <class T, int N, class Q, class Finish>
CUTLASS_DEVICE void walk_tokens(int32_t count, const T* p, int64_t p_step, Q q, int64_t q_step, Finish finish) {
  constexpr int kTokens = kUnroll<T, N>;
  CUTLASS_PRAGMA_NO_UNROLL
  for (; count > 0; count -= kTokens) {
    Vector<T, N> v[kTokens];
    CUTLASS_PRAGMA_UNROLL
    for (int u = 0; u < kTokens; ++u, p += p_step)
      if (u < count) v[u] = load_streaming<T, N>(p);
    CUTLASS_PRAGMA_UNROLL
    for (int u = 0; u < kTokens; ++u, q += q_step)
      if (u < count) finish(v[u], q);
  }
}

enum class Form { kSoftplus, kSigmoid };

// A_log and dt_bias of N adjacent channels.
template <Form kForm, bool kPerChannel, int N>
struct Column {
  float bias[N];
  math::Pair factor[kPerChannel ? 1 : N];  // exp(A_log): KDA has one a head

  CUTLASS_DEVICE Column(const Problem& p, uint32_t head, uint32_t channel) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < N; ++i) bias[i] = load_parameter(p.dt_bias, p.dt_bias_dtype, int64_t(head) * p.row + channel + i, 0.0f);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < (kPerChannel ? 1 : N); ++i)
      factor[i] = math::exp_pair(load_parameter(p.a_log, p.a_log_dtype, kPerChannel ? head : channel + i, 0.0f));
  }

  template <bool kPrecise>
  CUTLASS_DEVICE float log_decay(float x, int i, float lower_bound) const {
    const math::Pair a = factor[kPerChannel ? 0 : i];
    if constexpr (kForm == Form::kSoftplus) {
      if constexpr (kPrecise) return -a.hi * math::softplus(math::two_sum(x, bias[i]));
      return -a.hi * math::softplus_fast(x + bias[i]);
    } else {
      if constexpr (kPrecise) return lower_bound * math::sigmoid(math::multiply(a, math::two_sum(x, bias[i])));
      return lower_bound * math::sigmoid_fast(a.hi * (x + bias[i]));
    }
  }
};

// G: type of the result; void: by p.g_dtype, an element at a time.
template <Form kForm, bool kPerChannel, int N, class G>
CUTLASS_DEVICE void gate_columns(const Problem& p, const Walk& w) {
  constexpr bool kAnyType = std::is_void_v<G>;
  constexpr bool kPrecise = kAnyType || std::is_same_v<G, float>;
  const uint32_t head_columns = p.row / N, threads = gridDim.x * kThreads;
  const int64_t token_columns = int64_t(p.heads) * head_columns;
  CUTLASS_PRAGMA_NO_UNROLL
  for (int64_t i = w.column; i < p.batch * token_columns; i += threads) {
    const int64_t b = p.batch == 1 ? 0 : divide(i, token_columns);
    const int64_t within = i - b * token_columns;
    const uint32_t head = static_cast<uint32_t>(divide(within, head_columns));
    const uint32_t channel = static_cast<uint32_t>(within - int64_t(head) * head_columns) * N;
    const Column<kForm, kPerChannel, N> column(p, head, channel);
    const Io* x = p.x + b * p.x_batch + w.lane * p.x_token + head * p.x_head + channel;
    const int64_t g = b * p.g_batch + w.lane * p.g_token + head * p.g_head + channel;
    const int64_t x_step = w.lanes * p.x_token, g_step = w.lanes * p.g_token;
    if constexpr (kAnyType) {
      walk_tokens<Io, 1>(w.count, x, x_step, g, g_step, [&](const Vector<Io, 1>& v, int64_t at) {
        store_value(p.g, p.g_dtype, at, column.template log_decay<true>(float(v[0]), 0, p.lower_bound));
      });
    } else {
      walk_tokens<Io, N>(w.count, x, x_step, static_cast<G*>(p.g) + g, g_step, [&](const Vector<Io, N>& v, G* at) {
        cutlass::Array<float, N> y = to_float<Io, N>(v);
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < N; ++i) y[i] = column.template log_decay<kPrecise>(y[i], i, p.lower_bound);
        store<G, N>(at, from_float<G, N>(y));
      });
    }
  }
}

// Sigmoid of the logits, times 1 or 2, element by element: beta is a hundredth of the bytes of kda_gate.
template <class T>
CUTLASS_DEVICE void activate_beta(const Beta& p, const Walk& w, T) {
  const uint32_t threads = gridDim.x * kThreads;
  CUTLASS_PRAGMA_NO_UNROLL
  for (int64_t i = w.column; i < p.batch * p.heads; i += threads) {
    const int64_t b = p.batch == 1 ? 0 : divide(i, p.heads), head = i - b * p.heads;
    const T* in = static_cast<const T*>(p.in) + b * p.in_batch + w.lane * p.in_token + head * p.in_head;
    const int64_t out = b * p.out_batch + w.lane * p.out_token + head * p.out_head;
    walk_tokens<T, 1>(w.count, in, w.lanes * p.in_token, out, w.lanes * p.out_token, [&](const Vector<T, 1>& v, int64_t at) {
      store_value(p.out, p.out_dtype, at, p.factor * math::sigmoid({float(v[0]), 0.0f}));
    });
  }
}

template <bool kPerChannel, int N, class G>
CUTLASS_DEVICE void gate_form(const Problem& p, const Walk& w) {
  if (kPerChannel && p.lower_bound != 0.0f) {
    gate_columns<Form::kSigmoid, kPerChannel, N, G>(p, w);
  } else {
    gate_columns<Form::kSoftplus, kPerChannel, N, G>(p, w);
  }
}

// wide: accesses of 16 bytes on the wider side of x and g, of 4 or 8 elements on both, are legal.
template <bool kPerChannel>
CUTLASS_DEVICE void gate_kernel(const Problem& p, const Beta& beta, bool wide) {
  wait_for_previous_grid();
  const uint32_t threads = gridDim.x * kThreads, thread = blockIdx.x * kThreads + threadIdx.x;
  const int elements = !wide ? 1 : sizeof(Io) == 4 || p.g_dtype == kFloat32 ? 4 : 8;
  const Walk w = walk(thread, threads, p.batch * p.heads * (p.row / elements), p.tokens);
  if (!wide) {
    gate_form<kPerChannel, 1, void>(p, w);
  } else {
    with_dtype(p.g_dtype, [&](auto t) {
      using G = decltype(t);
      gate_form<kPerChannel, sizeof(Io) == 4 || sizeof(G) == 4 ? 4 : 8, G>(p, w);
    });
  }
  allow_next_grid();  // not earlier: decode lost 0.4 us of 4.3 when it was the first thing in the kernel
  if (beta.in != nullptr) {
    // counted from the last thread: in a small problem those take beta that have no gate
    const Walk v = walk(threads - 1 - thread, threads, beta.batch * beta.heads, beta.tokens);
    with_dtype(beta.in_dtype, [&](auto t) { activate_beta(beta, v, t); });
  }
}

}  // namespace cula::gates

// The entry of an op: the parameters are those of params_gate.def in its order (tests/gates_math compares).
#define CULA_GATE_ENTRY(symbol, per_channel)                                                                                          \
  extern "C" __global__ void __launch_bounds__(cula::gates::kThreads, cula::gates::kBlocks)                                           \
      symbol(const cula::Io* x, void* g, const void* a_log, const void* dt_bias, const void* beta, void* beta_out, int64_t x_b,       \
             int64_t x_t, int64_t x_h, int64_t g_b, int64_t g_t, int64_t g_h, int64_t beta_b, int64_t beta_t, int64_t beta_h,         \
             int64_t beta_out_b, int64_t beta_out_t, int64_t beta_out_h, int64_t batch, int64_t tokens, int32_t hv, int32_t head_dim, \
             int32_t modes, float lower_bound) {                                                                                      \
    const cula::gates::GateModes m{modes};                                                                                            \
    const cula::gates::Problem problem{                                                                                               \
        x,     g,      a_log,                  dt_bias,                    x_b,         x_t,           x_h,               g_b,        \
        g_t,   g_h,    batch,                  tokens,                     uint32_t(per_channel ? hv : 1), uint32_t(per_channel ? head_dim : hv), \
        m.g_dtype(),   m.a_log_dtype(),        m.dt_bias_dtype(),          lower_bound};                                              \
    const cula::gates::Beta logits{beta,   beta_out, beta_b,         beta_t,             beta_h, beta_out_b, beta_out_t, beta_out_h,  \
                                   batch,  tokens,   uint32_t(hv),             m.beta_dtype(),     m.beta_out_dtype(),                          \
                                   m.beta_kind() == 2 ? 2.0f : 1.0f};                                                                 \
    cula::gates::gate_kernel<per_channel>(problem, logits, m.wide());                                                                 \
  }
