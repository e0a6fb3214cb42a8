// The CPU branch of plan_prefill.
#pragma once
#include "aot/ops/chunk/problem.h"

namespace cula::chunk {

// p has at least one sequence, and its operands are CPU tensors.
cula_status plan_cpu(const Request& request, const Problem& p, Plan* plan) noexcept;

}  // namespace cula::chunk
