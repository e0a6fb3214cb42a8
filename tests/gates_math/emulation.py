"""Runs the CUDA sources of aot/ops/gates on the CPU: compiled by g++ over emulate.h, launched by parameter pointers as the GPU is."""

from __future__ import annotations

import ctypes
import functools
import pathlib
import re
import shutil
import subprocess

import numpy as np

from aot.build import toolchain

ROOT = pathlib.Path(__file__).resolve().parents[2]
GATES = ROOT / "aot/ops/gates"
PARAMS = {"kda_gate": GATES / "params_gate.def", "gdn_gate": GATES / "params_gate.def", "l2norm": GATES / "params_l2norm.def"}
CTYPES = {"ptr": ctypes.c_void_p, "i64": ctypes.c_int64, "i32": ctypes.c_int32, "f32": ctypes.c_float}
DTYPE_CODE = {"fp32": 0, "bf16": 1, "fp16": 2, None: 3}


def params(op: str) -> list[tuple[str, str]]:
    """(kind, name) in order."""
    return re.findall(r"^CULA_PARAM\((\w+), (\w+)\)", PARAMS[op].read_text(), re.M)


def modes(op: str, **values: int) -> int:
    fields = {n: (int(s), int(w)) for n, s, w in re.findall(r"^CULA_MODE\((\w+), (\d+), (\d+)\)", PARAMS[op].read_text(), re.M)}
    assert values.keys() == fields.keys()
    assert all(0 <= value < 1 << fields[name][1] for name, value in values.items())
    return sum(value << fields[name][0] for name, value in values.items())


def compiler() -> str:
    found = shutil.which("g++")
    assert found, "the emulation needs g++"
    return found


@functools.cache
def library(op: str, io: str, folder: pathlib.Path) -> ctypes.CDLL:
    out = folder / f"{op}_{io}.so"
    include = toolchain.nvcc().parent.parent / "include"
    subprocess.run(
        [compiler(), "-std=c++17", "-O1", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
        + [f"-DCULA_IO_{io.upper()}", f'-DKERNEL_SOURCE="aot/ops/gates/{op}.cu"', f"-DKERNEL_ENTRY=cula_{op}", f"-I{ROOT}"]
        + ["-isystem", str(toolchain.cutlass_include()), "-isystem", str(include / "cccl"), "-isystem", str(include)]
        + [str(pathlib.Path(__file__).with_name("kernels.cpp")), "-o", str(out)],
        check=True,
    )
    return ctypes.CDLL(str(out))


def launch(op: str, io: str, folder: pathlib.Path, grid: int, values: dict) -> None:
    lib, names = library(op, io, folder), params(op)
    assert lib.param_count() == len(names)
    assert values.keys() == {name for _, name in names}
    cells = [CTYPES[kind](values[name]) for kind, name in names]
    lib.launch(ctypes.c_uint(grid), (ctypes.c_void_p * len(cells))(*[ctypes.addressof(cell) for cell in cells]))


# ------------------------------------------------------------------------------------------------- tensors with guards


def encode(values: np.ndarray, dtype: str) -> np.ndarray:
    """float64 -> bits of dtype, rounded to nearest even."""
    f32 = np.asarray(values, np.float32)
    if dtype == "fp32":
        return f32.view(np.uint32)
    if dtype == "fp16":
        with np.errstate(over="ignore"):
            return f32.astype(np.float16).view(np.uint16)
    bits = f32.view(np.uint32)
    rounded = ((bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(f32), np.uint16(0x7FC0), rounded)


def decode(bits: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "fp32":
        return bits.view(np.float32).astype(np.float64)
    if dtype == "fp16":
        return bits.view(np.float16).astype(np.float64)
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


POISON = {"fp32": 0x7FC5A5A5, "fp16": 0x7E5A, "bf16": 0x7FC5}  # a NaN: what is read without being written shows


class Tensor:
    """A strided tensor in a poisoned allocation. offset: elements past a 64-byte boundary."""

    def __init__(self, shape, strides, dtype, offset=0, values=None):
        self.shape, self.strides, self.dtype = tuple(shape), tuple(strides), dtype
        size = 4 if dtype == "fp32" else 2
        span = sum((n - 1) * s for n, s in zip(shape, strides)) + 1 if all(shape) else 0
        word = np.uint32 if size == 4 else np.uint16
        raw = np.full(span + offset + 256, POISON[dtype], word)
        start = (-raw.ctypes.data // size) % (64 // size) + 64 // size + offset
        self.raw, self.start = raw, start
        index = np.full(self.shape, start)
        for axis, (n, stride) in enumerate(zip(shape, strides)):
            index = index + (np.arange(n) * stride).reshape([-1 if a == axis else 1 for a in range(len(shape))])
        self.index = index
        assert np.unique(index).size == index.size, "the case overlaps itself"
        if values is not None:
            raw[index] = encode(values, dtype)

    @property
    def pointer(self) -> int:
        return self.raw.ctypes.data + self.start * self.raw.itemsize

    @property
    def values(self) -> np.ndarray:
        return decode(self.raw[self.index], self.dtype)

    def assert_poison_outside(self) -> None:
        rest = np.ones(self.raw.size, bool)
        rest[self.index.ravel()] = False
        assert (self.raw[rest] == POISON[self.dtype]).all(), "written outside of the tensor"


UNIT = {"fp32": 2.0**-24, "fp16": 2.0**-11, "bf16": 2.0**-8}  # half an ulp, relative
TINY = {"fp32": 2.0**-123, "fp16": 2.0**-25, "bf16": 2.0**-123}  # flushed results times lower_bound; half the spacing of subnormals


def assert_close(got: np.ndarray, ref: np.ndarray, dtype: str, slack: float) -> None:
    """Within the rounding of dtype plus `slack` relative."""
    assert np.isfinite(got).all(), "not written, or not finite"
    error = np.abs(got - ref)
    bound = np.abs(ref) * (UNIT[dtype] + slack) + TINY[dtype]
    worst = np.argmax(error - bound)
    assert (error <= bound).all(), (np.unravel_index(worst, ref.shape), got.ravel()[worst], ref.ravel()[worst])
