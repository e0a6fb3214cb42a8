"""One process from its start to a first result on the GPU, with cuda-python buffers and no framework. Run by host.py.

`cuda_only` initialises CUDA, allocates and fills the buffers, and synchronises; `cula` then decodes once and reads the result.
"""

import json
import os
import struct
import sys
import time

from cuda.bindings import driver

N, H, D = 4, 64, 128
HALF_ONE, FLOAT_TENTH = struct.pack("<e", 1.0), struct.pack("<f", 0.1)


def check(result):
    status, *values = result
    if int(status):
        raise RuntimeError(driver.cuGetErrorString(status)[1].decode())
    return values[0] if len(values) == 1 else values


class Buffer:
    """Device memory filled with one value, exported through __cuda_array_interface__."""

    def __init__(self, shape, typestr, value):
        self.count = 1
        for extent in shape:
            self.count *= extent
        self.bytes = self.count * len(value)
        self.pointer = check(driver.cuMemAlloc(self.bytes))
        check(driver.cuMemcpyHtoD(self.pointer, value * self.count, self.bytes))
        self.__cuda_array_interface__ = {"shape": shape, "typestr": typestr, "data": (int(self.pointer), False), "version": 3,
                                         "strides": None}


def main(mode):
    check(driver.cuInit(0))
    context = check(driver.cuDevicePrimaryCtxRetain(check(driver.cuDeviceGet(0))))
    check(driver.cuCtxSetCurrent(context))
    stream = check(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))
    q, k, v, gate, out = (Buffer((N, H, D), "<f2", HALF_ONE) for _ in range(5))
    beta = Buffer((N, H), "<f4", FLOAT_TENTH)
    A_log, dt_bias = Buffer((H,), "<f4", FLOAT_TENTH), Buffer((H, D), "<f4", FLOAT_TENTH)
    state = Buffer((N, H, D, D), "<f4", FLOAT_TENTH)
    check(driver.cuStreamSynchronize(stream))
    if mode == "cula":
        from benchmarks.cula_call import bind

        host = bytearray(out.bytes)
        poison = b"\xff" * out.bytes
        check(driver.cuMemcpyHtoD(out.pointer, poison, out.bytes))
        bind("kda", q, k, v, out=out, gate=gate, gate_kind="raw", A_log=A_log, dt_bias=dt_bias, beta=beta,
             beta_kind="logit", l2norm=True, lower_bound=-5.0, state=state, stream=int(stream))()
        check(driver.cuStreamSynchronize(stream))
        check(driver.cuMemcpyDtoH(host, out.pointer, out.bytes))
        values = struct.unpack(f"<{out.count}e", host)
        assert all(0 < abs(x) < 100 for x in values), "the first result is not a result"
    seconds = time.time() - float(os.environ["CULA_BENCH_T0"])
    print(json.dumps({"mode": mode, "seconds": seconds}))


main(sys.argv[1])
