// The gate and norm kernels of the CPU arch under the names of the kernel table: each calls the best ISA level of the machine.
// Work items are those of params_gate.def and params_l2norm.def; thread-safe over disjoint ranges of items.
#include "aot/ops/gates/cpu_gates.h"

CULA_BEST_TABLE(GateTable, kGates)

#define CULA_GATE(op, io, code)                                                          \
  extern "C" void cula_cpu_##op##_##io(void* const* params, int64_t begin, int64_t end) { \
    cula::cpu::best().op[code](params, begin, end);                                      \
  }
#define CULA_GATES(op) CULA_GATE(op, fp32, 0) CULA_GATE(op, bf16, 1) CULA_GATE(op, fp16, 2)

CULA_GATES(kda_gate)
CULA_GATES(gdn_gate)
CULA_GATES(l2norm)
