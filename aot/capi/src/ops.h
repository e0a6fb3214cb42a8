// The ops: what an exported function needs to know of each. A new op is one row in ops.cpp.
#pragma once
#include "plan.h"

namespace cula {

constexpr size_t kMaxArgsSize = 512;  // of every args struct

struct Op {
  cula_op op;
  const char* name;
  const char* args_name;   // "cula_decode_args"
  size_t first_size;       // bytes of the args struct in its first version
  size_t size;             // bytes that this version knows
  size_t tensors_end;      // the const DLTensor* members stand together, behind struct_size, up to here
  PlanFn plan;
};

const Op* find_op(cula_op op) noexcept;  // nullptr: no such op

}  // namespace cula
