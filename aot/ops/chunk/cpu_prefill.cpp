// The prefill kernels of the CPU arch under the names of the kernel table: each calls the best ISA level of the machine.
// Work items as in params_cpu.def; thread-safe over disjoint ranges of items.
#include "aot/ops/chunk/cpu_prefill.h"

CULA_BEST_TABLE(StateTable, kPrefill)
CULA_STATE_KERNELS(prefill)
