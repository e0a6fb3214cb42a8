// The recurrence over one chunk of kTokens tokens on the CPU, in float32. For cpu_isa_prefill.cpp only (see isa.h).
//
// With P_i the product of the decays of tokens 0 to i of the chunk, and S the state before it:
//   u_i = beta_i (v_i - (P_i k_i)^T S - sum_{j<i} L_ij u_j)      L_ij = sum_c k_i[c] k_j[c] a_{j+1}[c] ... a_i[c]
//   o_i = (P_i q_i)^T S + sum_{j<=i} Q_ij u_j                    Q_ij likewise with q_i; Q_ii = q_i . k_i
//   S  <- P_last S + sum_j (a_{j+1} ... a_last k_j) u_j^T
// Decays are only ever multiplied with one another, each pair of tokens having its own product: no exponent is taken
// back, so nothing overflows and nothing loses digits, whatever the gate. With 16 tokens these products are 8 % of the work.
//
// Reading order: Chunk, decays_and_scores, then of a tile of 64 value columns products_with_state, substitute, update_state.
#pragma once

#include "aot/common/cpu/operands.h"

namespace cula::cpu::CULA_ISA {
namespace {

constexpr int kTokens = 16;
constexpr int kMaxK = 256;
constexpr int kRow = kMaxK + 16;  // floats between rows; 256 would put every row into the same four sets of the L1 cache
constexpr int kTile = 64;         // value columns
// Blocks of the products, in registers: rows times vectors of accumulators. 16 registers of the lower levels hold 4 x 2.
constexpr int kRows = 4, kVectors = W == 16 ? 4 : 2;
constexpr int kDepth = 64;        // channels of a block: a state block of 16 KB stays in L1, and no chain of additions is longer

struct Chunk {
  alignas(64) float k[kTokens][kRow];      // normed
  alignas(64) float q[kTokens][kRow];      // normed and scaled
  alignas(64) float a[kTokens][kRow];      // decay
  alignas(64) float d[2 * kTokens][kRow];  // rows 2 i, 2 i + 1: P_i k_i, P_i q_i
  alignas(64) float r[kTokens][kRow];      // k_j with the decays after j
  alignas(64) float total[kMaxK];          // P of the last token
  float l[kTokens][kTokens];               // L, below the diagonal
  float p[kTokens][kTokens];               // Q, the diagonal comes from the one who loads q and k
  float beta[kTokens];
  alignas(64) float x[2 * kTokens][kTile];  // d S of one tile
  alignas(64) float u[kTokens][kTile];
};

// Subnormal numbers in a product cost hundreds of cycles an instruction on some machines, and a chunk of strong decays is full of them.
CULA_INLINE VF without_subnormals(VF x) { return select(abs(x) < 0x1p-126f, VF{}, x); }

// d, r, total, l and p below the diagonal, from k, q and a of `count` tokens.
void decays_and_scores(Chunk& c, int K, int count) {
  for (int i = 0; i < K; i += W) {
    VF product = splat(1.0f);
    for (int t = 0; t < count; ++t) {
      product = without_subnormals(product * load(c.a[t] + i));
      store(c.d[2 * t] + i, without_subnormals(product * load(c.k[t] + i)));
      store(c.d[2 * t + 1] + i, without_subnormals(product * load(c.q[t] + i)));
    }
    store(c.total + i, product);
    if (count % 2 != 0) {  // products_with_state takes four rows at a time
      store(c.d[2 * count] + i, VF{});
      store(c.d[2 * count + 1] + i, VF{});
    }
  }
  constexpr int kGroup = 4;  // vectors of k_j in registers
  for (int j = 0; j < count; ++j) {
    VF with_k[kTokens] = {}, with_q[kTokens] = {};
    for (int i = 0; i < K; i += kGroup * W) {
      VF r[kGroup];
#pragma GCC unroll 4
      for (int n = 0; n < kGroup; ++n) r[n] = load(c.k[j] + i + n * W);
      for (int t = j + 1; t < count; ++t) {
        VF sum_k = with_k[t], sum_q = with_q[t];
#pragma GCC unroll 4
        for (int n = 0; n < kGroup; ++n) {
          r[n] = without_subnormals(r[n] * load(c.a[t] + i + n * W));
          sum_k += r[n] * load(c.k[t] + i + n * W);
          sum_q += r[n] * load(c.q[t] + i + n * W);
        }
        with_k[t] = sum_k;
        with_q[t] = sum_q;
      }
#pragma GCC unroll 4
      for (int n = 0; n < kGroup; ++n) store(c.r[j] + i + n * W, r[n]);
    }
    for (int t = j + 1; t < count; t += 2) {  // with an even count the second of the last two is a row that does not exist
      const int next = t + 1 < count ? t + 1 : t;
      const VF pair[4] = {with_k[t], with_q[t], with_k[next], with_q[next]};
      const V4 sums = sum4(pair);
      c.l[t][j] = sums[0];
      c.p[t][j] = sums[1];
      c.l[next][j] = sums[2];
      c.p[next][j] = sums[3];
    }
  }
}

// x = d S. state: [K][kTile].
void products_with_state(Chunk& c, const float* state, int K, int count) {
  for (int first = 0; first < K; first += kDepth) {
    for (int row = 0; row < 2 * count; row += kRows) {
      for (int column = 0; column < kTile; column += kVectors * W) {
        VF sum[kRows][kVectors] = {};
        const float* s = state + first * kTile + column;
        const float* d = c.d[row] + first;
        for (int i = 0; i < kDepth; ++i, s += kTile, ++d) {
          VF part[kVectors];
#pragma GCC unroll 4
          for (int n = 0; n < kVectors; ++n) part[n] = load(s + n * W);
#pragma GCC unroll 4
          for (int r = 0; r < kRows; ++r) {
            const VF factor = splat(d[r * kRow]);
#pragma GCC unroll 4
            for (int n = 0; n < kVectors; ++n) sum[r][n] += factor * part[n];
          }
        }
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
          for (int n = 0; n < kVectors; ++n) {
            float* x = c.x[row + r] + column + n * W;
            store(x, first == 0 ? sum[r][n] : load(x) + sum[r][n]);
          }
        }
      }
    }
  }
}

// u, and the outputs; v and out: of the tile in token 0, token_v and token_out bytes between tokens.
template <class Io>
CULA_INLINE void substitute(Chunk& c, const char* v, int64_t token_v, char* out, int64_t token_out, int count) {
  for (int column = 0; column < kTile; column += kVectors * W) {
    for (int t = 0; t < count; ++t) {
      VF u[kVectors], o[kVectors];
#pragma GCC unroll 4
      for (int n = 0; n < kVectors; ++n) {
        const int at = column + n * W;
        u[n] = Io::load(v + t * token_v + at * Io::kBytes) - load(c.x[2 * t] + at);
        o[n] = load(c.x[2 * t + 1] + at);
      }
      for (int j = 0; j < t; ++j) {
        const VF l = splat(c.l[t][j]), p = splat(c.p[t][j]);
#pragma GCC unroll 4
        for (int n = 0; n < kVectors; ++n) {
          const VF before = load(c.u[j] + column + n * W);
          u[n] -= l * before;
          o[n] += p * before;
        }
      }
      const VF beta = splat(c.beta[t]), p = splat(c.p[t][t]);
#pragma GCC unroll 4
      for (int n = 0; n < kVectors; ++n) {
        const int at = column + n * W;
        u[n] *= beta;
        store(c.u[t] + at, u[n]);
        Io::store(out + t * token_out + at * Io::kBytes, o[n] + p * u[n]);
      }
    }
  }
}

// What the chunk adds is summed by itself: with a slow decay the state then takes one rounding a chunk, not one a token.
void update_state(const Chunk& c, float* state, int K, int count) {
  for (int i = 0; i < K; i += kRows) {
    for (int column = 0; column < kTile; column += kVectors * W) {
      VF sum[kRows][kVectors] = {};
      for (int t = 0; t < count; ++t) {
        VF u[kVectors];
#pragma GCC unroll 4
        for (int n = 0; n < kVectors; ++n) u[n] = load(c.u[t] + column + n * W);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
          const VF factor = splat(c.r[t][i + r]);
#pragma GCC unroll 4
          for (int n = 0; n < kVectors; ++n) sum[r][n] += factor * u[n];
        }
      }
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        const VF decay = splat(c.total[i + r]);
#pragma GCC unroll 4
        for (int n = 0; n < kVectors; ++n) {
          float* s = state + (i + r) * kTile + column + n * W;
          store(s, decay * load(s) + sum[r][n]);
        }
      }
    }
  }
}

}  // namespace
}  // namespace cula::cpu::CULA_ISA
