// From checked operands to a kernel's parameters: what the plans of several families fill in alike. Members of one name have one
// meaning in every params*.def. P is a family's Problem, D its parameter struct, M its modes.
#pragma once
#include <cmath>
#include <limits>

#include "tensor.h"

namespace cula {

// Codes of the params*.def.
inline uint32_t index_code(const Tensor& t) noexcept { return !present(t) ? 0 : t.dtype == Element::i32 ? 1 : 2; }
inline uint32_t float_code(const Tensor& t) noexcept { return static_cast<uint32_t>(t.dtype); }  // absent is 3

// Slot stride, head stride and slots of a pool; 0 without one, whose shape and strides are not set.
inline void fill_pool(const Tensor& pool, int64_t& slot, int64_t& head, int64_t& slots) noexcept {
  slot = head = slots = 0;
  if (present(pool)) slot = pool.stride[0], head = pool.stride[1], slots = pool.shape[0];
}

template <class P>
int64_t null_slot_of(const P& p) noexcept {
  return p.args->has_null_slot ? p.args->null_slot : std::numeric_limits<int64_t>::min();
}
template <class P>
float scale_of(const P& p) noexcept {
  return p.args->has_scale ? p.args->scale : static_cast<float>(1.0 / std::sqrt(static_cast<double>(p.dim_k)));
}

// The gate's parameters, beta and the state pools. `written` is where the states go.
template <class D, class P>
void fill_operands(D& d, const P& p, const Tensor& written) noexcept {
  d.out = p.out.data;
  d.gate = p.gate.data, d.a_log = p.a_log.data, d.dt_bias = p.dt_bias.data, d.beta = p.beta.data;
  d.state_in = p.state.data, d.state_out = written.data;
  d.read_index = p.read.data, d.write_index = p.write.data;
  fill_pool(p.state, d.in_slot, d.in_h, d.in_slots);
  fill_pool(written, d.out_slot, d.out_state_h, d.out_slots);
  d.null_slot = null_slot_of(p);
}

template <class D, class P>
void fill_dims(D& d, const P& p) noexcept {
  d.group = static_cast<int32_t>(p.hv / p.h);
  d.head_dim_k = static_cast<int32_t>(p.dim_k);
  d.head_dim_v = static_cast<int32_t>(p.dim_v);
  d.scale = scale_of(p);
  d.lower_bound = p.args->lower_bound;
}

// Of the rows' activation: gate, beta, norm.
template <class M, class P>
void fill_activation_modes(M& m, const P& p) noexcept {
  m.gate_dtype = float_code(p.gate);
  m.a_log_dtype = float_code(p.a_log);
  m.dt_bias_dtype = float_code(p.dt_bias);
  m.beta_kind = static_cast<uint32_t>(p.args->beta_kind);
  m.beta_dtype = float_code(p.beta);
  m.l2norm = static_cast<uint32_t>(p.args->l2norm);
}

template <class M, class P>
void fill_modes(M& m, const P& p) noexcept {
  fill_activation_modes(m, p);
  m.read_dtype = index_code(p.read);
  m.write_dtype = index_code(p.write);
}

}  // namespace cula
