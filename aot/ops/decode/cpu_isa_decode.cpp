// Decode on the CPU, one ISA level (aot/common/cpu/isa.h). Work item: one row and value head.
//
// Reading order: Head (the operands of one item in float32), prepare, update_vk and update_kv (the pass over the state), decode.
//
// With S the state as it is read, a = exp g and S' = diag(a) S, both dot products of the recurrence are taken over S:
//   d = S'^T k = sum_k S[k] (a k)     p = S'^T q^ = sum_k S[k] (a q^)
//   u = beta (v - d), or v without the delta rule     o = p + u (k . q^)     S_new = a S + k u^T
// The first sweep over a tile of S makes d and p, the second stores S_new; a tile is small enough that the second one finds
// it in L1 or L2, so memory is read once and written once. Prefetches may run past the head, into the next one of the slot.
//
// Accuracy: sums over K run in blocks of 64 (vk) or 8 (kv) channels that are then added up, so that no chain of float32
// additions is longer than 32; one chain of 256 would alone cost 4e-7 of the result.
#include "aot/common/cpu/operands.h"
#include "aot/ops/decode/cpu_decode.h"

namespace cula::cpu::CULA_ISA {
namespace {

constexpr int kMaxK = 256, kMaxV = 512;
constexpr int kGateNone = 0, kGateRaw = 3, kGateConstHead = 4;  // cula_gate_kind

// Measured on an EPYC 9005 core (48 KB L1, 1 MB L2), D = 128, float32 state from memory:
// vk: sums over a tile of rows, then its update; 8 to 16 KB are equal. The prefetch runs this far ahead of the sums and takes the
// rate from 24 to 62 GB/s: the hardware does not follow the four rows that are summed together.
constexpr int kRowTileBytes = 8 << 10, kRowsAhead = 8 << 10;
// kv: all rows of as many columns as make this; 64 KB are 10 % slower at K = 256. While a tile is stored the next one is fetched.
constexpr int kColumnTileBytes = 128 << 10;

struct Head {
  alignas(64) float k[kMaxK];   // normed
  alignas(64) float q[kMaxK];   // normed and scaled
  alignas(64) float a[kMaxK];   // decay
  alignas(64) float ak[kMaxK];
  alignas(64) float aq[kMaxK];
  alignas(64) float v[kMaxV];
  alignas(64) float o[kMaxV];
  float beta;
  float kq;                     // k . q
};

// ------------------------------------------------------------------------------------------------------------ operands

// a of the head: exp(g), constant over the channels unless the gate is per channel.
void load_decay(const DecodeParams& p, int64_t row, int64_t head, float* a) {
  const int K = p.head_dim_k;
  const int64_t at = row * p.gate_n + head * p.gate_h;
  const bool raw = p.gate_kind == kGateRaw;
  const VF rate = raw ? load_rate(p, head) : splat(1.0f);
  if (p.channel_gate && p.gate_kind != kGateNone) {
    load_channels(a, p.gate, at, p.gate_dtype, K);
    alignas(64) float bias[kMaxK];
    if (raw) load_bias(p, head, bias);
    for (int i = 0; i < K; i += W) {
      const VF x = load(a + i);
      store(a + i, exp(raw ? raw_gate(x, load(bias + i), rate, p.lower_bound) : x));
    }
    return;
  }
  VF decay = splat(1.0f);
  if (p.gate_kind != kGateNone) {
    decay = splat(load_scalar(p.gate, at, p.gate_dtype));
    if (raw) decay = raw_gate(decay, splat(load_scalar(p.dt_bias, head, p.dt_bias_dtype)), rate, p.lower_bound);
    if (p.gate_kind != kGateConstHead) decay = exp(decay);
  }
  for (int i = 0; i < K; i += W) store(a + i, decay);
}

template <class Io>
void prepare(const DecodeParams& p, int64_t row, int64_t head, bool reads, Head& h) {
  const int K = p.head_dim_k, V = p.head_dim_v;
  const int64_t qk_head = head / p.group;
  const char* q = p.q + (row * p.q_n + qk_head * p.q_h) * Io::kBytes;
  const char* k = p.k + (row * p.k_n + qk_head * p.k_h) * Io::kBytes;
  const char* v = p.v + (row * p.v_n + head * p.v_h) * Io::kBytes;
  for (int i = 0; i < V; i += W) store(h.v + i, Io::load(v + i * Io::kBytes));

  h.kq = load_qk<Io>(p, q, k, h.q, h.k);
  h.beta = p.delta ? load_beta(p, p.beta, row * p.beta_n + head * p.beta_h) : 1.0f;
  if (!reads) return;  // the decay acts on nothing
  load_decay(p, row, head, h.a);
  for (int i = 0; i < K; i += W) {
    const VF a = load(h.a + i);
    store(h.ak + i, a * load(h.k + i));
    store(h.aq + i, a * load(h.q + i));
  }
}

// --------------------------------------------------------------------------------------------------- the state, k contiguous

// in, out: the V x K state of the head; out may be in, or NULL (nothing is stored). k, q, a, ak, aq are in the pair order of S.
template <class S, bool kDelta>
void update_vk(Head& h, const char* in, char* out, int K, int V) {
  constexpr int kRows = 4, kBlock = 64;  // 4 rows share the loads of ak, aq, a and k
  const int row_bytes = K * S::kBytes;
  const int tile = kRowTileBytes / row_bytes;  // 8 to 64 rows
  for (int first = 0; first < V; first += tile) {
    const int last = first + tile < V ? first + tile : V;
    for (int v = first; v < last; v += kRows) {
      const char* rows = in + v * row_bytes;
      VF d[kRows] = {}, p[kRows] = {};
      for (int i = 0; i < kRows * row_bytes; i += 64) __builtin_prefetch(rows + kRowsAhead + i);
      for (int block = 0; block < K; block += kBlock) {
        VF block_d[kRows] = {}, block_p[kRows] = {};
#pragma GCC unroll 8
        for (int i = 0; i < kBlock; i += 2 * W) {
          const int c = block + i;
          const VF ak = load(h.ak + c), ak2 = load(h.ak + c + W), aq = load(h.aq + c), aq2 = load(h.aq + c + W);
#pragma GCC unroll 4
          for (int r = 0; r < kRows; ++r) {
            VF s, s2;
            S::load_pair(rows + r * row_bytes + c * S::kBytes, s, s2);
            if (kDelta) block_d[r] = block_d[r] + s * ak + s2 * ak2;
            block_p[r] = block_p[r] + s * aq + s2 * aq2;
          }
        }
        for (int r = 0; r < kRows; ++r) {
          d[r] += block_d[r];
          p[r] += block_p[r];
        }
      }
      V4 u = load_raw<V4>(h.v + v);
      if (kDelta) u = h.beta * (u - sum4(d));
      u = S::operand(u);
      store_raw<V4>(h.v + v, u);
      store_raw<V4>(h.o + v, sum4(p) + u * h.kq);
    }
    if (out == nullptr) continue;
    for (int v = first; v < last; v += kRows) {
      const V4 u = load_raw<V4>(h.v + v);
      for (int c = 0; c < K; c += 2 * W) {
        const VF a = load(h.a + c), a2 = load(h.a + c + W), k = load(h.k + c), k2 = load(h.k + c + W);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
          const int at = (v + r) * row_bytes + c * S::kBytes;
          VF s, s2;
          S::load_pair(in + at, s, s2);
          S::store_pair(out + at, a * s + k * u[r], a2 * s2 + k2 * u[r]);
        }
      }
    }
  }
}

// A row that starts from zero: S_new = k u^T.
template <class S>
void start_vk(Head& h, char* out, int K, int V) {
  for (int v = 0; v < V; ++v) {
    const VF u = S::operand(splat(h.beta * h.v[v]));
    h.o[v] = u[0] * h.kq;
    if (out == nullptr) continue;
    for (int c = 0; c < K; c += 2 * W) S::store_pair(out + c * S::kBytes, load(h.k + c) * u, load(h.k + c + W) * u);
    out += K * S::kBytes;
  }
}

// --------------------------------------------------------------------------------------------------- the state, v contiguous

// v and o are in the pair order of S.
template <class S, bool kDelta>
void update_kv(Head& h, const char* in, char* out, int K, int V) {
  constexpr int kGroup = 8;  // state rows that share the loads and stores of d and p
  const int row_bytes = V * S::kBytes;
  int columns = kColumnTileBytes / (K * S::kBytes) / 64 * 64;
  if (columns > V) columns = V;
  alignas(64) float d[kMaxV], p[kMaxV];
  for (int first = 0; first < V; first += columns) {
    const int last = first + columns < V ? first + columns : V;
    const int ahead = last < V ? columns * S::kBytes : K * row_bytes - first * S::kBytes;  // the next tile, of this head or the next
    for (int v = first; v < last; v += W) {
      store(d + v, VF{});
      store(p + v, VF{});
    }
    for (int k = 0; k < K; k += kGroup) {
      const char* rows = in + k * row_bytes;
      for (int v = first; v < last; v += 2 * W) {
        VF group_d{}, group_d2{}, group_p{}, group_p2{};
#pragma GCC unroll 8
        for (int r = 0; r < kGroup; ++r) {
          VF s, s2;
          S::load_pair(rows + r * row_bytes + v * S::kBytes, s, s2);
          if (kDelta) {
            group_d += s * h.ak[k + r];
            group_d2 += s2 * h.ak[k + r];
          }
          group_p += s * h.aq[k + r];
          group_p2 += s2 * h.aq[k + r];
        }
        if (kDelta) {
          store(d + v, load(d + v) + group_d);
          store(d + v + W, load(d + v + W) + group_d2);
        }
        store(p + v, load(p + v) + group_p);
        store(p + v + W, load(p + v + W) + group_p2);
      }
    }
    for (int v = first; v < last; v += W) {
      VF u = load(h.v + v);
      if (kDelta) u = h.beta * (u - load(d + v));
      u = S::operand(u);
      store(h.v + v, u);
      store(h.o + v, load(p + v) + u * h.kq);
    }
    if (out == nullptr) continue;
    for (int k = 0; k < K; ++k) {
      const float a = h.a[k], key = h.k[k];
      for (int i = first * S::kBytes; i < last * S::kBytes; i += 64) __builtin_prefetch(in + k * row_bytes + ahead + i);
      for (int v = first; v < last; v += 2 * W) {
        const int at = k * row_bytes + v * S::kBytes;
        VF s, s2;
        S::load_pair(in + at, s, s2);
        S::store_pair(out + at, a * s + key * load(h.v + v), a * s2 + key * load(h.v + v + W));
      }
    }
  }
}

template <class S>
void start_kv(Head& h, char* out, int K, int V) {
  for (int v = 0; v < V; v += W) {
    const VF u = S::operand(h.beta * load(h.v + v));
    store(h.v + v, u);
    store(h.o + v, u * h.kq);
  }
  if (out == nullptr) return;
  for (int k = 0; k < K; ++k)
    for (int v = 0; v < V; v += 2 * W)
      S::store_pair(out + (k * V + v) * S::kBytes, load(h.v + v) * h.k[k], load(h.v + v + W) * h.k[k]);
}

// In place: makes float32 operands what the pass over the state takes (see store_pair), those along its contiguous dimension in
// the pair order of S.
template <class S, bool kContiguous>
void to_state_order(float* x, int count) {
  for (int i = 0; i < count; i += 2 * W) {
    VF a = load(x + i), b = load(x + i + W);
    if (kContiguous) S::to_pair_order(a, b);
    store(x + i, S::operand(a));
    store(x + i + W, S::operand(b));
  }
}
template <class S>
void from_state_order(float* x, int count) {
  for (int i = 0; i < count; i += 2 * W) {
    VF a = load(x + i), b = load(x + i + W);
    S::from_pair_order(a, b);
    store(x + i, a);
    store(x + i + W, b);
  }
}

// -------------------------------------------------------------------------------------------------------------- kernel

template <class S, bool kVk>
void update(const DecodeParams& p, Head& h, const char* in, char* out) {
  const int K = p.head_dim_k, V = p.head_dim_v;
  float* const of_k[] = {h.k, h.a, h.ak, h.aq};
  for (float* x : of_k) to_state_order<S, kVk>(x, K);
  to_state_order<S, !kVk>(h.v, V);
  if (in == nullptr) return kVk ? start_vk<S>(h, out, K, V) : start_kv<S>(h, out, K, V);
  if (p.delta) return kVk ? update_vk<S, true>(h, in, out, K, V) : update_kv<S, true>(h, in, out, K, V);
  return kVk ? update_vk<S, false>(h, in, out, K, V) : update_kv<S, false>(h, in, out, K, V);
}

template <class Io, class S, bool kVk>
void decode(void* const* params, int64_t begin, int64_t end) {
  DecodeParams p;
  read_params(params, p);
  Head h;
  for (int64_t item = begin; item < end; ++item) {
    const int64_t row = item / p.hv, head = item % p.hv;
    const int64_t read = load_index(p.read_index, row * p.read_stride, p.read_dtype, row);
    const int64_t write = load_index(p.write_index, row * p.write_stride, p.write_dtype, read);
    const bool reads = !p.no_state && live_slot(read, p.in_slots, p.null_slot);
    const bool writes = p.state_out != nullptr && live_slot(write, p.out_slots, p.null_slot);
    const bool pools = !p.no_state || p.state_out != nullptr;  // without any no row is padding

    char* o = p.out + (row * p.out_n + head * p.out_h) * Io::kBytes;
    if (pools && !reads && !writes) {
      __builtin_memset(o, 0, static_cast<unsigned>(p.head_dim_v * Io::kBytes));
      continue;
    }
    const char* in = reads ? p.state_in + (read * p.in_slot + head * p.in_h) * S::kBytes : nullptr;
    char* out = writes ? p.state_out + (write * p.out_slot + head * p.out_state_h) * S::kBytes : nullptr;
    prepare<Io>(p, row, head, reads, h);
    update<S, kVk>(p, h, in, out);
    if (!kVk) from_state_order<S>(h.o, p.head_dim_v);
    for (int i = 0; i < p.head_dim_v; i += W) Io::store(o + i * Io::kBytes, load(h.o + i));
  }
}

}  // namespace

const StateTable kDecode = CULA_STATE_TABLE(decode);

}  // namespace cula::cpu::CULA_ISA
