// The table of compiled kernels that the build generates (kernel_table.cpp) and the plans search.
#pragma once
#include <cstddef>
#include <cstdint>

namespace cula {

// Codes shared by the matrix (aot/matrix.py), the params.def files and the table. Never renumber.
enum class DType : uint8_t { f32 = 0, bf16 = 1, fp16 = 2, none = 3 };

// Which of the kernels that a call launches, for ops that launch several. Order as in aot/matrix.py.
enum class Variant : uint8_t { none, prep, prep_gf32, state, scan, carry, state_checkpoints };

// What picks a kernel. Axes that an op does not have are 0.
struct KernelKey {
  int32_t op;       // cula_op
  int32_t arch;     // cula_arch
  uint8_t io;       // DType
  uint8_t state;    // DType
  uint8_t layout;   // cula_state_layout
  Variant variant;
  uint16_t k;
  uint16_t v;
};

// One grid of a CPU kernel: work items [begin, end) of `params`; thread-safe over disjoint ranges.
using CpuKernel = void (*)(void* const* params, int64_t begin, int64_t end);

struct KernelRow {
  KernelKey key;
  const char* id;
  const char* entry;           // GPU entry symbol, "" for CPU
  const unsigned char* cubin;  // GPU image, nullptr for CPU
  size_t cubin_bytes;
  const uint16_t* param_sizes;
  int16_t param_count;
  int16_t registers;
  int32_t static_smem;
  int32_t max_dynamic_smem;
  int32_t smem_carveout;       // percent, 0: the driver's choice
  CpuKernel cpu;               // CPU only
};

// Sorted by (arch, op, io, state, layout, variant, k, v), so that a plan can search it by bisection.
extern const KernelRow kKernels[];
extern const int32_t kKernelCount;
extern const char kBuildInfo[];

// Index of the kernel with this key, or -1.
int32_t find_kernel(const KernelKey& key) noexcept;

}  // namespace cula
