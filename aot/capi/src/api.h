// Steps that the exported functions share.
#pragma once
#include "abi_struct.h"
#include "error.h"
#include "ops.h"

namespace cula {

cula_status find_op_checked(const char* function, cula_op op, const Op** found) noexcept;

// The args struct of the op, completed with zeros, into kMaxArgsSize bytes.
inline cula_status read_args(const char* function, const Op& op, const void* args, unsigned char* copy) noexcept {
  CULA_TRY(check_struct(function, op.args_name, args, op.first_size, op.size));
  size_t size;
  std::memcpy(&size, args, sizeof size);
  if (size > op.size) size = op.size;
  std::memcpy(copy, args, size);
  std::memset(copy + size, 0, kMaxArgsSize - size);
  return CULA_OK;
}

// Validates args and plans. `plan` is filled only on CULA_OK.
cula_status plan_call(const char* function, const Op& op, const void* args, int32_t arch, int32_t sm_count, void* workspace, Plan* plan);

cula_status check_workspace(const Op& op, const Plan& plan, const void* workspace, size_t bytes) noexcept;

// Copies a plan into the caller's launches; touches only what the plan uses.
void fill_launches(const Plan& plan, cula_launches* launches) noexcept;

}  // namespace cula
