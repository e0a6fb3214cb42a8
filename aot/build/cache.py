"""Content-addressed store of compiled results: build/cache/<key[:2]>/<key>/.

An entry is a folder of files and result.json, which is written last and lists size and sha256 of the others. It is made under a
temporary name and renamed, so a reader sees all of it or nothing. Who loses the race to commit the same key has succeeded too:
both wrote the same thing. A damaged entry is a miss, and is removed.

The key is the hash of everything that decides the result. What cannot be put into it is an error, not a weaker key.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

SCHEMA = 1  # part of every key: raise it when the meaning of an entry changes


def canonical(value) -> str:
    """JSON with one spelling for equal values. Raises TypeError for anything but dict, list, tuple, str, int, bool, None."""

    def check(item):
        if isinstance(item, dict):
            for key, inner in item.items():
                if not isinstance(key, str):
                    raise TypeError(f"cannot be part of a cache key: dict key {key!r}")
                check(inner)
        elif isinstance(item, (list, tuple)):
            for inner in item:
                check(inner)
        elif not (item is None or isinstance(item, (str, int, bool))):
            raise TypeError(f"cannot be part of a cache key: {type(item).__name__} {item!r}")

    check(value)
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def key_of(**parts) -> str:
    return hashlib.sha256(canonical({"schema": SCHEMA, **parts}).encode()).hexdigest()


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def source_hashes(root: Path, paths) -> dict[str, str]:
    """Path relative to root -> sha256, of files. Two files swapped, renamed or emptied give other keys."""
    return {path.relative_to(root).as_posix(): sha256(path.read_bytes()) for path in sorted(set(paths))}


@dataclass(frozen=True)
class Entry:
    files: dict[str, bytes]
    facts: dict  # JSON that the compile step stored beside the files


class Cache:
    def __init__(self, folder: Path):
        self.folder = Path(folder)

    def path(self, key: str) -> Path:
        return self.folder / key[:2] / key

    def load(self, key: str) -> Entry | None:
        """The entry, checked against its hashes; None if there is none, or if it was damaged (and is gone now)."""
        path = self.path(key)
        try:
            result = json.loads((path / "result.json").read_bytes())
            files = {}
            for name, expected in result["files"].items():
                data = (path / name).read_bytes()
                if len(data) != expected["size"] or sha256(data) != expected["sha256"]:
                    raise ValueError(f"{name} is damaged")
                files[name] = data
            return Entry(files, result["facts"])
        except FileNotFoundError:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
        except (ValueError, KeyError, TypeError, AttributeError, OSError):
            shutil.rmtree(path, ignore_errors=True)
        return None

    def store(self, key: str, files: dict[str, bytes], facts: dict) -> None:
        target = self.path(key)
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=".new-", dir=target.parent))
        try:
            for name, data in files.items():
                (temporary / name).write_bytes(data)
            listed = {name: {"size": len(data), "sha256": sha256(data)} for name, data in files.items()}
            (temporary / "result.json").write_text(json.dumps({"files": listed, "facts": facts}, indent=1, sort_keys=True))
            try:
                os.rename(temporary, target)
            except OSError:
                if self.load(key) is None:  # not another build's entry but the rest of a damaged one: load removed it
                    os.rename(temporary, target)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
