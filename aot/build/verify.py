"""Checks an artifact folder offline: every file, kernel and symbol against the manifest, the matrix and cula.h.

A violation has a kind, so that tests and tools can tell them apart:
    missing unknown truncated changed arch entry params resources registers spills embedded matrix exports glibc size manifest
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

from aot.archs import ARCHS
from aot.build import assemble, exports, lint, sass
from aot.build.cache import sha256
from aot.build.cubin_info import CubinError, read_cubin
from aot.build.elf import Elf, ElfError
from aot.build.header import HeaderError, read_header
from aot.build.manifest import ManifestError, listed_files, read_manifest
from aot.build.params import Declared, ParamsError, placed, read_params
from aot.matrix import AXES, KernelSpec

SIZE_LIMIT = 64 << 20  # bytes of libcula.so per GPU arch in it


@dataclass(frozen=True)
class Violation:
    kind: str
    where: str  # path or kernel id
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.where}: {self.text}"


def verify(artifacts: Path, specs: tuple[KernelSpec, ...], root: Path, allow_partial: bool = False) -> list[Violation]:
    """All violations; empty when the folder is what its manifest, the matrix (specs) and the params.def files say."""
    try:
        manifest = read_manifest(artifacts)
        listed = listed_files(manifest)
        kernels = {kernel["id"]: kernel for kernel in manifest["kernels"]}
        by_id = {spec.kernel_id: spec for spec in specs}
        declared = functools.cache(lambda path: read_params(root / path))
        return [
            *_check_files(artifacts, listed),
            *_check_matrix(manifest, kernels, by_id, allow_partial),
            *(v for kernel in manifest["kernels"] for v in _check_kernel(artifacts, kernel, by_id.get(kernel["id"]), declared)),
            *_check_library(artifacts, manifest),
        ]
    except ManifestError as error:
        return [Violation("manifest", "manifest.json", str(error))]
    except (KeyError, TypeError, AttributeError) as error:
        return [Violation("manifest", "manifest.json", f"has not the fields of schema 1: {type(error).__name__} {error}")]


def _check_files(artifacts: Path, listed: dict[str, dict]):
    present = set(assemble.files_in(artifacts))
    if assemble.MARKER in present:
        yield Violation("unknown", assemble.MARKER, "a build was interrupted while it wrote this folder: build again")
    for path in sorted(set(listed) - present):
        yield Violation("missing", path, "listed in manifest.json, but not there")
    for path in sorted(present - set(listed) - {"manifest.json", assemble.MARKER}):
        yield Violation("unknown", path, "there, but not listed in manifest.json")
    for path in sorted(set(listed) & present):
        data, entry = (artifacts / path).read_bytes(), listed[path]
        if (artifacts / path).is_symlink():
            yield Violation("unknown", path, "is a symbolic link")
        elif len(data) < entry["size"]:
            yield Violation("truncated", path, f"has {len(data)} bytes, manifest.json says {entry['size']}")
        elif sha256(data) != entry["sha256"]:
            yield Violation("changed", path, "has another sha256 than manifest.json says")


def _check_matrix(manifest: dict, kernels: dict, by_id: dict[str, KernelSpec], allow_partial: bool):
    if len(kernels) != len(manifest["kernels"]):
        yield Violation("matrix", "manifest.json", "lists a kernel twice")
    wanted = {name: spec for name, spec in by_id.items() if spec.arch in manifest["archs"]}
    for name in sorted(set(kernels) - set(wanted)):
        yield Violation("matrix", name, "is in manifest.json, but not in the matrix")
    if not manifest["complete"] and not allow_partial:
        yield Violation("matrix", "manifest.json", "is of a partial build (complete: false)")
    if manifest["complete"]:
        for name in sorted(set(wanted) - set(kernels)):
            yield Violation("matrix", name, "is in the matrix, but not in manifest.json")
    for name in sorted(set(kernels) & set(wanted)):
        differ = [axis for axis in AXES if kernels[name][axis] != wanted[name].axes[axis]]
        if differ:
            yield Violation("matrix", name, f"has other values of {', '.join(differ)} in manifest.json than in the matrix")


def _check_kernel(artifacts: Path, kernel: dict, spec: KernelSpec | None, read_declared):
    name = kernel["id"]
    stated = tuple(Declared(p["name"], p["kind"], p["offset"], p["size"]) for p in kernel["params"])
    info = found = None
    if "cubin" in kernel:
        path = artifacts / kernel["cubin"]["file"]
        if not path.is_file():
            return  # reported as missing
        try:
            info = read_cubin(path.read_bytes())
        except CubinError as error:
            yield Violation("changed", kernel["cubin"]["file"], f"is no whole cubin: {error}")
            return
        found = info.kernels.get(kernel["entry_symbol"])
    elif kernel["arch"] != "cpu":
        yield Violation("manifest", name, "has no cubin, and is not of the cpu arch")
        return
    if spec is not None:
        try:
            if stated != placed(read_declared(spec.params), found.param_base if found else 0):
                yield Violation("params", name, f"manifest.json lists other parameters than {spec.params}")
        except (ParamsError, OSError) as error:
            yield Violation("params", name, str(error))
        if "limits" in kernel and kernel["limits"]["max_local_bytes"] != spec.max_local_bytes:
            yield Violation("spills", name, "manifest.json allows other local memory than the matrix")
    if info is None:
        return
    if info.sm != ARCHS[kernel["arch"]].number:
        yield Violation("arch", name, f"compiled for sm_{info.sm}, but the arch is {kernel['arch']}")
    if found is None:
        yield Violation("entry", name, f"{kernel['entry_symbol']} is not in the cubin, which has: {', '.join(info.kernels)}")
        return
    for text in lint.compare_params(stated, found):
        yield Violation("params", name, text)
    limit = spec.max_local_bytes if spec else 0
    if found.local_bytes > limit:
        yield Violation("spills", name, f"{found.local_bytes} bytes of local memory a thread, allowed {limit}")
    if spec and spec.max_registers and found.registers > spec.max_registers:
        yield Violation("registers", name, f"{found.registers} registers a thread; the budget in the matrix is {spec.max_registers}")
    resources = kernel["resources"]
    for key, value in (("registers", found.registers), ("static_smem", found.static_smem), ("local_bytes", found.local_bytes)):
        if resources[key] != value:
            yield Violation("resources", name, f"manifest.json says {key} {resources[key]}, the cubin {value}")


def _check_library(artifacts: Path, manifest: dict):
    path = manifest["library"]["file"]
    if not (artifacts / path).is_file():
        return  # reported as missing
    data = (artifacts / path).read_bytes()
    try:
        elf = Elf(data)
        problems = exports.check_system(elf)
        header = read_header(artifacts / "include/cula.h")
        for text in exports.check_exports(elf, header.exports):
            yield Violation("exports", path, text)
    except (ElfError, ValueError, IndexError) as error:
        kind = "manifest" if isinstance(error, HeaderError) else "changed"
        yield Violation(kind, path, f"cannot be read: {error}")
        return
    except OSError:
        return  # include/cula.h is reported as missing
    for text in problems:
        yield Violation("glibc", path, text)
    for kernel in manifest["kernels"]:
        cubin = artifacts / kernel["cubin"]["file"] if "cubin" in kernel else None
        if cubin and cubin.is_file() and data.find(cubin.read_bytes()) < 0:
            yield Violation("embedded", kernel["id"], f"{path} does not hold this cubin")
    limit = SIZE_LIMIT * max(1, len([arch for arch in manifest["archs"] if arch != "cpu"]))
    if len(data) > limit:
        yield Violation("size", path, f"has {len(data) / 2**20:.1f} MB, allowed {limit / 2**20:.0f} MB for its archs")


_EXPLAINED = {"waits": "waits", "narrow_loads": "narrow loads in loops", "generic": "generic", "local": "local"}


def lint_artifacts(artifacts: Path, specs: tuple[KernelSpec, ...], explain: bool = False) -> tuple[list[str], int]:
    """lint.lint_code for the kernels of an artifact folder: lines to print, and how many kernels are refused. explain: a line for each.
    Raises ManifestError, SassError, ToolError."""
    by_id = {spec.kernel_id: spec for spec in specs}
    kernels = [kernel for kernel in read_manifest(artifacts)["kernels"] if "cubin" in kernel]
    if unknown := [kernel["id"] for kernel in kernels if kernel["id"] not in by_id]:
        raise ManifestError(f"{unknown[0]} is in {artifacts}, but not in the matrix: build again")
    try:
        cubins = [(artifacts / kernel["cubin"]["file"]).read_bytes() for kernel in kernels]
    except OSError as error:
        raise ManifestError(f"{error}: build again") from None
    lines, refused = [], 0
    found = sass.read_facts([(kernel["arch"], cubin, kernel["entry_symbol"]) for kernel, cubin in zip(kernels, cubins)])
    for kernel, facts in zip(kernels, found):
        problems = lint.lint_code(by_id[kernel["id"]], facts)
        refused += bool(problems)
        lines += [f"{kernel['id']}: {problem}" for problem in problems]
        if explain and "unread" not in facts:
            tensor = ", ".join(f"{count} {name}" for name, count in facts["tensor"].items()) or "no tensor core"
            numbers = ", ".join(f"{facts[key]['count']} {text}" for key, text in _EXPLAINED.items())
            lines.append(f"{kernel['id']:50}  {tensor}, {numbers}, {kernel['resources']['registers']} registers")
    return lines, refused
