// Programmatic dependent launch (sm_90 and later): the next kernel on the stream may start before this one is done, and this one
// before its predecessor is. cutlass/arch/grid_dependency_control.h has the same two instructions behind per-arch macros and pulls
// in the GEMM policies.
#pragma once

#include <cutlass/cutlass.h>

namespace cula {

#if defined(__CUDACC__)

// Before any access to global memory: until here the predecessor's writes are not visible. Returns at once in a plain launch.
CUTLASS_DEVICE void wait_for_previous_grid() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Lets the successor be scheduled as blocks of this grid leave room; it still waits for the whole grid before it reads.
CUTLASS_DEVICE void allow_next_grid() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

#else  // a host test runs one grid

inline void wait_for_previous_grid() {}
inline void allow_next_grid() {}

#endif

}  // namespace cula
