"""What a build prints: one line a finished compile, the failures, the summary."""

from __future__ import annotations

import itertools
import sys
from collections import defaultdict
from pathlib import Path

from aot.archs import ARCHS
from aot.build.built import BuiltKernel


def say(text: str = "") -> None:
    print(text, flush=True)


def error(text: str) -> None:
    sys.stdout.flush()
    print(f"error: {text}", file=sys.stderr, flush=True)


def kernel_facts(kernel: BuiltKernel) -> str:
    info = kernel.info
    spills = f"spill {kernel.spill_stores + kernel.spill_loads} B  " if kernel.spec.toolchain == "cutlass" else ""
    return (
        f"regs {info.registers:3}  smem {(info.static_smem + kernel.max_dynamic_smem) / 1024:5.1f} KB  local {info.local_bytes} B  "
        f"{spills}cubin {len(kernel.cubin) / 1024:5.1f} KB"
    )


def progress_line(done: int, total: int, seconds: float, name: str, facts: str) -> str:
    width = len(str(total))
    return f"[{done:{width}}/{total}] {seconds:6.1f}s  {name:48}  {facts}"


def print_failures(failures: list[tuple[str, str]], logs: Path) -> None:
    """A table of what failed, grouped by message; the whole text of each goes to a file."""
    logs.mkdir(parents=True, exist_ok=True)
    groups: dict[str, list[str]] = defaultdict(list)
    texts = dict(failures)
    for name, text in failures:
        (logs / _log_name(name)).write_text(text)
        groups[_message(text)[:300]].append(name)
    say(f"\n{len(failures)} failed:")
    for message, names in groups.items():
        say(
            f"  {message}\n      {names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}; whole message: {logs / _log_name(names[0])}"
        )
        for line in _instructions(texts[names[0]], message):
            say(f"          {line}")


def _message(text: str) -> str:
    """The line that says what is wrong: the first of the most telling kind."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("$ ")]
    if lines and any(line.startswith("Traceback ") for line in lines):
        return lines[-1]
    for kind in ("undefined reference", " error: ", "error: "):
        if found := [line for line in lines if kind in line and not line.startswith(("File ", "collect2"))]:
            return found[0]
    return lines[-1] if lines else "no message"


def _instructions(text: str, message: str) -> list[str]:
    """The first of those that lint lists under a message."""
    lines = text.splitlines()
    at = next((number for number, line in enumerate(lines) if line.startswith(message)), len(lines))
    under = itertools.takewhile(lambda line: line.startswith("    0x"), lines[at + 1 :])
    return [line.strip() for line in itertools.islice(under, 3)]


def _log_name(name: str) -> str:
    return name.replace("/", "_").replace(" ", "_") + ".log"


def summary_table(kernels: list[BuiltKernel]) -> str:
    """Per arch and op: kernels, registers, local memory, bytes."""
    groups: dict[tuple[str, str], list[BuiltKernel]] = defaultdict(list)
    for kernel in kernels:
        groups[kernel.spec.arch, kernel.spec.op].append(kernel)
    rows = [("arch", "op", "toolchain", "kernels", "registers", "local B", "KB", "code")]
    for (arch, op), members in sorted(groups.items(), key=lambda item: (list(ARCHS).index(item[0][0]), item[0][1])):
        infos = [member.info for member in members if member.info]
        registers = [info.registers for info in infos]
        rows.append((
            arch, op, members[0].spec.toolchain, str(len(members)),
            f"{min(registers)}-{max(registers)}" if registers else "-",
            str(max(info.local_bytes for info in infos)) if infos else "-",
            f"{sum(len(member.cubin) for member in members) / 1024:.0f}" if infos else "-",
            f"{excepted} excepted" if (excepted := [member.code for member in members].count("excepted")) else members[0].code,
        ))  # fmt: skip
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)
