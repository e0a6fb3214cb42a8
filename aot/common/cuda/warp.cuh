// Reductions inside a warp.
#pragma once

#include <cutlass/cutlass.h>

namespace cula {

// Sum over each aligned group of kLanes lanes, a power of two; every lane gets it. All 32 lanes must take part.
template <int kLanes>
CUTLASS_DEVICE float group_sum(float v) {
  static_assert(kLanes >= 1 && kLanes <= 32 && (kLanes & (kLanes - 1)) == 0, "a power of two");
  CUTLASS_PRAGMA_UNROLL
  for (int lane = kLanes / 2; lane > 0; lane /= 2) v += __shfl_xor_sync(0xffffffffu, v, lane);
  return v;
}

}  // namespace cula
