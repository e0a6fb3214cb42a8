// What the CPU decode kernels of all ISA levels share: the parameters, and the table of kernels that each level defines.
#pragma once

#include "aot/common/cpu/tables.h"

namespace cula::cpu {

#define CULA_PARAMS DecodeParams
#define CULA_PARAMS_DEF "aot/ops/decode/params.def"
#include "aot/common/cpu/params.inc"

CULA_LEVEL_TABLES(StateTable, kDecode)

}  // namespace cula::cpu
