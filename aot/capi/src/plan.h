// From a validated problem to a launch list. A plan is pure: no driver, no allocation, no GPU; the same for every executor.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "cula.h"
#include "kernel_table.h"

namespace cula {

// What the plan needs to know of the machine.
struct Target {
  int32_t arch = 0;      // cula_arch, never CULA_ARCH_DEVICE
  int32_t sm_count = 0;
};

struct LaunchDesc {
  int32_t kernel = -1;   // index into kKernels
  uint32_t grid[3] = {1, 1, 1};
  uint32_t block[3] = {1, 1, 1};
  uint32_t cluster[3] = {1, 1, 1};
  uint32_t dynamic_smem = 0;
  bool pdl = false;      // programmatic stream serialization: the kernel waits with griddepcontrol before it reads
  int64_t cpu_items = 0; // CPU: number of work items
  int32_t cpu_threads = 0;
  const void* params = nullptr;   // struct of the family, laid out as its params.def lists
  const uint16_t* param_offsets = nullptr;
  int32_t param_count = 0;
  int32_t param_bytes = 0;
};

struct Plan {
  int32_t count = 0;
  LaunchDesc launch[CULA_MAX_LAUNCHES];
  size_t workspace_bytes = 0;
  size_t workspace_align = 1;
  int32_t device_type = 0;  // DLDeviceType of the operands
  int32_t device_id = 0;
  alignas(8) unsigned char storage[CULA_PARAM_BYTES];  // the families' parameter structs live here
};

}  // namespace cula
