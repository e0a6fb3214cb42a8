// From a validated problem to a launch list. A plan is pure: no driver, no allocation, no GPU; the same for every executor.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cula.h"
#include "kernel_table.h"

namespace cula {

// Types of the parameter kinds of params.def.
namespace param_type {
using ptr = const void*;
using i64 = int64_t;
using i32 = int32_t;
using f32 = float;
}  // namespace param_type

// What the plan needs to know of the machine.
struct Target {
  int32_t arch = 0;      // cula_arch, never CULA_ARCH_DEVICE
  int32_t sm_count = 0;
};

// One call, as the exported functions hand it to a family.
struct Request {
  cula_op op;
  const char* name;        // of the op, first word of every message
  int32_t arch;            // cula_arch that was asked for, CULA_ARCH_DEVICE: that of the tensors
  int32_t sm_count;        // 0: the device's or the arch's
  void* workspace;         // whose size is checked after the plan; NULL for a query
};

struct LaunchDesc {
  int32_t kernel = -1;   // index into kKernels
  uint32_t grid[3] = {1, 1, 1};
  uint32_t block[3] = {1, 1, 1};
  uint32_t cluster[3] = {1, 1, 1};
  uint32_t dynamic_smem = 0;
  bool pdl = false;      // programmatic stream serialization: the kernel waits with griddepcontrol before it reads
  int64_t cpu_items = 0; // CPU: number of work items
  int64_t cpu_item_bytes = 0;  // CPU: cost of an item, see parallel.h
  int32_t cpu_threads = 0;
  const void* params = nullptr;   // struct of the family, laid out as its params.def lists
  const uint16_t* param_offsets = nullptr;
  int32_t param_count = 0;
  int32_t param_bytes = 0;
};

struct Plan {
  int32_t count = 0;        // 0: nothing to do
  int32_t storage_used = 0;
  size_t workspace_bytes = 0;
  size_t workspace_align = 1;
  int32_t device_type = 0;  // DLDeviceType of the operands
  int32_t device_id = 0;
  LaunchDesc launch[CULA_MAX_LAUNCHES];
  alignas(8) unsigned char storage[CULA_PARAM_BYTES];  // the families' parameter structs live here

  // Appends a launch of `kernel` with its parameters.
  template <class Params, size_t N>
  LaunchDesc& add(int32_t kernel, const Params& params, const uint16_t (&offsets)[N]) noexcept {
    static_assert(std::is_trivially_copyable_v<Params> && sizeof(Params) <= CULA_PARAM_BYTES / 8 && N <= CULA_MAX_PARAMS);
    LaunchDesc& d = launch[count++];
    std::memcpy(storage + storage_used, &params, sizeof params);
    d.kernel = kernel;
    d.params = storage + storage_used;
    d.param_offsets = offsets;
    d.param_count = N;
    d.param_bytes = sizeof params;
    storage_used += (sizeof params + 7) / 8 * 8;
    return d;
  }
};

// Validates and plans. One a family; the op table of ops.cpp names it. args: the family's struct, complete.
using PlanFn = cula_status (*)(const Request& request, const void* args, Plan* plan);

cula_status plan_decode(const Request& request, const void* args, Plan* plan);
cula_status plan_prefill(const Request& request, const void* args, Plan* plan);
cula_status plan_gate(const Request& request, const void* args, Plan* plan);
cula_status plan_l2norm(const Request& request, const void* args, Plan* plan);

}  // namespace cula
