// kda_prefill on the CPU, one ISA level (aot/common/cpu/isa.h). Work item: up to 128 value columns of one sequence and value head.
//
// Reading order: Chain, load_tokens (the operands of a chunk in float32), load_state and store_state, prefill. The mathematics of a
// chunk is in cpu_chunk.h.
//
// The state of an item stays in float32 in the cache from the first token to the last, as tiles of 64 value columns [K][64]; bf16
// pools are rounded to once, when a state is stored. Value columns do not touch one another, so bits do not depend on how
// a chain is cut into items, and items on any thread.
#include "aot/common/cpu/operands.h"
#include "aot/ops/chunk/cpu_chunk.h"
#include "aot/ops/chunk/cpu_prefill.h"

namespace cula::cpu::CULA_ISA {
namespace {

constexpr int kMaxColumns = 128;

// On the stack of the thread: 0.24 MB.
struct Work {
  Chunk chunk;
  alignas(64) float state[kMaxK * kMaxColumns];
  alignas(64) float bias[kMaxK];
  alignas(64) float rows[4][kMaxK];  // of a state with K contiguous, on their way
  VF rate;                           // exp(A_log)
};

// A sequence and value head: where its rows begin.
struct Chain {
  int64_t sequence, head;
  int64_t tokens;
  const char *q, *k, *v, *gate, *beta;
  char* out;
};

// ------------------------------------------------------------------------------------------------------------ operands

// cu_seqlens is data, not checked by anyone: whatever it holds, no token outside of the tensors is touched.
template <class Io>
Chain find_chain(const PrefillParams& p, int64_t sequence, int64_t head) {
  Chain c;
  c.sequence = sequence;
  c.head = head;
  int64_t row = sequence, first = 0, last = p.tokens;
  if (p.cu_dtype != 0) {
    row = 0;
    first = load_index(p.cu_seqlens, sequence, p.cu_dtype, 0);
    last = load_index(p.cu_seqlens, sequence + 1, p.cu_dtype, 0);
    first = first < 0 ? 0 : first > p.tokens ? p.tokens : first;
    last = last < first ? first : last > p.tokens ? p.tokens : last;
  }
  c.tokens = last - first;
  const int64_t qk_head = head / p.group;
  c.q = p.q + (row * p.q_b + first * p.q_t + qk_head * p.q_h) * Io::kBytes;
  c.k = p.k + (row * p.k_b + first * p.k_t + qk_head * p.k_h) * Io::kBytes;
  c.v = p.v + (row * p.v_b + first * p.v_t + head * p.v_h) * Io::kBytes;
  c.out = p.out + (row * p.out_b + first * p.out_t + head * p.out_h) * Io::kBytes;
  c.gate = p.gate + (row * p.gate_b + first * p.gate_t + head * p.gate_h) * bytes_of(p.gate_dtype);
  c.beta = p.beta + (row * p.beta_b + first * p.beta_t + head * p.beta_h) * bytes_of(p.beta_dtype);
  return c;
}

template <class G>
void load_decay(const PrefillParams& p, const Work& w, const char* gate, float* a) {
  for (int i = 0; i < p.head_dim_k; i += W) {
    VF g = G::load(gate + i * G::kBytes);
    if (p.gate_raw) g = raw_gate(g, load(w.bias + i), w.rate, p.lower_bound);
    store(a + i, without_subnormals(exp(g)));
  }
}

// q, k, their product, beta and the decay of `count` tokens from token `first` of the chain on.
template <class Io>
void load_tokens(const PrefillParams& p, const Chain& chain, int64_t first, int count, Work& w) {
  Chunk& c = w.chunk;
  for (int t = 0; t < count; ++t) {
    const int64_t token = first + t;
    const char* q = chain.q + token * p.q_t * Io::kBytes;
    const char* k = chain.k + token * p.k_t * Io::kBytes;
    c.p[t][t] = load_qk<Io>(p, q, k, c.q[t], c.k[t]);
    c.beta[t] = load_beta(p, chain.beta, token * p.beta_t);
    with_dtype(p.gate_dtype, [&](auto g) {
      load_decay<decltype(g)>(p, w, chain.gate + token * p.gate_t * decltype(g)::kBytes, c.a[t]);
    });
  }
}

// -------------------------------------------------------------------------------------------------------------- states

// [4 rows of K] <-> 4 columns of a tile [K][kTile].
CULA_INLINE void transpose(V4 (&x)[4]) {
  const V4 a = __builtin_shufflevector(x[0], x[1], 0, 4, 1, 5), b = __builtin_shufflevector(x[2], x[3], 0, 4, 1, 5);
  const V4 c = __builtin_shufflevector(x[0], x[1], 2, 6, 3, 7), d = __builtin_shufflevector(x[2], x[3], 2, 6, 3, 7);
  x[0] = __builtin_shufflevector(a, b, 0, 1, 4, 5);
  x[1] = __builtin_shufflevector(a, b, 2, 3, 6, 7);
  x[2] = __builtin_shufflevector(c, d, 0, 1, 4, 5);
  x[3] = __builtin_shufflevector(c, d, 2, 3, 6, 7);
}

// from: the state of the head in a pool; columns `first` to first + count of V.
template <class S, bool kVk>
void load_state(const char* from, int K, int V, int first, int count, Work& w) {
  for (int column = 0; column < count; column += kVk ? 4 : W) {
    float* to = w.state + column / kTile * kTile * K + column % kTile;
    if (!kVk) {
      for (int i = 0; i < K; ++i) store(to + i * kTile, S::load(from + (int64_t{i} * V + first + column) * S::kBytes));
      continue;
    }
    for (int r = 0; r < 4; ++r)
      for (int i = 0; i < K; i += W) store(w.rows[r] + i, S::load(from + (int64_t{first + column + r} * K + i) * S::kBytes));
    for (int i = 0; i < K; i += 4) {
      V4 x[4];
      for (int r = 0; r < 4; ++r) x[r] = load_raw<V4>(w.rows[r] + i);
      transpose(x);
      for (int r = 0; r < 4; ++r) store_raw(to + (i + r) * kTile, x[r]);
    }
  }
}

template <class S, bool kVk>
void store_state(char* to, int K, int V, int first, int count, Work& w) {
  for (int column = 0; column < count; column += kVk ? 4 : W) {
    const float* from = w.state + column / kTile * kTile * K + column % kTile;
    if (!kVk) {
      for (int i = 0; i < K; ++i) S::store(to + (int64_t{i} * V + first + column) * S::kBytes, load(from + i * kTile));
      continue;
    }
    for (int i = 0; i < K; i += 4) {
      V4 x[4];
      for (int r = 0; r < 4; ++r) x[r] = load_raw<V4>(from + (i + r) * kTile);
      transpose(x);
      for (int r = 0; r < 4; ++r) store_raw(w.rows[r] + i, x[r]);
    }
    for (int r = 0; r < 4; ++r)
      for (int i = 0; i < K; i += W) S::store(to + (int64_t{first + column + r} * K + i) * S::kBytes, load(w.rows[r] + i));
  }
}

// -------------------------------------------------------------------------------------------------------------- kernel

template <class Io, class S, bool kVk>
void run_item(const PrefillParams& p, const Chain& chain, int first, Work& w) {
  const int K = p.head_dim_k, V = p.head_dim_v;
  const int columns = V - first < p.columns ? V - first : p.columns;
  const auto live = [&](int64_t slot, int64_t slots) { return live_slot(slot, slots, p.null_slot); };

  const int64_t read = load_index(p.read_index, chain.sequence, p.read_dtype, chain.sequence);
  if (live(read, p.in_slots)) {
    load_state<S, kVk>(p.state_in + (read * p.in_slot + chain.head * p.in_h) * S::kBytes, K, V, first, columns, w);
  } else {
    for (int i = 0; i < K * columns; i += W) store(w.state + i, VF{});
  }
  w.rate = load_rate(p, chain.head);
  load_bias(p, chain.head, w.bias);

  int64_t to_checkpoint = p.checkpoint_interval, column = 0;
  for (int64_t token = 0; token < chain.tokens; token += kTokens) {
    const int count = chain.tokens - token < kTokens ? static_cast<int>(chain.tokens - token) : kTokens;
    load_tokens<Io>(p, chain, token, count, w);
    decays_and_scores(w.chunk, K, count);
    for (int tile = 0; tile < columns; tile += kTile) {
      float* state = w.state + tile * K;
      products_with_state(w.chunk, state, K, count);
      const int64_t at = first + tile;
      substitute<Io>(w.chunk, chain.v + (token * p.v_t + at) * Io::kBytes, p.v_t * Io::kBytes,
                     chain.out + (token * p.out_t + at) * Io::kBytes, p.out_t * Io::kBytes, count);
      update_state(w.chunk, state, K, count);
    }
    if (p.checkpoint_interval == 0) continue;
    to_checkpoint -= count;
    if (to_checkpoint != 0 || column == p.checkpoint_columns) continue;
    const int64_t slot = load_index(p.checkpoint_index, chain.sequence * p.checkpoint_columns + column, p.checkpoint_dtype, -1);
    if (live(slot, p.checkpoint_slots)) {
      store_state<S, kVk>(p.checkpoints + (slot * p.checkpoint_slot + chain.head * p.checkpoint_h) * S::kBytes, K, V, first, columns, w);
    }
    to_checkpoint = p.checkpoint_interval;
    ++column;
  }

  const int64_t write = load_index(p.write_index, chain.sequence, p.write_dtype, chain.sequence);
  if (live(write, p.out_slots)) {
    store_state<S, kVk>(p.state_out + (write * p.out_slot + chain.head * p.out_state_h) * S::kBytes, K, V, first, columns, w);
  }
}

template <class Io, class S, bool kVk>
void prefill(void* const* params, int64_t begin, int64_t end) {
  PrefillParams p;
  read_params(params, p);
  Work w;
  for (int64_t item = begin; item < end; ++item) {
    const int64_t chain = item / p.blocks;
    const int first = static_cast<int>(item % p.blocks) * p.columns;
    run_item<Io, S, kVk>(p, find_chain<Io>(p, chain % p.sequences, chain / p.sequences), first, w);
  }
}

}  // namespace

const StateTable kPrefill = CULA_STATE_TABLE(prefill);

}  // namespace cula::cpu::CULA_ISA
