// What the CPU gate and norm kernels of all ISA levels share: the parameters, and the tables of kernels that each level defines.
#pragma once

#include "aot/common/cpu/tables.h"

namespace cula::cpu {

#define CULA_PARAMS GateParams
#define CULA_PARAMS_DEF "aot/ops/gates/params_gate.def"
#include "aot/common/cpu/params.inc"

#define CULA_PARAMS NormParams
#define CULA_PARAMS_DEF "aot/ops/gates/params_l2norm.def"
#include "aot/common/cpu/params.inc"

struct GateTable {
  CpuKernel kda_gate[3], gdn_gate[3], l2norm[3];  // by the DType of x
};
CULA_LEVEL_TABLES(GateTable, kGates)

}  // namespace cula::cpu
