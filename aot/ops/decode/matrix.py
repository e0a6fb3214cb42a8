"""Decode: one token a row for KDA, GDN, GLA and Lightning attention.

head_dim_v is no axis: a kernel takes any multiple of 64 from 64 to 512 at run time, because the value dimension only says how
many independent state rows there are. Gate and beta forms, index types and slot strides are run-time modes (params.def):
as axes they would multiply the kernels by more than fifty, and the branches on them are uniform and before the state is read.
"""

from aot.matrix import AllowedNarrowLoads, OpMatrix, Route

MATRICES = (
    OpMatrix(
        family="decode",
        axes=dict(
            op=("kda_decode", "gdn_decode", "gla_decode", "lightning_decode"),
            arch=("cpu", "sm90", "sm100", "sm103", "sm120"),
            io=("bf16", "fp16", "fp32"),
            state=("fp32", "bf16"),
            k=(64, 128, 256),
            layout=("vk", "kv"),
        ),
        routes=(
            Route(("sm90", "sm100", "sm103", "sm120"), "cute_dsl", "aot.ops.decode.kernel:compile_decode", "aot/ops/decode/params.def"),
            Route(("cpu",), "cpu", "cula_cpu_decode_{io}_s{state}_{layout}", "aot/ops/decode/params.def"),
        ),
        narrow_loads=(
            AllowedNarrowLoads(1, "the lane's element of v for the next step: 2 bytes beside a state row of 128 to 1024",
                               arch=("sm90", "sm100", "sm103", "sm120"), io=("bf16", "fp16"), layout="vk"),
        ),
    ),
)  # fmt: skip
