// KDA prefill, first kernel: q, k, gate, beta -> one record per (chunk of 32 tokens, value head). RECORD.md has the layout.
//
// G_i is the inclusive sum of log2 decay over the chunk, k and q are normalised and q is scaled:
//   Kd_i = k_i 2^{G_i}    Qd_i = q_i 2^{G_i}    Kr_j = k_j 2^{G_C - G_j}          (factors <= 1)
//   A_ij = sum_c k_ic k_jc 2^{G_ic - G_jc}  (j < i)      P_ij likewise with q  (j <= i)
//   T = (I + diag(beta) A)^-1 diag(beta)
//
// A block of 128 threads makes one record at a time and walks over them (persistent grid). For elementwise work, a thread
// owns 2 channels of the 16 tokens of a sub-chunk: the prefix sum stays in its registers. Score products anchor the exponent
// at the start of the sub-chunk: 2^{G_i - G_s} and 2^{G_s - G_j}. The second factor is at least 1 and overflows when a
// channel decays by more than 2^-126 inside 16 tokens (a softplus gate can); such records take the exact path below.
#ifdef CULA_EMULATE
#include "dev/emulate.h"
#else
#include "prep_device.cuh"
#endif
#include "record.h"

namespace cula::kda {
using namespace cula::dev;

constexpr int kThreads = 128;
constexpr int kBlocksPerSm = 4;
// Largest decay of a channel within a sub-chunk, in log2, that the anchored products may see. The safe gate reaches 115.4.
constexpr float kAnchoredRange = 120.f;
constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

// Shared memory. A tile of tokens by 128 channels in bf16 is two halves of 64 channels; a token is a 128-byte row of 16-byte
// units, permuted by the token number: conflict-free for ldmatrix and for the elementwise threads, and what wgmma reads.
constexpr int kHalf32 = kChunk * 128, kHalf16 = kSub * 128;  // bytes between the halves of a tile of 32 or 16 tokens
constexpr int kSmemRawK = kRecordBytes;              // raw k; later the score operands {k_j / decay, sub 0; Kh, sub 1}
constexpr int kSmemRawQ = kSmemRawK + 2 * kHalf32;   // raw q; later {k_j to the sub-chunk's end, sub 0; Qh, sub 1}
constexpr int kSmemInv1 = kSmemRawQ + 2 * kHalf32;   // k_j / decay, sub 1
constexpr int kSmemTot = kSmemInv1 + 2 * kHalf16;    // float [2][128]: log2 decay of each sub-chunk
constexpr int kSmemNorm = kSmemTot + 2 * kDim * 4;   // float2 [32]: factors of k and q
constexpr int kSmemBeta = kSmemNorm + kChunk * 8;    // float [32]
constexpr int kPitch = 20;                           // floats; 16x16 matrices, rows 16-byte aligned
constexpr int kMat = kSub * kPitch * 4;
constexpr int kSmemL0 = kSmemBeta + kChunk * 4;      // strict lower diagonal blocks of diag(beta) A
constexpr int kSmemL1 = kSmemL0 + kMat;
constexpr int kSmemL10 = kSmemL1 + kMat;             // and the block below the diagonal
constexpr int kSmemX0 = kSmemL10 + kMat;             // inverses of I + L0, I + L1
constexpr int kSmemX1 = kSmemX0 + kMat;
constexpr int kSmemY = kSmemX1 + kMat;
constexpr int kSmemBytes = kSmemY + kMat;            // dynamic shared memory of a launch
static_assert(kSmemBytes == 58752, "the plan's figure");

enum DtypeCode { kF32 = 0, kBf16 = 1, kFp16 = 2, kAbsent = 3 };
CULA_DEV int mode(int modes, int shift, int bits) { return (modes >> shift) & ((1 << bits) - 1); }

CULA_DEV float load_scalar(const void* p, int64_t i, int dtype) {
  if (dtype == kF32) return static_cast<const float*>(p)[i];
  if (dtype == kBf16) return __bfloat162float(static_cast<const __nv_bfloat16*>(p)[i]);
  return __half2float(static_cast<const __half*>(p)[i]);
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

// acc += A B^T over 128 channels; A: 16 token rows from a_row of tile a, B: 16 token rows from b_row of tile b.
CULA_DEV void score(float (&acc)[2][4], const uint8_t* a, int a_half, int a_row, const uint8_t* b, int b_half, int b_row, int lane) {
  const int r = lane & 15, u = lane >> 4;
#pragma unroll
  for (int ks = 0; ks < kDim / 16; ++ks) {
    uint32_t fa[4], fb[4];
    ldmatrix_x4(fa, a + tile_offset(a_half, a_row + r, ks * 2 + u));
    ldmatrix_x4(fb, b + tile_offset(b_half, b_row + r, ks * 2 + u));
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
  int hv, group, head_group, sequences, chunks, modes;
  float scale, lower_bound;
};

// A record to make: its first token, how many of its 32 tokens exist.
struct Item {
  int chunk, head, valid, batch;
  int64_t token;
};

// Virtual chunk index of the first chunk of sequence s. Intervals of different sequences are disjoint, because a sequence of
// n tokens that starts at t has at most floor((t + n) / 32) - floor(t / 32) + 1 chunks. No prefix sum, no host read.
CULA_DEV int64_t first_chunk(const Args& a, int64_t s) { return load_index(a.cu, s, mode(a.modes, 12, 2)) / kChunk + s; }

// The first item at or after `i` (stepping by the grid) that has a token; chunk = a.chunks if none is left.
CULA_DEV Item next_item(const Args& a, int64_t i, int64_t step, int64_t& at) {
  Item it;
  for (; i < static_cast<int64_t>(a.chunks) * a.hv; i += step) {
    // Groups of heads outermost: the chains of a group run at the same time in the state kernel, and want their records so.
    const int64_t group_items = static_cast<int64_t>(a.chunks) * a.head_group;
    const int group = static_cast<int>(i / group_items), head0 = group * a.head_group;
    const int64_t rest = i - group * group_items;
    const int heads = a.hv - head0 < a.head_group ? a.hv - head0 : a.head_group;
    it.chunk = static_cast<int>(rest / heads);
    it.head = head0 + static_cast<int>(rest - static_cast<int64_t>(it.chunk) * heads);
    int64_t left;
    if (mode(a.modes, 12, 2) == 0) {
      const int per = static_cast<int>((a.tokens + kChunk - 1) / kChunk);
      it.batch = it.chunk / per;
      it.token = static_cast<int64_t>(it.chunk - it.batch * per) * kChunk;
      left = a.tokens - it.token;
    } else {
      int lo = 0, hi = a.sequences;  // the last s with first_chunk(s) <= chunk; first_chunk grows strictly
      while (hi - lo > 1) {
        const int mid = (lo + hi) >> 1;
        if (first_chunk(a, mid) <= it.chunk) lo = mid; else hi = mid;
      }
      const int code = mode(a.modes, 12, 2);
      const int64_t start = load_index(a.cu, lo, code), end = load_index(a.cu, lo + 1, code);
      it.batch = 0;
      it.token = start + (it.chunk - (start / kChunk + lo)) * kChunk;
      left = it.token >= start ? end - it.token : 0;
    }
    if (left > 0) {
      it.valid = left < kChunk ? static_cast<int>(left) : kChunk;
      at = i;
      return it;
    }
  }
  it.chunk = a.chunks;
  at = i;
  return it;
}

#if defined(CULA_GATE_F32)
using GatePair = float2;
CULA_DEV float2 unpack_gate(float2 x, bool) { return x; }
CULA_DEV GatePair no_gate() { return make_float2(0.f, 0.f); }
constexpr int kGateBytes = 4;
#else
using GatePair = uint32_t;
CULA_DEV float2 unpack_gate(uint32_t x, bool bf16) { return bf16 ? unpack_bf16(x) : unpack_fp16(x); }
CULA_DEV GatePair no_gate() { return 0u; }
constexpr int kGateBytes = 2;
#endif

// Global loads of one record, in flight while the previous record is finished.
struct Prefetch {
  GatePair gate[kSub];  // 2 channels of 16 tokens
  float2 dt_bias;
  float a_log, beta;
};

CULA_DEV void prefetch_regs(const Args& a, const Item& it, int tid, Prefetch& p) {
  const int pair = tid & 63, sub = tid >> 6;
  const uint8_t* gate = static_cast<const uint8_t*>(a.gate) +
                        (it.batch * a.gate_b + (it.token + sub * kSub) * a.gate_t + it.head * a.gate_h + 2 * pair) * kGateBytes;
#pragma unroll
  for (int t = 0; t < kSub; ++t) {
    p.gate[t] = sub * kSub + t < it.valid ? *reinterpret_cast<const GatePair*>(gate) : no_gate();
    gate += a.gate_t * kGateBytes;
  }
  p.dt_bias = make_float2(0.f, 0.f);
  p.a_log = p.beta = 0.f;
  if (mode(a.modes, 0, 1)) {
    const int dd = mode(a.modes, 5, 2), ad = mode(a.modes, 3, 2);
    if (dd != kAbsent) {
      p.dt_bias.x = load_scalar(a.dt_bias, static_cast<int64_t>(it.head) * kDim + 2 * pair, dd);
      p.dt_bias.y = load_scalar(a.dt_bias, static_cast<int64_t>(it.head) * kDim + 2 * pair + 1, dd);
    }
    if (ad != kAbsent) p.a_log = load_scalar(a.a_log, it.head, ad);
  }
  if (tid < it.valid) p.beta = load_scalar(a.beta, it.batch * a.beta_b + (it.token + tid) * a.beta_t + it.head * a.beta_h, mode(a.modes, 9, 2));
}

CULA_DEV void prefetch_qk(const Args& a, const Item& it, int tid, uint8_t* smem) {
  const int h = it.head / a.group;
  const uint16_t* q = static_cast<const uint16_t*>(a.q) + it.batch * a.q_b + it.token * a.q_t + h * a.q_h;
  const uint16_t* k = static_cast<const uint16_t*>(a.k) + it.batch * a.k_b + it.token * a.k_t + h * a.k_h;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = (tid >> 4) + i * 8, unit = tid & 15;
    const bool ok = row < it.valid;
    const int r = ok ? row : 0;  // an address that exists
    cp_async16(smem + kSmemRawK + tile_offset(kHalf32, row, unit), k + r * a.k_t + unit * 8, ok);
    cp_async16(smem + kSmemRawQ + tile_offset(kHalf32, row, unit), q + r * a.q_t + unit * 8, ok);
  }
  cp_async_commit();
}

CULA_DEV float softplus(float x) {
  if (x > 20.f) return x;
  const float e = ex2(x * kLog2e);
  // log(1 + e) loses the low bits of a small e: its series instead, to e^5
  return e < 0.03125f ? e * (1.f - e * (0.5f - e * (0.33333333f - e * 0.25f))) : lg2(1.f + e) * kLn2;
}

// log2 decay of one element
enum GateForm { kLog, kSoftplus, kSafe };
template <int kForm>
CULA_DEV float decay_log2(float x, float dt_bias, float a, float lower_bound) {
  if (kForm == kLog) return x * kLog2e;
  if (kForm == kSoftplus) return -a * kLog2e * softplus(x + dt_bias);
  return lower_bound * kLog2e * rcp(1.f + ex2(-kLog2e * a * (x + dt_bias)));
}

// Inclusive prefix sums of log2 decay over the sub-chunk; tokens that do not exist do not decay.
template <int kForm>
CULA_DEV void prefix(float2 (&g)[kSub], const Prefetch& p, int valid, bool bf16, float lower_bound) {
  const float a = expf(p.a_log);
  float2 sum = make_float2(0.f, 0.f);
#pragma unroll
  for (int t = 0; t < kSub; ++t) {
    const float2 x = unpack_gate(p.gate[t], bf16);
    if (t < valid) {
      sum.x += decay_log2<kForm>(x.x, p.dt_bias.x, a, lower_bound);
      sum.y += decay_log2<kForm>(x.y, p.dt_bias.y, a, lower_bound);
    }
    g[t] = sum;
  }
}

#if defined(CULA_IO_FP16)
CULA_DEV float2 unpack_io(uint32_t x) { return unpack_fp16(x); }
CULA_DEV void mma_io(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) { mma_fp16(c, a, b0, b1); }
#else
CULA_DEV float2 unpack_io(uint32_t x) { return unpack_bf16(x); }
CULA_DEV void mma_io(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) { mma_bf16(c, a, b0, b1); }
#endif

// The 16 prefix sums of each of a thread's two channels, and where its values lie in the tiles.
struct Lane {
  float2 g[kSub];
  int pair, sub, base;  // base: byte offset of (first token of the sub-chunk, channel pair) before the permutation
};
CULA_DEV int lane_offset(const Lane& l, int base, int t) { return (base ^ ((t & 7) << 4)) + (t >> 3) * 1024 + (t & 7) * 128; }

// Scores of the diagonal blocks when an anchored factor would overflow: rare, and 5 times the elementwise work.
// At level 0 to 3, pairs (i, j) whose numbers first differ in bit 3 - level meet at the boundary m of their block,
// i >= m > j, and both exponents G_i - G_{m-1} and G_{m-1} - G_j are <= 0. Level 4 is the diagonal, factor 1.
// Warp w ends with {A of sub 0, A of sub 1, P of sub 0, P of sub 1}[w].
CULA_DEV void exact_scores(float (&acc)[2][4], const Lane& l, uint8_t* smem, int warp, int lane) {
  const float2* norm = reinterpret_cast<const float2*>(smem + kSmemNorm) + l.sub * kSub;
  const int at = (warp & 1) * kSub;
#pragma unroll 1
  for (int level = 0; level < 5; ++level) {
    const int bit = 3 - level;
#pragma unroll
    for (int t = 0; t < kSub; ++t) {
      const float2 anchor = level == 0 ? l.g[7] : level == 1 ? l.g[(t & 8) + 3] : level == 2 ? l.g[(t & 12) + 1] : l.g[t & 14];
      const bool upper = (t << level) & 8;
      float2 f = make_float2(upper ? l.g[t].x - anchor.x : anchor.x - l.g[t].x, upper ? l.g[t].y - anchor.y : anchor.y - l.g[t].y);
      f = level == 4 ? make_float2(1.f, 1.f) : make_float2(ex2(f.x), ex2(f.y));
      const float2 row = upper ? f : make_float2(1.f, 1.f), col = upper ? make_float2(1.f, 1.f) : f;
      const int o = lane_offset(l, l.base, t);
      const float2 k = unpack_io(*reinterpret_cast<const uint32_t*>(smem + kSmemRawK + o));
      const float2 q = unpack_io(*reinterpret_cast<const uint32_t*>(smem + kSmemRawQ + o));
      const float2 n = norm[t];
      *reinterpret_cast<uint32_t*>(smem + kRecKd + o) = pack_bf16(k.x * n.x * row.x, k.y * n.x * row.y);
      *reinterpret_cast<uint32_t*>(smem + kRecQd + o) = pack_bf16(q.x * n.y * row.x, q.y * n.y * row.y);
      *reinterpret_cast<uint32_t*>(smem + kRecKr + o) = pack_bf16(k.x * n.x * col.x, k.y * n.x * col.y);
    }
    __syncthreads();
    float s[2][4] = {};
    score(s, smem + (warp < 2 ? kRecKd : kRecQd), kHalf32, at, smem + kRecKr, kHalf32, at, lane);
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int i = acc_row(lane, e), j = acc_col(lane, n, e);
        if (level == 4 ? i == j : i > j && ((i ^ j) >> bit) == 1) acc[n][e] = s[n][e];
      }
    __syncthreads();
  }
}

// Kd, Qd, Kr into the record and the score operands over the raw tiles, which each thread reads where it writes.
template <bool kExact>
CULA_DEV void factors(const Lane& l, uint8_t* smem) {
  const float* tot = reinterpret_cast<const float*>(smem + kSmemTot);
  const float2* norm = reinterpret_cast<const float2*>(smem + kSmemNorm);
  const float2 t0 = *reinterpret_cast<const float2*>(tot + 2 * l.pair), t1 = *reinterpret_cast<const float2*>(tot + kDim + 2 * l.pair);
  const float2 e0 = make_float2(ex2(t0.x), ex2(t0.y)), e1 = make_float2(ex2(t1.x), ex2(t1.y));
  const int kr_base = l.base - (l.pair >> 5) * (kHalf32 - 1024) + l.sub * 2048;
#pragma unroll
  for (int t = 0; t < kSub; ++t) {
    const int o = lane_offset(l, l.base, t);
    const int o_kr = (kr_base ^ ((t & 7) << 4)) + (t >> 3) * 2048 + (t & 7) * 128;
    uint32_t* raw_k = reinterpret_cast<uint32_t*>(smem + kSmemRawK + o);
    uint32_t* raw_q = reinterpret_cast<uint32_t*>(smem + kSmemRawQ + o);
    const float2 n = norm[l.sub * kSub + t], g = l.g[t];
    float2 k = unpack_io(*raw_k), q = unpack_io(*raw_q);
    k.x *= n.x; k.y *= n.x; q.x *= n.y; q.y *= n.y;
    const float2 e = make_float2(ex2(g.x), ex2(g.y));
    float2 kd = make_float2(k.x * e.x, k.y * e.y), qd = make_float2(q.x * e.x, q.y * e.y);
    float2 inv = make_float2(0.f, 0.f), end;  // end: k to the end of its sub-chunk
    if (kExact) {
      const float2 s = l.sub ? t1 : t0;
      end = make_float2(k.x * ex2(s.x - g.x), k.y * ex2(s.y - g.y));
    } else {
      inv = make_float2(k.x * ex2(-g.x), k.y * ex2(-g.y));
      end = l.sub ? make_float2(inv.x * e1.x, inv.y * e1.y) : make_float2(inv.x * e0.x, inv.y * e0.y);
    }
    if (l.sub == 0) {
      *raw_k = pack_bf16(inv.x, inv.y);
      *raw_q = pack_bf16(end.x, end.y);
      end.x *= e1.x; end.y *= e1.y;
    } else {
      *raw_k = pack_bf16(kd.x, kd.y);
      *raw_q = pack_bf16(qd.x, qd.y);
      const int o_inv = o - kSub * 128 - (l.pair >> 5) * kHalf16;
      *reinterpret_cast<uint32_t*>(smem + kSmemInv1 + o_inv) = pack_bf16(inv.x, inv.y);
      kd.x *= e0.x; kd.y *= e0.y; qd.x *= e0.x; qd.y *= e0.y;
    }
    *reinterpret_cast<uint32_t*>(smem + kRecKd + o) = pack_bf16(-kd.x, -kd.y);
    *reinterpret_cast<uint32_t*>(smem + kRecQd + o) = pack_bf16(qd.x, qd.y);
    *reinterpret_cast<uint32_t*>(smem + kRecKr + o_kr) = pack_bf16(end.x, end.y);
  }
  if (l.sub == 0) {  // channel c: n = c / 8; float order [n / 2][(c % 8) / 2][n % 2][c % 2]
    const int n = l.pair >> 2;
    float* decay = reinterpret_cast<float*>(smem + kRecDecay) + (n >> 1) * 16 + (l.pair & 3) * 4 + (n & 1) * 2;
    *reinterpret_cast<float2*>(decay) = make_float2(ex2(t0.x + t1.x), ex2(t0.y + t1.y));
  }
}

// Square norms of 16 tokens of q or k: the diagonal of X X^T, whose two operands are the same fragments.
CULA_DEV void token_norms(uint8_t* smem, int warp, int lane, bool l2norm, float scale) {
  const bool is_q = warp & 1;
  const int at = (warp >> 1) * kSub;
  float s[2][4] = {};
  if (l2norm) {
    const uint8_t* tile = smem + (is_q ? kSmemRawQ : kSmemRawK);
#pragma unroll
    for (int ks = 0; ks < kDim / 16; ++ks) {
      uint32_t f[4];
      ldmatrix_x4(f, tile + tile_offset(kHalf32, at + (lane & 15), ks * 2 + (lane >> 4)));
      mma_io(s[0], f, f[0], f[2]);
      mma_io(s[1], f, f[1], f[3]);
    }
  }
  const int g = lane >> 2;
  if ((g >> 1) == (lane & 3)) {
    float* norm = reinterpret_cast<float*>(smem + kSmemNorm) + is_q;
    const float a = (g & 1) ? s[0][1] : s[0][0], b = (g & 1) ? s[1][3] : s[1][2];
    norm[2 * (at + g)] = (l2norm ? rsqrtf(a + 1e-6f) : 1.f) * (is_q ? scale : 1.f);
    norm[2 * (at + g + 8)] = (l2norm ? rsqrtf(b + 1e-6f) : 1.f) * (is_q ? scale : 1.f);
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
  const int64_t flags = static_cast<int64_t>(a.chunks) * a.hv;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + tid; i < flags; i += static_cast<int64_t>(gridDim.x) * kThreads) a.flags[i] = 0;
  __threadfence();
  __syncthreads();
  launch_dependents();

  int64_t at;
  Item it = next_item(a, blockIdx.x, gridDim.x, at);
  Prefetch p;
  if (it.chunk < a.chunks) {
    prefetch_qk(a, it, tid, smem);
    prefetch_regs(a, it, tid, p);
  }
  int64_t pending = -1;  // record whose bulk store is in flight (thread 0)
  while (it.chunk < a.chunks) {
    tid = opaque(threadIdx.x);
    const int lane = tid & 31;
    Lane l;
    l.pair = tid & 63;
    l.sub = tid >> 6;
    l.base = (l.pair >> 5) * kHalf32 + l.sub * kSub * 128 + (lane >> 2) * 16 + (lane & 3) * 4;
    cp_async_wait_all();
    __syncthreads();

    token_norms(smem, warp, lane, mode(a.modes, 11, 1), a.scale);
    {
      const bool bf16 = mode(a.modes, 1, 2) == kBf16;
      const int valid = it.valid - l.sub * kSub;
      if (!mode(a.modes, 0, 1)) prefix<kLog>(l.g, p, valid, bf16, 0.f);
      else if (a.lower_bound == 0.f) prefix<kSoftplus>(l.g, p, valid, bf16, 0.f);
      else prefix<kSafe>(l.g, p, valid, bf16, a.lower_bound);
    }
    const float2 sum = l.g[kSub - 1];
    *reinterpret_cast<float2*>(smem + kSmemTot + (l.sub * kDim + 2 * l.pair) * 4) = sum;
    if (tid < kChunk) {
      const int kind = mode(a.modes, 7, 2);
      const float b = kind == 0 ? p.beta : rcp(1.f + ex2(-kLog2e * p.beta)) * (kind == 2 ? 2.f : 1.f);
      beta[tid] = tid < it.valid ? b : 0.f;
    }
    if (tid == 0 && pending >= 0) {  // the record image is free again, and its record may be read
      bulk_wait_all();
      store_release(a.flags + pending, 1u);
    }
    const bool exact = __syncthreads_or(sum.x < -kAnchoredRange || sum.y < -kAnchoredRange);

    float acc[2][4] = {};
    if (exact) {
      exact_scores(acc, l, smem, warp, lane);
      factors<true>(l, smem);
    } else {
      factors<false>(l, smem);
    }
    const int64_t record = static_cast<int64_t>(it.chunk) * a.hv + it.head;
    const int64_t flag = static_cast<int64_t>(it.head) * a.chunks + it.chunk;
    const Item next = next_item(a, at + gridDim.x, gridDim.x, at);
    const bool more = next.chunk < a.chunks;
    __syncthreads();

    // warp 0: A of sub 0 and its inverse; 1: the same of sub 1; 2: A below the diagonal, P of sub 0; 3: the rest of P
    uint8_t *const Kd = smem + kRecKd, *const Qd = smem + kRecQd;
    uint8_t *const inv0 = smem + kSmemRawK, *const kh1 = smem + kSmemRawK, *const end0 = smem + kSmemRawQ, *const qh1 = smem + kSmemRawQ,
            *const inv1 = smem + kSmemInv1;
    if (warp == 0) {
      if (!exact) score(acc, Kd, kHalf32, 0, inv0, kHalf32, 0, lane);  // the record holds -Kd
      store_l(L0, acc, exact ? 1.f : -1.f, true, beta, lane);
      __syncwarp();
      invert_leaf(L0, X0, smem + kRecT, 0, beta, lane);
    } else if (warp == 1) {
      if (!exact) score(acc, kh1, kHalf32, kSub, inv1, kHalf16, 0, lane);
      store_l(L1, acc, 1.f, true, beta + kSub, lane);
      __syncwarp();
      invert_leaf(L1, X1, smem + kRecT, kSub, beta, lane);
    } else if (warp == 2) {
      if (!exact) score(acc, Qd, kHalf32, 0, inv0, kHalf32, 0, lane);
      store_p(smem, acc, 0, 0, true, lane);
      float off[2][4] = {};
      score(off, kh1, kHalf32, kSub, end0, kHalf32, 0, lane);
      store_l(L10, off, 1.f, false, beta + kSub, lane);
      const float zero[2][4] = {};
      store_p(smem, zero, 0, kSub, false, lane);                      // above the diagonal
      store_p(smem + (kRecT - kRecP), zero, 0, kSub, false, lane);
    } else {
      if (!exact) score(acc, qh1, kHalf32, kSub, inv1, kHalf16, 0, lane);
      store_p(smem, acc, kSub, kSub, true, lane);
      float off[2][4] = {};
      score(off, qh1, kHalf32, kSub, end0, kHalf32, 0, lane);
      store_p(smem, off, kSub, 0, false, lane);
    }
    fence_async_smem();
    __syncthreads();

    if (more) {  // the score operands are dead
      prefetch_qk(a, next, tid, smem);
      prefetch_regs(a, next, tid, p);
    }
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
    it = next;
  }
  if (tid == 0 && pending >= 0) {
    bulk_wait_all();
    store_release(a.flags + pending, 1u);
  }
}

}  // namespace cula::kda

#ifndef CULA_EMULATE
extern "C" __global__ void __launch_bounds__(cula::kda::kThreads, cula::kda::kBlocksPerSm)
cula_kda_prep(const void* q, const void* k, const void* gate, const void* a_log, const void* dt_bias, const void* beta,
              const void* cu_seqlens, void* records, void* flags, int64_t q_b, int64_t q_t, int64_t q_h, int64_t k_b, int64_t k_t,
              int64_t k_h, int64_t gate_b, int64_t gate_t, int64_t gate_h, int64_t beta_b, int64_t beta_t, int64_t beta_h,
              int64_t tokens, int32_t hv, int32_t group, int32_t head_group, int32_t sequences, int32_t chunks, int32_t modes, float scale,
              float lower_bound) {
  extern __shared__ __align__(1024) uint8_t smem[];
  const cula::kda::Args a{q, k, gate, a_log, dt_bias, beta, cu_seqlens, static_cast<uint8_t*>(records), static_cast<uint32_t*>(flags),
                          q_b, q_t, q_h, k_b, k_t, k_h, gate_b, gate_t, gate_h, beta_b, beta_t, beta_h, tokens,
                          hv, group, head_group, sequences, chunks, modes, scale, lower_bound};
  cula::kda::prep(a, smem);
}
#endif
