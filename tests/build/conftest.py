"""A small project with one kernel of each toolchain, built for real once, for the tests of the build itself.

So that these tests need none of the product's kernels, and a change of those does not slow them down.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from aot.build.header import read_header
from aot.build.pipeline import Request, build
from aot.matrix import ROOT, KernelSpec

HERE = Path(__file__).parent
COPIED = ("aot/capi/include/cula.h", "aot/capi/src/kernel_table.h", "aot/common/cpu/glibc_compat.h", "aot/build/glibc_compat.cpp")

PARAMS = "toy/params.def"
CUTLASS = KernelSpec("l2norm", "toy", "sm90", "bf16", "cutlass", "toy/scale.cu", PARAMS)
CUTE_DSL = KernelSpec("kda_decode", "toy", "sm90", "fp32", "cute_dsl", "toy.dsl:compile_scale", PARAMS, state="fp32", k=64, layout="vk")
CPU = KernelSpec("l2norm", "toy", "cpu", "bf16", "cpu", "cula_cpu_toy", PARAMS)
SPECS = (CUTLASS, CUTE_DSL, CPU)


def make_project(root: Path) -> Path:
    for name in COPIED:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, root / name)
    shutil.copytree(ROOT / "aot/capi/cmake", root / "aot/capi/cmake")
    shutil.copytree(HERE / "project", root / "toy")
    exports = read_header(root / "aot/capi/include/cula.h").exports
    lines = ['#include "kernel_table.h"']
    lines += [f'extern "C" __attribute__((visibility("default"))) const void* {name}() {{ return cula::kKernels; }}' for name in exports]
    lines.append('extern "C" void cula_cpu_toy(void* const*, long, long) {}')
    (root / "aot/capi/src/stub.cpp").write_text("\n".join(lines) + "\n")
    return root


def request_of(root: Path, specs=SPECS, **changes) -> Request:
    return replace(Request(specs=specs, matrix=specs, out=root / "artifacts", build_dir=root / "build", workers=2, root=root), **changes)


@pytest.fixture(scope="session")
def built(tmp_path_factory) -> Path:
    """The root of the toy project, built. Never to be changed: copy it."""
    root = make_project(tmp_path_factory.mktemp("toy"))
    assert build(request_of(root)) == 0
    return root


@pytest.fixture
def project(built, tmp_path) -> Path:
    """A copy of the built toy project, with its cache, to be changed at will."""
    root = tmp_path / "project"
    shutil.copytree(built, root)
    return root
