"""What the build needs to know of cula.h: version, numbers of ops and archs, exported functions. Read from the header, so that
they stand in one place."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path


class HeaderError(ValueError):
    """cula.h lacks something that the build needs."""


@dataclass(frozen=True)
class Header:
    version: str  # "0.1.0"
    major: int
    minor: int
    ops: dict[str, int]  # "kda_decode" -> 1
    archs: dict[str, int]  # "sm90" -> 90; without DEVICE
    exports: tuple[str, ...]  # sorted


def read_header(path: Path) -> Header:
    text = path.read_text(encoding="utf-8")
    version = dict(re.findall(r"^#define CULA_VERSION_(MAJOR|MINOR|PATCH) (\d+)$", text, re.M))
    if len(version) != 3:
        raise HeaderError(f"{path}: CULA_VERSION_MAJOR, _MINOR, _PATCH are not all there")
    code = re.sub(r"/\*.*?\*/", "", text, flags=re.S)
    ops = {name.lower(): int(number) for name, number in re.findall(r"\bCULA_OP_(\w+) = (\d+)", code)}
    archs = {name.lower(): int(number) for name, number in re.findall(r"\bCULA_ARCH_(\w+) = (\d+)", code)}
    exports = re.findall(r"^CULA_API [^;(]*?\b(cula_\w+)\(", code, re.M)
    if not ops or not archs or not exports:
        raise HeaderError(f"{path}: no ops, archs or CULA_API functions found")
    archs.pop("device", None)
    return Header(
        ".".join(version[part] for part in ("MAJOR", "MINOR", "PATCH")), int(version["MAJOR"]), int(version["MINOR"]),
        ops, archs, tuple(sorted(exports)),
    )  # fmt: skip
