"""What a kernel may not do: spill, use local memory, take other parameters than those declared, be for another arch, or have other
machine code than its matrix says (tensor-core instructions, waits for them, registers, narrow or generic loads in loops)."""

from __future__ import annotations

from aot.archs import ARCHS
from aot.build.cubin_info import CubinInfo, Kernel
from aot.build.params import Declared, compare_params
from aot.matrix import KernelSpec

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
    max_registers: int = 0,
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
    if max_registers and kernel.registers > max_registers:
        problems.append(f"{kernel.registers} registers a thread; the budget in its matrix.py is {max_registers}")
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


def lint_code(spec: KernelSpec, facts: dict) -> list[str]:
    """Violations of one kernel's machine code, in words. facts: of sass.facts. The first line says what is wrong, the lines after it
    which instructions do it."""
    if "unread" in facts:
        return [f"machine code cannot be checked: {facts['unread']}"]
    problems = []
    wanted = dict(spec.tensor)
    for name in sorted(wanted.keys() | facts["tensor"].keys()):
        count, meant = facts["tensor"].get(name, 0), wanted.get(name, 0)
        if count != meant:
            problems.append(
                f"{count} {name}, but its matrix.py says {meant}: tensor-core code was lost, doubled or never declared; "
                "put the kernel right, or the number in a MachineCode with its reason"
            )
    if facts["waits"]["count"] != spec.waits:
        problems.append(
            f"{facts['waits']['count']} waits for wgmma, but its matrix.py says {spec.waits}: with more, ptxas put in its own and the tensor "
            f"cores idle there; with fewer, the source has lost one{_listed(facts['waits'])}"
        )
    if facts["narrow_loads"]["count"] > spec.max_narrow_loads:
        problems.append(
            f"{facts['narrow_loads']['count']} global loads of 1 or 2 bytes in loops, allowed {spec.max_narrow_loads}: vectorise them "
            "(alignment and strides known to the compiler), or write an AllowedNarrowLoads with the reason in its matrix.py"
            + _listed(facts["narrow_loads"])
        )
    if facts["generic"]["count"]:
        problems.append(
            f"{facts['generic']['count']} generic loads or stores in loops: the compiler lost which memory a pointer is of (one read from "
            f"shared memory, one of two spaces); load through a pointer that came as a parameter{_listed(facts['generic'])}"
        )
    if facts["local"]["count"] and not spec.max_local_bytes:
        problems.append(f"{facts['local']['count']} accesses of local memory, allowed 0{_listed(facts['local'])}")
    return problems


def word(facts: dict) -> str:
    """Of a kernel that lint_code has nothing against: does it need a written exception?"""
    return "excepted" if facts["narrow_loads"]["count"] or facts["local"]["count"] else "clean"


def _listed(found: dict) -> str:
    rest = found["count"] - len(found["first"])
    return "".join(f"\n    {text}" for text in found["first"]) + (f"\n    and {rest} more" if rest else "")
