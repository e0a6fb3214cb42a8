"""The loader on a GPU without torch: CuPy, JAX, and bare buffers of cuda-python, each in a process that imports nothing else."""

from __future__ import annotations

import importlib.util

import pytest

from tests.loader.gpu import run_python

pytestmark = pytest.mark.gpu


def needs(module: str):
    return pytest.mark.skipif(importlib.util.find_spec(module) is None, reason=f"{module} is not installed")


CUPY = """
import sys, cupy, numpy, cula
from tests.loader.gpu import OPTIONS, check, problem
rows = problem()
cupy.cuda.Device(0).use()
for stream in (cupy.cuda.Stream.null, cupy.cuda.Stream(non_blocking=True)):
    with stream:
        given = {name: cupy.asarray(x) for name, x in rows.items()}
        out = cula.kda.kda_decode(**given, **OPTIONS)
        assert type(out) is cupy.ndarray and out.dtype == numpy.float16
        stream.synchronize()
        check(cupy.asnumpy(out), cupy.asnumpy(given["state"]), rows)
    given = {name: cupy.asarray(x) for name, x in rows.items()}
    out = cupy.empty_like(out)
    cupy.cuda.Stream.null.synchronize()
    cula.kda.kda_decode(**given, out=out, stream=stream, **OPTIONS)
    stream.synchronize()
    check(cupy.asnumpy(out), cupy.asnumpy(given["state"]), rows)
assert cula.last_kernels()[0].startswith("kda_decode.sm") and "torch" not in sys.modules
print("done")
"""

JAX = """
import sys, jax, jax.numpy as jnp, numpy, cula
from cuda.bindings import driver
from tests.loader.gpu import OPTIONS, check, problem
rows = problem()
given = {name: jnp.array(x) for name, x in rows.items()}
assert next(iter(given["q"].devices())).platform == "gpu"
status, stream = driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
assert int(status) == 0
try:
    cula.kda.kda_decode(**given, donate=True, **OPTIONS)
except cula.InvalidArgumentError as error:
    assert "pass stream=" in str(error), error
else:
    raise AssertionError("JAX's stream cannot be known")
try:
    cula.kda.kda_decode(**given, stream=int(stream), **OPTIONS)
except cula.InvalidArgumentError as error:
    assert "donate=True" in str(error), error
else:
    raise AssertionError("an immutable array was written")
out = cula.kda.kda_decode(**given, stream=int(stream), donate=True, **OPTIONS)
assert int(driver.cuStreamSynchronize(stream)[0]) == 0
assert isinstance(out, jax.Array)
check(numpy.asarray(out), numpy.asarray(given["state"]), rows)
assert cula.last_kernels()[0].startswith("kda_decode.sm") and "torch" not in sys.modules
print("done")
"""

BUFFERS = """
import os, sys
seen = []
def hook(event, args):
    if event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        seen.append(args[0])
    elif event in ("subprocess.Popen", "os.system", "os.mkdir", "os.rename"):
        seen.append(event)
import numpy
from cuda.bindings import driver
from tests.loader.gpu import OPTIONS, check, problem
sys.dont_write_bytecode = True
sys.addaudithook(hook)
import cula
def ok(result):
    assert int(result[0]) == 0, result
    return result[1] if len(result) == 2 else result[1:]
class Buffer:
    def __init__(self, x, **more):
        self.x, self.pointer = x, int(ok(driver.cuMemAlloc(x.nbytes)))
        ok(driver.cuMemcpyHtoD(self.pointer, x.ctypes.data, x.nbytes))
        self.__cuda_array_interface__ = {"version": 3, "shape": x.shape, "typestr": x.dtype.str, "data": (self.pointer, False), "strides": None, **more}
    def get(self):
        x = numpy.empty_like(self.x)
        ok(driver.cuMemcpyDtoH(x.ctypes.data, self.pointer, x.nbytes))
        return x
ok(driver.cuInit(0))
device = ok(driver.cuDeviceGet(0))
CONTEXT
stream = ok(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))
rows = problem()
for how in ("argument", "interface"):
    more = {"stream": int(stream)} if how == "interface" else {}
    given = {name: Buffer(x, **more) for name, x in rows.items()}
    out = Buffer(numpy.full(rows["v"].shape, numpy.nan, "float16"), **more)
    ok(driver.cuCtxSynchronize())
    cula.kda.kda_decode(**given, out=out, **({"stream": int(stream)} if how == "argument" else {}), **OPTIONS)
    ok(driver.cuStreamSynchronize(stream))
    check(out.get(), given["state"].get(), rows)
assert cula.last_kernels()[0].startswith("kda_decode.sm")
assert int(ok(driver.cuCtxGetCurrent())) == int(context)
assert "torch" not in sys.modules and not seen, seen
print("done")
"""

PRIMARY = "context = ok(driver.cuDevicePrimaryCtxRetain(device)); ok(driver.cuCtxSetCurrent(context))"
# A context of the program's own: the kernel must run in it, not in the primary one. cuCtxCreate has one argument more in CUDA 13.
OWN = """
try:
    context = ok(driver.cuCtxCreate(None, 0, device))
except TypeError:
    context = ok(driver.cuCtxCreate(0, device))
"""


@needs("cupy")
def test_cupy():
    assert "done" in run_python(CUPY)


def has_jax_gpu() -> bool:
    if importlib.util.find_spec("jax") is None:
        return False
    return run_python("import jax; print(any(d.platform == 'gpu' for d in jax.devices()))").strip().endswith("True")


@needs("jax")
def test_jax():
    if not has_jax_gpu():
        pytest.skip("JAX has no GPU here")
    assert "done" in run_python(JAX)


@pytest.mark.parametrize("context", ["primary", "own"])
def test_bare_buffers_of_cuda_python(context):
    """No framework in the process, nothing written, no child process."""
    assert "done" in run_python(BUFFERS.replace("CONTEXT", PRIMARY if context == "primary" else OWN))


def test_the_commands():
    facts = run_python("import runpy, sys; sys.argv = ['cula', 'info']; runpy.run_module('cula', run_name='__main__')")
    assert "can run" in facts and "cuda:0: " in facts and "cuda:0" in next(line for line in facts.splitlines() if ": can run" in line and "cuda" in line)
    tested = run_python("import runpy, sys; sys.argv = ['cula', 'selftest', '--device', 'cuda']; runpy.run_module('cula', run_name='__main__')")
    assert "FAIL" not in tested and "all right on cuda:0" in tested
    assert all(f"ok   cuda:0 {op}" in tested for op in ("kda_decode", "gdn_decode", "gla_decode", "lightning_decode", "kda_gate", "gdn_gate", "l2norm"))
