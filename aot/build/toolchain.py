"""Finds the pinned compilers and headers in the environment's own packages, and the C++ compiler of the machine.

Nothing here imports a compiler package: an unchanged build only reads versions.
"""

from __future__ import annotations

import functools
import importlib.metadata as metadata
import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from aot.matrix import ROOT

REQUIREMENTS = ROOT / "requirements" / "build.txt"
DSL = ("nvidia-cutlass-dsl", "nvidia-cutlass-dsl-libs-base", "nvidia-cutlass-dsl-libs-core", "nvidia-cutlass-dsl-libs-cu12")
NVCC = ("nvidia-cuda-nvcc", "nvidia-nvvm", "nvidia-cuda-crt", "nvidia-cuda-runtime", "nvidia-cuda-cccl", "nvidia-cutlass")
NVDISASM = ("nvidia-cuda-nvdisasm",)  # what lint reads; decides nothing of a kernel
HOST = ("cuda-core", "jaxlib")  # for dlpack.h and XLA's FFI header


class ToolError(RuntimeError):
    """A tool is missing or is not the pinned one. The message says which and what to do."""


@dataclass(frozen=True)
class Compiler:
    """The C++ compiler: $CXX, else c++, g++ or clang++."""

    path: str
    version: str  # its first line of --version
    machine: str


def pins() -> dict[str, str]:
    """Package -> version of requirements/build.txt, for this Python."""
    found = {}
    for line in REQUIREMENTS.read_text().splitlines():
        line, _, marker = line.partition("#")[0].partition(";")
        if "==" not in line:
            continue
        if marker.strip():
            compare = re.fullmatch(r'\s*python_version\s*(<|>=)\s*"(\d+)\.(\d+)"\s*', marker)
            if not compare:
                raise ToolError(f"{REQUIREMENTS}: marker {marker.strip()!r} is not understood; use python_version < or >=")
            newer = sys.version_info[:2] >= (int(compare[2]), int(compare[3]))
            if newer != (compare[1] == ">="):
                continue
        name, _, version = line.strip().partition("==")
        found[name.strip()] = version.strip()
    return found


@functools.cache
def _distribution(package: str) -> metadata.Distribution:
    wanted = pins().get(package)
    how = "run `make artifacts`, which makes .venv from requirements/build.txt, or: pip install --no-deps -r requirements/build.txt"
    try:
        found = metadata.distribution(package)
    except metadata.PackageNotFoundError:
        raise ToolError(f"{package} is not installed in {sys.prefix}; {how}") from None
    if wanted is None:
        raise ToolError(f"{package} is not pinned in requirements/build.txt")
    if found.version != wanted:
        raise ToolError(f"{package} {found.version} is installed in {sys.prefix}, but {wanted} is pinned; {how}")
    return found


def versions(packages: tuple[str, ...]) -> dict[str, str]:
    """Versions of installed packages. Raises ToolError when one is missing or not as pinned."""
    return {package: _distribution(package).version for package in packages}


def _inside(package: str, relative: str) -> Path:
    path = Path(_distribution(package).locate_file(relative))
    if not path.exists():
        raise ToolError(f"{package} {_distribution(package).version} has no {relative} in {sys.prefix}: reinstall it")
    return path.resolve()


def nvcc() -> Path:
    return _inside("nvidia-cuda-nvcc", "nvidia/cu13/bin/nvcc")


def ptxas() -> Path:
    return _inside("nvidia-cuda-nvcc", "nvidia/cu13/bin/ptxas")


def nvdisasm() -> Path:
    return _inside("nvidia-cuda-nvdisasm", "nvidia/cu13/bin/nvdisasm")


def cutlass_include() -> Path:
    return _inside("nvidia-cutlass", "cutlass_library/source/include")


def dlpack_header() -> Path:
    return _inside("cuda-core", "cuda/core/_include/dlpack.h")


def xla_ffi_header() -> Path:
    return _inside("jaxlib", "jaxlib/include/xla/ffi/api/c_api.h")


def system_dirs() -> tuple[Path, ...]:
    """Include folders of other projects' headers, for the C++ of the library."""
    return (dlpack_header().parent, xla_ffi_header().parents[3])


@functools.cache
def cxx() -> Compiler:
    """Raises ToolError if there is no C++ compiler, or the machine is not x86-64 Linux."""
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "AMD64"):
        raise ToolError(f"libcula.so is built for Linux on x86-64; this is {sys.platform} on {platform.machine()}")
    wanted = os.environ.get("CXX")
    names = [wanted] if wanted else ["c++", "g++", "clang++"]
    path = next((found for found in map(shutil.which, names) if found), None)
    if path is None:
        raise ToolError(
            f"no C++ compiler: looked for {', '.join(names)} on PATH. Install one (Debian, Ubuntu: apt install g++; Fedora, "
            "RHEL: dnf install gcc-c++), or name one by CXX=..."
        )
    first = _output(path, "--version").splitlines()[:1]
    return Compiler(path, first[0] if first else "", _output(path, "-dumpmachine").strip())


def _output(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise ToolError(f"{' '.join(command)} failed with exit code {done.returncode}: {done.stderr.strip()[:300]}")
    return done.stdout


def identity(toolchain: str) -> dict:
    """All that decides what a toolchain ("cute_dsl", "cutlass", "host") makes of its input, apart from the input and flags."""
    if toolchain == "cute_dsl":
        # The Python version counts because the DSL reads the syntax tree.
        return versions(DSL) | {"python": ".".join(map(str, sys.version_info[:2]))}
    compiler = {"cxx": cxx().version, "machine": cxx().machine}
    return (versions(NVCC) if toolchain == "cutlass" else versions(HOST)) | compiler


def summary() -> dict:
    """Versions for the manifest."""
    return {
        "cute_dsl": versions(DSL)["nvidia-cutlass-dsl"],
        "nvcc": versions(NVCC)["nvidia-cuda-nvcc"],
        "cutlass": versions(NVCC)["nvidia-cutlass"],
        "cxx": cxx().version,
        "python": ".".join(map(str, sys.version_info[:2])),
    }
