#include "names.h"

#include "cula.h"

namespace cula {
namespace {

template <int N>
const char* at(const char* const (&names)[N], int32_t index) noexcept {
  return index >= 0 && index < N ? names[index] : nullptr;
}

}  // namespace

const char* status_name(int32_t status) noexcept {
  static constexpr const char* kNames[] = {
      "CULA_OK",          "CULA_ERR_INVALID_ARGUMENT", "CULA_ERR_UNSUPPORTED", "CULA_ERR_NOT_FOUND",     "CULA_ERR_ARTIFACT",
      "CULA_ERR_VERSION", "CULA_ERR_WORKSPACE",        "CULA_ERR_CUDA",        "CULA_ERR_OUT_OF_MEMORY", "CULA_ERR_INTERNAL"};
  const char* name = at(kNames, status);
  return name != nullptr ? name : "CULA_ERR_UNKNOWN";
}

const char* arch_name(int32_t arch) noexcept {
  switch (arch) {
    case CULA_ARCH_CPU: return "cpu";
    case CULA_ARCH_SM90: return "sm90";
    case CULA_ARCH_SM100: return "sm100";
    case CULA_ARCH_SM103: return "sm103";
    case CULA_ARCH_SM120: return "sm120";
    default: return nullptr;
  }
}

const char* dtype_name(DType dtype) noexcept {
  static constexpr const char* kNames[] = {"fp32", "bf16", "fp16"};
  const char* name = at(kNames, static_cast<int32_t>(dtype));
  return name != nullptr ? name : "?";
}

const char* variant_name(Variant variant) noexcept {
  static constexpr const char* kNames[] = {"", "prep", "prep_gf32", "state", "scan", "carry", "state_checkpoints"};
  const char* name = at(kNames, static_cast<int32_t>(variant));
  return name != nullptr ? name : "?";
}

const char* gate_kind_name(int32_t kind) noexcept {
  static constexpr const char* kNames[] = {"NONE", "LOG_HEAD", "LOG_CHANNEL", "RAW", "CONST_HEAD"};
  return at(kNames, kind);
}

const char* beta_kind_name(int32_t kind) noexcept {
  static constexpr const char* kNames[] = {"VALUE", "LOGIT", "LOGIT_TWICE"};
  return at(kNames, kind);
}

const char* layout_name(int32_t layout) noexcept {
  static constexpr const char* kNames[] = {"vk", "kv"};
  return at(kNames, layout);
}

const char* prefill_variant_name(int32_t variant) noexcept {
  static constexpr const char* kNames[] = {"AUTO", "SERIAL", "OVERLAP", "CHAIN"};
  return at(kNames, variant);
}

const char* device_type_name(int32_t type) noexcept {
  switch (type) {
    case kDLCPU: return "cpu";
    case kDLCUDA: return "cuda";
    case kDLCUDAHost: return "cuda_host";
    case kDLCUDAManaged: return "cuda_managed";
    case kDLOpenCL: return "opencl";
    case kDLVulkan: return "vulkan";
    case kDLMetal: return "metal";
    case kDLVPI: return "vpi";
    case kDLROCM: return "rocm";
    case kDLROCMHost: return "rocm_host";
    case kDLOneAPI: return "oneapi";
    case kDLWebGPU: return "webgpu";
    case kDLHexagon: return "hexagon";
    default: return nullptr;
  }
}

}  // namespace cula
