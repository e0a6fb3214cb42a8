// How many threads this process may use.
#pragma once

#include <cstdint>

namespace cula::cpu {

// CULA_NUM_THREADS if it is a number from 1 to 4096 (anything else counts as not set), else the CPUs of the calling thread's
// affinity mask, at most as many as the CPU quota of the control group (rounded up) pays for. At least 1.
int32_t default_threads() noexcept;

// The parts, for tests. text: contents of cpu.max (cgroup v2), "max 100000" or "150000 100000"; 0 if it sets no limit.
int32_t quota_from_cpu_max(const char* text) noexcept;

}  // namespace cula::cpu
