"""What is built: kernels as data. Standard library only, so that tests and docs can read it.

Each family folder has a matrix.py with MATRICES, a tuple of OpMatrix: closed axes, exclusions with reasons, and by which
toolchain each arch is built. `expand` multiplies them out, the same way for every op.

    kernel_id = op.arch.io[.s<state>][.k<k>][.v<v>][.<layout>][.<variant>]     kda_decode.sm90.bf16.sfp32.k128.vk
"""

from __future__ import annotations

import fnmatch
import importlib
import itertools
import re
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

from aot.archs import ARCHS

ROOT = Path(__file__).resolve().parent.parent
OPS = ROOT / "aot" / "ops"

# Closed sets: a value outside of them is a typing mistake in a matrix. Order and codes as in kernel_table.h.
IO = ("fp32", "bf16", "fp16")
STATE = ("", "fp32", "bf16")
LAYOUT = ("", "vk", "kv")
VARIANT = ("", "prep", "prep_gf32", "state", "scan", "carry", "state_checkpoints")  # which of the kernels that a call of the op launches
TOOLCHAINS = ("cute_dsl", "cutlass", "cpu")
AXES = ("op", "arch", "io", "state", "k", "v", "layout", "variant")
# Fields of a spec that only decide whether a kernel is fit to ship: a change of them compiles nothing again.
JUDGED = ("max_local_bytes", "tensor", "waits", "max_registers", "max_narrow_loads")


class MatrixError(ValueError):
    """A matrix that contradicts itself. The message names the matrix file's op and the entry."""


@dataclass(frozen=True)
class KernelSpec:
    """One kernel to build. Axes that an op does not have are '' or 0."""

    op: str
    family: str  # folder of aot/ops
    arch: str
    io: str
    toolchain: str
    compile: str  # cute_dsl: "module:function"; cutlass: "path.cu:entry", without an entry cula_<op>; cpu: C++ symbol in namespace cula
    params: str  # path of the params.def
    state: str = ""
    k: int = 0  # head_dim_k
    v: int = 0  # head_dim_v, 0: any
    layout: str = ""
    variant: str = ""
    defines: tuple[str, ...] = ()  # cutlass: macros beside that of io
    block: tuple[int, ...] = ()  # cutlass: threads of a block that has no __launch_bounds__
    dynamic_smem: int = 0  # cutlass: bytes of a launch
    smem_carveout: int = 0  # percent of an SM's memory that is to be shared memory, 0: the driver's choice
    max_local_bytes: int = 0  # local memory per thread that a written exception allows
    tensor: tuple[tuple[str, int], ...] = ()  # tensor-core instructions of the machine code and their numbers
    waits: int = 0  # for groups of wgmma
    max_registers: int = 0  # a thread, 0: no budget
    max_narrow_loads: int = 0  # in loops, that a written exception allows

    @property
    def kernel_id(self) -> str:
        parts = [self.op, self.arch, self.io]
        parts += [f"s{self.state}"] if self.state else []
        parts += [f"k{self.k}"] if self.k else []
        parts += [f"v{self.v}"] if self.v else []
        parts += [self.layout] if self.layout else []
        parts += [self.variant] if self.variant else []
        return ".".join(parts)

    @property
    def axes(self) -> dict:
        return {name: getattr(self, name) for name in AXES}

    @property
    def is_gpu(self) -> bool:
        return self.toolchain != "cpu"

    def fields(self) -> dict:
        return asdict(self)


_ID = re.compile(
    r"(?P<op>[a-z0-9_]+)\.(?P<arch>[a-z0-9]+)\.(?P<io>fp32|bf16|fp16)(?:\.s(?P<state>fp32|bf16))?(?:\.k(?P<k>[1-9]\d*))?"
    rf"(?:\.v(?P<v>[1-9]\d*))?(?:\.(?P<layout>vk|kv))?(?:\.(?P<variant>{'|'.join(VARIANT[1:])}))?"
)


def parse_kernel_id(kernel_id: str) -> dict:
    """The axes of a kernel id: the inverse of KernelSpec.kernel_id. Raises ValueError for a text that is no id.

    For people and tests; programs read the fields in manifest.json."""
    match = _ID.fullmatch(kernel_id)
    if not match or match["arch"] not in ARCHS:
        raise ValueError(f"{kernel_id!r} is no kernel id (op.arch.io[.s<state>][.k<k>][.v<v>][.<layout>][.<variant>])")
    axes = {name: match[name] or "" for name in AXES}
    return axes | {name: int(axes[name] or 0) for name in ("k", "v")}


class _Match:
    """Entries that pick kernels by axis values, where a tuple means any of its members."""

    def _set(self, **fields):
        """In __init__: the entries are frozen, and take the axes as keywords of their own."""
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    def matches(self, spec: KernelSpec) -> bool:
        return all(getattr(spec, axis) in (value if isinstance(value, tuple) else (value,)) for axis, value in self.where.items())

    def __str__(self) -> str:
        return ", ".join(f"{axis}={value}" for axis, value in self.where.items())


@dataclass(frozen=True)
class Excluded(_Match):
    """Kernels of the product of the axes that are not built, and why."""

    reason: str
    where: dict

    def __init__(self, reason: str, **where):
        self._set(reason=reason, where=where)


@dataclass(frozen=True)
class AllowedLocalMemory(_Match):
    """Kernels that may use up to `max_bytes` of local memory a thread (spills, local arrays), and why that is right."""

    max_bytes: int
    reason: str
    where: dict

    def __init__(self, max_bytes: int, reason: str, **where):
        self._set(max_bytes=max_bytes, reason=reason, where=where)


@dataclass(frozen=True)
class MachineCode(_Match):
    """What the machine code of kernels must be, and why: how many tensor-core instructions it has by name ("HGMMA": wgmma, "HMMA":
    mma.sync); how many waits for groups of wgmma, which are those of the source unless ptxas put in more; how many registers
    a thread at most, 0 for no budget. Kernels without an entry may have neither tensor-core instructions nor waits."""

    reason: str
    tensor: dict[str, int]
    waits: int
    registers: int
    where: dict

    def __init__(self, reason: str, *, tensor: dict[str, int] | None = None, waits: int = 0, registers: int = 0, **where):
        self._set(reason=reason, tensor=tensor or {}, waits=waits, registers=registers, where=where)


@dataclass(frozen=True)
class AllowedNarrowLoads(_Match):
    """Kernels whose loops may have up to `most` global loads of 1 or 2 bytes, and why they are not the ones that count."""

    most: int
    reason: str
    where: dict

    def __init__(self, most: int, reason: str, **where):
        self._set(most=most, reason=reason, where=where)


@dataclass(frozen=True)
class Route:
    """How the kernels of these archs are built. `compile` may hold axis names in braces: "cula_cpu_{op}_{io}"."""

    archs: tuple[str, ...]
    toolchain: str
    compile: str
    params: str
    defines: tuple[str, ...] = ()
    block: tuple[int, ...] = ()
    dynamic_smem: int = 0
    smem_carveout: int = 0


@dataclass(frozen=True)
class OpMatrix:
    family: str
    axes: dict[str, tuple]  # op, arch, io, and those of state, k, v, layout, variant that the op has
    routes: tuple[Route, ...]
    excluded: tuple[Excluded, ...] = ()
    local_memory: tuple[AllowedLocalMemory, ...] = ()
    machine_code: tuple[MachineCode, ...] = ()
    narrow_loads: tuple[AllowedNarrowLoads, ...] = ()

    @property
    def entries(self) -> tuple[_Match, ...]:
        return (*self.excluded, *self.local_memory, *self.machine_code, *self.narrow_loads)


@dataclass(frozen=True)
class Expansion:
    specs: tuple[KernelSpec, ...]
    excluded: tuple[tuple[KernelSpec, str], ...] = field(default=())  # with the reason


def _check(matrix: OpMatrix) -> None:
    where = f"matrix of {matrix.family}"
    closed = {"arch": tuple(ARCHS), "io": IO, "state": STATE, "layout": LAYOUT, "variant": VARIANT}
    for axis, values in matrix.axes.items():
        if axis not in AXES:
            raise MatrixError(f"{where}: unknown axis {axis!r}; axes: {', '.join(AXES)}")
        if not isinstance(values, tuple) or not values or len(set(values)) != len(values):
            raise MatrixError(f"{where}: axis {axis} must be a tuple of different values, not {values!r}")
        for value in values:
            if axis in closed and value not in closed[axis]:
                raise MatrixError(f"{where}: {axis} {value!r} does not exist; allowed: {', '.join(map(repr, closed[axis]))}")
            if axis in ("k", "v") and not (isinstance(value, int) and value >= 0):
                raise MatrixError(f"{where}: {axis} {value!r} must be a non-negative integer")
    for axis in ("op", "arch", "io"):
        if axis not in matrix.axes:
            raise MatrixError(f"{where}: axis {axis} is missing")
    for entry in matrix.entries:
        if not entry.reason.strip() or not entry.where:
            raise MatrixError(f"{where}: {type(entry).__name__}({entry}) needs a reason and at least one axis")
        if unknown := set(entry.where) - set(AXES):
            raise MatrixError(f"{where}: {type(entry).__name__}({entry}): unknown axis {', '.join(sorted(unknown))}")
    for entry in matrix.machine_code:
        for name, count in entry.tensor.items():
            if not re.fullmatch("[A-Z]*MMA", name) or not isinstance(count, int) or count < 1:
                raise MatrixError(
                    f"{where}: MachineCode({entry}): tensor {name!r}: {count!r} must be an instruction like HGMMA and its number"
                )
        if entry.waits < 0 or (entry.waits > 0) != ("HGMMA" in entry.tensor):
            raise MatrixError(f"{where}: MachineCode({entry}): waits {entry.waits}, but only wgmma (HGMMA) has waits, and always")
        if not 0 <= entry.registers <= 255:
            raise MatrixError(f"{where}: MachineCode({entry}): registers {entry.registers} must be 1 to 255, or 0 for no budget")
    for route in matrix.routes:
        if route.toolchain not in TOOLCHAINS:
            raise MatrixError(f"{where}: toolchain {route.toolchain!r} does not exist; allowed: {', '.join(TOOLCHAINS)}")


def expand(matrix: OpMatrix) -> Expansion:
    """All kernels of a matrix, in the order of its axes. Raises MatrixError, also for an entry that matches nothing: such an
    entry is stale, and whoever reads it believes something that is no longer so."""
    _check(matrix)
    where = f"matrix of {matrix.family}"
    specs, excluded = [], []
    for values in itertools.product(*matrix.axes.values()):
        axes = dict(zip(matrix.axes, values, strict=True))
        routes = [route for route in matrix.routes if axes["arch"] in route.archs]
        if len(routes) != 1:
            raise MatrixError(f"{where}: arch {axes['arch']} has {len(routes)} routes; it must have one")
        route = routes[0]
        spec = KernelSpec(
            family=matrix.family, toolchain=route.toolchain, compile=route.compile.format(**axes), params=route.params,
            defines=route.defines, block=route.block, dynamic_smem=route.dynamic_smem, smem_carveout=route.smem_carveout, **axes,
        )  # fmt: skip
        reasons = [entry.reason for entry in matrix.excluded if entry.matches(spec)]
        if reasons:
            excluded.append((spec, reasons[0]))
            continue
        codes = [entry for entry in matrix.machine_code if entry.matches(spec)]
        if len(codes) > 1:
            raise MatrixError(f"{where}: {spec.kernel_id} has {len(codes)} MachineCode: {'; '.join(map(str, codes))}; it may have one")
        code = codes[0] if codes else MachineCode("")
        specs.append(
            replace(
                spec,
                max_local_bytes=max((entry.max_bytes for entry in matrix.local_memory if entry.matches(spec)), default=0),
                max_narrow_loads=max((entry.most for entry in matrix.narrow_loads if entry.matches(spec)), default=0),
                tensor=tuple(sorted(code.tensor.items())), waits=code.waits, max_registers=code.registers,
            )
        )  # fmt: skip
    for entry in matrix.excluded:
        if not any(entry.matches(spec) for spec, _ in excluded):
            raise MatrixError(f"{where}: Excluded({entry}) matches no kernel: remove it")
    for entry in matrix.entries[len(matrix.excluded) :]:
        if not any(entry.matches(spec) for spec in specs):
            raise MatrixError(f"{where}: {type(entry).__name__}({entry}) matches no kernel: remove it")
    return Expansion(tuple(specs), tuple(excluded))


def expand_all(ops: Path = OPS) -> Expansion:
    """The kernels of every aot/ops/<family>/matrix.py, sorted by id. Raises MatrixError if two have the same id."""
    specs, excluded = {}, []
    for path in sorted(ops.glob("*/matrix.py")):
        for matrix in importlib.import_module(f"aot.ops.{path.parent.name}.matrix").MATRICES:
            expansion = expand(matrix)
            excluded += expansion.excluded
            for spec in expansion.specs:
                if spec.kernel_id in specs:
                    raise MatrixError(
                        f"matrix of {matrix.family}: a kernel {spec.kernel_id} exists already in {specs[spec.kernel_id].family}"
                    )
                specs[spec.kernel_id] = spec
    ordered = tuple(specs[name] for name in sorted(specs))
    return Expansion(ordered, tuple(sorted(excluded, key=lambda pair: pair[0].kernel_id)))


def select(specs, **patterns: str | None) -> list[KernelSpec]:
    """The specs whose axes match every pattern: a glob, or several separated by commas. None: any.

    Raises ValueError for an axis that has no such value anywhere in `specs`, naming those that there are: a filter that
    selects nothing because of a typing mistake is not an empty build."""
    chosen = list(specs)
    for axis, pattern in patterns.items():
        if pattern is None:
            continue
        globs = [part.strip() for part in str(pattern).split(",") if part.strip()]
        values = {str(getattr(spec, axis)) for spec in specs}
        for glob in globs:
            if not fnmatch.filter(values, glob):
                known = sorted((value for value in values if value not in ("", "0")), key=lambda value: (len(value), value))
                raise ValueError(f"no kernel has {axis} {glob!r}; there are: {', '.join(known)}")
        chosen = [spec for spec in chosen if any(fnmatch.fnmatchcase(str(getattr(spec, axis)), glob) for glob in globs)]
    return chosen


assert set(AXES) | set(JUDGED) <= {f.name for f in fields(KernelSpec)}
