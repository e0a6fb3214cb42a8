"""Where the host time of one decode call with nine torch tensors goes: python -m tests.loader.host_time, on a machine with a GPU.

Medians in microseconds. The GPU is kept behind: rows are few, and the stream is synchronised between loops, not inside.
"""

from __future__ import annotations

import statistics
import time

import torch

import cula
from cula_loader import cuda, dispatch
from cula_loader.ops import KDA_DECODE

N, H, D = 1, 64, 128


def median_us(function, loops: int = 21, calls: int = 300) -> float:
    times = []
    for _ in range(loops):
        start = time.perf_counter()
        for _ in range(calls):
            function()
        times.append((time.perf_counter() - start) / calls * 1e6)
        torch.cuda.synchronize()
    return statistics.median(times)


def main() -> None:
    make = lambda *shape, dtype=torch.bfloat16: torch.zeros(shape, dtype=dtype, device="cuda")
    q, k, v, out = (make(N, H, D) for _ in range(4))
    gate, beta, state = make(N, H, D), make(N, H), make(N, H, D, D, dtype=torch.float32)
    A_log, dt_bias = make(H, dtype=torch.float32), make(H, D, dtype=torch.float32)
    options = dict(A_log=A_log, dt_bias=dt_bias, gate_kind="raw", beta_kind="logit", l2norm=True, lower_bound=-5.0, out=out)
    decode = cula.kda.kda_decode
    with torch.no_grad():
        decode(q, k, v, gate, beta, state, **options)
        state_of_thread = dispatch._local.pool[-1]
        prepared = next(iter(state_of_thread.prepared[KDA_DECODE].values()))
        objects = (q, k, v, None, out, gate, A_log, dt_bias, beta, state, None, None, None)
        state_of_thread.objects.value = id(objects) + dispatch._TUPLE_ITEMS
        config, params = state_of_thread.configs[0], state_of_thread.params[0]
        kernel = next(iter(cuda.gpus[torch.cuda.current_device()].functions.values()))
        handle = cuda.check(cuda.driver.cuKernelGetFunction(cuda.driver.CUkernel(int(kernel))), "cuKernelGetFunction")
        rows = {
            "call, no_grad": lambda: decode(q, k, v, gate, beta, state, **options),
            "  of it: nine tensors and the stream read, planned": lambda: dispatch._bind_objects(*prepared.bind_args),
            "  of it: launch (of the CUkernel)": lambda: cuda.launch_kernel(config, kernel, params, 0),
            "launch of the CUfunction, for comparison": lambda: cuda.launch_kernel(config, handle, params, 0),
            "call, out allocated": lambda: decode(q, k, v, gate, beta, state, **{**options, "out": None}),
        }
        measured = {name: median_us(function) for name, function in rows.items()}
    measured["call, grad mode on"] = median_us(lambda: decode(q, k, v, gate, beta, state, **options))
    with cuda.context_of(cuda.gpu(torch.cuda.current_device())):
        measured["torch.add, for comparison"] = median_us(lambda: torch.add(q, k, out=out))
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for name, us in measured.items():
        print(f"{us:8.2f} us  {name}")


if __name__ == "__main__":
    main()
