#include "ops.h"

#include <cstddef>

namespace cula {
namespace {

#define CULA_OP_ROW(number, name, args, last_tensor, plan) \
  {number, name, #args, CULA_SIZEOF(args), CULA_SIZEOF(args), offsetof(args, last_tensor) + sizeof(const DLTensor*), plan}

constexpr Op kOps[] = {
    CULA_OP_ROW(CULA_OP_KDA_DECODE, "kda_decode", cula_decode_args, write_index, plan_decode),
    CULA_OP_ROW(CULA_OP_GDN_DECODE, "gdn_decode", cula_decode_args, write_index, plan_decode),
    CULA_OP_ROW(CULA_OP_GLA_DECODE, "gla_decode", cula_decode_args, write_index, plan_decode),
    CULA_OP_ROW(CULA_OP_LIGHTNING_DECODE, "lightning_decode", cula_decode_args, write_index, plan_decode),
    CULA_OP_ROW(CULA_OP_KDA_PREFILL, "kda_prefill", cula_prefill_args, checkpoint_index, plan_prefill),
    CULA_OP_ROW(CULA_OP_KDA_GATE, "kda_gate", cula_gate_args, beta_out, plan_gate),
    CULA_OP_ROW(CULA_OP_GDN_GATE, "gdn_gate", cula_gate_args, beta_out, plan_gate),
    CULA_OP_ROW(CULA_OP_L2NORM, "l2norm", cula_l2norm_args, rstd, plan_l2norm),
};

static_assert(sizeof(cula_decode_args) <= kMaxArgsSize && sizeof(cula_prefill_args) <= kMaxArgsSize && sizeof(cula_gate_args) <= kMaxArgsSize && sizeof(cula_l2norm_args) <= kMaxArgsSize);

}  // namespace

const Op* find_op(cula_op op) noexcept {
  for (const Op& row : kOps) {
    if (row.op == op) return &row;
  }
  return nullptr;
}

}  // namespace cula
