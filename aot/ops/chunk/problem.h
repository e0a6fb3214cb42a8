// What a prefill call says: cula_prefill_args -> checked operands and dims. All rules of the struct are here, none elsewhere,
// and hold for every arch; what one arch does not support is refused by its plan.
//
// Reading order: Problem, then read_problem at the end, which names the steps.
#pragma once
#include <cmath>
#include <initializer_list>

#include "aot/ops/chunk/record.h"
#include "error.h"
#include "fill.h"
#include "names.h"
#include "pool.h"
#include "tensor.h"

namespace cula::chunk {

constexpr int64_t kChunkTokens = 32;     // of a chunk; checkpoints stand at multiples of it
using kda::kMaxSegments;

// ------------------------------------------------------------------------------------------------------------ problem

// Strides in elements of a tensor [B,T,heads,...] or [T,heads,...]; 0 for an extent of 1 or one that is not there.
struct TokenStrides {
  int64_t b, t, h;
};

struct Problem {
  const char* op;
  const cula_prefill_args* args;
  Tensor q, k, v, out, gate, a_log, dt_bias, beta, cu, state, state_out, read, write, checkpoints, checkpoint_index;  // absent ones have dtype absent
  TokenStrides q_at, k_at, v_at, out_at, gate_at, beta_at;
  bool packed;             // no B: [T,H,K]
  int64_t batch, tokens;   // B and T
  int64_t n;               // sequences: B, or those of cu_seqlens
  int64_t h, hv, dim_k, dim_v;
  int64_t checkpoint_columns;  // C
};

// float32 where there is no pool at all: what the state is kept in then shows in no result.
inline Element state_dtype(const Problem& p) noexcept {
  for (const Tensor* pool : {&p.state, &p.state_out, &p.checkpoints}) {
    if (present(*pool)) return pool->dtype;
  }
  return Element::f32;
}

inline TokenStrides strides_of(const Problem& p, const Tensor& t) noexcept {
  return p.packed ? TokenStrides{0, t.stride[0], t.stride[1]} : TokenStrides{t.stride[0], t.stride[1], t.stride[2]};
}

// ------------------------------------------------------------------------------------------------------------ options

inline cula_status expect_flag(const Problem& p, const char* name, int32_t value) noexcept {
  return value == 0 || value == 1 ? CULA_OK : fail(CULA_ERR_INVALID_ARGUMENT, "%s: %s is %d; must be 0 or 1", p.op, name, value);
}

inline cula_status check_options(const Problem& p) noexcept {
  const cula_prefill_args& a = *p.args;
  CULA_TRY(expect_flag(p, "has_null_slot", a.has_null_slot));
  CULA_TRY(expect_flag(p, "l2norm", a.l2norm));
  CULA_TRY(expect_flag(p, "exact", a.exact));
  CULA_TRY(expect_flag(p, "has_scale", a.has_scale));
  if (layout_name(a.state_layout) == nullptr) {
    return fail(CULA_ERR_INVALID_ARGUMENT, "%s: state_layout is %d; must be CULA_STATE_VK (0) or CULA_STATE_KV (1)", p.op, a.state_layout);
  }
  if (a.gate_kind != CULA_GATE_LOG_CHANNEL && a.gate_kind != CULA_GATE_RAW) {
    const char* name = gate_kind_name(a.gate_kind);
    return name != nullptr ? fail(CULA_ERR_INVALID_ARGUMENT, "%s: gate_kind is %s; allowed: LOG_CHANNEL, RAW", p.op, name)
                           : fail(CULA_ERR_INVALID_ARGUMENT, "%s: gate_kind is %d; allowed: LOG_CHANNEL, RAW", p.op, a.gate_kind);
  }
  if (beta_kind_name(a.beta_kind) == nullptr) {
    return fail(CULA_ERR_INVALID_ARGUMENT, "%s: beta_kind is %d; allowed: VALUE, LOGIT, LOGIT_TWICE", p.op, a.beta_kind);
  }
  if (!(a.lower_bound == 0.0f)) {
    if (a.gate_kind != CULA_GATE_RAW) return fail(CULA_ERR_INVALID_ARGUMENT, "%s: lower_bound is %g, but it belongs to the RAW gate", p.op, a.lower_bound);
    if (!(a.lower_bound >= -5.0f && a.lower_bound < 0.0f)) {
      return fail(CULA_ERR_INVALID_ARGUMENT, "%s: lower_bound is %g; must be 0 (softplus form) or in [-5,0)", p.op, a.lower_bound);
    }
  }
  if (a.has_scale ? !std::isfinite(a.scale) : !(a.scale == 0.0f)) {
    return a.has_scale ? fail(CULA_ERR_INVALID_ARGUMENT, "%s: scale is %g; must be finite", p.op, a.scale)
                       : fail(CULA_ERR_INVALID_ARGUMENT, "%s: scale is %g, but has_scale is 0", p.op, a.scale);
  }
  if (!a.has_null_slot && a.null_slot != 0) {
    return fail(CULA_ERR_INVALID_ARGUMENT, "%s: null_slot is %lld, but has_null_slot is 0", p.op, static_cast<long long>(a.null_slot));
  }
  if (prefill_variant_name(a.variant) == nullptr) {
    return fail(CULA_ERR_INVALID_ARGUMENT, "%s: variant is %d; allowed: AUTO, SERIAL, OVERLAP, CHAIN", p.op, a.variant);
  }
  if (a.segments < 0 || a.segments > kMaxSegments) {
    return fail(CULA_ERR_INVALID_ARGUMENT, "%s: segments is %d; must be 0 (the plan chooses) or from 1 to %d", p.op, a.segments, kMaxSegments);
  }
  if (a.num_threads < 0) return fail(CULA_ERR_INVALID_ARGUMENT, "%s: num_threads is %d; must be 0 (all) or more", p.op, a.num_threads);
  return CULA_OK;
}

// What an executor on the CPU or a GPU has no use for.
inline cula_status check_options_of_device(const Problem& p, bool cpu) noexcept {
  const cula_prefill_args& a = *p.args;
  if (!cpu) {
    return a.num_threads == 0 ? CULA_OK : fail(CULA_ERR_INVALID_ARGUMENT, "%s: num_threads is %d; must be 0 for tensors on a GPU", p.op, a.num_threads);
  }
  if (a.variant != CULA_PREFILL_AUTO) {
    return fail(CULA_ERR_INVALID_ARGUMENT, "%s: variant is %s; must be AUTO for CPU tensors", p.op, prefill_variant_name(a.variant));
  }
  if (a.segments > 1) return fail(CULA_ERR_INVALID_ARGUMENT, "%s: segments is %d; must be 0 or 1 for CPU tensors", p.op, a.segments);
  return CULA_OK;
}

// ----------------------------------------------------------------------------------------------------------- operands

// Reads every operand that is given, and refuses what this combination of options has no use for.
inline cula_status read_operands(Operands& operands, Problem& p) noexcept {
  const cula_prefill_args& a = *p.args;
  CULA_TRY(operands.required("q", a.q, kFloats, &p.q));
  CULA_TRY(operands.required("k", a.k, kFloats, &p.k));
  CULA_TRY(operands.required("v", a.v, kFloats, &p.v));
  CULA_TRY(operands.required("out", a.out, kFloats, &p.out));
  CULA_TRY(operands.required("gate", a.gate, kFloats, &p.gate));
  if (a.gate_kind != CULA_GATE_RAW) {
    CULA_TRY(operands.forbidden("A_log", a.A_log, "gate_kind is not RAW"));
    CULA_TRY(operands.forbidden("dt_bias", a.dt_bias, "gate_kind is not RAW"));
  }
  CULA_TRY(operands.optional("A_log", a.A_log, kFloats, &p.a_log));
  CULA_TRY(operands.optional("dt_bias", a.dt_bias, kFloats, &p.dt_bias));
  CULA_TRY(operands.required("beta", a.beta, kFloats, &p.beta));
  CULA_TRY(operands.optional("cu_seqlens", a.cu_seqlens, kIndices, &p.cu));

  CULA_TRY(operands.optional("state", a.state, kStates, &p.state));
  CULA_TRY(operands.optional("state_out", a.state_out, kStates, &p.state_out));
  CULA_TRY(operands.optional("checkpoints", a.checkpoints, kStates, &p.checkpoints));
  if (!present(p.state)) CULA_TRY(operands.forbidden("read_index", a.read_index, "there is no state to read"));
  if (!present(p.state_out)) CULA_TRY(operands.forbidden("write_index", a.write_index, "there is no state_out to write"));
  if (present(p.checkpoints)) {
    if (a.checkpoint_interval < 1 || a.checkpoint_interval % kChunkTokens != 0) {
      return fail(CULA_ERR_INVALID_ARGUMENT, "%s: checkpoint_interval is %lld; must be a positive multiple of %d tokens", p.op,
                  static_cast<long long>(a.checkpoint_interval), static_cast<int>(kChunkTokens));
    }
    CULA_TRY(operands.required("checkpoint_index", a.checkpoint_index, kIndices, &p.checkpoint_index));
  } else {
    CULA_TRY(operands.forbidden("checkpoint_index", a.checkpoint_index, "there are no checkpoints"));
    CULA_TRY(operands.optional("checkpoint_index", nullptr, 0, &p.checkpoint_index));
    if (a.checkpoint_interval != 0) {
      return fail(CULA_ERR_INVALID_ARGUMENT, "%s: checkpoint_interval is %lld, but there are no checkpoints", p.op, static_cast<long long>(a.checkpoint_interval));
    }
  }
  if (a.has_null_slot && !present(p.state) && !present(p.state_out) && !present(p.checkpoints)) {
    return fail(CULA_ERR_INVALID_ARGUMENT, "%s: has_null_slot is 1, but there is neither state nor state_out nor checkpoints", p.op);
  }
  CULA_TRY(operands.optional("read_index", a.read_index, kIndices, &p.read));
  return operands.optional("write_index", a.write_index, kIndices, &p.write);
}

// ------------------------------------------------------------------------------------------------------------- tokens

inline cula_status expect_dtype(const Problem& p, const Tensor& t) noexcept {
  if (t.dtype == p.q.dtype) return CULA_OK;
  return fail(CULA_ERR_INVALID_ARGUMENT, "%s: %s is %s, q is %s; q, k, v and out have one dtype", p.op, t.name, element_name(t.dtype), element_name(p.q.dtype));
}

// `t` has B (unless packed) and T of q, then `tail` extents; want: all of them, B first.
inline cula_status expect_tokens(const Problem& p, const Tensor& t, int32_t tail, const char* packed_layout, const char* layout, const int64_t (&want)[4],
                                 TokenStrides* at) noexcept {
  const int32_t skip = p.packed ? 1 : 0, rank = 2 + tail - skip;
  bool same = t.rank == rank;
  for (int i = 0; same && i < rank; ++i) same = t.shape[i] == want[skip + i];
  if (__builtin_expect(!same, 0)) {
    return fail(CULA_ERR_INVALID_ARGUMENT, "%s: %s has shape %s; expected %s = %s, as q and v have", p.op, t.name, shape_text(t).s,
                p.packed ? packed_layout : layout, shape_text(rank, want + skip).s);
  }
  *at = strides_of(p, t);
  return CULA_OK;
}

inline cula_status check_sequences(Problem& p) noexcept {
  if (!present(p.cu)) {
    if (p.q.rank != 4) {
      return fail(CULA_ERR_INVALID_ARGUMENT, "%s: q has shape %s; expected [B,T,H,K]%s", p.op, shape_text(p.q).s,
                  p.q.rank == 3 ? "; [T,H,K] is for sequences packed with cu_seqlens" : "");
    }
  } else if (p.q.rank != 3 && !(p.q.rank == 4 && p.q.shape[0] == 1)) {
    return fail(CULA_ERR_INVALID_ARGUMENT, "%s: q has shape %s; with cu_seqlens expected [T,H,K] or [1,T,H,K]", p.op, shape_text(p.q).s);
  }
  p.packed = p.q.rank == 3;
  p.batch = p.packed ? 1 : p.q.shape[0];
  p.tokens = p.q.shape[p.packed ? 0 : 1];
  p.h = p.q.shape[p.packed ? 1 : 2];
  p.dim_k = p.q.shape[p.packed ? 2 : 3];
  p.n = p.batch;
  if (!present(p.cu)) return CULA_OK;
  if (p.cu.rank != 1 || p.cu.shape[0] < 1) return fail(CULA_ERR_INVALID_ARGUMENT, "%s: cu_seqlens has shape %s; expected [N+1]", p.op, shape_text(p.cu).s);
  CULA_TRY(require_vector(p.op, p.cu, p.cu.shape[0], "N+1"));
  p.n = p.cu.shape[0] - 1;
  return CULA_OK;
}

inline cula_status check_tokens(Problem& p) noexcept {
  for (const Tensor* t : {&p.k, &p.v, &p.out}) CULA_TRY(expect_dtype(p, *t));
  CULA_TRY(check_sequences(p));
  if (p.h < 1 || p.dim_k < 1) {
    return fail(CULA_ERR_INVALID_ARGUMENT, "%s: q has shape %s; H and K must be at least 1", p.op, shape_text(p.q).s);
  }
  const int32_t rank = p.packed ? 3 : 4;
  if (p.v.rank != rank || p.v.shape[rank - 2] < 1 || p.v.shape[rank - 1] < 1) {
    return fail(CULA_ERR_INVALID_ARGUMENT, "%s: v has shape %s; expected %s with HV and V at least 1", p.op, shape_text(p.v).s, p.packed ? "[T,HV,V]" : "[B,T,HV,V]");
  }
  p.hv = p.v.shape[rank - 2];
  p.dim_v = p.v.shape[rank - 1];
  p.q_at = strides_of(p, p.q);
  CULA_TRY(expect_tokens(p, p.k, 2, "[T,H,K]", "[B,T,H,K]", {p.batch, p.tokens, p.h, p.dim_k}, &p.k_at));
  CULA_TRY(expect_tokens(p, p.v, 2, "[T,HV,V]", "[B,T,HV,V]", {p.batch, p.tokens, p.hv, p.dim_v}, &p.v_at));
  CULA_TRY(expect_tokens(p, p.out, 2, "[T,HV,V]", "[B,T,HV,V]", {p.batch, p.tokens, p.hv, p.dim_v}, &p.out_at));
  CULA_TRY(expect_tokens(p, p.gate, 2, "[T,HV,K]", "[B,T,HV,K]", {p.batch, p.tokens, p.hv, p.dim_k}, &p.gate_at));
  CULA_TRY(expect_tokens(p, p.beta, 1, "[T,HV]", "[B,T,HV]", {p.batch, p.tokens, p.hv, 0}, &p.beta_at));
  if (p.hv % p.h != 0) {
    return fail(CULA_ERR_INVALID_ARGUMENT, "%s: HV = %lld value heads (v) for H = %lld heads (q); HV must be a multiple of H", p.op,
                static_cast<long long>(p.hv), static_cast<long long>(p.h));
  }
  // Limits of the kernels' 32-bit parameters and of the products below.
  if (p.n > INT32_MAX || p.hv > INT32_MAX || p.dim_k > INT32_MAX || p.dim_v > INT32_MAX) {
    return fail(CULA_ERR_UNSUPPORTED, "%s: v has shape %s and there are %lld sequences; these, HV, K and V must be below 2^31", p.op, shape_text(p.v).s,
                static_cast<long long>(p.n));
  }
  for (const Tensor* t : {&p.q, &p.k, &p.v, &p.out, &p.gate}) CULA_TRY(require_unit_stride(p.op, *t));
  CULA_TRY(require_distinct(p.op, p.out));
  if (present(p.a_log)) CULA_TRY(require_vector(p.op, p.a_log, p.hv, "HV"));
  return present(p.dt_bias) ? require_vector(p.op, p.dt_bias, p.hv * p.dim_k, "HV*K") : CULA_OK;
}

// ------------------------------------------------------------------------------------------------------------- states

inline cula_status check_index(const Problem& p, const Tensor& index) noexcept {
  if (!present(index)) return CULA_OK;
  if (index.rank != 1 || index.shape[0] != p.n) {
    return fail(CULA_ERR_INVALID_ARGUMENT, "%s: %s has shape %s; expected [N] = [%lld]", p.op, index.name, shape_text(index).s, static_cast<long long>(p.n));
  }
  return require_vector(p.op, index, p.n, "N");
}

inline cula_status check_checkpoints(Problem& p) noexcept {
  p.checkpoint_columns = 0;
  if (!present(p.checkpoints)) return CULA_OK;
  const Tensor& index = p.checkpoint_index;
  if (index.rank != 2 || index.shape[0] != p.n) {
    return fail(CULA_ERR_INVALID_ARGUMENT, "%s: checkpoint_index has shape %s; expected [N,C] with N = %lld", p.op, shape_text(index).s, static_cast<long long>(p.n));
  }
  CULA_TRY(require_vector(p.op, index, index.elements, "N*C"));
  p.checkpoint_columns = index.shape[1];
  const int64_t needed = p.tokens / p.args->checkpoint_interval;
  if (!present(p.cu) && p.checkpoint_columns < needed) {
    return fail(CULA_ERR_INVALID_ARGUMENT, "%s: checkpoint_index has shape %s; %lld tokens with checkpoint_interval %lld need C of at least %lld", p.op,
                shape_text(index).s, static_cast<long long>(p.tokens), static_cast<long long>(p.args->checkpoint_interval), static_cast<long long>(needed));
  }
  return CULA_OK;
}

inline cula_status check_states(Problem& p) noexcept {
  CULA_TRY(check_index(p, p.read));
  CULA_TRY(check_index(p, p.write));
  CULA_TRY(check_checkpoints(p));
  if (present(p.read) && present(p.state_out) && !present(p.write)) {
    return fail(CULA_ERR_INVALID_ARGUMENT, "%s: write_index is missing (NULL); with read_index and state_out it must be given", p.op);
  }
  const PoolShape shape{p.args->state_layout == CULA_STATE_VK, p.hv, p.dim_k, p.dim_v, p.n > 0};
  const Tensor* first = nullptr;
  for (const Tensor* pool : {&p.state, &p.state_out, &p.checkpoints}) {
    if (!present(*pool)) continue;
    CULA_TRY(check_pool(p.op, shape, *pool));
    if (first == nullptr) {
      first = pool;
    } else if (pool->dtype != first->dtype) {
      return fail(CULA_ERR_INVALID_ARGUMENT, "%s: %s is %s, %s is %s; all pools have one dtype", p.op, pool->name, element_name(pool->dtype), first->name,
                  element_name(first->dtype));
    }
  }
  if (present(p.state) && !present(p.read)) CULA_TRY(check_slots(p.op, p.state, p.n, "read_index"));
  if (present(p.state_out) && !present(p.write)) CULA_TRY(check_slots(p.op, p.state_out, p.n, "write_index"));
  for (const Tensor* pool : {&p.state_out, &p.checkpoints}) {
    if (present(*pool)) CULA_TRY(require_distinct(p.op, *pool));
  }
  return CULA_OK;
}

inline cula_status check_aliasing(const Problem& p) noexcept {
  const Tensor* read_only[] = {&p.q, &p.k, &p.v, &p.gate, &p.a_log, &p.dt_bias, &p.beta, &p.cu, &p.read, &p.write, &p.checkpoint_index};
  for (const Tensor* t : read_only) {
    for (const Tensor* written : {&p.out, &p.state_out, &p.checkpoints}) CULA_TRY(require_disjoint(p.op, *written, *t));
  }
  for (const Tensor* pool : {&p.state, &p.state_out, &p.checkpoints}) CULA_TRY(require_disjoint(p.op, p.out, *pool));
  CULA_TRY(check_same_or_apart(p.op, p.state, p.state_out));
  CULA_TRY(check_same_or_apart(p.op, p.state, p.checkpoints));
  return check_same_or_apart(p.op, p.state_out, p.checkpoints);
}

inline cula_status read_problem(const Request& request, const cula_prefill_args& args, Operands& operands, Problem& p) noexcept {
  p.op = request.name;
  p.args = &args;
  CULA_TRY(check_options(p));
  CULA_TRY(read_operands(operands, p));
  CULA_TRY(check_options_of_device(p, operands.device_type() == kDLCPU));
  CULA_TRY(check_tokens(p));
  CULA_TRY(check_states(p));
  return check_aliasing(p);
}

}  // namespace cula::chunk
