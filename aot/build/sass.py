"""What the machine code of kernels does, from NVIDIA's disassembler: tensor-core instructions, waits for them, loads in loops.

nvdisasm takes 0.3 s to start and 10 ms for a kernel, so that all kernels of an arch are one run: their code one after the other, as a raw
binary, in which every branch has its target as an address. An instruction is in a loop when control can come back to it. That a branch
goes backward does not say so: ptxas puts code for diverged warps behind a kernel's end, from where it jumps back.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from aot.archs import ARCHS
from aot.build import toolchain
from aot.build.cache import Cache, key_of, sha256
from aot.build.elf import Elf

_LINE = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:(@!?U?P[0-9T]+)\s+)?([A-Z][A-Z0-9_.]*)\s*([^;]*);", re.M)
_ADDRESS = re.compile(r"0x[0-9a-f]+")
_TENSOR = re.compile(r"[A-Z]*MMA")  # HGMMA, HMMA, IMMA, UTCHMMA, ...; HFMA2.MMA is a move
_INDIRECT = ("BRX", "BRXU", "JMX", "JMXU", "JMP", "CALL.ABS")
SHOWN = 8  # instructions of a rule that a report keeps: a message names these, and the number of all


class SassError(RuntimeError):
    """The code cannot be disassembled, or has what this reader does not follow. The message says what."""


@dataclass(frozen=True)
class Instruction:
    address: int
    guard: str  # "@!P0", "" for none
    name: str  # "LDG.E.U16"
    operands: str

    @property
    def root(self) -> str:
        return self.name.partition(".")[0]

    def __str__(self) -> str:
        return f"0x{self.address:04x} {self.guard}{' ' if self.guard else ''}{self.name} {self.operands}".rstrip()


def parse(text: str) -> list[Instruction]:
    return [Instruction(int(at, 16), guard, name, operands.strip()) for at, guard, name, operands in _LINE.findall(text)]


def disassemble(codes: Iterable[bytes], arch: str) -> list[list[Instruction]]:
    """The instructions of each code, addresses from its start. Raises SassError, ToolError."""
    codes = list(codes)
    target = ARCHS[arch].target.replace("sm_", "SM")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "code.bin")
        path.write_bytes(b"".join(codes))
        run = subprocess.run([toolchain.nvdisasm(), "-b", target, path], capture_output=True, text=True)
    if run.returncode:
        raise SassError(f"nvdisasm -b {target} failed with exit code {run.returncode}: {run.stderr.strip()[:300]}")
    found = parse(run.stdout)
    if [instruction.address for instruction in found] != list(range(0, sum(map(len, codes)), 16)):
        raise SassError(f"nvdisasm -b {target} printed {len(found)} instructions of {sum(map(len, codes)) / 16:g}")
    kernels, first = [], 0
    for code in codes:
        count, base = len(code) // 16, first * 16
        kernels.append([
            Instruction(i.address - base, i.guard, i.name, _moved(i, base)) for i in found[first : first + count]
        ])  # fmt: skip
        first += count
    return kernels


def _moved(instruction: Instruction, base: int) -> str:
    """Operands with the target of a branch counted from the kernel's start."""
    if base and instruction.root in ("BRA", "CALL", "BSSY", "WARPSYNC"):
        return _ADDRESS.sub(lambda match: hex(int(match[0], 16) - base), instruction.operands)
    return instruction.operands


def _successors(instructions: list[Instruction]) -> tuple[list[list[int]], list[tuple[int, int]]]:
    """Where control goes after each instruction, by index; and calls, (index of the call, index of the function)."""
    index = {instruction.address: number for number, instruction in enumerate(instructions)}
    edges, calls = [], []
    for number, i in enumerate(instructions):
        after = [number + 1] if number + 1 < len(instructions) else []
        if i.name.startswith(_INDIRECT):
            raise SassError(f"{i}: a branch to a computed address, so that loops cannot be told; write the switch as ifs")
        if i.root in ("BRA", "CALL"):
            targets = _ADDRESS.findall(i.operands)
            if len(targets) != 1 or int(targets[0], 16) not in index:
                raise SassError(f"{i}: leaves the kernel's own code")
            target = index[int(targets[0], 16)]
            if i.root == "CALL":
                calls.append((number, target))
            elif not i.guard and i.name == "BRA" and i.operands == targets[0]:
                after = [target]
            else:
                after = [*after, target]
        elif i.root in ("EXIT", "RET") and not i.guard:
            after = []
        edges.append(after)
    return edges, calls


def in_loops(instructions: list[Instruction]) -> set[int]:
    """Indices of the instructions to which control can come back: the cycles of the control flow (Tarjan's strongly connected
    components), and all of a function that is called in one."""
    edges, calls = _successors(instructions)
    found: set[int] = set()
    order, low, stack, on_stack = [-1] * len(edges), [0] * len(edges), [], [False] * len(edges)
    clock = 0
    for start in (0, *(target for _, target in calls)):
        if not edges or order[start] >= 0:
            continue
        order[start] = low[start] = clock
        clock += 1
        stack.append(start)
        on_stack[start] = True
        path = [(start, iter(edges[start]))]
        while path:
            node, rest = path[-1]
            for other in rest:
                if order[other] < 0:
                    order[other] = low[other] = clock
                    clock += 1
                    stack.append(other)
                    on_stack[other] = True
                    path.append((other, iter(edges[other])))
                    break
                if on_stack[other]:
                    low[node] = min(low[node], order[other])
            else:
                path.pop()
                if path:
                    low[path[-1][0]] = min(low[path[-1][0]], low[node])
                if low[node] == order[node]:
                    members = []
                    while True:
                        member = stack.pop()
                        on_stack[member] = False
                        members.append(member)
                        if member == node:
                            break
                    if len(members) > 1 or node in edges[node]:
                        found.update(members)
    entered: set[int] = set()
    while waiting := [target for at, target in calls if at in found and target not in entered]:
        entered.update(waiting)
        while waiting:
            node = waiting.pop()
            found.add(node)
            waiting += [other for other in edges[node] if other not in found]
    return found


def facts(instructions: list[Instruction]) -> dict:
    """What the rules of lint.py look at, as JSON: kept in the build cache."""
    looped = in_loops(instructions)
    tensor = Counter(i.root for i in instructions if _TENSOR.fullmatch(i.root))
    in_loop = [i for number, i in enumerate(instructions) if number in looped]

    def listed(chosen: list[Instruction]) -> dict:
        return {"count": len(chosen), "first": [str(i) for i in chosen[:SHOWN]]}

    return {
        "tensor": dict(sorted(tensor.items())),
        "waits": listed([i for i in instructions if i.name.startswith("WARPGROUP.DEPBAR")]),
        "local": listed([i for i in instructions if i.root in ("LDL", "STL")]),
        "narrow_loads": listed([i for i in in_loop if i.root == "LDG" and {"U16", "S16", "U8", "S8"} & set(i.name.split("."))]),
        "generic": listed([i for i in in_loop if i.root in ("LD", "ST")]),
    }


def code_of(cubin: bytes, entry: str) -> bytes:
    """The machine code of a kernel. Raises SassError if a part of it is elsewhere in the cubin."""
    elf = Elf(cubin)
    texts = [section for section in elf.sections if section.name.startswith(".text.")]
    if [section.name for section in texts] != [f".text.{entry}"]:
        names = ", ".join(section.name for section in texts)
        raise SassError(f"code in other sections than .text.{entry}: {names}; functions that it calls must be static or inline")
    return elf.bytes_of(texts[0])


def read_facts(kernels: list[tuple[str, bytes, str]], cache: Cache | None = None) -> list[dict]:
    """Facts of kernels, each (arch, cubin, entry), from the cache where it has them. {"unread": why} for code that cannot be
    followed. Raises SassError, ToolError."""
    tool = toolchain.versions(toolchain.NVDISASM) if kernels else {}
    reader = sha256(Path(__file__).read_bytes())
    keys = [key_of(what="machine code", reader=reader, tool=tool, cubin=sha256(cubin), entry=entry) for _, cubin, entry in kernels]
    found: dict[str, dict] = {}
    for key in set(keys) if cache else ():
        if entry := cache.load(key):
            found[key] = entry.facts
    for arch in sorted({arch for arch, _, _ in kernels}):
        codes: dict[str, bytes] = {}
        for key, (of, cubin, entry) in zip(keys, kernels):
            if of == arch and key not in found:
                try:
                    codes[key] = code_of(cubin, entry)
                except SassError as error:
                    found[key] = {"unread": str(error)}
        for key, instructions in zip(codes, disassemble(codes.values(), arch) if codes else []):
            try:
                found[key] = facts(instructions)
            except SassError as error:
                found[key] = {"unread": str(error)}
            if cache:
                cache.store(key, {}, found[key])
    return [found[key] for key in keys]
