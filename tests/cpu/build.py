"""Compiles the CPU kernels with the test harness, or the benchmark, as the build of libcula.so does it.

python -m tests.cpu.build FOLDER [harness|bench] [extra compiler flags ...]
"""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path

from aot.build import host

ROOT = Path(__file__).resolve().parents[2]
LEVELS = host.ISA_FLAGS if platform.machine() == "x86_64" else {"base": ()}


def library_sources() -> list[str]:
    found = [*ROOT.glob("aot/common/cpu/*.cpp"), *ROOT.glob("aot/ops/*/cpu_*.cpp")]
    return sorted(path.relative_to(ROOT).as_posix() for path in found)


def compile_source(source: str, folder: Path, extra: tuple[str, ...] = ()) -> list[Path]:
    """Objects of one source: one a level if its name says so."""
    stem = source.replace("/", "_").removesuffix(".cpp")
    isa = Path(source).name.startswith("cpu_isa_")
    objects = []
    for level, flags in LEVELS.items() if isa else (("", ()),):
        objects.append(folder / f"{stem}{level and '_' + level}.o")
        words = [*shlex.split(os.environ.get("CXX", "g++")), *host.FLAGS, "-Werror", *flags, "-include", host.PRELUDE, *extra]
        words += [f"-I{folder}" for folder in host.include_dirs(ROOT)]
        words += [f"-DCULA_ISA={level}"] if isa else []
        subprocess.run([*words, "-c", source, "-o", objects[-1]], cwd=ROOT, check=True)
    return objects


def build(folder: Path, target: str = "harness", extra: tuple[str, ...] = ()) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    own = {"harness": ["tests/cpu/harness.cpp", "tests/cpu/cpu_isa_math.cpp"], "bench": ["tests/cpu/bench_decode.cpp"]}[target]
    objects = [o for source in (*library_sources(), *own) for o in compile_source(source, folder, extra)]
    output = folder / ("harness.so" if target == "harness" else "bench")
    link = ["-shared"] if target == "harness" else []
    subprocess.run([*shlex.split(os.environ.get("CXX", "g++")), *link, *extra, *objects, "-o", output, "-lm"], check=True)
    return output


if __name__ == "__main__":
    print(build(Path(sys.argv[1]), *(sys.argv[2:3] or ["harness"]), tuple(sys.argv[3:])))
