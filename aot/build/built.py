"""A compiled kernel with all that is known of it: the step between the cache and the library, the manifest and the checks."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

from aot.build import cache, compile_cutedsl, compile_cutlass, cubin_info, lint, toolchain
from aot.build.params import Declared
from aot.matrix import JUDGED, KernelSpec


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
    code: str = "-"  # lint's word for its machine code


class KernelKeys:
    """Keys of compiled kernels. Kernels of one op share sources, so these are followed and hashed once; an object is good for
    one build, because it does not see later changes of files."""

    STEPS = {"cute_dsl": compile_cutedsl, "cutlass": compile_cutlass}

    def __init__(self, root: Path):
        self.root = root
        self.sources = functools.cache(self._sources)
        self.tools = functools.cache(toolchain.identity)
        self.steps = {name: cache.sha256(Path(step.__file__).read_bytes()) for name, step in self.STEPS.items()}

    def _sources(self, toolchain_name: str, compile_text: str, params: str) -> dict[str, str]:
        step = self.STEPS[toolchain_name]
        return cache.source_hashes(self.root, step.source_files(compile_text, params, self.root))

    def __call__(self, spec: KernelSpec) -> tuple[str, dict[str, str]]:
        """The key, and the hashes of the sources in it. What only decides whether a kernel is fit to ship is not in the key."""
        sources = self.sources(spec.toolchain, spec.compile, spec.params)
        key = cache.key_of(
            spec={name: value for name, value in spec.fields().items() if name not in JUDGED},
            sources=sources,
            step=self.steps[spec.toolchain],
            tools=self.tools(spec.toolchain),
            flags=[*compile_cutlass.flags(spec), *compile_cutlass.PTXAS_FLAGS] if spec.toolchain == "cutlass" else [],
        )
        return key, sources


def gpu_kernel(spec: KernelSpec, declared: tuple[Declared, ...], key: str, entry: cache.Entry) -> tuple[BuiltKernel, list[str]]:
    """The kernel of a cache entry, and what makes it unfit to ship: see lint.py."""
    cubin, facts = entry.files["kernel.cubin"], entry.facts
    try:
        info = cubin_info.read_cubin(cubin)
    except cubin_info.CubinError as error:
        return BuiltKernel(spec, declared, key, cubin), [f"the compiler's output is no cubin: {error}"]
    kernel = info.kernels.get(facts["entry"])
    block = tuple(facts["block"] or (kernel and (kernel.max_block or kernel.required_block)) or (0, 0, 0))
    problems = lint.lint(
        arch=spec.arch, entry=facts["entry"], block=block, max_dynamic_smem=facts["max_dynamic_smem"],
        max_local_bytes=spec.max_local_bytes, max_registers=spec.max_registers, declared=declared, info=info,
    )  # fmt: skip
    built = BuiltKernel(
        spec, declared, key, cubin, facts["entry"], block, facts["max_dynamic_smem"], kernel, info.toolkit,
        facts.get("spill_stores", 0), facts.get("spill_loads", 0),
    )  # fmt: skip
    return built, problems
