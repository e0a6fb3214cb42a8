// gdn_gate: the heads of a token are the channels of one row.
#include "aot/ops/gates/gate.cuh"

CULA_GATE_ENTRY(cula_gdn_gate, false)
