// A LaunchDesc as the driver wants it; shared by cula_run, which launches, and cula_bind, which lets others launch.
#pragma once
#include "driver_api.h"
#include "plan.h"

namespace cula {

// attributes: room for 2; config points at them.
inline void fill_config(const LaunchDesc& d, void* stream, cula_launch_config* config, cula_launch_attribute* attributes) noexcept {
  uint32_t count = 0;
  if (d.pdl) {
    attributes[count].id = driver::kProgrammaticStreamSerialization;
    attributes[count].pad = 0;
    std::memset(&attributes[count].value, 0, sizeof attributes[count].value);
    attributes[count++].value.i32[0] = 1;
  }
  if (d.cluster[0] * d.cluster[1] * d.cluster[2] > 1) {
    attributes[count].id = driver::kClusterDimension;
    attributes[count].pad = 0;
    std::memset(&attributes[count].value, 0, sizeof attributes[count].value);
    std::memcpy(attributes[count++].value.u32, d.cluster, sizeof d.cluster);
  }
  std::memcpy(config->grid, d.grid, sizeof d.grid);
  std::memcpy(config->block, d.block, sizeof d.block);
  config->dynamic_smem = d.dynamic_smem;
  config->stream = stream;
  config->attributes = count > 0 ? attributes : nullptr;
  config->attribute_count = count;
}

// Addresses of the parameters, given where the bytes of their struct are.
inline void fill_params(const LaunchDesc& d, const unsigned char* base, void** params) noexcept {
  for (int32_t i = 0; i < d.param_count; ++i) params[i] = const_cast<unsigned char*>(base) + d.param_offsets[i];
}

}  // namespace cula
