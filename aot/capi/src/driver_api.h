// The part of cuda.h that the library uses, by hand: no CUDA header is needed to build it. tests/capi compares the numbers
// and layouts with cuda.h.
#pragma once
#include <cstddef>
#include <cstdint>

#include "cula.h"

namespace cula::driver {

using Result = int;
using Device = int;
using Context = void*;
using Library = void*;
using Kernel = void*;
using Function = void*;

constexpr Result kSuccess = 0, kErrorInvalidValue = 1, kErrorOutOfMemory = 2, kErrorInvalidImage = 200,
                 kErrorNoBinaryForGpu = 209, kErrorInvalidPtx = 218, kErrorUnsupportedPtxVersion = 222, kErrorInvalidSource = 300,
                 kErrorNotFound = 500;
constexpr int kAttributeMultiprocessors = 16, kAttributeMajor = 75, kAttributeMinor = 76;  // CUdevice_attribute
constexpr int kMaxDynamicSharedSize = 8, kPreferredSharedCarveout = 9;                     // CUfunction_attribute
constexpr int kClusterDimension = 4, kProgrammaticStreamSerialization = 6;                 // CUlaunchAttributeID
constexpr int kCaptureRelaxed = 2;                                                         // CUstreamCaptureMode

// CULA_DRIVER(member, symbol, arguments). Symbols with _v2 are what cuda.h's macros make of the plain name.
#define CULA_DRIVER_FUNCTIONS(CULA_DRIVER)                                                                                  \
  CULA_DRIVER(init, cuInit, (unsigned flags))                                                                               \
  CULA_DRIVER(error_name, cuGetErrorName, (Result error, const char** name))                                                \
  CULA_DRIVER(device_get, cuDeviceGet, (Device * device, int ordinal))                                                      \
  CULA_DRIVER(device_count, cuDeviceGetCount, (int* count))                                                                 \
  CULA_DRIVER(device_attribute, cuDeviceGetAttribute, (int* value, int attribute, Device device))                           \
  CULA_DRIVER(primary_state, cuDevicePrimaryCtxGetState, (Device device, unsigned* flags, int* active))                     \
  CULA_DRIVER(primary_retain, cuDevicePrimaryCtxRetain, (Context * context, Device device))                                 \
  CULA_DRIVER(context_device, cuCtxGetDevice, (Device * device))                                                            \
  CULA_DRIVER(context_push, cuCtxPushCurrent_v2, (Context context))                                                         \
  CULA_DRIVER(context_pop, cuCtxPopCurrent_v2, (Context * context))                                                         \
  CULA_DRIVER(exchange_capture_mode, cuThreadExchangeStreamCaptureMode, (int* mode))                                        \
  CULA_DRIVER(library_load, cuLibraryLoadData,                                                                              \
              (Library * library, const void* image, int* jit_options, void** jit_values, unsigned jit_count, int* options, \
               void** values, unsigned count))                                                                              \
  CULA_DRIVER(library_unload, cuLibraryUnload, (Library library))                                                           \
  CULA_DRIVER(library_kernel, cuLibraryGetKernel, (Kernel * kernel, Library library, const char* name))                     \
  CULA_DRIVER(kernel_function, cuKernelGetFunction, (Function * function, Kernel kernel))                                   \
  CULA_DRIVER(kernel_set_attribute, cuKernelSetAttribute, (int attribute, int value, Kernel kernel, Device device))         \
  CULA_DRIVER(kernel_param, cuKernelGetParamInfo, (Kernel kernel, size_t index, size_t* offset, size_t* size))              \
  CULA_DRIVER(launch_kernel, cuLaunchKernelEx, (const cula_launch_config* config, Function function, void** params, void** extra))

struct Api {
#define CULA_DRIVER(member, symbol, arguments) Result(*member) arguments;
  CULA_DRIVER_FUNCTIONS(CULA_DRIVER)
#undef CULA_DRIVER
};

}  // namespace cula::driver
