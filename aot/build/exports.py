"""What libcula.so shows to and asks of the system: exported symbols, glibc versions, needed libraries."""

from __future__ import annotations

import re

from aot.build.elf import DT_NEEDED, SHN_UNDEF, SHT_DYNSYM, STB_LOCAL, Elf

GLIBC = (2, 28)  # RHEL 8, Debian 10, Ubuntu 18.10 and all later: the manylinux_2_28 level
LIBRARIES = {"libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2", "ld-linux-x86-64.so.2"}


def exported_symbols(elf: Elf) -> list[str]:
    """Names that other objects can bind to; the version definition itself (CULA_0) is not counted."""
    symbols = [s for s in elf.symbols(SHT_DYNSYM) if s.section != SHN_UNDEF and s.bind != STB_LOCAL and s.name]
    return sorted(s.name for s in symbols if not re.fullmatch(r"CULA_\d+", s.name))


def check_exports(elf: Elf, wanted: tuple[str, ...]) -> list[str]:
    have = exported_symbols(elf)
    problems = [f"exports {name}, which cula.h does not declare" for name in have if name not in wanted]
    return problems + [f"does not export {name}, which cula.h declares" for name in wanted if name not in have]


def check_system(elf: Elf) -> list[str]:
    """Symbols newer than GLIBC, and libraries beyond LIBRARIES."""
    problems = []
    users: dict[str, list[str]] = {}
    for symbol in elf.symbols(SHT_DYNSYM):
        if symbol.section == SHN_UNDEF and symbol.version:
            users.setdefault(symbol.version, []).append(symbol.name)
    limit = ".".join(map(str, GLIBC))
    for library, _, version in elf.needed_versions():
        number = re.fullmatch(r"GLIBC_(\d+)\.(\d+)(?:\.\d+)?", version)
        if number and (int(number[1]), int(number[2])) <= GLIBC:
            continue
        names = ", ".join(sorted(users.get(version, []))) or "the file format itself"
        problems.append(f"needs {version} of {library} for {names}; the oldest supported glibc is {limit}")
    problems += [f"needs {name}; allowed: {', '.join(sorted(LIBRARIES))}" for name in elf.dynamic(DT_NEEDED) if name not in LIBRARIES]
    return problems
