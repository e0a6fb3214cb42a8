"""Compiles the C++ of libcula.so: which sources, with which flags.

A source named cpu_isa_*.cpp is compiled once per instruction-set level (aot/common/cpu/isa.h); cpu_*.cpp beside it picks a level
at run time.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from aot.build import sources, toolchain
from aot.build.job import Compiled, CompileError, run_tool

COMPAT = "aot/build/glibc_compat.cpp"
PATTERNS = (COMPAT, "aot/capi/src/*.cpp", "aot/common/cpu/*.cpp", "aot/ops/*/plan*.cpp", "aot/ops/*/cpu*.cpp")

ISA_FLAGS = {
    "base": (),
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
    "avx512": ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx2", "-mfma", "-mf16c"),
}

# Included first in every source but COMPAT: binds pthread and dl functions to versions that glibc 2.28 has too.
PRELUDE = "aot/common/cpu/glibc_compat.h"

FLAGS = (
    "-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-fvisibility-inlines-hidden", "-ffunction-sections", "-fdata-sections",
    "-fno-semantic-interposition", "-Wall", "-Wextra",
)  # fmt: skip


@dataclass(frozen=True)
class Source:
    path: str  # relative to the root
    isa: str = ""

    @property
    def name(self) -> str:
        return f"{self.path} ({self.isa})" if self.isa else self.path


def find_sources(root: Path) -> list[Source]:
    paths = sorted({path.relative_to(root).as_posix() for pattern in PATTERNS for path in root.glob(pattern)})
    found = []
    for path in paths:
        levels = ISA_FLAGS if Path(path).name.startswith("cpu_isa_") else ("",)
        found += [Source(path, isa) for isa in levels]
    return found


def include_dirs(root: Path) -> tuple[Path, ...]:
    return (root / "aot/capi/include", root / "aot/capi/src", root / "aot/common/cpu", root)


def source_files(source: Source, root: Path) -> list[Path]:
    found = sources.include_closure(root / source.path, include_dirs(root))
    return found + ([] if source.path == COMPAT else [root / PRELUDE])


def flags(source: Source, werror: bool) -> list[str]:
    isa = [f"-DCULA_ISA={source.isa}", *ISA_FLAGS[source.isa]] if source.isa else []
    # Only asked for by developers and CI: a compiler newer than ours may warn of something new, and that must not break a user's build.
    return [*FLAGS, *isa, *(["-Werror"] if werror else [])]


def command(source: Source, root: Path, werror: bool, system_dirs: tuple[Path, ...]) -> list:
    """Compiler command without input and output."""
    includes = [word for folder in include_dirs(root) for word in ("-I", folder)]
    includes += [word for folder in system_dirs for word in ("-isystem", folder)]
    return [
        toolchain.cxx().path, *flags(source, werror), *includes, f"-ffile-prefix-map={root}=.",
        *([] if source.path == COMPAT else ["-include", root / PRELUDE]),
    ]  # fmt: skip


def compile_source(source: Source, werror: bool, root: Path, workdir: Path) -> Compiled:
    output, depends = workdir / "object.o", workdir / "object.d"
    words = command(source, root, werror, toolchain.system_dirs())
    log = run_tool(*words, "-MD", "-MF", depends, "-c", root / source.path, "-o", output, cwd=workdir)
    if extra := sources.undeclared(sources.depfile_paths(depends.read_text()), source_files(source, root), root):
        raise CompileError(f"read {', '.join(extra)}, which its cache key does not cover: include by quotes and a plain name")
    return Compiled({"object.o": output.read_bytes()}, {"warnings": log})
