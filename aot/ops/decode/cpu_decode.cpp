// The decode kernels of the CPU arch under the names of the kernel table: each calls the best ISA level of the machine.
// Work item = row * HV + head; thread-safe over disjoint ranges of items.
#include "aot/ops/decode/cpu_decode.h"

CULA_BEST_TABLE(StateTable, kDecode)
CULA_STATE_KERNELS(decode)
