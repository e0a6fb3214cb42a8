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

from aot.matrix import AllowedLocalMemory, OpMatrix, Route

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
    )  # fmt: skip


MATRICES = (
    _prep("prep", ()),
    _prep("prep_gf32", ("CULA_GATE_F32",)),
    OpMatrix(
        family="chunk",
        axes=dict(op=("kda_prefill",), arch=GPU, io=("bf16", "fp16"), state=("fp32", "bf16"), **DIMS, layout=("vk", "kv"), variant=("state", "state_checkpoints", "scan")),
        routes=(Route(GPU, "cute_dsl", "aot.ops.chunk.compile:compile_state", "aot/ops/chunk/params_state.def", smem_carveout=LARGEST_CARVEOUT),),
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
