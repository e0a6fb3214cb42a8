"""manifest.json: what an artifact folder holds. Written here, read here by verify, and on its own by the loader.

Sorted keys, no dates and no commit: the same sources and tools give the same bytes in every folder. Times, commit and
machine are in build/report.json, which is not shipped.
"""

from __future__ import annotations

import json
from pathlib import Path, PurePosixPath

from aot.build import toolchain
from aot.build.built import BuiltKernel
from aot.build.cache import key_of, sha256
from aot.build.elf import Elf
from aot.build.exports import exported_symbols
from aot.build.header import Header
from aot.build.params import placed

SCHEMA = 1


class ManifestError(ValueError):
    """manifest.json is missing, is no manifest, or is of another schema."""


def cubin_path(kernel: BuiltKernel) -> str:
    return f"{kernel.spec.arch}/{kernel.spec.op}/{kernel.spec.kernel_id}.cubin"


def _file(data: bytes) -> dict:
    return {"size": len(data), "sha256": sha256(data)}


def kernel_record(kernel: BuiltKernel) -> dict:
    s = kernel.spec
    declared = placed(kernel.declared, kernel.info.param_base) if kernel.info else kernel.declared
    record = {
        "id": s.kernel_id,
        **s.axes,
        "family": s.family,
        "toolchain": s.toolchain,
        "compile": s.compile,
        "params": [{"name": p.name, "kind": p.kind, "offset": p.offset, "size": p.size} for p in declared],
    }
    if not s.is_gpu:
        return record
    return record | {
        "build_key": f"sha256:{kernel.key}",
        "cubin": {"file": cubin_path(kernel), "toolkit_version": kernel.toolkit, **_file(kernel.cubin)},
        "entry_symbol": kernel.entry,
        "launch": {"block": list(kernel.block), "max_dynamic_smem": kernel.max_dynamic_smem, "smem_carveout": s.smem_carveout},
        "resources": {
            "registers": kernel.info.registers,
            "static_smem": kernel.info.static_smem,
            "local_bytes": kernel.info.local_bytes,
            "spill_stores": kernel.spill_stores,
            "spill_loads": kernel.spill_loads,
        },
        "limits": {"max_local_bytes": s.max_local_bytes},
    }


def make_manifest(kernels: list[BuiltKernel], files: dict[str, bytes], header: Header, complete: bool) -> dict:
    """files: path -> bytes of all that is shipped, cubins included. complete: every kernel of the matrix for these archs."""
    library = files["lib/libcula.so"]
    cubins = {cubin_path(kernel) for kernel in kernels if kernel.cubin}
    return {
        "schema": SCHEMA,
        "package_version": header.version,
        "abi": {"major": header.major, "minor": header.minor},
        "complete": complete,
        "archs": sorted({kernel.spec.arch for kernel in kernels}, key=header.archs.get),
        "build_key": "sha256:"
        + key_of(kernels=sorted(kernel.key for kernel in kernels), files={path: sha256(data) for path, data in files.items()}),
        "toolchain": toolchain.summary(),
        "library": {"file": "lib/libcula.so", "exports": exported_symbols(Elf(library)), **_file(library)},
        "files": {path: _file(data) for path, data in files.items() if path not in cubins and path != "lib/libcula.so"},
        "kernels": [kernel_record(kernel) for kernel in sorted(kernels, key=lambda kernel: kernel.spec.kernel_id)],
    }


def to_text(manifest: dict) -> str:
    """Indented, but a kernel a line: with every parameter on lines of its own it was 4 times as large, and writing it took a
    quarter of an unchanged build."""
    mark = '"@kernels"'
    head = json.dumps(manifest | {"kernels": "@kernels"}, indent=2, sort_keys=True)
    lines = ",\n".join("    " + json.dumps(kernel, sort_keys=True) for kernel in manifest["kernels"])
    return head.replace(mark, f"[\n{lines}\n  ]") + "\n"


def read_manifest(artifacts: Path) -> dict:
    """Raises ManifestError, with what to do."""
    path = artifacts / "manifest.json"
    try:
        manifest = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ManifestError(f"{path} does not exist: run `make artifacts ARCH=sm90`") from None
    except ValueError as error:
        raise ManifestError(f"{path} is damaged: {error}") from None
    if not isinstance(manifest, dict) or manifest.get("schema") != SCHEMA:
        found = manifest.get("schema") if isinstance(manifest, dict) else None
        raise ManifestError(f"{path} has schema {found!r}; this version reads {SCHEMA}")
    return manifest


def listed_files(manifest: dict) -> dict[str, dict]:
    """Path -> {size, sha256} of every file that the folder must hold beside manifest.json."""
    found = dict(manifest["files"])
    for entry in [manifest["library"], *(kernel["cubin"] for kernel in manifest["kernels"] if "cubin" in kernel)]:
        path = PurePosixPath(entry["file"])
        if path.is_absolute() or ".." in path.parts:
            raise ManifestError(f"manifest.json names a file outside of its folder: {path}")
        found[entry["file"]] = entry
    return found
