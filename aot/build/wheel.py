"""`make wheel`: the two wheels and the tarball, byte for byte the same for the same inputs.

    dist/cula-<version>-py3-none-any.whl                                     loader and front ends, pure Python
    dist/cula_artifacts_<archs>-<version>-py3-none-manylinux_2_28_x86_64.whl  libcula.so, cubins, manifest, headers, CMake, pkg-config
    dist/cula-<version>-<archs>-linux-x86_64.tar.gz                          the same files for C and C++ users, with the examples

A wheel is a zip file with three text files more, so this is written out here instead of depending on a build backend: the order of
entries, their times and their modes are what makes the result reproducible, and backends differ in all three between versions.

The artifacts of one arch set are in the folder `cula_artifacts/<archs>/`, with no __init__.py: the wheels of several arch sets can be
installed side by side, and the loader takes the one that fits the machine.
"""

from __future__ import annotations

import argparse
import base64
import gzip
import hashlib
import io
import sys
import tarfile
import zipfile
from pathlib import Path

from aot.build.manifest import ManifestError, listed_files, read_manifest

ROOT = Path(__file__).resolve().parents[2]
LIMIT_BYTES = 30_000_000  # of one wheel: what a package index and a container layer take without a special case
TAG = "py3-none-manylinux_2_28_x86_64"
DOS_EPOCH = (1980, 1, 1, 0, 0, 0)
PYTHON_SOURCES = ((ROOT / "loader", "cula_loader"), (ROOT / "python", "cula"))


class PackagingError(Exception):
    """What is to be packaged is incomplete or inconsistent; the message says what to do."""


def arch_set(archs: list[str]) -> str:
    """'sm90', 'sm90-sm100', 'cpu': the GPU archs of a build, in the order of the manifest; every build has the cpu arch."""
    return "-".join(arch for arch in archs if arch != "cpu") or "cpu"


def artifact_files(artifacts: Path, manifest: dict) -> dict[str, bytes]:
    """Relative path -> content of exactly what the manifest lists, and the manifest. Raises PackagingError if one is not as listed."""
    files = {"manifest.json": (artifacts / "manifest.json").read_bytes()}
    for path, entry in listed_files(manifest).items():
        try:
            files[path] = (artifacts / path).read_bytes()
        except OSError as error:
            raise PackagingError(f"{artifacts / path}: {error.strerror}; run `make artifacts` again") from None
        if hashlib.sha256(files[path]).hexdigest() != entry["sha256"]:
            raise PackagingError(f"{artifacts / path} is not what manifest.json says; run `make artifacts` again")
    return files


def python_files() -> dict[str, bytes]:
    files = {}
    for folder, package in PYTHON_SOURCES:
        for path in sorted((folder / package).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".pyc":
                files[path.relative_to(folder).as_posix()] = path.read_bytes()
        if f"{package}/__init__.py" not in files:
            raise PackagingError(f"{folder / package} has no __init__.py")
    return files


def write_wheel(out: Path, name: str, version: str, tag: str, metadata: list[str], description: str, files: dict[str, bytes]) -> Path:
    """Writes <name>-<version>-<tag>.whl: sorted entries, fixed times and modes, RECORD last."""
    info = f"{name}-{version}.dist-info"
    head = [
        "Metadata-Version: 2.1",
        f"Name: {name.replace('_', '-')}",
        f"Version: {version}",
        *metadata,
        "Description-Content-Type: text/markdown",
    ]
    entries = dict(files)
    entries[f"{info}/METADATA"] = ("\n".join(head) + "\n\n" + description).encode()
    pure = "true" if tag.endswith("-any") else "false"
    entries[f"{info}/WHEEL"] = f"Wheel-Version: 1.0\nGenerator: cula\nRoot-Is-Purelib: {pure}\nTag: {tag}\n".encode()
    record = []
    for path in sorted(entries):
        digest = base64.urlsafe_b64encode(hashlib.sha256(entries[path]).digest()).rstrip(b"=").decode()
        record.append(f"{path},sha256={digest},{len(entries[path])}")
    record.append(f"{info}/RECORD,,")
    out.mkdir(parents=True, exist_ok=True)
    target = out / f"{name}-{version}-{tag}.whl"
    temporary = target.with_suffix(".tmp")
    with zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for path in [*sorted(entries), f"{info}/RECORD"]:
            entry = zipfile.ZipInfo(path, DOS_EPOCH)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.create_system = 3  # Unix, whatever the machine
            entry.external_attr = (0o100755 if path.endswith(".so") else 0o100644) << 16
            content = entries[path] if path in entries else ("\n".join(record) + "\n").encode()
            archive.writestr(entry, content, compresslevel=9)
    if temporary.stat().st_size > LIMIT_BYTES:
        size = temporary.stat().st_size
        temporary.unlink()
        raise PackagingError(f"{target.name} has {size / 1e6:.1f} MB, the limit is {LIMIT_BYTES / 1e6:.0f} MB: package fewer archs")
    return temporary.replace(target)


def write_tarball(out: Path, stem: str, files: dict[str, bytes]) -> Path:
    """Writes <stem>.tar.gz with one top folder <stem>/; sorted, owner 0, time 0."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for path in sorted(files):
            entry = tarfile.TarInfo(f"{stem}/{path}")
            entry.size = len(files[path])
            entry.mode = 0o755 if path.endswith(".so") else 0o644
            archive.addfile(entry, io.BytesIO(files[path]))
    out.mkdir(parents=True, exist_ok=True)
    target = out / f"{stem}.tar.gz"
    temporary = target.with_suffix(".tmp")
    with open(temporary, "wb") as raw, gzip.GzipFile("", "wb", compresslevel=9, fileobj=raw, mtime=0) as packed:
        packed.write(buffer.getvalue())
    return temporary.replace(target)


def build(artifacts: Path, out: Path) -> list[Path]:
    try:
        manifest = read_manifest(artifacts)
    except ManifestError as error:
        raise PackagingError(str(error)) from None
    if not manifest["complete"]:
        raise PackagingError("manifest.json says that the build is not complete: run `make artifacts` again")
    files = artifact_files(artifacts, manifest)
    version, archs = manifest["package_version"], arch_set(manifest["archs"])

    readme = (ROOT / "README.md").read_text()
    common = [
        "Requires-Python: >=3.10",
        "Classifier: Operating System :: POSIX :: Linux",
        "Classifier: Programming Language :: Python :: 3",
    ]
    name = f"cula_artifacts_{archs.replace('-', '_')}"
    made = [
        write_wheel(
            out,
            "cula",
            version,
            "py3-none-any",
            [
                "Summary: Linear-attention kernels compiled ahead of time: loader and front ends",
                *common,
                "Requires-Dist: cuda-bindings>=12.8; extra == 'gpu'",
                "Provides-Extra: gpu",
            ],
            readme,
            python_files(),
        ),
        write_wheel(
            out,
            name,
            version,
            TAG,
            [f"Summary: cula kernels for {archs.replace('-', ', ')}: shared library, cubins, headers", *common],
            readme,
            {f"cula_artifacts/{archs}/{path}": content for path, content in files.items()},
        ),
    ]
    examples = {
        path.relative_to(ROOT).as_posix(): path.read_bytes()
        for path in sorted((ROOT / "examples").rglob("*"))
        if path.is_file() and path.suffix in (".c", ".cpp", ".h", ".txt", ".md") or path.name == "Makefile" and path.is_file()
    }
    docs = {f"docs/{page}": (ROOT / "docs" / page).read_bytes() for page in ("abi.md", "states-and-indices.md")}
    made.append(write_tarball(out, f"cula-{version}-{archs}-linux-x86_64", {**files, **examples, **docs, "README.md": readme.encode()}))
    return made


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Package artifacts/ and the Python folders as wheels and a tarball.")
    parser.add_argument("--artifacts", type=Path, default=ROOT / "artifacts")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    options = parser.parse_args(arguments)
    try:
        for path in build(options.artifacts, options.out):
            print(f"{path.stat().st_size / 1e6:7.2f} MB  {hashlib.sha256(path.read_bytes()).hexdigest()[:16]}  {path}")
    except PackagingError as error:
        print(f"wheel: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
