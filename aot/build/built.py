"""A compiled kernel with all that is known of it: the step between the cache and the library, the manifest and the checks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from aot.build import cache, compile_cutedsl, compile_cutlass, cubin_info, lint, toolchain
from aot.build.params import Declared, read_params
from aot.matrix import KernelSpec


@dataclass(frozen=True)
class BuiltKernel:
    spec: KernelSpec
    declared: tuple[Declared, ...]
    key: str = ""  # of the cache entry; "" for the CPU, whose code is in the library
    cubin: bytes = b""
    entry: str = ""
    block: tuple[int, int, int] = (0, 0, 0)
    max_dynamic_smem: int = 0
    info: cubin_info.Kernel | None = None
    toolkit: int = 0
    spill_stores: int = 0
    spill_loads: int = 0


def kernel_key(spec: KernelSpec, root: Path) -> str:
    """Key of the compiled kernel. What only decides whether a kernel is fit to ship (max_local_bytes) is not in it."""
    step = {"cute_dsl": compile_cutedsl, "cutlass": compile_cutlass}[spec.toolchain]
    fields = {name: value for name, value in spec.fields().items() if name != "max_local_bytes"}
    return cache.key_of(
        spec=fields,
        sources=cache.source_hashes(root, step.source_files(spec, root)),
        step=cache.sha256(Path(step.__file__).read_bytes()),
        tools=toolchain.identity(spec.toolchain),
        flags=[*compile_cutlass.flags(spec), *compile_cutlass.PTXAS_FLAGS] if spec.toolchain == "cutlass" else [],
    )


def cpu_kernel(spec: KernelSpec, root: Path) -> BuiltKernel:
    return BuiltKernel(spec, read_params(root / spec.params))


def gpu_kernel(spec: KernelSpec, root: Path, key: str, entry: cache.Entry) -> tuple[BuiltKernel, list[str]]:
    """The kernel of a cache entry, and what makes it unfit to ship: see lint.py."""
    cubin, facts = entry.files["kernel.cubin"], entry.facts
    declared = read_params(root / spec.params)
    try:
        info = cubin_info.read_cubin(cubin)
    except cubin_info.CubinError as error:
        return BuiltKernel(spec, declared, key, cubin), [f"the compiler's output is no cubin: {error}"]
    kernel = info.kernels.get(facts["entry"])
    block = tuple(facts["block"] or (kernel and (kernel.max_block or kernel.required_block)) or (0, 0, 0))
    problems = lint.lint(
        arch=spec.arch, entry=facts["entry"], block=block, max_dynamic_smem=facts["max_dynamic_smem"],
        max_local_bytes=spec.max_local_bytes, declared=declared, info=info,
    )  # fmt: skip
    built = BuiltKernel(
        spec, declared, key, cubin, facts["entry"], block, facts["max_dynamic_smem"], kernel, info.toolkit,
        facts.get("spill_stores", 0), facts.get("spill_loads", 0),
    )  # fmt: skip
    return built, problems
