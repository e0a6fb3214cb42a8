// Which record a block makes next, and the loads of its inputs.
#pragma once
#include "prep_layout.cuh"

namespace cula::kda {

struct Args {
  const void *q, *k, *gate, *a_log, *dt_bias, *beta, *cu;
  uint8_t* records;
  uint32_t* flags;
  int64_t q_b, q_t, q_h, k_b, k_t, k_h, gate_b, gate_t, gate_h, beta_b, beta_t, beta_h, tokens;
  int hv, group, head_group, sequences, chunks, segments, cut;
  uint32_t flag_words;
  int modes;
  float scale, lower_bound;
};

// 4 channels of one token
#if defined(CULA_GATE_F32)
using GateQuad = float4;
CULA_DEV void unpack_gate(float (&x)[4], const float4& g, bool) { x[0] = g.x; x[1] = g.y; x[2] = g.z; x[3] = g.w; }
constexpr int kGateBytes = 4;
CULA_DEV float4 load_gate(const void* p) { return load_f32x4(p); }
#else
using GateQuad = uint2;
CULA_DEV void unpack_gate(float (&x)[4], const uint2& g, bool bf16) {
  const float2 a = bf16 ? unpack_bf16(g.x) : unpack_fp16(g.x), b = bf16 ? unpack_bf16(g.y) : unpack_fp16(g.y);
  x[0] = a.x; x[1] = a.y; x[2] = b.x; x[3] = b.y;
}
constexpr int kGateBytes = 2;
CULA_DEV uint2 load_gate(const void* p) { return load_u32x2(p); }
#endif

// A record to make: the addresses of its first token, how many of its 32 tokens exist. One warp works them out for the block,
// two records ahead: the divisions and 64-bit products are too many instructions for every warp.
struct alignas(16) Work {
  const uint8_t *q, *k, *gate, *beta;
  int valid, chunk, head, bound;  // bound: whether its flag says what it forgets
};
static_assert(sizeof(Work) == 48, "");

// The record whose copy to memory is under way. Thread kStorer's, but in registers it would be one of every thread.
struct InFlight {
  uint8_t* record;
  int flag;
  uint32_t value;
  uint32_t next;  // warp 7: number from which the next search for work starts
};
static_assert(3 * sizeof(Work) + sizeof(InFlight) <= kSmemBytes - kSmemWork, "");

// Virtual chunk index of the first chunk of sequence s. Intervals of different sequences are disjoint, because a sequence of
// n tokens that starts at t has at most floor((t + n) / 32) - floor(t / 32) + 1 chunks. No prefix sum, no host read.
CULA_DEV int64_t first_chunk(const Args& a, int64_t s) { return load_index(a.cu, s, mode(a.modes, 12, 2)) / kChunk + s; }

// The first record at or after number `i` (stepping by the grid) that has a token; chunk = a.chunks if none is left. Returns
// the number after it. The plan keeps chunks * hv below 2^31 (62 TB of records).
// All lanes of a warp write the same values to w in shared memory.
CULA_DEV uint32_t find_work(const Args& a, uint32_t i, uint32_t step, Work& w) {
  const int code = mode(a.modes, 12, 2);
  // Segments of one sequence run side by side in the state kernel: chunk 0 of each, chunk 1 of each, ... Before them the
  // chunks that a segment may start from.
  const bool cut = a.segments > 1;
  int64_t start = 0, end = a.tokens;
  if (cut && code) { start = load_index(a.cu, 0, code); end = load_index(a.cu, 1, code); }
  const int count = cut ? static_cast<int>((end - start + kChunk - 1) / kChunk) : a.chunks;
  const int per_segment = (count + a.segments - 1) / a.segments, slots = per_segment * a.segments;
  const int lead = per_segment > kWarm ? kWarm : 0;
  const uint32_t total = static_cast<uint32_t>(slots) * a.hv;
  for (; i < total; i += step) {
    // Groups of heads outermost: the chains of a group run at the same time in the state kernel, and want their records so.
    const uint32_t group_items = static_cast<uint32_t>(slots) * a.head_group;
    const uint32_t group = i / group_items, rest = i - group * group_items;
    const int head0 = group * a.head_group;
    const uint32_t heads = a.hv - head0 < a.head_group ? a.hv - head0 : a.head_group;
    const int slot = rest / heads, head = head0 + static_cast<int>(rest - slot * heads);
    int chunk = slot, local, in_sequence = count;  // local: number in its sequence, of in_sequence
    int64_t token, left, batch = 0;
    if (cut) {
      const int turn = slot / a.segments;
      local = (slot - turn * a.segments) * per_segment + (turn < lead ? per_segment - lead + turn : turn - lead);
      chunk = static_cast<int>(start / kChunk) + local;
      if (local >= count || chunk >= a.chunks) continue;
      token = start + static_cast<int64_t>(local) * kChunk;
      left = end - token;
    } else if (code == 0) {
      in_sequence = static_cast<int>((a.tokens + kChunk - 1) / kChunk);
      batch = chunk / in_sequence;
      local = chunk - static_cast<int>(batch) * in_sequence;
      token = static_cast<int64_t>(local) * kChunk;
      left = a.tokens - token;
    } else {
      int lo = 0, hi = a.sequences;  // the last s with first_chunk(s) <= chunk; first_chunk grows strictly
      while (hi - lo > 1) {
        const int mid = (lo + hi) >> 1;
        if (first_chunk(a, mid) <= chunk) lo = mid; else hi = mid;
      }
      start = load_index(a.cu, lo, code);
      end = load_index(a.cu, lo + 1, code);
      local = chunk - static_cast<int>(start / kChunk + lo);
      in_sequence = static_cast<int>((end - start + kChunk - 1) / kChunk);
      token = start + static_cast<int64_t>(local) * kChunk;
      left = local >= 0 ? end - token : 0;
    }
    if (left > 0) {
      const int to_cut = (in_sequence + a.cut - 1) / a.cut;
      w.bound = a.cut > 1 && to_cut - local % to_cut <= kWarm;
      const int h = head / a.group;
      w.q = static_cast<const uint8_t*>(a.q) + (batch * a.q_b + token * a.q_t + h * a.q_h) * 2;
      w.k = static_cast<const uint8_t*>(a.k) + (batch * a.k_b + token * a.k_t + h * a.k_h) * 2;
      w.gate = static_cast<const uint8_t*>(a.gate) + (batch * a.gate_b + token * a.gate_t + head * a.gate_h) * kGateBytes;
      w.beta = static_cast<const uint8_t*>(a.beta) + (batch * a.beta_b + token * a.beta_t + head * a.beta_h) * (mode(a.modes, 9, 2) == kF32 ? 4 : 2);
      w.valid = left < kChunk ? static_cast<int>(left) : kChunk;
      w.chunk = chunk;
      w.head = head;
      return i + step;
    }
  }
  w.chunk = a.chunks;
  w.valid = 0;
  return i;
}

// What a thread reads of one record: 4 channels of its warp's 4 tokens, zero where there is no token.
struct Gates {
  GateQuad gate[kGroup];
  uint32_t beta;  // bits
};
// Of the head, and the same for many records: from L1 when they are needed.
struct HeadGate {
  float dt_bias[4], a_log;
};
struct Tokens {
  uint2 k[kGroup], q[kGroup];
};

CULA_DEV void load_gates(const Args& a, const Work& w, int tid, Gates& in) {
  const int quad = tid & 31, first = (tid >> 5) * kGroup, valid = w.valid - first;
  const uint8_t* gate = w.gate + (first * a.gate_t + 4 * quad) * kGateBytes;
#pragma unroll
  for (int t = 0; t < kGroup; ++t) {
    in.gate[t] = GateQuad{};
    if (t < valid) in.gate[t] = load_gate(gate);
    gate += a.gate_t * kGateBytes;
  }
  in.beta = 0u;
  if (tid < w.valid) in.beta = load_bits(w.beta, tid * a.beta_t, mode(a.modes, 9, 2));
}

CULA_DEV void load_head(const Args& a, int head, int quad, HeadGate& in) {
#pragma unroll
  for (int e = 0; e < 4; ++e) in.dt_bias[e] = 0.f;
  in.a_log = 0.f;
  if (mode(a.modes, 0, 1)) {
    const int dd = mode(a.modes, 5, 2), ad = mode(a.modes, 3, 2);
    const int64_t i = static_cast<int64_t>(head) * kDim + 4 * quad;
    if (dd == kF32) {  // aligned to 16 bytes like every tensor
      const float4 x = *reinterpret_cast<const float4*>(static_cast<const float*>(a.dt_bias) + i);
      in.dt_bias[0] = x.x; in.dt_bias[1] = x.y; in.dt_bias[2] = x.z; in.dt_bias[3] = x.w;
    } else if (dd != kAbsent) {
#pragma unroll
      for (int e = 0; e < 4; ++e) in.dt_bias[e] = scalar(load_bits(a.dt_bias, i + e, dd), dd);
    }
    if (ad != kAbsent) in.a_log = scalar(load_bits(a.a_log, head, ad), ad);
  }
}

CULA_DEV void load_rows(const Args& a, const Work& w, int tid, Tokens& in) {
  const int quad = tid & 31, first = (tid >> 5) * kGroup, valid = w.valid - first;
  const uint8_t *k = w.k + first * a.k_t * 2 + 8 * quad, *q = w.q + first * a.q_t * 2 + 8 * quad;
#pragma unroll
  for (int t = 0; t < kGroup; ++t) {
    in.k[t] = in.q[t] = make_uint2(0u, 0u);
    if (t < valid) {
      in.k[t] = load_u32x2(k);
      in.q[t] = load_u32x2(q);
    }
    k += a.k_t * 2;
    q += a.q_t * 2;
  }
}

}  // namespace cula::kda
