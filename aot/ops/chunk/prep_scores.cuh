// Score products on tensor cores: A, P, and the exact form for gates that the anchored products cannot hold.
#pragma once
#include "prep_gate.cuh"

namespace cula::kda {

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

// acc += A B^T over 128 channels for 16 rows each, in two sums: half the chain of products
CULA_DEV void score(float (&acc)[2][4], const Rows& a, const Rows& b) {
  float odd[2][4] = {};
#pragma unroll
  for (int ks = 0; ks < kDim / 16; ++ks) {
    float(&s)[2][4] = ks & 1 ? odd : acc;
    uint32_t fa[4], fb[4];
    ldmatrix_x4(fa, step(a, ks));
    ldmatrix_x4(fb, step(b, ks));
    mma_bf16(s[0], fa, fb[0], fb[2]);
    mma_bf16(s[1], fa, fb[1], fb[3]);
  }
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) acc[n][e] += odd[n][e];
}

// Row and column of element e of an accumulator pair [2][4].
CULA_DEV int acc_row(int lane, int e) { return (lane >> 2) + (e >> 1) * 8; }
CULA_DEV int acc_col(int lane, int n, int e) { return n * 8 + (lane & 3) * 2 + (e & 1); }

// Scores of the diagonal blocks when an anchored factor would overflow: rare, and 5 times the elementwise work.
// At level 0 to 3, pairs (i, j) whose numbers first differ in bit 3 - level meet at the boundary m of their block,
// i >= m > j, and both exponents G_i - G_{m-1} and G_{m-1} - G_j are <= 0. Level 4 is the diagonal, factor 1.
// Warp w < 4 ends with {A of sub 0, A of sub 1, P of sub 0, P of sub 1}[w].
CULA_DEV void exact_scores(float (&acc)[2][4], const float (&g_own)[kGroup][4], float norms, const Lane& l, uint8_t* smem, int warp, int lane) {
  const float* tot = reinterpret_cast<const float*>(smem + kSmemTot) + 4 * l.quad + (l.group & 4) * kDim;
  const int in_sub = l.group & 3;  // group of the sub-chunk
  float g[kGroup][4];              // over the sub-chunk
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const float before = (in_sub > 0 ? tot[e] : 0.f) + (in_sub > 1 ? tot[kDim + e] : 0.f) + (in_sub > 2 ? tot[2 * kDim + e] : 0.f);
#pragma unroll
    for (int t = 0; t < kGroup; ++t) g[t][e] = g_own[t][e] + before;
  }
  const int first = (warp & 1) * kSub;
#pragma unroll 1
  for (int level = 0; level < 5; ++level) {
#pragma unroll
    for (int t = 0; t < kGroup; ++t) {
      const bool upper = (((in_sub * kGroup + t) << level) & 8) && level < 4;
      float k[4], q[4], kr[4], qr[4], kc[4];
      const int o = at(l.base, t);
      unpack_quad(k, word_pair_at(smem + kSmemA + o), __shfl_sync(~0u, norms, 4 * t));
      unpack_quad(q, word_pair_at(smem + kSmemB + o), __shfl_sync(~0u, norms, 16 + 4 * t));
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

}  // namespace cula::kda
