"""Toy CuTe DSL kernels for the tests of the build: the same parameters as the CUDA C++ one."""

import re

import cutlass
import cutlass.cute as cute
from cuda.bindings import driver
from cutlass import Float32, Int32, Int64
from cutlass.cute.runtime import make_fake_stream

from aot.archs import ARCHS


@cute.kernel
def scale_kernel(x: Int64, y: Int64, n: Int32, stride: Int64, scale: Float32):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    i = block * 64 + thread
    if i < n:
        source = cute.make_tensor(cute.make_ptr(cutlass.Float32, x + Int64(i) * 4, cute.AddressSpace.gmem), cute.make_layout(1))
        target = cute.make_tensor(cute.make_ptr(cutlass.Float32, y + Int64(i) * stride * 4, cute.AddressSpace.gmem), cute.make_layout(1))
        target[0] = scale * source[0]


def compile_scale(spec, out_dir):
    @cute.jit
    def host(stream: driver.CUstream):
        scale_kernel(Int64(0), Int64(0), Int32(1), Int64(1), Float32(2.0)).launch(grid=(1, 1, 1), block=(64, 1, 1), stream=stream)

    compiled = cute.compile(host, make_fake_stream(), options=f"--gpu-arch {ARCHS[spec.arch].target} --keep-cubin --keep-ptx")
    (entry,) = re.findall(r"\.entry\s+(\w+)", compiled.__ptx__)
    return dict(cubin=compiled.__cubin__, entry=entry, block=(64, 1, 1), max_dynamic_smem=0)
