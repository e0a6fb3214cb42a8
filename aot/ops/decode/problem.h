// What a decode call says: cula_decode_args -> checked operands and dims. All rules of the struct are here, none elsewhere.
//
// Reading order: Form (what each op takes), Problem, then read_problem at the end, which names the steps.
#pragma once
#include <cmath>
#include <initializer_list>

#include "error.h"
#include "names.h"
#include "tensor.h"

namespace cula::decode {

// -------------------------------------------------------------------------------------------------------------- forms

struct Form {
  bool delta;         // delta rule: beta is required
  bool channel_gate;  // gate and dt_bias have an element a key channel
  uint32_t gates;     // bit a cula_gate_kind
  const char* gate_names;
};

inline constexpr uint32_t bit(int kind) { return 1u << kind; }

inline constexpr Form kKda{true, true, bit(CULA_GATE_NONE) | bit(CULA_GATE_LOG_CHANNEL) | bit(CULA_GATE_RAW), "NONE, LOG_CHANNEL, RAW"};
inline constexpr Form kGdn{true, false, bit(CULA_GATE_NONE) | bit(CULA_GATE_LOG_HEAD) | bit(CULA_GATE_RAW), "NONE, LOG_HEAD, RAW"};
inline constexpr Form kGla{false, true, bit(CULA_GATE_NONE) | bit(CULA_GATE_LOG_CHANNEL), "NONE, LOG_CHANNEL"};
inline constexpr Form kLightning{false, false, bit(CULA_GATE_NONE) | bit(CULA_GATE_LOG_HEAD) | bit(CULA_GATE_CONST_HEAD), "NONE, LOG_HEAD, CONST_HEAD"};

inline const Form& form_of(cula_op op) noexcept {
  switch (op) {
    case CULA_OP_KDA_DECODE: return kKda;
    case CULA_OP_GDN_DECODE: return kGdn;
    case CULA_OP_GLA_DECODE: return kGla;
    default: return kLightning;
  }
}

// ------------------------------------------------------------------------------------------------------------ problem

struct Problem {
  const char* op;
  const Form* form;
  const cula_decode_args* args;
  Tensor q, k, v, mixed, out, gate, a_log, dt_bias, beta, state, state_out, read, write;  // absent ones have dtype absent
  Rows q_rows, k_rows, v_rows, mixed_rows, out_rows, gate_rows, beta_rows;
  int64_t n, h, hv, dim_k, dim_v;
};

// The rows of `t` are [N, tail...], with the sizes that other operands have set.
inline cula_status expect_rows(const Problem& p, const Tensor& t, const char* layout, const int64_t (&want)[3], int32_t tail, Rows* rows) noexcept {
  CULA_TRY(rows_of(p.op, t, tail, layout, rows));
  bool same = rows->n == want[0];
  for (int i = 0; i < tail; ++i) same = same && rows->shape[i] == want[1 + i];
  if (__builtin_expect(same, 1)) return CULA_OK;
  return fail(CULA_ERR_INVALID_ARGUMENT, "%s: %s has shape %s; expected %s = %s", p.op, t.name, shape_text(t).s, layout, shape_text(tail + 1, want).s);
}

inline cula_status expect_dtype(const Problem& p, const Tensor& t, const Tensor& first) noexcept {
  if (t.dtype == first.dtype) return CULA_OK;
  return fail(CULA_ERR_INVALID_ARGUMENT, "%s: %s is %s, %s is %s; q, k, v, mixed_qkv and out have one dtype", p.op, t.name, element_name(t.dtype),
              first.name, element_name(first.dtype));
}

inline cula_status expect_flag(const Problem& p, const char* name, int32_t value) noexcept {
  return value == 0 || value == 1 ? CULA_OK : fail(CULA_ERR_INVALID_ARGUMENT, "%s: %s is %d; must be 0 or 1", p.op, name, value);
}

inline cula_status check_options(const Problem& p) noexcept {
  const cula_decode_args& a = *p.args;
  const Form& form = *p.form;
  CULA_TRY(expect_flag(p, "has_null_slot", a.has_null_slot));
  CULA_TRY(expect_flag(p, "l2norm", a.l2norm));
  CULA_TRY(expect_flag(p, "has_scale", a.has_scale));
  if (layout_name(a.state_layout) == nullptr) {
    return fail(CULA_ERR_INVALID_ARGUMENT, "%s: state_layout is %d; must be CULA_STATE_VK (0) or CULA_STATE_KV (1)", p.op, a.state_layout);
  }
  if (gate_kind_name(a.gate_kind) == nullptr) {
    return fail(CULA_ERR_INVALID_ARGUMENT, "%s: gate_kind is %d; allowed: %s", p.op, a.gate_kind, form.gate_names);
  }
  if (!(form.gates & bit(a.gate_kind))) {
    return fail(CULA_ERR_INVALID_ARGUMENT, "%s: gate_kind is %s; allowed: %s", p.op, gate_kind_name(a.gate_kind), form.gate_names);
  }
  if (beta_kind_name(a.beta_kind) == nullptr) {
    return fail(CULA_ERR_INVALID_ARGUMENT, "%s: beta_kind is %d; allowed: VALUE, LOGIT, LOGIT_TWICE", p.op, a.beta_kind);
  }
  if (!form.delta && a.beta_kind != CULA_BETA_VALUE) {
    return fail(CULA_ERR_INVALID_ARGUMENT, "%s: beta_kind is %s, but this op has no delta rule and takes no beta", p.op, beta_kind_name(a.beta_kind));
  }
  if (!(a.lower_bound == 0.0f)) {
    if (a.gate_kind != CULA_GATE_RAW || !form.channel_gate) {
      return fail(CULA_ERR_INVALID_ARGUMENT, "%s: lower_bound is %g, but it belongs to the RAW gate of kda_decode", p.op, a.lower_bound);
    }
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
  if (a.num_threads < 0) return fail(CULA_ERR_INVALID_ARGUMENT, "%s: num_threads is %d; must be 0 (all) or more", p.op, a.num_threads);
  if (a.reserved0 != 0) return fail(CULA_ERR_INVALID_ARGUMENT, "%s: reserved0 is %d; must be 0", p.op, a.reserved0);
  return CULA_OK;
}

// Reads every operand that is given, and refuses what this combination of op and options has no use for.
inline cula_status read_operands(Operands& operands, Problem& p) noexcept {
  const cula_decode_args& a = *p.args;
  CULA_TRY(operands.required("out", a.out, kFloats, &p.out));
  CULA_TRY(operands.optional("mixed_qkv", a.mixed_qkv, kFloats, &p.mixed));
  if (present(p.mixed)) {
    static constexpr const char* kWhy = "mixed_qkv holds q, k and v";
    CULA_TRY(operands.forbidden("q", a.q, kWhy));
    CULA_TRY(operands.forbidden("k", a.k, kWhy));
    CULA_TRY(operands.forbidden("v", a.v, kWhy));
  } else {
    CULA_TRY(operands.required("q", a.q, kFloats, &p.q));
    CULA_TRY(operands.required("k", a.k, kFloats, &p.k));
    CULA_TRY(operands.required("v", a.v, kFloats, &p.v));
  }

  if (a.gate_kind == CULA_GATE_NONE) {
    CULA_TRY(operands.forbidden("gate", a.gate, "gate_kind is NONE"));
    CULA_TRY(operands.optional("gate", nullptr, 0, &p.gate));
  } else {
    CULA_TRY(operands.required("gate", a.gate, a.gate_kind == CULA_GATE_CONST_HEAD ? kFloat32 : kFloats, &p.gate));
  }
  if (a.gate_kind != CULA_GATE_RAW) {
    CULA_TRY(operands.forbidden("A_log", a.A_log, "gate_kind is not RAW"));
    CULA_TRY(operands.forbidden("dt_bias", a.dt_bias, "gate_kind is not RAW"));
  }
  CULA_TRY(operands.optional("A_log", a.A_log, kFloats, &p.a_log));
  CULA_TRY(operands.optional("dt_bias", a.dt_bias, kFloats, &p.dt_bias));
  if (p.form->delta) {
    CULA_TRY(operands.required("beta", a.beta, kFloats, &p.beta));
  } else {
    CULA_TRY(operands.forbidden("beta", a.beta, "this op has no delta rule"));
    CULA_TRY(operands.optional("beta", nullptr, 0, &p.beta));
  }

  CULA_TRY(operands.optional("state", a.state, kStates, &p.state));
  CULA_TRY(operands.optional("state_out", a.state_out, kStates, &p.state_out));
  if (!present(p.state)) {
    CULA_TRY(operands.forbidden("read_index", a.read_index, "there is no state to read"));
    if (!present(p.state_out)) {
      CULA_TRY(operands.forbidden("write_index", a.write_index, "there is neither state nor state_out"));
      if (a.has_null_slot) return fail(CULA_ERR_INVALID_ARGUMENT, "%s: has_null_slot is 1, but there is neither state nor state_out", p.op);
    }
  }
  CULA_TRY(operands.optional("read_index", a.read_index, kIndices, &p.read));
  return operands.optional("write_index", a.write_index, kIndices, &p.write);
}

// K of a packed row cannot be told from its length alone: the states say it, or a gate per channel.
inline cula_status dims_of_mixed(Problem& p) noexcept {
  const Tensor& pool = present(p.state) ? p.state : p.state_out;
  if (present(pool)) {
    if (pool.rank != 4) return fail(CULA_ERR_INVALID_ARGUMENT, "%s: %s has shape %s; expected [slots,HV,%s]", p.op, pool.name, shape_text(pool).s, p.args->state_layout == CULA_STATE_VK ? "V,K" : "K,V");
    p.dim_k = pool.shape[p.args->state_layout == CULA_STATE_VK ? 3 : 2];
  } else if (present(p.gate) && p.form->channel_gate && p.gate.rank >= 1) {
    p.dim_k = p.gate.shape[p.gate.rank - 1];
  } else {
    return fail(CULA_ERR_INVALID_ARGUMENT, "%s: head_dim_k of mixed_qkv is not known without state, state_out or a gate per channel; give one, or q, k and v", p.op);
  }
  CULA_TRY(rows_of(p.op, p.mixed, 1, "[N, H*K + H*K + HV*V]", &p.mixed_rows));
  const int64_t row = p.mixed_rows.shape[0];
  int64_t value_part, key_part = 0;
  const bool fits = !__builtin_mul_overflow(p.hv, p.dim_v, &value_part) && !__builtin_sub_overflow(row, value_part, &key_part) && p.dim_k > 0 &&
                    p.dim_k <= (int64_t{1} << 32) && key_part > 0 && key_part % (2 * p.dim_k) == 0;
  if (p.mixed_rows.n != p.n || !fits) {
    return fail(CULA_ERR_INVALID_ARGUMENT,
                "%s: mixed_qkv has shape %s; expected [N, H*K + H*K + HV*V] with N = %lld, K = %lld, HV*V = %lld*%lld of out", p.op,
                shape_text(p.mixed).s, static_cast<long long>(p.n), static_cast<long long>(p.dim_k), static_cast<long long>(p.hv),
                static_cast<long long>(p.dim_v));
  }
  p.h = key_part / (2 * p.dim_k);
  CULA_TRY(require_unit_stride(p.op, p.mixed));
  return CULA_OK;
}

inline cula_status dims_of_qkv(Problem& p) noexcept {
  CULA_TRY(expect_dtype(p, p.out, p.q));
  CULA_TRY(expect_dtype(p, p.k, p.q));
  CULA_TRY(expect_dtype(p, p.v, p.q));
  CULA_TRY(rows_of(p.op, p.q, 2, "[N,H,K]", &p.q_rows));
  if (p.q_rows.n != p.n) {
    return fail(CULA_ERR_INVALID_ARGUMENT, "%s: q has shape %s; expected [N,H,K] with N = %lld, as out has", p.op, shape_text(p.q).s,
                static_cast<long long>(p.n));
  }
  p.h = p.q_rows.shape[0];
  p.dim_k = p.q_rows.shape[1];
  CULA_TRY(expect_rows(p, p.k, "[N,H,K]", {p.n, p.h, p.dim_k}, 2, &p.k_rows));
  CULA_TRY(expect_rows(p, p.v, "[N,HV,V]", {p.n, p.hv, p.dim_v}, 2, &p.v_rows));
  CULA_TRY(require_unit_stride(p.op, p.q));
  CULA_TRY(require_unit_stride(p.op, p.k));
  return require_unit_stride(p.op, p.v);
}

inline cula_status check_rows(Problem& p) noexcept {
  CULA_TRY(rows_of(p.op, p.out, 2, "[N,HV,V]", &p.out_rows));
  p.n = p.out_rows.n;
  p.hv = p.out_rows.shape[0];
  p.dim_v = p.out_rows.shape[1];
  if (p.hv < 1 || p.dim_v < 1) return fail(CULA_ERR_INVALID_ARGUMENT, "%s: out has shape %s; expected [N,HV,V] with HV and V at least 1", p.op, shape_text(p.out).s);
  if (present(p.mixed)) {
    CULA_TRY(expect_dtype(p, p.out, p.mixed));
    CULA_TRY(dims_of_mixed(p));
  } else {
    CULA_TRY(dims_of_qkv(p));
  }
  if (p.h < 1 || p.dim_k < 1) return fail(CULA_ERR_INVALID_ARGUMENT, "%s: q has shape %s; expected [N,H,K] with H and K at least 1", p.op, shape_text(p.q).s);
  if (p.hv % p.h != 0) {
    return fail(CULA_ERR_INVALID_ARGUMENT, "%s: HV = %lld value heads (out) for H = %lld heads (%s); HV must be a multiple of H", p.op,
                static_cast<long long>(p.hv), static_cast<long long>(p.h), present(p.mixed) ? "mixed_qkv" : "q");
  }
  // Limits of the kernels' 32-bit parameters and of the products below.
  if (p.n > INT32_MAX || p.hv > INT32_MAX || p.dim_k > INT32_MAX || p.dim_v > INT32_MAX) {
    return fail(CULA_ERR_UNSUPPORTED, "%s: out has shape %s; N, HV, K and V must be below 2^31", p.op, shape_text(p.out).s);
  }
  CULA_TRY(require_unit_stride(p.op, p.out));
  return require_distinct(p.op, p.out);
}

inline cula_status check_gate_and_beta(Problem& p) noexcept {
  const cula_decode_args& a = *p.args;
  if (a.gate_kind == CULA_GATE_CONST_HEAD) {
    if (p.gate.rank != 1 || p.gate.shape[0] != p.hv) {
      return fail(CULA_ERR_INVALID_ARGUMENT, "%s: gate has shape %s; CONST_HEAD expects [HV] = [%lld]", p.op, shape_text(p.gate).s,
                  static_cast<long long>(p.hv));
    }
  } else if (present(p.gate) && p.form->channel_gate) {
    CULA_TRY(expect_rows(p, p.gate, "[N,HV,K]", {p.n, p.hv, p.dim_k}, 2, &p.gate_rows));
    CULA_TRY(require_unit_stride(p.op, p.gate));
  } else if (present(p.gate)) {
    CULA_TRY(expect_rows(p, p.gate, "[N,HV]", {p.n, p.hv, 0}, 1, &p.gate_rows));
  }
  if (present(p.a_log)) CULA_TRY(require_vector(p.op, p.a_log, p.hv, "HV"));
  if (present(p.dt_bias)) {
    CULA_TRY(p.form->channel_gate ? require_vector(p.op, p.dt_bias, p.hv * p.dim_k, "HV*K") : require_vector(p.op, p.dt_bias, p.hv, "HV"));
  }
  if (present(p.beta)) CULA_TRY(expect_rows(p, p.beta, "[N,HV]", {p.n, p.hv, 0}, 1, &p.beta_rows));
  return CULA_OK;
}

inline cula_status check_pool(const Problem& p, const Tensor& pool) noexcept {
  const bool vk = p.args->state_layout == CULA_STATE_VK;
  const int64_t want[2] = {vk ? p.dim_v : p.dim_k, vk ? p.dim_k : p.dim_v};
  if (pool.rank != 4 || pool.shape[1] != p.hv || pool.shape[2] != want[0] || pool.shape[3] != want[1]) {
    return fail(CULA_ERR_INVALID_ARGUMENT, "%s: %s has shape %s; expected [slots,HV,%s] = [slots,%lld,%lld,%lld]", p.op, pool.name, shape_text(pool).s,
                vk ? "V,K" : "K,V", static_cast<long long>(p.hv), static_cast<long long>(want[0]), static_cast<long long>(want[1]));
  }
  if (pool.shape[0] < 1 && p.n > 0) return fail(CULA_ERR_INVALID_ARGUMENT, "%s: %s has shape %s; a pool has at least one slot", p.op, pool.name, shape_text(pool).s);
  if (pool.elements == 0) return CULA_OK;
  if ((want[1] > 1 && pool.stride[3] != 1) || (want[0] > 1 && pool.stride[2] != want[1])) {
    return fail(CULA_ERR_INVALID_ARGUMENT, "%s: the last two strides of %s are %lld and %lld; must be %lld and 1: a state is compact inside a head", p.op,
                pool.name, static_cast<long long>(pool.stride[2]), static_cast<long long>(pool.stride[3]), static_cast<long long>(want[1]));
  }
  if (!aligned16(pool)) {
    return fail(CULA_ERR_INVALID_ARGUMENT, "%s: %s is at %#llx with slot stride %lld and head stride %lld of %s; address and both strides must be multiples of 16 bytes",
                p.op, pool.name, static_cast<unsigned long long>(reinterpret_cast<uintptr_t>(pool.data)), static_cast<long long>(pool.stride[0]),
                static_cast<long long>(pool.stride[1]), element_name(pool.dtype));
  }
  return CULA_OK;
}

inline cula_status check_index(const Problem& p, const Tensor& index) noexcept {
  if (!present(index) || (index.rank == 1 && index.shape[0] == p.n)) return CULA_OK;
  return fail(CULA_ERR_INVALID_ARGUMENT, "%s: %s has shape %s; expected [N] = [%lld]", p.op, index.name, shape_text(index).s, static_cast<long long>(p.n));
}

// A row without an index uses the slot of its number, so there must be one.
inline cula_status check_slots(const Problem& p, const Tensor& pool, const char* index) noexcept {
  if (pool.shape[0] >= p.n) return CULA_OK;
  return fail(CULA_ERR_INVALID_ARGUMENT, "%s: %s has %lld slots for %lld rows; without %s row n uses slot n", p.op, pool.name,
              static_cast<long long>(pool.shape[0]), static_cast<long long>(p.n), index);
}

inline cula_status check_states(const Problem& p) noexcept {
  CULA_TRY(check_index(p, p.read));
  CULA_TRY(check_index(p, p.write));
  const Tensor& written = present(p.state_out) ? p.state_out : p.state;
  if (present(p.state)) {
    CULA_TRY(check_pool(p, p.state));
    if (!present(p.read)) CULA_TRY(check_slots(p, p.state, "read_index"));
  }
  if (present(p.state_out)) {
    CULA_TRY(check_pool(p, p.state_out));
    if (!present(p.read) && !present(p.write)) CULA_TRY(check_slots(p, p.state_out, "write_index"));
    if (present(p.state) && p.state.dtype != p.state_out.dtype) {
      return fail(CULA_ERR_INVALID_ARGUMENT, "%s: state_out is %s, state is %s; both pools have one dtype", p.op, element_name(p.state_out.dtype),
                  element_name(p.state.dtype));
    }
  }
  return present(written) ? require_distinct(p.op, written) : CULA_OK;
}

inline cula_status check_aliasing(const Problem& p) noexcept {
  const Tensor& written = present(p.state_out) ? p.state_out : p.state;
  const Tensor* read_only[] = {&p.q, &p.k, &p.v, &p.mixed, &p.gate, &p.a_log, &p.dt_bias, &p.beta, &p.read, &p.write};
  for (const Tensor* t : read_only) {
    CULA_TRY(require_disjoint(p.op, p.out, *t));
    CULA_TRY(require_disjoint(p.op, written, *t));
  }
  CULA_TRY(require_disjoint(p.op, p.out, p.state));
  CULA_TRY(require_disjoint(p.op, p.out, p.state_out));
  if (!present(p.state) || !present(p.state_out) || !overlaps(p.state, p.state_out)) return CULA_OK;
  const bool same = p.state.data == p.state_out.data && (p.hv == 1 || p.state.stride[1] == p.state_out.stride[1]) &&
                    (p.state.shape[0] == 1 || p.state_out.shape[0] == 1 || p.state.stride[0] == p.state_out.stride[0]);
  if (same) return CULA_OK;
  return fail(CULA_ERR_INVALID_ARGUMENT, "%s: state_out overlaps state in memory, but starts elsewhere or has other strides; it must be the same pool or another", p.op);
}

inline cula_status read_problem(const Request& request, const cula_decode_args& args, Operands& operands, Problem& p) noexcept {
  p.op = request.name;
  p.form = &form_of(request.op);
  p.args = &args;
  for (Tensor* t : {&p.q, &p.k, &p.v}) CULA_TRY(operands.optional("", nullptr, 0, t));
  CULA_TRY(check_options(p));
  CULA_TRY(read_operands(operands, p));
  CULA_TRY(check_rows(p));
  CULA_TRY(check_gate_and_beta(p));
  CULA_TRY(check_states(p));
  CULA_TRY(check_aliasing(p));
  if (operands.device_type() != kDLCPU && args.num_threads != 0) {
    return fail(CULA_ERR_INVALID_ARGUMENT, "%s: num_threads is %d; must be 0 for tensors on a GPU", p.op, args.num_threads);
  }
  return CULA_OK;
}

}  // namespace cula::decode
