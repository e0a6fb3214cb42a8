"""Compiles one CUDA C++ kernel to a cubin: nvcc to PTX, then ptxas.

In two steps because nvcc names internal symbols by a hash of the absolute path of the source, so that the same source compiled
in two folders gives two cubins, even when nothing but CuTe's own constants has internal linkage. In the PTX these names
are text, and are replaced by ones without the hash; what ptxas makes of it is then the same in every folder (measured: nvcc's
-frandom-seed changes nothing; one fixed build directory would do too, but two builds could not run at a time).
"""

from __future__ import annotations

import re
from pathlib import Path

from aot.archs import ARCHS
from aot.build import sources, toolchain
from aot.build.job import Compiled, CompileError, run_tool
from aot.matrix import KernelSpec

FLAGS = ("-std=c++17", "-O3", "--expt-relaxed-constexpr", "-ptx")
PTXAS_FLAGS = ("-m64", "-O3", "-v")

# _INTERNAL_<hash>_<length>_<file>_cu_<hash>, and the same after _GLOBAL__N__
_MODULE_ID = re.compile(r"(_INTERNAL_|_GLOBAL__N__)[0-9a-f]{8}_(\d+_\w+?_cu)_[0-9a-f]{8}")


def source_files(compile_text: str, params: str, root: Path) -> list[Path]:
    return sources.include_closure(root / compile_text.partition(":")[0], (root,)) + [root / params]


def flags(spec: KernelSpec) -> list[str]:
    arch = ARCHS[spec.arch]
    return [
        *FLAGS,
        f"-gencode=arch={arch.compute},code={arch.compute}",
        f"-DCULA_IO_{spec.io.upper()}",
        *(f"-D{name}" for name in spec.defines),
    ]


def entry(spec: KernelSpec) -> str:
    return spec.compile.partition(":")[2] or f"cula_{spec.op}"


def compile_kernel(spec: KernelSpec, root: Path, workdir: Path) -> Compiled:
    source = root / spec.compile.partition(":")[0]
    ptx, cubin, depends = (workdir / f"kernel.{suffix}" for suffix in ("ptx", "cubin", "d"))
    run_tool(
        toolchain.nvcc(), *flags(spec), "-ccbin", toolchain.cxx().path, "-I", root, "-I", toolchain.cutlass_include(),
        "-MD", "-MF", depends, source, "-o", ptx, cwd=workdir,
    )  # fmt: skip
    if extra := sources.undeclared(sources.depfile_paths(depends.read_text()), source_files(spec.compile, spec.params, root), root):
        raise CompileError(f'read {", ".join(extra)}, which its cache key does not cover: write #include "path from the root"')
    ptx.write_text(_MODULE_ID.sub(r"\g<1>00000000_\2_00000000", ptx.read_text()))
    log = run_tool(toolchain.ptxas(), *PTXAS_FLAGS, f"-arch={ARCHS[spec.arch].target}", ptx, "-o", cubin, cwd=workdir)
    if remarks := [line for line in log.splitlines() if "(C75" in line]:
        raise CompileError("error: wgmma serialised or with waits of ptxas's own:\n" + "\n".join(remarks))
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    return Compiled(
        {"kernel.cubin": cubin.read_bytes()},
        {
            "entry": entry(spec),
            "block": spec.block or None,  # None: the plan's choice within __launch_bounds__, which the cubin states
            "max_dynamic_smem": spec.dynamic_smem,
            "spill_stores": max((int(stores) for stores, _ in spills), default=0),
            "spill_loads": max((int(loads) for _, loads in spills), default=0),
        },
    )
