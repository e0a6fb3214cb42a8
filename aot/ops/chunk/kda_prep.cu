// KDA prefill, first kernel: q, k, gate, beta -> one record per (chunk of 32 tokens, value head). RECORD.md has the layout.
//
// G_i is the inclusive sum of log2 decay over the chunk, k and q are normalised and q is scaled:
//   Kd_i = k_i 2^{G_i}    Qd_i = q_i 2^{G_i}    Kr_j = k_j 2^{G_C - G_j}          (factors <= 1)
//   A_ij = sum_c k_ic k_jc 2^{G_ic - G_jc}  (j < i)      P_ij likewise with q  (j <= i)
//   T = (I + diag(beta) A)^-1 diag(beta)
//
// A block of 8 warps makes one record at a time and walks over them (persistent grid). For elementwise work, warp w owns tokens
// 4 w to 4 w + 3 (a group; four make a sub-chunk) and a lane 4 channels of them. Score products anchor the exponent at the
// start of the sub-chunk: 2^{G_i - G_s} and 2^{G_s - G_j}. The second factor is at least 1 and overflows when a channel decays
// by more than 2^-126 inside 16 tokens (a softplus gate can); such records take the exact path below.
//
// Loops over tokens are rolled where registers allow it: unrolled, the kernel waited for instructions a third of its time.
#ifdef CULA_EMULATE
#include "dev/emulate.h"
#else
#include "prep_device.cuh"
#endif
#include "record.h"

namespace cula::kda {
using namespace cula::dev;

constexpr int kThreads = 256;
// Registers: 2 blocks and a block of the state kernel (224) fit the 512 a lane of an SM's quarter.
constexpr int kRegisters = 72;
constexpr int kGroup = 4;                   // tokens of a warp
constexpr int kGroups = kChunk / kGroup;
// Largest decay of a channel within a group, in log2, that the anchored products may see: four of them stay below 2^126.
// The safe gate reaches 28.9.
constexpr float kAnchoredRange = 30.f;
constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

// Shared memory. A tile of tokens by 128 channels in bf16 is two halves of 64 channels; a token is a 128-byte row of 16-byte
// units, permuted by the token number: conflict-free for ldmatrix and for the elementwise threads, and what wgmma reads.
constexpr int kHalf32 = kChunk * 128, kHalf16 = kSub * 128;  // bytes between the halves of a tile of 32 or 16 tokens
constexpr int kSmemRawK = kRecordBytes;              // raw k; later the score operands {k_j 2^-G_j, sub 0; k_i 2^(G_i - G_s), sub 1}
constexpr int kSmemRawQ = kSmemRawK + 2 * kHalf32;   // raw q; later {exact: k_j to the sub-chunk's end, sub 0; as k's with q, sub 1}
constexpr int kSmemInv1 = kSmemRawQ + 2 * kHalf32;   // k_j 2^(G_s - G_j), sub 1
constexpr int kSmemTot = kSmemInv1 + 2 * kHalf16;    // float [8][128]: log2 decay of each group
constexpr int kSmemNorm = kSmemTot + kGroups * kDim * 4;  // float2 [32]: factors of k and q
constexpr int kSmemBeta = kSmemNorm + kChunk * 8;    // float [32]
constexpr int kPitch = 20;                           // floats; 16x16 matrices, rows 16-byte aligned
constexpr int kMat = kSub * kPitch * 4;
constexpr int kSmemL0 = kSmemBeta + kChunk * 4;      // strict lower diagonal blocks of diag(beta) A
constexpr int kSmemL1 = kSmemL0 + kMat;
constexpr int kSmemL10 = kSmemL1 + kMat;             // and the block below the diagonal
constexpr int kSmemX0 = kSmemL10 + kMat;             // inverses of I + L0, I + L1
constexpr int kSmemX1 = kSmemX0 + kMat;
constexpr int kSmemY = kSmemL0;                      // L10 X0, when L0 is inverted
constexpr int kSmemWork = kSmemX1 + kMat;            // Work [2], and the number of a flag
constexpr int kSmemBytes = kSmemWork + 128;          // dynamic shared memory of a launch
static_assert(kSmemBytes == 60672, "the plan's figure");

enum DtypeCode { kF32 = 0, kBf16 = 1, kFp16 = 2, kAbsent = 3 };
CULA_DEV int mode(int modes, int shift, int bits) { return (modes >> shift) & ((1 << bits) - 1); }

// A scalar in two steps: a prefetched one must not be converted, hence waited for, where it is loaded.
CULA_DEV uint32_t load_bits(const void* p, int64_t i, int dtype) {
  return dtype == kF32 ? static_cast<const uint32_t*>(p)[i] : static_cast<const uint16_t*>(p)[i];
}
CULA_DEV float scalar(uint32_t bits, int dtype) {
  return dtype == kF32 ? __uint_as_float(bits) : dtype == kBf16 ? __uint_as_float(bits << 16) : unpack_fp16(bits).x;
}
CULA_DEV int64_t load_index(const void* p, int64_t i, int code) {
  return code == 1 ? static_cast<int64_t>(static_cast<const int32_t*>(p)[i]) : static_cast<const int64_t*>(p)[i];
}

// 16-byte unit `unit` (8 channels) of token `row`.
CULA_DEV int tile_offset(int half_bytes, int row, int unit) {
  return (unit >> 3) * half_bytes + (row >> 3) * 1024 + (row & 7) * 128 + (((unit ^ row) & 7) << 4);
}
// Byte offset of element (i, j) of P or T.
CULA_DEV int score_offset(int i, int j) { return i * 64 + ((((j >> 3) ^ (i >> 1)) & 3) << 4) + (j & 7) * 2; }

// A tile's 16 token rows as ldmatrix wants them: this lane's row address for channels 0 to 15; `half` bytes to channel 64.
struct Rows {
  const uint8_t* p;
  int half;
};
CULA_DEV Rows rows(const uint8_t* tile, int half_bytes, int first, int lane) {
  return {tile + tile_offset(half_bytes, first + (lane & 15), lane >> 4), half_bytes};
}
// The same for channels 16 ks to 16 ks + 15: two units further, which the permutation turns into an exclusive or.
CULA_DEV const uint8_t* step(const Rows& r, int ks) {
  return reinterpret_cast<const uint8_t*>(reinterpret_cast<uintptr_t>(r.p) ^ ((ks & 3) << 5)) + (ks >> 2) * r.half;
}

// acc += A B^T over 128 channels for 16 rows each
CULA_DEV void score(float (&acc)[2][4], const Rows& a, const Rows& b) {
#pragma unroll
  for (int ks = 0; ks < kDim / 16; ++ks) {
    uint32_t fa[4], fb[4];
    ldmatrix_x4(fa, step(a, ks));
    ldmatrix_x4(fb, step(b, ks));
    mma_bf16(acc[0], fa, fb[0], fb[2]);
    mma_bf16(acc[1], fa, fb[1], fb[3]);
  }
}

// Row and column of element e of an accumulator pair [2][4].
CULA_DEV int acc_row(int lane, int e) { return (lane >> 2) + (e >> 1) * 8; }
CULA_DEV int acc_col(int lane, int n, int e) { return n * 8 + (lane & 3) * 2 + (e & 1); }

// c = sign * A B for 16x16 float32 matrices in shared memory. Each operand is split in two tf32 parts: float32 accuracy,
// which keeps the inverse right for correlated keys (KERNELS 1.4: low-precision series do not).
CULA_DEV void matmul16(float (&c)[2][4], const float* a, const float* b, float sign, int lane) {
  const int g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) c[n][e] = 0.f;
#pragma unroll
  for (int ks = 0; ks < 2; ++ks) {
    float hi[4], lo[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float x = sign * a[(g + (e & 1) * 8) * kPitch + ks * 8 + t + (e >> 1) * 4];
      hi[e] = __uint_as_float(__float_as_uint(x) & 0xffffe000u);
      lo[e] = x - hi[e];
    }
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      float bh[2], bl[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float x = b[(ks * 8 + t + e * 4) * kPitch + n * 8 + g];
        bh[e] = __uint_as_float(__float_as_uint(x) & 0xffffe000u);
        bl[e] = x - bh[e];
      }
      mma_tf32(c[n], lo, bh[0], bh[1]);
      mma_tf32(c[n], hi, bl[0], bl[1]);
      mma_tf32(c[n], hi, bh[0], bh[1]);
    }
  }
}

// x = (I + L)^-1 by forward substitution in float32: lane j makes column j (lanes 16 to 31 repeat it and do not store).
CULA_DEV void invert_leaf(const float* L, float* X, uint8_t* T, int at, const float* beta, int lane) {
  const int j = lane & 15;
  float x[kSub];
#pragma unroll
  for (int i = 0; i < kSub; ++i) {
    float s[4] = {i == j ? 1.f : 0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int m = 0; m < i; m += 4) {
      const float4 l = *reinterpret_cast<const float4*>(L + i * kPitch + m);
      s[0] -= l.x * x[m];
      if (m + 1 < i) s[1] -= l.y * x[m + 1];
      if (m + 2 < i) s[2] -= l.z * x[m + 2];
      if (m + 3 < i) s[3] -= l.w * x[m + 3];
    }
    x[i] = (s[0] + s[1]) + (s[2] + s[3]);
  }
  if (lane < kSub) {
    const float b = beta[at + j];
#pragma unroll
    for (int i = 0; i < kSub; ++i) {
      X[i * kPitch + j] = x[i];
      *reinterpret_cast<uint16_t*>(T + score_offset(at + i, at + j)) = static_cast<uint16_t>(pack_bf16(x[i] * b, 0.f));
    }
  }
}

struct Args {
  const void *q, *k, *gate, *a_log, *dt_bias, *beta, *cu;
  uint8_t* records;
  uint32_t* flags;
  int64_t q_b, q_t, q_h, k_b, k_t, k_h, gate_b, gate_t, gate_h, beta_b, beta_t, beta_h, tokens;
  int hv, group, head_group, sequences, chunks, segments, modes;
  float scale, lower_bound;
};

// 4 channels of one token
#if defined(CULA_GATE_F32)
using GateQuad = float4;
CULA_DEV void unpack_gate(float (&x)[4], const float4& g, bool) { x[0] = g.x; x[1] = g.y; x[2] = g.z; x[3] = g.w; }
constexpr int kGateBytes = 4;
#else
using GateQuad = uint2;
CULA_DEV void unpack_gate(float (&x)[4], const uint2& g, bool bf16) {
  const float2 a = bf16 ? unpack_bf16(g.x) : unpack_fp16(g.x), b = bf16 ? unpack_bf16(g.y) : unpack_fp16(g.y);
  x[0] = a.x; x[1] = a.y; x[2] = b.x; x[3] = b.y;
}
constexpr int kGateBytes = 2;
#endif

// A record to make: the addresses of its first token, how many of its 32 tokens exist. One warp works them out for the block,
// two records ahead: the divisions and 64-bit products are too many instructions for every warp.
struct alignas(16) Work {
  const uint8_t *q, *k, *gate, *beta;
  int valid, chunk, head, unused;
};
static_assert(sizeof(Work) == 48, "");

// Virtual chunk index of the first chunk of sequence s. Intervals of different sequences are disjoint, because a sequence of
// n tokens that starts at t has at most floor((t + n) / 32) - floor(t / 32) + 1 chunks. No prefix sum, no host read.
CULA_DEV int64_t first_chunk(const Args& a, int64_t s) { return load_index(a.cu, s, mode(a.modes, 12, 2)) / kChunk + s; }

// The first record at or after number `i` (stepping by the grid) that has a token; chunk = a.chunks if none is left. Returns
// the number after it. The plan keeps chunks * hv below 2^31 (62 TB of records).
// All lanes of a warp write the same values to w in shared memory.
CULA_DEV uint32_t find_work(const Args& a, uint32_t i, uint32_t step, Work& w) {
  // Segments of one sequence run side by side in the state kernel: chunk 0 of each, chunk 1 of each, ...
  const int per_segment = (a.chunks + a.segments - 1) / a.segments, slots = per_segment * a.segments;
  const uint32_t total = static_cast<uint32_t>(slots) * a.hv;
  const int code = mode(a.modes, 12, 2);
  for (; i < total; i += step) {
    // Groups of heads outermost: the chains of a group run at the same time in the state kernel, and want their records so.
    const uint32_t group_items = static_cast<uint32_t>(slots) * a.head_group;
    const uint32_t group = i / group_items, rest = i - group * group_items;
    const int head0 = group * a.head_group;
    const uint32_t heads = a.hv - head0 < a.head_group ? a.hv - head0 : a.head_group;
    const int slot = rest / heads, head = head0 + static_cast<int>(rest - slot * heads);
    const int chunk = a.segments == 1 ? slot : slot % a.segments * per_segment + slot / a.segments;
    if (chunk >= a.chunks) continue;
    int64_t token, left, batch = 0;
    if (code == 0) {
      const int per = static_cast<int>((a.tokens + kChunk - 1) / kChunk);
      batch = chunk / per;
      token = static_cast<int64_t>(chunk - static_cast<int>(batch) * per) * kChunk;
      left = a.tokens - token;
    } else {
      int lo = 0, hi = a.sequences;  // the last s with first_chunk(s) <= chunk; first_chunk grows strictly
      while (hi - lo > 1) {
        const int mid = (lo + hi) >> 1;
        if (first_chunk(a, mid) <= chunk) lo = mid; else hi = mid;
      }
      const int64_t start = load_index(a.cu, lo, code), end = load_index(a.cu, lo + 1, code);
      token = start + (chunk - (start / kChunk + lo)) * kChunk;
      left = token >= start ? end - token : 0;
    }
    if (left > 0) {
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

// What a thread reads of one record's gates.
struct Gates {
  GateQuad gate[kGroup];
  float dt_bias[4];
  uint32_t a_log, beta;  // bits
};

CULA_DEV void load_gates(const Args& a, const Work& w, int tid, Gates& p) {
  const int quad = tid & 31, first = (tid >> 5) * kGroup;
  const int64_t row = a.gate_t * kGateBytes;
  const uint8_t* gate = w.gate + first * row + 4 * quad * kGateBytes;
  const int valid = w.valid, head = w.head;
#pragma unroll
  for (int t = 0; t < kGroup; ++t) {
    p.gate[t] = GateQuad{};
    if (first + t < valid) p.gate[t] = *reinterpret_cast<const GateQuad*>(gate);
    gate += row;
  }
#pragma unroll
  for (int e = 0; e < 4; ++e) p.dt_bias[e] = 0.f;
  p.a_log = p.beta = 0u;
  if (mode(a.modes, 0, 1)) {
    const int dd = mode(a.modes, 5, 2), ad = mode(a.modes, 3, 2);
    const int64_t i = static_cast<int64_t>(head) * kDim + 4 * quad;
    if (dd == kF32) {  // aligned to 16 bytes like every tensor
      const float4 x = *reinterpret_cast<const float4*>(static_cast<const float*>(a.dt_bias) + i);
      p.dt_bias[0] = x.x; p.dt_bias[1] = x.y; p.dt_bias[2] = x.z; p.dt_bias[3] = x.w;
    } else if (dd != kAbsent) {
#pragma unroll
      for (int e = 0; e < 4; ++e) p.dt_bias[e] = scalar(load_bits(a.dt_bias, i + e, dd), dd);
    }
    if (ad != kAbsent) p.a_log = load_bits(a.a_log, head, ad);
  }
  if (tid < valid) p.beta = load_bits(w.beta, tid * a.beta_t, mode(a.modes, 9, 2));
}

CULA_DEV void prefetch_qk(const Args& a, const Work& w, int tid, uint8_t* smem) {
  const int row = tid >> 4, unit = tid & 15, valid = w.valid;
  const uint8_t *q = w.q + row * a.q_t * 2 + unit * 16, *k = w.k + row * a.k_t * 2 + unit * 16;
  uint8_t* to = smem + kSmemRawK + tile_offset(kHalf32, row, unit);
#pragma unroll
  for (int i = 0; i < 2; ++i) {  // 16 tokens on: 2048 bytes
    const bool inside = row + 16 * i < valid;
    cp_async16(to + i * 2048, k, inside);
    cp_async16(to + (kSmemRawQ - kSmemRawK) + i * 2048, q, inside);
    q += a.q_t * 32;
    k += a.k_t * 32;
  }
  cp_async_commit();
}

// A record's inputs to L2, one record ahead of the loads: those then wait for L2 and not for memory.
CULA_DEV void prefetch_far(const Args& a, const Work& w, int tid) {
  const int row = (tid & 63) >> 1, part = (tid & 1) * 128, what = tid >> 6;  // what: q, k, gate, its second half
  if (row < w.valid) {
    if (what < 2) prefetch_l2((what ? w.k + row * a.k_t * 2 : w.q + row * a.q_t * 2) + part);
    else if (kGateBytes == 4 || what == 2) prefetch_l2(w.gate + row * a.gate_t * kGateBytes + (what - 2) * 256 + part);
  }
}

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

// Where a lane's values lie in the tiles: 8 bytes (4 channels) of the group's first token; the others follow by at().
struct Lane {
  int quad, group, base;
};
CULA_DEV Lane make_lane(int tid) {
  const int quad = tid & 31, group = tid >> 5, first = (group & 1) * kGroup;
  const int base = (quad >> 4) * kHalf32 + (group >> 1) * 1024 + ((quad & 15) >> 1) * 16 + (quad & 1) * 8;
  return {quad, group, (base ^ (first << 4)) + first * 128};
}
CULA_DEV int at(int base, int t) { return (base ^ (t << 4)) + t * 128; }  // t in 0..3

CULA_DEV float2& pair_at(uint8_t* p) { return *reinterpret_cast<float2*>(p); }
CULA_DEV uint2& word_pair_at(uint8_t* p) { return *reinterpret_cast<uint2*>(p); }

// The prefix sums of a group wait where Kd and Qd of the same elements will be: same size, same thread.
CULA_DEV void store_prefix(uint8_t* smem, int o, const float (&g)[4]) {
  pair_at(smem + kRecKd + o) = make_float2(g[0], g[1]);
  pair_at(smem + kRecQd + o) = make_float2(g[2], g[3]);
}
CULA_DEV void load_prefix(float (&g)[4], uint8_t* smem, int o) {
  const float2 a = pair_at(smem + kRecKd + o), b = pair_at(smem + kRecQd + o);
  g[0] = a.x; g[1] = a.y; g[2] = b.x; g[3] = b.y;
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

#if defined(CULA_IO_FP16)
CULA_DEV float2 unpack_io(uint32_t x) { return unpack_fp16(x); }
CULA_DEV void mma_io(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) { mma_fp16(c, a, b0, b1); }
#else
CULA_DEV float2 unpack_io(uint32_t x) { return unpack_bf16(x); }
CULA_DEV void mma_io(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) { mma_bf16(c, a, b0, b1); }
#endif

CULA_DEV void load_io(float (&x)[4], uint8_t* p, float norm) {
  const uint2 w = word_pair_at(p);
  const float2 a = unpack_io(w.x), b = unpack_io(w.y);
  x[0] = a.x * norm; x[1] = a.y * norm; x[2] = b.x * norm; x[3] = b.y * norm;
}
CULA_DEV void store_bf16(uint8_t* p, const float (&x)[4]) { word_pair_at(p) = make_uint2(pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3])); }

// Scores of the diagonal blocks when an anchored factor would overflow: rare, and 5 times the elementwise work.
// At level 0 to 3, pairs (i, j) whose numbers first differ in bit 3 - level meet at the boundary m of their block,
// i >= m > j, and both exponents G_i - G_{m-1} and G_{m-1} - G_j are <= 0. Level 4 is the diagonal, factor 1.
// Warp w < 4 ends with {A of sub 0, A of sub 1, P of sub 0, P of sub 1}[w].
CULA_DEV void exact_scores(float (&acc)[2][4], const Lane& l, uint8_t* smem, int warp, int lane) {
  const float2* norm = reinterpret_cast<const float2*>(smem + kSmemNorm) + l.group * kGroup;
  const float* tot = reinterpret_cast<const float*>(smem + kSmemTot) + 4 * l.quad + (l.group & 4) * kDim;
  const int in_sub = l.group & 3;  // group of the sub-chunk
  float g[kGroup][4];              // over the sub-chunk
#pragma unroll
  for (int t = 0; t < kGroup; ++t) load_prefix(g[t], smem, at(l.base, t));
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const float before = (in_sub > 0 ? tot[e] : 0.f) + (in_sub > 1 ? tot[kDim + e] : 0.f) + (in_sub > 2 ? tot[2 * kDim + e] : 0.f);
#pragma unroll
    for (int t = 0; t < kGroup; ++t) g[t][e] += before;
  }
  const int first = (warp & 1) * kSub;
#pragma unroll 1
  for (int level = 0; level < 5; ++level) {
#pragma unroll
    for (int t = 0; t < kGroup; ++t) {
      const bool upper = (((in_sub * kGroup + t) << level) & 8) && level < 4;
      float k[4], q[4], kr[4], qr[4], kc[4];
      const float2 n = norm[t];
      const int o = at(l.base, t);
      load_io(k, smem + kSmemRawK + o, n.x);
      load_io(q, smem + kSmemRawQ + o, n.y);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float anchor;
        if (level == 0) anchor = tot[e] + tot[kDim + e];
        else if (level == 1) anchor = in_sub < 2 ? tot[e] : tot[e] + tot[kDim + e] + tot[2 * kDim + e];
        else anchor = level == 2 ? g[1][e] : g[t & 2][e];
        const float f = level == 4 ? 1.f : ex2(fminf(upper ? g[t][e] - anchor : anchor - g[t][e], 0.f));
        kr[e] = upper ? k[e] * f : k[e];
        qr[e] = upper ? q[e] * f : q[e];
        kc[e] = upper ? k[e] : k[e] * f;
      }
      store_bf16(smem + kRecKd + o, kr);
      store_bf16(smem + kRecQd + o, qr);
      store_bf16(smem + kRecKr + o, kc);
      no_hoisting();  // of the next token's loads: registers
    }
    __syncthreads();
    if (warp < 4) {
      float s[2][4] = {};
      score(s, rows(smem + (warp < 2 ? kRecKd : kRecQd), kHalf32, first, lane), rows(smem + kRecKr, kHalf32, first, lane));
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int i = acc_row(lane, e), j = acc_col(lane, n, e);
          if (level == 4 ? i == j : i > j && ((i ^ j) >> (3 - level)) == 1) acc[n][e] = s[n][e];
        }
    }
    __syncthreads();
  }
#pragma unroll
  for (int t = 0; t < kGroup; ++t) store_prefix(smem, at(l.base, t), g[t]);
  no_hoisting();
}

// Kd, Qd, Kr into the record and the score operands over the raw tiles, which each thread reads where it writes.
template <int kSubChunk, bool kExact>
CULA_DEV void factors(const Lane& l, uint8_t* smem) {
  const float* tot = reinterpret_cast<const float*>(smem + kSmemTot) + 4 * l.quad;
  const float2* norm = reinterpret_cast<const float2*>(smem + kSmemNorm) + l.group * kGroup;
  // log2 decay of the sub-chunk before this group (exact_scores has added it), of all the sub-chunk; factors: decay of
  // sub-chunk 0, from where inv (exact: kr) stands to the end of the chunk
  float before[4] = {}, sums[2][4] = {}, e0[4], to_end[4];
#pragma unroll
  for (int i = 0; i < kGroups; ++i) {
    // One 16-byte load: 4-byte ones at this stride conflict four ways, and shared memory is what this kernel is short of
    const float4 x = *reinterpret_cast<const float4*>(tot + i * kDim);
    const float v[4] = {x.x, x.y, x.z, x.w};
    float(&s)[4] = sums[i / (kGroups / 2)];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (!kExact && i == l.group) before[e] = s[e];
      s[e] += v[e];
    }
  }
  const float(&own)[4] = sums[kSubChunk];
  float end[4];
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    e0[e] = ex2(sums[0][e]);
    // Two factors, not ex2 of the sum: inv can be 2^115 and the sum's factor below the smallest float
    to_end[e] = kSubChunk ? ex2(sums[1][e]) : ex2(sums[1][e]) * (kExact ? 1.f : e0[e]);
    end[e] = sums[0][e] + sums[1][e];
  }
  if (l.group == 0) {  // 2^G_C; float order [c / 16][(c % 8) / 2][(c / 8) % 2][c % 2] of channel c
    float* decay = reinterpret_cast<float*>(smem + kRecDecay) + (l.quad >> 2) * 16 + (l.quad & 1) * 8 + ((l.quad >> 1) & 1) * 2;
    *reinterpret_cast<float2*>(decay) = make_float2(ex2(end[0]), ex2(end[1]));
    *reinterpret_cast<float2*>(decay + 4) = make_float2(ex2(end[2]), ex2(end[3]));
  }
  const int kr_base = l.base - (l.quad >> 4) * (kHalf32 - 1024) + (l.group >> 1) * 1024;
#pragma unroll 1
  for (int t = 0; t < kGroup; ++t) {
    const int o = at(l.base, t), o_kr = at(kr_base, t);
    const float2 n = norm[t];
    float k[4], q[4], g[4], kd[4], qd[4], inv[4], kr[4];
    load_io(k, smem + kSmemRawK + o, n.x);
    load_io(q, smem + kSmemRawQ + o, n.y);
    load_prefix(g, smem, o);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      g[e] += before[e];
      const float f = ex2(g[e]);
      kd[e] = k[e] * f;
      qd[e] = q[e] * f;
      if (kExact) kr[e] = k[e] * ex2(own[e] - g[e]);  // to the end of the sub-chunk
      else inv[e] = k[e] * ex2(-g[e]);
    }
    if (kSubChunk == 0) {
      if (kExact) store_bf16(smem + kSmemRawQ + o, kr); else store_bf16(smem + kSmemRawK + o, inv);
#pragma unroll
      for (int e = 0; e < 4; ++e) { kr[e] = (kExact ? kr[e] : inv[e]) * to_end[e]; kd[e] = -kd[e]; }
    } else {
      store_bf16(smem + kSmemRawK + o, kd);
      store_bf16(smem + kSmemRawQ + o, qd);
      if (!kExact) {
        store_bf16(smem + kSmemInv1 + o - kSub * 128 - (l.quad >> 4) * kHalf16, inv);
#pragma unroll
        for (int e = 0; e < 4; ++e) kr[e] = inv[e] * to_end[e];
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) { kd[e] *= -e0[e]; qd[e] *= e0[e]; }
    }
    store_bf16(smem + kRecKd + o, kd);
    store_bf16(smem + kRecQd + o, qd);
    store_bf16(smem + kRecKr + o_kr, kr);
  }
}

// Square norms of 16 tokens of q or k: the diagonal of X X^T, whose two operands are the same fragments.
CULA_DEV void token_norms(uint8_t* smem, int warp, int lane, bool l2norm, float scale) {
  const bool is_q = warp & 1;
  const int first = (warp >> 1) * kSub;
  float s[2][4] = {};
  if (l2norm) {
    const Rows r = rows(smem + (is_q ? kSmemRawQ : kSmemRawK), kHalf32, first, lane);
#pragma unroll
    for (int ks = 0; ks < kDim / 16; ++ks) {
      uint32_t f[4];
      ldmatrix_x4(f, step(r, ks));
      mma_io(s[0], f, f[0], f[2]);
      mma_io(s[1], f, f[1], f[3]);
    }
  }
  const int g = lane >> 2;
  if ((g >> 1) == (lane & 3)) {
    float* norm = reinterpret_cast<float*>(smem + kSmemNorm) + is_q;
    const float a = (g & 1) ? s[0][1] : s[0][0], b = (g & 1) ? s[1][3] : s[1][2];
    norm[2 * (first + g)] = (l2norm ? rsqrtf(a + 1e-6f) : 1.f) * (is_q ? scale : 1.f);
    norm[2 * (first + g + 8)] = (l2norm ? rsqrtf(b + 1e-6f) : 1.f) * (is_q ? scale : 1.f);
  }
}

CULA_DEV void store_p(uint8_t* smem, const float (&acc)[2][4], int at_i, int at_j, bool diagonal, int lane) {
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int e = 0; e < 4; e += 2) {
      const int i = acc_row(lane, e), j = acc_col(lane, n, e);
      const float x = !diagonal || j <= i ? acc[n][e] : 0.f, y = !diagonal || j + 1 <= i ? acc[n][e + 1] : 0.f;
      *reinterpret_cast<uint32_t*>(smem + kRecP + score_offset(at_i + i, at_j + j)) = pack_bf16(x, y);
    }
}

// L = diag(beta) A, strictly lower in a diagonal block; by select, because a masked product may be infinite.
CULA_DEV void store_l(float* L, const float (&acc)[2][4], float sign, bool diagonal, const float* beta, int lane) {
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int e = 0; e < 4; e += 2) {
      const int i = acc_row(lane, e), j = acc_col(lane, n, e);
      const float b = sign * beta[i];
      const float x = !diagonal || j < i ? b * acc[n][e] : 0.f, y = !diagonal || j + 1 < i ? b * acc[n][e + 1] : 0.f;
      *reinterpret_cast<float2*>(L + i * kPitch + j) = make_float2(x, y);
    }
}

CULA_DEV void prep(const Args& a, uint8_t* smem) {
  const int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0);
  int tid = threadIdx.x;
  float* const beta = reinterpret_cast<float*>(smem + kSmemBeta);
  float* const L0 = reinterpret_cast<float*>(smem + kSmemL0);
  float* const L1 = reinterpret_cast<float*>(smem + kSmemL1);
  float* const L10 = reinterpret_cast<float*>(smem + kSmemL10);
  float* const X0 = reinterpret_cast<float*>(smem + kSmemX0);
  float* const X1 = reinterpret_cast<float*>(smem + kSmemX1);
  float* const Y = reinterpret_cast<float*>(smem + kSmemY);

  // The state kernel may start once every block has come this far: it then finds cleared flags and waits on them.
  const uint32_t flags = static_cast<uint32_t>(a.chunks) * a.hv;
  for (uint32_t i = blockIdx.x * kThreads + tid; i < flags; i += gridDim.x * kThreads) a.flags[i] = 0;
  // P and T above the diagonal block stay zero for every record.
  if (tid < kSub) {
#pragma unroll
    for (int j = kSub; j < kChunk; j += 4) {
      word_pair_at(smem + kRecP + score_offset(tid, j)) = make_uint2(0u, 0u);
      word_pair_at(smem + kRecT + score_offset(tid, j)) = make_uint2(0u, 0u);
    }
  }
  __threadfence();
  __syncthreads();
  launch_dependents();

  Work* const work = reinterpret_cast<Work*>(smem + kSmemWork);  // [0], [1]: this record and the next, in turns
  uint32_t index = 0;                                           // warp 7: number from which the next search starts
  if (warp == 7) {
    index = find_work(a, blockIdx.x, gridDim.x, work[0]);
    index = find_work(a, index, gridDim.x, work[1]);
  }
  __syncthreads();
  if (work[0].chunk < a.chunks) prefetch_qk(a, work[0], tid, smem);
  int turn = 0;
  // Flag of the record whose bulk store is in flight: only thread 0's, but a register in all threads, so it lives here.
  int& pending = *reinterpret_cast<int*>(smem + kSmemWork + 2 * sizeof(Work));
  if (threadIdx.x == 0) pending = -1;
  while (work[turn].chunk < a.chunks) {
    tid = opaque(threadIdx.x);
    const int lane = tid & 31;
    const Lane l = make_lane(tid);
    const Work& next = work[turn ^ 1];
    const int valid_tokens = work[turn].valid;
    Gates p;
    load_gates(a, work[turn], tid, p);  // from L2, while q and k arrive
    cp_async_wait_all();
    if (tid == 0) bulk_wait_read();  // the record image is free again
    __syncthreads();
    prefetch_far(a, next, tid);

    if (warp < 4) token_norms(smem, warp, lane, mode(a.modes, 11, 1), a.scale);
    float sum[4];
    {
      const bool bf16 = mode(a.modes, 1, 2) == kBf16;
      const int valid = valid_tokens - l.group * kGroup;
      const float a_log = scalar(p.a_log, mode(a.modes, 3, 2));  // absent: bits 0, 0 in every dtype
      if (!mode(a.modes, 0, 1)) prefix<kLog>(sum, p, 0.f, l, smem, valid, bf16, 0.f);
      else if (a.lower_bound == 0.f) prefix<kSoftplus>(sum, p, a_log, l, smem, valid, bf16, 0.f);
      else prefix<kSafe>(sum, p, a_log, l, smem, valid, bf16, a.lower_bound);
      float4 total;
      total.x = sum[0]; total.y = sum[1]; total.z = sum[2]; total.w = sum[3];
      *reinterpret_cast<float4*>(smem + kSmemTot + (l.group * kDim + 4 * l.quad) * 4) = total;
    }
    if (tid < kChunk) {
      const int kind = mode(a.modes, 7, 2);
      const float x = scalar(p.beta, mode(a.modes, 9, 2));
      const float b = kind == 0 ? x : rcp(1.f + ex2(-kLog2e * x)) * (kind == 2 ? 2.f : 1.f);
      beta[tid] = tid < valid_tokens ? b : 0.f;
    }
    const float least = fminf(fminf(sum[0], sum[1]), fminf(sum[2], sum[3]));
    const bool exact = __syncthreads_or(least < -kAnchoredRange);

    float acc[2][4] = {};
    if (!exact) {
      if (warp < 4) factors<0, false>(l, smem); else factors<1, false>(l, smem);
    } else {
      exact_scores(acc, l, smem, warp, lane);
      if (warp < 4) factors<0, true>(l, smem); else factors<1, true>(l, smem);
    }
    const int64_t record = static_cast<int64_t>(work[turn].chunk) * a.hv + work[turn].head;
    const int flag = work[turn].head * a.chunks + work[turn].chunk;
    const bool more = next.chunk < a.chunks;
    if (tid == 0 && pending >= 0) {  // the previous record is in memory by now: it may be read
      bulk_wait_all();
      store_release(a.flags + pending, 1u);
    }
    __syncthreads();

    // Warps 0 to 3 have the diagonal blocks {A of sub 0, A of sub 1, P of sub 0, P of sub 1}, and 0 and 1 invert theirs;
    // warps 4 and 5 have the blocks of A and P below the diagonal.
    const int sub = warp & 1;
    if (warp < 4) {
      const Rows hi = sub ? rows(smem + (warp < 2 ? kSmemRawK : kSmemRawQ), kHalf32, kSub, lane) : rows(smem + (warp < 2 ? kRecKd : kRecQd), kHalf32, 0, lane);
      if (!exact) score(acc, hi, sub ? rows(smem + kSmemInv1, kHalf16, 0, lane) : rows(smem + kSmemRawK, kHalf32, 0, lane));
      if (warp < 2) {
        float* const L = sub ? L1 : L0;
        store_l(L, acc, exact || sub ? 1.f : -1.f, true, beta + sub * kSub, lane);  // the record holds -Kd
        __syncwarp();
        invert_leaf(L, sub ? X1 : X0, smem + kRecT, sub * kSub, beta, lane);
      } else {
        store_p(smem, acc, sub * kSub, sub * kSub, true, lane);
      }
    } else if (warp < 6) {
      // Anchored: (-Kd_i, Qd_i) and k_j 2^-G_j. Where Kd_i is too small for a float, the pair's factor is below 2^-126 2^115
      // and the term lost is below 2^-11 k_ic k_jc; subnormals push that to 2^-18.
      const uint8_t* const hi = smem + (exact ? (sub ? kSmemRawQ : kSmemRawK) : (sub ? kRecQd : kRecKd));
      score(acc, rows(hi, kHalf32, kSub, lane), rows(smem + (exact ? kSmemRawQ : kSmemRawK), kHalf32, 0, lane));
      if (sub) store_p(smem, acc, kSub, 0, false, lane);
      else store_l(L10, acc, exact ? 1.f : -1.f, false, beta + kSub, lane);
    }
    fence_async_smem();
    __syncthreads();

    if (more) prefetch_qk(a, next, tid, smem);  // the score operands are dead
    if (warp == 7) {  // into the place of this record, which nobody reads any more: barrier
      index = find_work(a, index, gridDim.x, work[turn]);
    }
    turn ^= 1;
    if (warp == 0) {  // T below the diagonal: -X1 L10 X0
      float c[2][4];
      matmul16(c, L10, X0, 1.f, lane);
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int e = 0; e < 4; e += 2)
          *reinterpret_cast<float2*>(Y + acc_row(lane, e) * kPitch + acc_col(lane, n, e)) = make_float2(c[n][e], c[n][e + 1]);
      __syncwarp();
      matmul16(c, X1, Y, -1.f, lane);
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int e = 0; e < 4; e += 2) {
          const int j = acc_col(lane, n, e);
          *reinterpret_cast<uint32_t*>(smem + kRecT + score_offset(kSub + acc_row(lane, e), j)) = pack_bf16(c[n][e] * beta[j], c[n][e + 1] * beta[j + 1]);
        }
      fence_async_smem();
      __syncwarp();
      if (lane == 0) {
        bulk_store(a.records + record * kRecordBytes, smem, kRecordBytes);
        pending = flag;
      }
    }
  }
  if (tid == 0 && pending >= 0) {
    bulk_wait_all();
    store_release(a.flags + pending, 1u);
  }
}

}  // namespace cula::kda

#ifndef CULA_EMULATE
extern "C" __global__ void __maxnreg__(cula::kda::kRegisters)
cula_kda_prep(const void* q, const void* k, const void* gate, const void* a_log, const void* dt_bias, const void* beta,
              const void* cu_seqlens, void* records, void* flags, int64_t q_b, int64_t q_t, int64_t q_h, int64_t k_b, int64_t k_t,
              int64_t k_h, int64_t gate_b, int64_t gate_t, int64_t gate_h, int64_t beta_b, int64_t beta_t, int64_t beta_h,
              int64_t tokens, int32_t hv, int32_t group, int32_t head_group, int32_t sequences, int32_t chunks, int32_t segments, int32_t modes, float scale,
              float lower_bound) {
  extern __shared__ __align__(1024) uint8_t smem[];
  const cula::kda::Args a{q, k, gate, a_log, dt_bias, beta, cu_seqlens, static_cast<uint8_t*>(records), static_cast<uint32_t*>(flags),
                          q_b, q_t, q_h, k_b, k_t, k_h, gate_b, gate_t, gate_h, beta_b, beta_t, beta_h, tokens,
                          hv, group, head_group, sequences, chunks, segments, modes, scale, lower_bound};
  cula::kda::prep(a, smem);
}
#endif
