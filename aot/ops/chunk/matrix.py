"""KDA prefill: the kernels that a call launches one after another, each a variant (README.md, "Host plan").

    prep, prep_gf32   records from q, k, gate and beta; the gate 16 bits wide, or float32
    state             the recurrence over the records: outputs and final states
    state_checkpoints that, with the state of every so many tokens kept: a kernel of its own, so that the loop of the other has none of it
    scan, carry       with segments: the states between them. carry computes in float32 whatever io is

Prep and carry do not see the state pools, so they have no axis of them. Gate and beta forms, dtypes of what is small and
index types are run-time modes (params_*.def).
The CPU has one kernel a call, with no axis v: it takes any multiple of 64, as decode does. Threads and shared memory of the .cu kernels stand in their sources too, in
static_assert; tests/capi compares them.
"""

from aot.matrix import AllowedLocalMemory, AllowedNarrowLoads, MachineCode, OpMatrix, Route

GPU = ("sm90", "sm100", "sm103", "sm120")
DIMS = dict(k=(128,), v=(128,))
LARGEST_CARVEOUT = 100  # else blocks of prep and state that fit a multiprocessor together are not put there together


def _prep(variant: str, defines: tuple[str, ...]) -> OpMatrix:
    return OpMatrix(
        family="chunk",
        axes=dict(op=("kda_prefill",), arch=GPU, io=("bf16", "fp16"), **DIMS, variant=(variant,)),
        routes=(
            Route(GPU, "cutlass", "aot/ops/chunk/kda_prep.cu:cula_kda_prep", "aot/ops/chunk/params_prep.def", defines, (256, 1, 1), 60464, LARGEST_CARVEOUT),
        ),
        local_memory=(
            AllowedLocalMemory(224, "saved registers of the functions of the exact path and of the chunk's bound, and 20 accesses of 900 instructions a "
                               "record: the next record's inputs wait in 24 registers", arch=GPU[:3]),
        ),
        machine_code=(
            MachineCode("3 score() of 16: the diagonal, below it, the exact path; 2 matmul16() of 12. Two blocks share a multiprocessor with one of state",
                        tensor={"HMMA": 72}, registers=72, arch=GPU[:3]),
            MachineCode("the same products; one block fits a multiprocessor, whatever it takes", tensor={"HMMA": 72}, registers=128, arch="sm120"),
        ),
        narrow_loads=(AllowedNarrowLoads(6, "A_log, dt_bias of 4 channels and beta: once a record, of the caller's dtype and alignment", variant=variant),),
    )  # fmt: skip


MATRICES = (
    _prep("prep", ()),
    _prep("prep_gf32", ("CULA_GATE_F32",)),
    OpMatrix(
        family="chunk",
        axes=dict(op=("kda_prefill",), arch=GPU, io=("bf16", "fp16"), state=("fp32", "bf16"), **DIMS, layout=("vk", "kv"), variant=("state", "state_checkpoints", "scan")),
        routes=(Route(GPU, "cute_dsl", "aot.ops.chunk.compile:compile_state", "aot/ops/chunk/params_state.def", smem_carveout=LARGEST_CARVEOUT),),
        machine_code=(
            MachineCode("8 for R, 8 and 2 for O, 2 for U, 2 for S; the loop's 4 wait_group. Beside two blocks of prep", arch="sm90",
                        variant=("state", "state_checkpoints"), tensor={"HGMMA": 22}, waits=4, registers=224),
            MachineCode("the same without O", arch="sm90", variant="scan", tensor={"HGMMA": 12}, waits=4, registers=224),
            MachineCode("a warp's 16 rows: 32 for R, 32 and 8 for O, 8 for U, 32 for S. Beside two blocks of prep", arch=GPU[1:],
                        variant=("state", "state_checkpoints"), tensor={"HMMA": 112}, registers=224),
            MachineCode("the same without O", arch=GPU[1:], variant="scan", tensor={"HMMA": 72}, registers=224),
        ),
    ),
    OpMatrix(
        family="chunk",
        axes=dict(op=("kda_prefill",), arch=GPU, io=("fp32",), **DIMS, variant=("carry",)),
        routes=(
            Route(GPU, "cutlass", "aot/ops/chunk/kda_carry.cu:cula_kda_carry", "aot/ops/chunk/params_carry.def", (), (128, 1, 1), 70144, LARGEST_CARVEOUT),
        ),
    ),
    OpMatrix(
        family="chunk",
        axes=dict(op=("kda_prefill",), arch=("cpu",), io=("bf16", "fp16", "fp32"), state=("fp32", "bf16"), k=(64, 128, 256), layout=("vk", "kv")),
        routes=(Route(("cpu",), "cpu", "cula_cpu_prefill_{io}_s{state}_{layout}", "aot/ops/chunk/params_cpu.def"),),
    ),
)  # fmt: skip
