// Which kernel serves a request, and what to say when none does.
#pragma once
#include "plan.h"

namespace cula {

// Finds the kernel of `key` and checks that it takes `param_count` parameters. CULA_ERR_UNSUPPORTED names the first axis of
// the key that is not built and the values that are; CULA_ERR_ARTIFACT says that the table is of another build.
cula_status select_kernel(const char* op_name, const KernelKey& key, int32_t param_count, int32_t* kernel) noexcept;

}  // namespace cula
