"""Compiles one CuTe DSL kernel to a cubin. Runs in a worker process that sees no GPU."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

from aot.build import sources
from aot.build.job import Compiled, CompileError
from aot.matrix import KernelSpec


def source_files(compile_text: str, params: str, root: Path) -> list[Path]:
    """The compile module with what it imports, and the params.def, which it reads as data."""
    module, _, _ = compile_text.partition(":")
    return sources.import_closure(module, root) + [root / params]


def _isolate() -> None:
    """Before the DSL is imported: its output must depend on nothing of the environment, and its own cache of earlier results
    is not ours to trust."""
    for name in [name for name in os.environ if name.startswith(("CUTE_DSL_", "CUTLASS_"))]:
        del os.environ[name]
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["CUTE_DSL_DISABLE_FILE_CACHING"] = "1"


def compile_kernel(spec: KernelSpec, root: Path, workdir: Path) -> Compiled:
    if "cutlass" not in sys.modules:
        _isolate()
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    os.chdir(workdir)  # the DSL drops its .ptx and .cubin into the current directory, always under the same names
    module, _, function = spec.compile.partition(":")
    before = set(sys.modules)
    result = getattr(importlib.import_module(module), function)(spec, str(workdir))
    read = [getattr(sys.modules[name], "__file__", None) for name in set(sys.modules) - before]
    if extra := sources.undeclared(
        [path for path in read if path], [*source_files(spec.compile, spec.params, root), *root.glob("aot/build/*.py")], root
    ):
        raise CompileError(f"imported {', '.join(extra)}, which its cache key does not cover: import it by a plain import statement")
    if unexpected := set(result) ^ {"cubin", "entry", "block", "max_dynamic_smem"}:
        raise CompileError(
            f"{spec.compile} returned other keys than cubin, entry, block, max_dynamic_smem: {', '.join(sorted(unexpected))}"
        )
    block = tuple(int(extent) for extent in result["block"])
    return Compiled(
        {"kernel.cubin": bytes(result["cubin"])},
        {"entry": result["entry"], "block": block, "max_dynamic_smem": int(result["max_dynamic_smem"])},
    )
