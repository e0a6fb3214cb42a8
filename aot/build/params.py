"""params.def: the declared parameters of a family's kernels, and their check against a compiled cubin."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

from aot.build.cubin_info import Kernel

SIZES = {"ptr": 8, "i64": 8, "i32": 4, "f32": 4, "tensor_map": 128}
ALIGNS = {**SIZES, "tensor_map": 64}


class ParamsError(ValueError):
    """A params.def that cannot be read. The message has the file."""


@dataclass(frozen=True)
class Declared:
    name: str
    kind: str
    offset: int
    size: int


def placed(declared: tuple[Declared, ...], base: int) -> tuple[Declared, ...]:
    """With the offsets that the parameters have when the first is at `base` of the constant bank. The alignment is that of
    base + offset: a tensor map (64) has other offsets on sm_90, where base is 0x210, than on sm_100, where it is 0x380."""
    at, found = base, []
    for param in declared:
        at = -(-at // ALIGNS[param.kind]) * ALIGNS[param.kind]
        found.append(replace(param, offset=at - base))
        at += param.size
    return tuple(found)


def read_params(path: Path) -> tuple[Declared, ...]:
    """The parameters in order, with the offsets that they have in a struct: each at its natural alignment."""
    text = re.sub(r"/\*.*?\*/", "", path.read_text(encoding="utf-8"), flags=re.S)
    declared = []
    for arguments in re.findall(r"^\s*CULA_PARAM\(([^)]*)\)", text, re.M):
        kind, _, name = (part.strip() for part in arguments.partition(","))
        if kind not in SIZES:
            raise ParamsError(f"{path}: CULA_PARAM({arguments}): kind {kind!r} does not exist; allowed: {', '.join(SIZES)}")
        if not name.isidentifier() or name in [param.name for param in declared]:
            raise ParamsError(f"{path}: CULA_PARAM({arguments}): the name must be an identifier that was not used before")
        declared.append(Declared(name, kind, 0, SIZES[kind]))
    if not declared:
        raise ParamsError(f"{path}: no CULA_PARAM in it")
    return placed(tuple(declared), 0)


def compare_params(declared: tuple[Declared, ...], kernel: Kernel) -> list[str]:
    """How the parameters of a cubin differ from the declared ones; empty when they agree."""
    problems = []
    declared = placed(declared, kernel.param_base)
    if len(declared) != len(kernel.params):
        problems.append(f"{len(kernel.params)} parameters in the cubin, {len(declared)} declared")
    for index, (want, have) in enumerate(zip(declared, kernel.params)):
        if have.ordinal != index:
            problems.append(f"parameter {index} ({want.name}) is missing in the cubin")
            break
        if (want.offset, want.size) != (have.offset, have.size):
            problems.append(
                f"parameter {index} ({want.name}, {want.kind}): {have.size} bytes at offset {have.offset} in the cubin, "
                f"{want.size} bytes at offset {want.offset} declared"
            )
            break
    return problems
