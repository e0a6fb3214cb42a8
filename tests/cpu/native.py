"""The harness from Python: building it, parameters from the .def files, guarded operands, dtypes that numpy lacks."""

from __future__ import annotations

import ctypes
import functools
import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tests.cpu.build import LEVELS, ROOT, build

GRAIN_BYTES = 128 << 10  # kGrainBytes of parallel.h
PREFILL_FLOAT32 = 5.4e-7  # relative RMSE of prefill in float32, derived in test_prefill.py
FP32, BF16, FP16, ABSENT = range(4)  # dtype codes of the .def files
DTYPES = (FP32, BF16, FP16)
BETA_KIND = {"value": 0, "logit": 1, "logit_twice": 2}
STORED = {FP32: np.float32, BF16: np.uint16, FP16: np.float16}
LEVEL_NAMES = tuple(LEVELS)


@functools.cache
def library() -> ctypes.CDLL:
    """The harness. CULA_TEST_CPU_HARNESS names one that is built already (with a sanitizer)."""
    path = os.environ.get("CULA_TEST_CPU_HARNESS")
    lib = ctypes.CDLL(path or str(build(Path(tempfile.mkdtemp(prefix="cula_cpu_")))))
    i32, i64, p = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p
    lib.harness_state.argtypes = [i32, i32, i32, i32, i32, p, i64, i64, i32]
    lib.harness_gate.argtypes = [i32, i32, i32, p, i64, i64, i32]
    lib.harness_math.argtypes = [i32, i32, p, p, ctypes.c_float, p, i64]
    lib.harness_convert.argtypes = [i32, i32, p, p, i64, i32]
    lib.harness_convert_flushed.argtypes = [i32, i32, p, p, i64]
    lib.harness_cover.argtypes = [i64, i64, i32, i32, p]
    lib.harness_nested.argtypes = [i64, i64, p]
    lib.harness_quota.argtypes = [ctypes.c_char_p]
    return lib


def picker(rng, fixed):
    """pick(name, *choices) for random problems: fixed[name] where it is given, else one of the choices."""
    return lambda name, *choices: fixed[name] if name in fixed else choices[rng.integers(len(choices))]



def decode(*arguments) -> None:
    """level, io, state, layout, parameters, items, bytes of an item, threads."""
    library().harness_state(0, *arguments)


def prefill(*arguments) -> None:
    """As decode."""
    library().harness_state(1, *arguments)


def levels() -> list[int]:
    """ISA levels that this machine runs."""
    return list(range(library().harness_best_isa() + 1))


# ------------------------------------------------------------------------------------------------------------- dtypes

def round_to(x, code) -> np.ndarray:
    """float64 or float32 -> the stored form, to nearest even."""
    x = np.asarray(x, np.float32)
    if code != BF16:
        return x.astype(STORED[code])
    u = np.ascontiguousarray(x).view(np.uint32)
    r = ((u + 0x7FFF + ((u >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FC0), r)


def value_of(x, code) -> np.ndarray:
    """The stored form -> float64."""
    return (x.astype(np.uint32) << 16).view(np.float32).astype(np.float64) if code == BF16 else x.astype(np.float64)


def half_ulp(x, code) -> np.ndarray:
    """Half the distance between neighbours of a 16-bit dtype at float64 values; 0 for float32, whose error is bounded itself."""
    if code == FP32:
        return np.zeros_like(x)
    bits, emin = {BF16: (8, -126), FP16: (11, -14)}[code]
    return np.ldexp(1.0, np.maximum(np.frexp(x)[1] - 1, emin) - bits)


def assert_close(name, got, want, code, bound=2e-7) -> None:
    """Relative RMSE beyond the final rounding is at most `bound` (one float32 ulp is 1.2e-7)."""
    got = value_of(got, code)
    assert got.shape == want.shape, f"{name}: {got.shape} for {want.shape}"
    bad = ~np.isfinite(got)
    assert not bad.any(), f"{name}: {bad.sum()} of {bad.size} not finite, first at {np.argwhere(bad)[0]}"
    norm = np.linalg.norm(want)
    if norm == 0:
        assert not got.any(), f"{name}: must be zero"
        return
    excess = np.maximum(np.abs(got - want) - half_ulp(want, code), 0)
    figure = np.linalg.norm(excess) / norm
    worst = np.unravel_index(excess.argmax(), excess.shape)
    assert figure <= bound, f"{name}: {figure:.3g} > {bound:.3g}; worst at {worst}: {got[worst]!r} for {want[worst]!r}"


# ----------------------------------------------------------------------------------------------------------- operands

@dataclass
class Operand:
    """A strided view of `shape` into a storage whose every byte is 0xff (NaN, or index -1) until set, with guards around."""

    storage: np.ndarray
    view: np.ndarray
    code: int

    def set(self, x) -> None:
        self.view[...] = round_to(x, self.code)
        self.before = self.storage.copy()

    @property
    def values(self) -> np.ndarray:
        return value_of(self.view, self.code)

    @property
    def strides(self) -> list[int]:
        return [s // self.view.itemsize for s in self.view.strides]

    def changed_outside(self, owned=None) -> bool:
        """Has a byte changed that is not in view[owned]?"""
        now, then = self.storage.copy(), self.before.copy()
        if owned is not None:
            for x in (now, then):
                placed = np.ndarray(self.view.shape, self.view.dtype, x.data, self.offset, self.view.strides)
                placed[owned] = 0
        return not np.array_equal(now, then)


GUARD = 128


def operand(shape, code=FP32, strides=None, offset=0, dtype=None) -> Operand:
    """strides, offset: in elements. offset 1 is an address that is aligned to the element only."""
    dtype = np.dtype(dtype or STORED[code])
    if strides is None:
        strides = [int(np.prod(shape[i + 1:])) for i in range(len(shape))]
    last = sum((e - 1) * s for e, s in zip(shape, strides) if e > 1)
    raw = np.full((last + 1 + offset) * dtype.itemsize + 2 * GUARD + 64, 0xFF, np.uint8)
    start = GUARD + (-(raw.ctypes.data + GUARD)) % 64 + offset * dtype.itemsize
    view = np.ndarray(shape, dtype, raw.data, start, [s * dtype.itemsize for s in strides])
    x = Operand(raw, view, code)
    x.offset, x.before = start, raw.copy()
    return x


# --------------------------------------------------------------------------------------------------------- parameters

CTYPES = {"ptr": ctypes.c_void_p, "i64": ctypes.c_int64, "i32": ctypes.c_int32, "f32": ctypes.c_float}


@functools.cache
def definition(path: str):
    text = (ROOT / path).read_text()
    params = tuple((name, kind) for kind, name in re.findall(r"^CULA_PARAM\((\w+), (\w+)\)", text, re.M))
    modes = {name: (int(shift), int(bits)) for name, shift, bits in re.findall(r"^CULA_MODE\((\w+), (\d+), (\d+)\)", text, re.M)}
    return params, modes


class Params:
    """The pointer array of a kernel. Every value that is not given is poison: a parameter that is read by mistake shows."""

    def __init__(self, path: str, modes: dict, **values):
        params, fields = definition(path)
        assert not set(modes) - set(fields) and not set(values) - {n for n, _ in params}
        for name, value in modes.items():
            assert 0 <= value < 1 << fields[name][1], name
        values["modes"] = sum(int(value) << fields[name][0] for name, value in modes.items())
        poison = {"ptr": 0x5A5A5A5A5A5A5A5A, "i64": 0x5A5A5A5A5A5A5A5A, "i32": 0x5A5A5A5A, "f32": float("nan")}
        self.cells = [CTYPES[kind](values.get(name, poison[kind])) for name, kind in params]
        self.array = (ctypes.c_void_p * len(params))(*(ctypes.addressof(c) for c in self.cells))


def address(x: Operand | None) -> int:
    return 0 if x is None else x.view.ctypes.data
