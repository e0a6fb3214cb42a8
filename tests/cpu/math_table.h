#pragma once

#include <cstdint>

#include "aot/common/cpu/tables.h"

namespace cula::cpu {

enum MathFunction { kExp, kLog1p, kSigmoid, kSoftplus, kRawGate, kBoundedGate };

struct MathTable {
  void (*run)(int function, const float* x, const float* y, float parameter, float* out, int64_t n);
  // dtype code, 3: bf16 by pairs. narrow: from float32, else to it
  void (*convert)(int code, const char* from, char* to, int64_t n, bool narrow);
};

CULA_LEVEL_TABLES(MathTable, kMath)

}  // namespace cula::cpu
