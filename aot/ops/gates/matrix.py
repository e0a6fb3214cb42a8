"""Standalone gate and norm ops: raw gate -> log decay for KDA and GDN, and the L2 norm of q and k.

io is the dtype of x. The dtypes of the output, of A_log, dt_bias and beta are run-time modes: they are converted element by
element on the way in and out of registers.
"""

from aot.matrix import OpMatrix, Route

GPU = ("sm90", "sm100", "sm103", "sm120")


def _matrix(op: str, params: str) -> OpMatrix:
    return OpMatrix(
        family="gates",
        axes=dict(op=(op,), arch=("cpu", *GPU), io=("bf16", "fp16", "fp32")),
        routes=(
            Route(GPU, "cutlass", f"aot/ops/gates/{op}.cu", params),
            Route(("cpu",), "cpu", "cula_cpu_{op}_{io}", params),
        ),
    )


MATRICES = (
    _matrix("kda_gate", "aot/ops/gates/params_gate.def"),
    _matrix("gdn_gate", "aot/ops/gates/params_gate.def"),
    _matrix("l2norm", "aot/ops/gates/params_l2norm.def"),
)
