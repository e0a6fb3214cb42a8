// 64-bit index arithmetic.
#pragma once

#include <cstdint>

#include <cutlass/cutlass.h>

namespace cula {

// a / b, both not negative. 64-bit division is a call of about 100 instructions; nearly all problems fit in 32 bits.
CUTLASS_DEVICE int64_t divide(int64_t a, int64_t b) {
  if (((a | b) >> 32) == 0) return static_cast<uint32_t>(a) / static_cast<uint32_t>(b);
  return a / b;
}

}  // namespace cula
