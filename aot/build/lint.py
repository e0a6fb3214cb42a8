"""What a kernel may not do: spill, use local memory, take other parameters than those declared, or be for another arch."""

from __future__ import annotations

from aot.archs import ARCHS
from aot.build.cubin_info import CubinInfo, Kernel
from aot.build.params import Declared, compare_params

REGISTERS = 65536  # of a multiprocessor


def lint(
    *,
    arch: str,
    entry: str,
    block: tuple[int, int, int],
    max_dynamic_smem: int,
    max_local_bytes: int,
    declared: tuple[Declared, ...],
    info: CubinInfo,
) -> list[str]:
    """Violations of one compiled kernel, in words; empty when it is fit to ship. block: that the plan launches, (0, 0, 0) if
    the plan chooses it within __launch_bounds__."""
    record = ARCHS[arch]
    kernel: Kernel | None = info.kernels.get(entry)
    if kernel is None:
        return [f"entry {entry!r} is not in the cubin, which has: {', '.join(info.kernels)}"]
    problems = []
    if info.sm != record.number:
        problems.append(f"compiled for sm_{info.sm}, but the arch is {arch}")
    if len(info.kernels) > 1:
        problems.append(f"more than one kernel in the cubin: {', '.join(info.kernels)}")
    if kernel.local_bytes > max_local_bytes:
        problems.append(
            f"{kernel.local_bytes} bytes of local memory a thread (spills or local arrays), allowed {max_local_bytes}; "
            "use fewer registers, or write an AllowedLocalMemory with the reason in its matrix.py"
        )
    if kernel.static_smem + max_dynamic_smem > record.smem_limit:
        problems.append(f"{kernel.static_smem} + {max_dynamic_smem} bytes of shared memory; {arch} has {record.smem_limit}")
    threads = block[0] * block[1] * block[2]
    if kernel.required_block and threads and tuple(block) != kernel.required_block:
        problems.append(f"compiled for block {kernel.required_block}, but declared {tuple(block)}")
    limit = kernel.max_block or kernel.required_block
    if limit is None and kernel.register_cap < 255 and threads:  # __maxnreg__, which nvcc takes in the place of __launch_bounds__ only
        if kernel.registers * threads > REGISTERS:
            problems.append(f"{kernel.registers} registers of {threads} threads; a multiprocessor has {REGISTERS}")
    elif limit is None:
        problems.append("no __launch_bounds__: the compiler had to assume 1024 threads")
    elif threads > limit[0] * limit[1] * limit[2]:
        problems.append(f"declared block {tuple(block)} has more threads than the {limit} it was compiled for")
    return problems + compare_params(declared, kernel)
