// The CUDA driver, found with dlopen on first need: the library opens and answers on machines without a GPU.
//
// What lives here and how long: the driver's functions and, for each device, its target, its primary context (if it was used)
// and one handle a kernel. All of it is made once, under a lock, published by one atomic store and never freed: a launch reads
// it without a lock, from any thread, and nothing is torn down while the process exits and threads may still run.
#pragma once
#include "plan.h"

namespace cula::driver {

// Arch and multiprocessor count of a device. Initialises the driver, makes no context. CULA_ERR_UNSUPPORTED for a device
// whose compute capability no arch of this library has.
cula_status device_target(const char* function, int32_t device, Target* target) noexcept;

// cula_prepare.
cula_status prepare(int32_t device);

// Launches a plan for CUDA tensors.
cula_status launch(const char* function, const Plan& plan, void* stream) noexcept;

}  // namespace cula::driver
