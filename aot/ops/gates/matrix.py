"""Standalone gate and norm ops: raw gate -> log decay for KDA and GDN, and the L2 norm of q and k.

io is the dtype of x. The dtypes of the output, of A_log, dt_bias and beta are run-time modes: they are converted element by
element on the way in and out of registers.
"""

from aot.matrix import AllowedNarrowLoads, MachineCode, OpMatrix, Route

GPU = ("sm90", "sm100", "sm103", "sm120")
SCALARS = "the form for rows that are not aligned takes an element an access; A_log and dt_bias, of any dtype, are read once a column"


def _matrix(op: str, params: str, narrow: dict[str, int], four_blocks: tuple[str, ...] = GPU) -> OpMatrix:
    """narrow: loads of 1 or 2 bytes in loops by io, over all forms of the kernel. four_blocks: archs of whose multiprocessors the plan
    fills four blocks of 256 threads."""
    return OpMatrix(
        family="gates",
        axes=dict(op=(op,), arch=("cpu", *GPU), io=("bf16", "fp16", "fp32")),
        routes=(
            Route(GPU, "cutlass", f"aot/ops/gates/{op}.cu", params),
            Route(("cpu",), "cpu", "cula_cpu_{op}_{io}", params),
        ),
        machine_code=(MachineCode("four blocks of 256 threads fit a multiprocessor, as the plan counts", registers=64, arch=four_blocks),),
        narrow_loads=tuple(AllowedNarrowLoads(most, SCALARS, arch=GPU, io=io) for io, most in narrow.items()),
    )


MATRICES = (
    _matrix("kda_gate", "aot/ops/gates/params_gate.def", {"bf16": 116, "fp16": 116, "fp32": 76}),
    _matrix("gdn_gate", "aot/ops/gates/params_gate.def", {"bf16": 96, "fp16": 96, "fp32": 60}),
    _matrix("l2norm", "aot/ops/gates/params_l2norm.def", {"bf16": 30, "fp16": 30}, four_blocks=GPU[:3]),  # sm120: three, or it spills
)
