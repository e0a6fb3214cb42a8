// Names of enumerators, as messages and kernel ids spell them. NULL or "?" for a number that is none.
#pragma once
#include <cstdint>

#include "dlpack.h"
#include "kernel_table.h"

namespace cula {

const char* status_name(int32_t status) noexcept;       // "CULA_OK"; "CULA_ERR_UNKNOWN"
const char* arch_name(int32_t arch) noexcept;           // "sm90"; nullptr
const char* dtype_name(DType dtype) noexcept;           // "bf16"
const char* variant_name(Variant variant) noexcept;     // "prep"; "" for ops of one kernel
const char* gate_kind_name(int32_t kind) noexcept;      // "LOG_HEAD"; nullptr
const char* beta_kind_name(int32_t kind) noexcept;      // "LOGIT"; nullptr
const char* layout_name(int32_t layout) noexcept;       // "vk"; nullptr
const char* prefill_variant_name(int32_t variant) noexcept;  // "SERIAL"; nullptr
const char* device_type_name(int32_t type) noexcept;    // "cuda"; nullptr

}  // namespace cula
