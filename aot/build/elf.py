"""A minimal ELF64 reader: sections, symbols, and the versions of imported symbols. Standard library only."""

from __future__ import annotations

import struct
from dataclasses import dataclass

SHT_SYMTAB, SHT_DYNAMIC, SHT_NOBITS, SHT_DYNSYM = 2, 6, 8, 11
SHT_GNU_VERDEF, SHT_GNU_VERNEED, SHT_GNU_VERSYM = 0x6FFFFFFD, 0x6FFFFFFE, 0x6FFFFFFF
DT_NEEDED, DT_SONAME = 1, 14
STB_LOCAL, STB_WEAK = 0, 2
SHN_UNDEF = 0


class ElfError(ValueError):
    """The bytes are no ELF file that this reader understands: cut short, damaged, or something else."""


@dataclass(frozen=True)
class Section:
    name: str
    type: int
    flags: int
    offset: int
    size: int
    link: int
    info: int


@dataclass(frozen=True)
class Symbol:
    name: str
    bind: int
    visibility: int
    section: int  # SHN_UNDEF: imported
    size: int
    version: str = ""  # of a dynamic symbol


class Elf:
    """Attributes: machine, os_abi, abi_version, flags, sections."""

    def __init__(self, data: bytes):
        self.data = data
        if data[:4] != b"\x7fELF" or len(data) < 64:
            raise ElfError("not an ELF file")
        if data[4:6] != b"\x02\x01":
            raise ElfError("not a 64-bit little-endian ELF file")
        self.os_abi, self.abi_version = data[7], data[8]
        try:
            _, self.machine, _, _, program_offset, section_offset, self.flags = struct.unpack_from("<HHIQQQI", data, 16)
            _, program_size, program_count, entry_size, count, names = struct.unpack_from("<6H", data, 52)
            if program_offset + program_size * program_count > len(data):
                raise ElfError("cut short: the program headers end past the end of the file")
            if entry_size != 64 or names >= count:
                raise ElfError("section headers are damaged")
            raw = [struct.unpack_from("<IIQQQQIIQQ", data, section_offset + 64 * i) for i in range(count)]
            for header in raw:
                if header[1] not in (0, SHT_NOBITS) and header[4] + header[5] > len(data):
                    raise ElfError("cut short: a section ends past the end of the file")
            strings = raw[names][4]
            self.sections = [Section(self._string(strings + h[0]), h[1], h[2], h[4], h[5], h[6], h[7]) for h in raw]
        except (struct.error, ValueError) as error:
            raise error if isinstance(error, ElfError) else ElfError(f"damaged ELF file: {error}") from error

    def _string(self, offset: int) -> str:
        return self.data[offset : self.data.index(b"\0", offset)].decode("utf-8", "replace")

    def section(self, name: str) -> Section | None:
        return next((section for section in self.sections if section.name == name), None)

    def bytes_of(self, section: Section) -> bytes:
        return b"" if section.type == SHT_NOBITS else self.data[section.offset : section.offset + section.size]

    def _of_type(self, kind: int) -> Section | None:
        return next((section for section in self.sections if section.type == kind), None)

    def symbols(self, kind: int = SHT_SYMTAB) -> list[Symbol]:
        """The static (SHT_SYMTAB) or dynamic (SHT_DYNSYM) symbols; empty if the file has none."""
        table = self._of_type(kind)
        if table is None:
            return []
        strings = self.sections[table.link].offset
        versions = self._symbol_versions() if kind == SHT_DYNSYM else {}
        found = []
        for i in range(table.size // 24):
            name, info, other, section, _, size = struct.unpack_from("<IBBHQQ", self.data, table.offset + 24 * i)
            found.append(Symbol(self._string(strings + name), info >> 4, other & 3, section, size, versions.get(i, "")))
        return found

    def _symbol_versions(self) -> dict[int, str]:
        versym = self._of_type(SHT_GNU_VERSYM)
        if versym is None:
            return {}
        names = {index: name for _, index, name in self.needed_versions()} | dict(self._defined_versions())
        indexes = struct.unpack_from(f"<{versym.size // 2}H", self.data, versym.offset)
        return {i: names.get(index & 0x7FFF, "") for i, index in enumerate(indexes)}

    def _defined_versions(self) -> list[tuple[int, str]]:
        section = self._of_type(SHT_GNU_VERDEF)
        found, offset = [], section.offset if section else 0
        for _ in range(section.info if section else 0):
            _, _, index, _, _, aux, following = struct.unpack_from("<HHHHIII", self.data, offset)
            (name,) = struct.unpack_from("<I", self.data, offset + aux)
            found.append((index, self._string(self.sections[section.link].offset + name)))
            offset += following
        return found

    def needed_versions(self) -> list[tuple[str, int, str]]:
        """(library, version index, version name), for example ("libc.so.6", 3, "GLIBC_2.14"), that the file asks for."""
        section = self._of_type(SHT_GNU_VERNEED)
        found, offset = [], section.offset if section else 0
        strings = self.sections[section.link].offset if section else 0
        for _ in range(section.info if section else 0):
            _, count, library, aux, following = struct.unpack_from("<HHIII", self.data, offset)
            at = offset + aux
            for _ in range(count):
                _, _, index, name, next_aux = struct.unpack_from("<IHHII", self.data, at)
                found.append((self._string(strings + library), index, self._string(strings + name)))
                at += next_aux
            offset += following
        return found

    def dynamic(self, tag: int) -> list[str]:
        """Strings of dynamic entries with this tag: DT_NEEDED, DT_SONAME."""
        section = self._of_type(SHT_DYNAMIC)
        if section is None:
            return []
        strings = self.sections[section.link].offset
        entries = struct.iter_unpack("<QQ", self.bytes_of(section))
        return [self._string(strings + value) for found, value in entries if found == tag]
