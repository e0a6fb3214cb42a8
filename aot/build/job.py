"""The unit of work of a build: compile one thing, in a worker process."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass, field
from pathlib import Path


class CompileError(Exception):
    """The source does not compile. The message is what the compiler said."""


@dataclass(frozen=True)
class Compiled:
    files: dict[str, bytes]
    facts: dict = field(default_factory=dict)  # JSON


@dataclass(frozen=True)
class Job:
    name: str  # kernel id, or path of a source of the library
    kind: str  # "cute_dsl", "cutlass" or "host"
    key: str  # of its cache entry
    payload: object  # KernelSpec or host.Source
    root: Path  # of the project
    sources: dict[str, str] = field(default_factory=dict)  # path relative to root -> sha256, as they are in the key
    seconds: float = 1.0  # expected: the longest jobs start first


# All that a compiler may know of the environment. CPATH, CPLUS_INCLUDE_PATH, NVCC_APPEND_FLAGS and the like would change results
# without changing the cache key.
_KEPT = ("PATH", "HOME", "TMPDIR", "LD_LIBRARY_PATH")


def run_tool(*command, cwd: Path) -> str:
    """Runs a compiler and returns what it printed. Raises CompileError if it fails."""
    environment = {name: os.environ[name] for name in _KEPT if name in os.environ} | {"LC_ALL": "C"}
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
    text = done.stdout.decode("utf-8", "replace")
    if done.returncode:
        reason = f"killed by signal {-done.returncode} (out of memory?)" if done.returncode < 0 else f"exit code {done.returncode}"
        raise CompileError(f"{text}{Path(words[0]).name}: {reason}\n$ {' '.join(words)}")
    return text
