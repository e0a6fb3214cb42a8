"""Where the artifacts are, and what manifest.json says of them. Reads files; opens no library and no driver."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from . import abi
from .errors import ArtifactError, VersionError

SCHEMA = 1
AGAIN = "build or install the artifacts again"
SAME_VERSION = "install one version of both: pip install cula==<version> cula_artifacts_<arch>==<version>"
PACKAGE = "cula_artifacts"  # what the artifact wheels install
BUILD_HINT = ("build them with `make artifacts ARCH=<arch>` in the source tree, install a wheel (pip install cula_artifacts_<arch>), or set CULA_ARTIFACTS "
              "to a folder that has manifest.json")


@dataclass(frozen=True)
class Kernel:
    """One entry of the manifest, as far as the loader needs it."""

    id: str
    op: str
    arch: str
    entry_symbol: str
    cubin: Path | None  # None on the cpu arch, whose kernels are in the library
    cubin_sha256: str
    param_sizes: tuple[int, ...]
    toolkit_version: int  # CUDA version that made the cubin, 130 for 13.0; 0 on the cpu arch


@dataclass(frozen=True)
class Artifacts:
    root: Path
    package_version: str
    complete: bool
    library: Path
    library_size: int
    library_sha256: str
    kernels: dict[str, Kernel]

    @property
    def archs(self) -> list[str]:
        return sorted({k.arch for k in self.kernels.values()}, key=abi.ARCHS.__getitem__)

    def check_library_hash(self) -> None:
        """Raises ArtifactError if the library is not the one that the manifest describes. Reads the whole file."""
        check_sha256(self.library, self.library.read_bytes(), self.library_sha256)


def check_sha256(path: Path, content: bytes, expected: str) -> None:
    import hashlib

    found = hashlib.sha256(content).hexdigest()
    if found != expected:
        raise ArtifactError(f"{path}: sha256 {found}, but the manifest says {expected}: the file was damaged or comes from another build; "
                            + AGAIN)


def find() -> Path:
    """The artifacts folder: CULA_ARTIFACTS, else artifacts/ of the source tree that this file is in, else an installed package.

    Of several installed packages, the first (by name) that has kernels for a GPU of this machine, else the first.
    Raises ArtifactError with every place that was looked at.
    """
    named = os.environ.get("CULA_ARTIFACTS")
    if named:
        if not Path(named, "manifest.json").is_file():
            raise ArtifactError(f"CULA_ARTIFACTS={named}: no manifest.json there; {BUILD_HINT}")
        return Path(named).resolve()
    tree = Path(__file__).resolve().parents[2] / "artifacts"
    if (tree / "manifest.json").is_file():
        return tree
    packages = installed()
    if not packages:
        raise ArtifactError(f"no artifacts: CULA_ARTIFACTS is not set, {tree} has no manifest.json, and no {PACKAGE} package is "
                            f"installed; {BUILD_HINT}")
    if len(packages) > 1:
        from .devices import devices

        archs = {device.arch for device in devices().found}
        for folder in packages:
            if archs & set(read(folder).archs):
                return folder
    return packages[0]


def installed() -> list[Path]:
    """Folders of the artifact wheels, cula_artifacts/<archs>/ of a namespace package: several wheels can be side by side."""
    from importlib.util import find_spec

    spec = find_spec(PACKAGE)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    return sorted((path.parent for folder in folders for path in Path(folder).glob("*/manifest.json")), key=lambda path: path.name)


def read(root: Path) -> Artifacts:
    """Reads root/manifest.json. Unknown keys are ignored, an unknown schema or a missing or mistyped key is an ArtifactError."""
    import json  # here and not above: importing cula reads no manifest

    path = root / "manifest.json"
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ArtifactError(f"{path}: {error.strerror}; {BUILD_HINT}") from None
    try:
        whole = json.loads(text)
    except ValueError as error:
        raise ArtifactError(f"{path}: not JSON ({error}); {AGAIN}") from None
    top = _Entry(path, "", whole)
    schema = top.get("schema", int)
    if schema != SCHEMA:
        raise VersionError(f"{path}: schema {schema}, this loader reads {SCHEMA}; {SAME_VERSION}")
    version = top.get("package_version", str)
    major, minor = (top.entry("abi").get(part, int) for part in ("major", "minor"))
    if major != abi.VERSION[0] or minor < abi.VERSION[1]:
        raise VersionError(f"{path}: ABI {major}.{minor}, this loader needs {abi.VERSION[0]}.{abi.VERSION[1]} or a later minor version; "
                           f"{SAME_VERSION}")
    library = top.entry("library")
    kernels = {}
    for index, value in enumerate(top.get("kernels", list)):
        kernel = _kernel(root, _Entry(path, f"kernels[{index}]", value))
        if kernel.id in kernels:
            raise ArtifactError(f"{path}: kernel {kernel.id} appears twice; {AGAIN}")
        kernels[kernel.id] = kernel
    return Artifacts(root, version, top.get("complete", bool), _inside(root, library), library.get("size", int),
                     library.get("sha256", str), kernels)


def _kernel(root: Path, entry: _Entry) -> Kernel:
    arch = entry.get("arch", str)
    if arch not in abi.ARCHS:
        raise entry.error("arch", f"{arch!r} is none of {', '.join(abi.ARCHS)}")
    cubin, sha256, sizes, toolkit = None, "", (), 0
    if arch != "cpu":
        file = entry.entry("cubin")
        cubin, sha256, toolkit = _inside(root, file), file.get("sha256", str), file.get("toolkit_version", int)
        sizes = tuple(_Entry(entry.path, f"{entry.where}.params[{i}]", p).get("size", int)
                      for i, p in enumerate(entry.get("params", list)))
    return Kernel(entry.get("id", str), entry.get("op", str), arch, entry.get("entry_symbol", str) if cubin else "", cubin, sha256, sizes,
                  toolkit)


def _inside(root: Path, entry: _Entry) -> Path:
    """The file that an entry names; a path that leaves the artifacts folder is refused."""
    name = entry.get("file", str)
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise entry.error("file", f"{name!r} is not inside the artifacts folder")
    return root / name


class _Entry:
    """An object of the manifest that knows where it is, for messages."""

    def __init__(self, path: Path, where: str, value):
        self.path, self.where, self.value = path, where, value
        if not isinstance(value, dict):
            raise ArtifactError(f"{path}: {where or 'top level'} is {type(value).__name__}, not an object; {AGAIN}")

    def get(self, key: str, kind: type):
        if key not in self.value:
            raise self.error(key, "is missing")
        value = self.value[key]
        if type(value) is not kind:
            raise self.error(key, f"is {type(value).__name__}, not {kind.__name__}")
        return value

    def entry(self, key: str) -> _Entry:
        return _Entry(self.path, f"{self.where}.{key}".lstrip("."), self.get(key, dict))

    def error(self, key: str, text: str) -> ArtifactError:
        return ArtifactError(f"{self.path}: {self.where}{'.' if self.where else ''}{key} {text}; {AGAIN}")
