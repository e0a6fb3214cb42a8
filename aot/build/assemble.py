"""Puts the files of a build into the artifact folder: exactly these files, manifest.json last.

Files that are already right stay as they are; others are replaced by rename, so that a process that has the old library
loaded keeps its old pages. The marker says, during a change and after a crash in it, that the folder is not whole and is ours.
"""

from __future__ import annotations

import os
from pathlib import Path

MARKER = ".incomplete"


class AssembleError(RuntimeError):
    """The folder is somebody else's: nothing in it was touched."""


def files_in(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".new")
    temporary.write_bytes(data)
    temporary.chmod(0o755 if path.suffix == ".so" else 0o644)
    os.replace(temporary, path)


def assemble(folder: Path, files: dict[str, bytes], manifest: str) -> bool:
    """Returns whether anything had to change. Raises AssembleError for a folder with other things in it than a build."""
    wanted = {**files, "manifest.json": manifest.encode()}
    present = files_in(folder) if folder.exists() else []
    if present and not {"manifest.json", MARKER} & set(present):
        raise AssembleError(f"{folder} is not empty and is no artifact folder (no manifest.json in it): remove it or name another by --out")

    def right(path: str, data: bytes) -> bool:
        file = folder / path
        return file.is_file() and not file.is_symlink() and file.stat().st_size == len(data) and file.read_bytes() == data

    stale = [path for path in present if path not in wanted]
    changed = [path for path, data in wanted.items() if not right(path, data)]
    if not stale and not changed:
        return False
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARKER).touch()
    (folder / "manifest.json").unlink(missing_ok=True)
    for path in stale:
        (folder / path).unlink(missing_ok=True)
    for path in changed:
        if path != "manifest.json":
            _write(folder / path, wanted[path])
    for path in sorted((path for path in folder.rglob("*") if path.is_dir() and not path.is_symlink()), reverse=True):
        if not any(path.iterdir()):
            path.rmdir()
    _write(folder / "manifest.json", wanted["manifest.json"])
    (folder / MARKER).unlink(missing_ok=True)
    return True
