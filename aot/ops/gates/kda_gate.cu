// kda_gate: one A_log a head, one dt_bias a channel.
#include "aot/ops/gates/gate.cuh"

CULA_GATE_ENTRY(cula_kda_gate, true)
