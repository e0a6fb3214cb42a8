// What the CPU prefill kernels of all ISA levels share: the parameters, and the table of kernels that each level defines.
#pragma once

#include "aot/common/cpu/tables.h"

namespace cula::cpu {

#define CULA_PARAMS PrefillParams
#define CULA_PARAMS_DEF "aot/ops/chunk/params_cpu.def"
#include "aot/common/cpu/params.inc"

CULA_LEVEL_TABLES(StateTable, kPrefill)

}  // namespace cula::cpu
