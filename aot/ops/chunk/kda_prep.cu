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
// A warp has whole tokens, so norms and prefix sums stay in registers: shared memory is what the kernel is short of, and holds
// only the record, the score operands and small matrices.
#include "prep_gate.cuh"
#include "prep_inverse.cuh"
#include "prep_scores.cuh"
#include "prep_work.cuh"

namespace cula::kda {

// Kd, Qd, Kr into the record, and the score operands. g_own: prefix sums over the group.
template <int kSubChunk, bool kExact>
CULA_DEV void factors(const float (&g_own)[kGroup][4], const Tokens& in, float norms, const Lane& l, uint8_t* smem) {
  const float* tot = reinterpret_cast<const float*>(smem + kSmemTot) + 4 * l.quad;
  // log2 decay of the sub-chunk before this group, of all the sub-chunk; factors: decay of
  // sub-chunk 0, from where inv (exact: kr) stands to the end of the chunk
  float before[4] = {}, sums[2][4] = {}, e0[4], to_end[4];
#pragma unroll
  for (int i = 0; i < kGroups; ++i) {
    // One 16-byte load: 4-byte ones at this stride conflict four ways, and shared memory is what this kernel is short of
    const float4 x = *reinterpret_cast<const float4*>(tot + i * kDim);
    const float v[4] = {x.x, x.y, x.z, x.w};
    constexpr int kInSub = kGroups / 2;
    float(&s)[4] = sums[i / kInSub];
    const bool is_before = i / kInSub == kSubChunk && i < l.group;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      s[e] = i % kInSub ? s[e] + v[e] : v[e];
      if (is_before) before[e] = s[e];
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
#pragma unroll
  for (int t = 0; t < kGroup; ++t) {
    const int o = at(l.base, t), o_kr = at(kr_base, t);
    float k[4], q[4], g[4], kd[4], qd[4], inv[4], kr[4];
    normalised(k, q, in, t, norms);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      g[e] = g_own[t][e] + before[e];
      const float f = ex2(g[e]);
      kd[e] = k[e] * f;
      qd[e] = q[e] * f;
      if (kExact) kr[e] = k[e] * ex2(own[e] - g[e]);  // to the end of the sub-chunk
      else inv[e] = k[e] * ex2(-g[e]);
    }
    if (kSubChunk == 0) {
      if (kExact) store_bf16(smem + kSmemB + o, kr); else store_bf16(smem + kSmemA + o, inv);
#pragma unroll
      for (int e = 0; e < 4; ++e) { kr[e] = (kExact ? kr[e] : inv[e]) * to_end[e]; kd[e] = -kd[e]; }
    } else {
      store_bf16(smem + kSmemA + o, kd);
      store_bf16(smem + kSmemB + o, qd);
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

// The exact path goes through shared memory on both sides, so that its registers are its own: a thread leaves its values where
// its operands will be, and finds its scores of the diagonal blocks in Inv1, which this path has no other use for.
CULA_DEV void leave_for_exact(const float (&g)[kGroup][4], const Tokens& in, float norms, const Lane& l, uint8_t* smem) {
#pragma unroll
  for (int t = 0; t < kGroup; ++t) {
    const int o = at(l.base, t);
    word_pair_at(smem + kSmemA + o) = in.k[t];
    word_pair_at(smem + kSmemB + o) = in.q[t];
    word_pair_at(smem + kRecKd + o) = make_uint2(__float_as_uint(g[t][0]), __float_as_uint(g[t][1]));
    word_pair_at(smem + kRecQd + o) = make_uint2(__float_as_uint(g[t][2]), __float_as_uint(g[t][3]));
  }
  reinterpret_cast<float*>(smem + kSmemL0)[threadIdx.x] = norms;
}
CULA_DEV_COLD void exact_record(uint8_t* smem) {
  const int tid = threadIdx.x, warp = __shfl_sync(~0u, tid >> 5, 0), lane = tid & 31;
  const Lane l = make_lane(tid);
  float g[kGroup][4];
#pragma unroll
  for (int t = 0; t < kGroup; ++t) {
    const int o = at(l.base, t);
    const uint2 a = word_pair_at(smem + kRecKd + o), b = word_pair_at(smem + kRecQd + o);
    g[t][0] = __uint_as_float(a.x); g[t][1] = __uint_as_float(a.y); g[t][2] = __uint_as_float(b.x); g[t][3] = __uint_as_float(b.y);
  }
  const float norms = reinterpret_cast<const float*>(smem + kSmemL0)[tid];
  float acc[2][4] = {};
  exact_scores(acc, g, norms, l, smem, warp, lane);
  Tokens in;
#pragma unroll
  for (int t = 0; t < kGroup; ++t) {
    in.k[t] = word_pair_at(smem + kSmemA + at(l.base, t));
    in.q[t] = word_pair_at(smem + kSmemB + at(l.base, t));
  }
  if (warp < 4) factors<0, true>(g, in, norms, l, smem); else factors<1, true>(g, in, norms, l, smem);
  if (warp < 4) {
    float* to = reinterpret_cast<float*>(smem + kSmemInv1) + tid * 8;
#pragma unroll
    for (int i = 0; i < 8; ++i) to[i] = acc[i >> 2][i & 3];
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
  for (uint32_t i = blockIdx.x * kThreads + tid; i < a.flag_words; i += gridDim.x * kThreads) a.flags[i] = 0;
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

  Work* const work = reinterpret_cast<Work*>(smem + kSmemWork);  // this record, the next and the one after it, in turns
  InFlight& store = *reinterpret_cast<InFlight*>(smem + kSmemWork + 3 * sizeof(Work));
  if (warp == 7) {
    uint32_t from = blockIdx.x;
#pragma unroll 1
    for (int i = 0; i < 2; ++i) from = find_work(a, from, gridDim.x, work[i]);
    store.next = from;
  }
  __syncthreads();
  int turn = 0;
  Gates gates;
  Tokens in;
  load_gates(a, work[0], tid, gates);
  load_rows(a, work[0], tid, in);
  if (threadIdx.x == kStorer) store.flag = -1;
  while (work[turn].chunk < a.chunks) {
    tid = opaque(threadIdx.x);
    const int lane = tid & 31;
    const Lane l = make_lane(tid);
    const int turn1 = turn == 2 ? 0 : turn + 1;
    const Work& next = work[turn1];
    const int valid_tokens = work[turn].valid;

    float g[kGroup][4];
    {
      const bool bf16 = mode(a.modes, 1, 2) == kBf16;
      const int valid = valid_tokens - l.group * kGroup;
      HeadGate head;
      load_head(a, work[turn].head, l.quad, head);
      if (!mode(a.modes, 0, 1)) prefix<kLog>(g, gates, head, valid, bf16, 0.f);
      else if (a.lower_bound == 0.f) prefix<kSoftplus>(g, gates, head, valid, bf16, 0.f);
      else prefix<kSafe>(g, gates, head, valid, bf16, a.lower_bound);
      float4 total;
      total.x = g[3][0]; total.y = g[3][1]; total.z = g[3][2]; total.w = g[3][3];
      *reinterpret_cast<float4*>(smem + kSmemTot + (l.group * kDim + 4 * l.quad) * 4) = total;
    }
    if (tid < kChunk) {
      const int kind = mode(a.modes, 7, 2);
      const float x = scalar(gates.beta, mode(a.modes, 9, 2));
      const float b = kind == 0 ? x : rcp(1.f + ex2(-kLog2e * x)) * (kind == 2 ? 2.f : 1.f);
      beta[tid] = tid < valid_tokens ? b : 0.f;
    }
    const float norms = norm_factors(in, lane, mode(a.modes, 11, 1), a.scale);
    if (tid == 0 || tid == kStorer) bulk_wait_read();  // the record image is free again
    const float least = fminf(fminf(g[3][0], g[3][1]), fminf(g[3][2], g[3][3]));
    const bool exact = __syncthreads_or(least < -kAnchoredRange);

    if (!exact) {
      if (warp < 4) factors<0, false>(g, in, norms, l, smem); else factors<1, false>(g, in, norms, l, smem);
    } else {
      leave_for_exact(g, in, norms, l, smem);
      exact_record(smem);
    }
    if (tid == 0) bulk_wait_all();  // P and T of the previous record are in memory
    fence_async_smem();
    __syncthreads();

    if (tid == kStorer) {  // Kd, Qd and Kr leave while the scores are made
      store.record = a.records + (static_cast<int64_t>(work[turn].chunk) * a.hv + work[turn].head) * kRecordBytes;
      bulk_store(store.record, smem, kRecP);
    }
    const uint32_t previous = store.value;  // before warp 0 puts this record's there
    if (warp == kStorer / 32) barrier_arrive<kInverseBarrier, kInverseThreads>();
    // The next record's inputs, in flight during the scores. If there is none, valid is 0 and nothing is read.
    load_gates(a, next, tid, gates);
    load_rows(a, next, tid, in);
    if (tid == kStorer) {
      bulk_wait_all_but_last();
      if (store.flag >= 0) store_release(a.flags + store.flag, previous);
      store.flag = work[turn].head * a.chunks + work[turn].chunk;
    }

    if (warp == 7) {
      const uint32_t from = store.next;
      __syncwarp();
      store.next = find_work(a, from, gridDim.x, work[turn1 == 2 ? 0 : turn1 + 1]);
    }

    // Warps 0 to 3 have the diagonal blocks {A of sub 0, A of sub 1, P of sub 0, P of sub 1}, and 0 and 1 invert theirs;
    // warps 4 and 5 have the blocks of A and P below the diagonal.
    const int sub = warp & 1;
    float acc[2][4] = {};
    if (warp < 4) {
      if (exact) {
        const float* from = reinterpret_cast<const float*>(smem + kSmemInv1) + tid * 8;
#pragma unroll
        for (int i = 0; i < 8; ++i) acc[i >> 2][i & 3] = from[i];
      }
      const Rows hi = sub ? rows(smem + (warp < 2 ? kSmemA : kSmemB), kHalf32, kSub, lane) : rows(smem + (warp < 2 ? kRecKd : kRecQd), kHalf32, 0, lane);
      if (!exact) score(acc, hi, sub ? rows(smem + kSmemInv1, kHalf16, 0, lane) : rows(smem + kSmemA, kHalf32, 0, lane));
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
      const uint8_t* const hi = smem + (exact ? (sub ? kSmemB : kSmemA) : (sub ? kRecQd : kRecKd));
      score(acc, rows(hi, kHalf32, kSub, lane), rows(smem + (exact ? kSmemB : kSmemA), kHalf32, 0, lane));
      if (sub) store_p(smem, acc, kSub, 0, false, lane);
      else store_l(L10, acc, exact ? 1.f : -1.f, false, beta + kSub, lane);
    }
    fence_async_smem();
    // P, both leaves and L10 are written: warp 0 waits for it, the others go on to the next record.
    if (warp != 0) {
      if (warp < 6) barrier_arrive<kInverseBarrier, kInverseThreads>();
    } else {  // T below the diagonal: -X1 L10 X0
      barrier_sync<kInverseBarrier, kInverseThreads>();
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
      if (lane == 0) bulk_store(store.record + kRecP, smem + kRecP, kRecordBytes - kRecP);
      uint32_t value = 1;
      if (work[turn].bound) value += forgotten(smem, Y, lane);
      if (lane == 0) store.value = value;
    }
    turn = turn1;
  }
  if (tid == 0) bulk_wait_all();
  __syncthreads();
  if (tid == kStorer && store.flag >= 0) {
    bulk_wait_all();
    store_release(a.flags + store.flag, store.value);
  }
}

}  // namespace cula::kda

#ifndef CULA_EMULATE
extern "C" __global__ void __maxnreg__(cula::kda::kRegisters)
cula_kda_prep(const void* q, const void* k, const void* gate, const void* a_log, const void* dt_bias, const void* beta,
              const void* cu_seqlens, void* records, void* flags, int64_t q_b, int64_t q_t, int64_t q_h, int64_t k_b, int64_t k_t,
              int64_t k_h, int64_t gate_b, int64_t gate_t, int64_t gate_h, int64_t beta_b, int64_t beta_t, int64_t beta_h,
              int64_t tokens, int32_t hv, int32_t group, int32_t head_group, int32_t sequences, int32_t chunks, int32_t segments, int32_t cut, int32_t flag_words,
              int32_t modes, float scale,
              float lower_bound) {
  extern __shared__ __align__(1024) uint8_t smem[];
  const cula::kda::Args a{q, k, gate, a_log, dt_bias, beta, cu_seqlens, static_cast<uint8_t*>(records), static_cast<uint32_t*>(flags),
                          q_b, q_t, q_h, k_b, k_t, k_h, gate_b, gate_t, gate_h, beta_b, beta_t, beta_h, tokens,
                          hv, group, head_group, sequences, chunks, segments, cut, static_cast<uint32_t>(flag_words), modes, scale, lower_bound};
  cula::kda::prep(a, smem);
}
#endif
