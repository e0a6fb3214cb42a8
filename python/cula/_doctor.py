"""`python -m cula doctor`: what is wrong with this installation, in words, and what to do about it.

Looks at files, versions and the driver; runs no kernel (`python -m cula selftest` does) and imports no framework.
"""

from __future__ import annotations

import platform
import sys
from importlib import metadata
from typing import NamedTuple

from cula_loader import ArtifactError, artifacts

from . import __version__
from ._query import info

OK, NOTE, WRONG = "ok", "note", "WRONG"
BINDINGS = (12, 8)  # the first cuda-bindings with the launch that the loader uses
EXCHANGE_API = (2, 10)  # the first torch whose tensors are read without a Python call each


class Finding(NamedTuple):
    level: str
    subject: str
    text: str


def doctor() -> int:
    """Prints every finding; returns 1 if something is wrong, else 0. A machine without a GPU is not wrong."""
    findings = examine()
    for level, subject, text in findings:
        print(f"{level:5}  {subject}: {text}")
    wrong = sum(finding.level == WRONG for finding in findings)
    print(f"doctor: {wrong} to put right" if wrong else "doctor: nothing is wrong; `python -m cula selftest` runs every op")
    return 1 if wrong else 0


def examine() -> list[Finding]:
    facts = info()
    return [_machine(), *_wheels(), *_artifacts(facts), *_gpus(facts), *_frameworks()]


def _machine() -> Finding:
    text = f"Python {platform.python_version()}, {platform.system()} {platform.machine()}, {platform.libc_ver()[0]} {platform.libc_ver()[1]}"
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        return Finding(WRONG, "machine", f"{text}; libcula.so is built for Linux on x86-64")
    return Finding(OK, "machine", text)


def _wheels():
    """Installed distributions that do not belong together. A source tree has none, and nothing to say."""
    for found in metadata.distributions():
        name = (found.metadata["Name"] or "").replace("-", "_")
        if name.startswith("cula_artifacts_"):
            if found.version == __version__:
                yield Finding(OK, "wheel", f"{name} {found.version}")
            else:
                yield Finding(WRONG, "wheel", f"{name} is {found.version}, cula is {__version__}: pip install {name}=={__version__}")


def _artifacts(facts: dict):
    state = facts["artifacts"]
    if state["error"]:
        yield Finding(WRONG, "artifacts", state["error"])
        return
    described = artifacts.read(artifacts.find())
    if not state["complete"]:
        yield Finding(NOTE, "artifacts", "made by a build of a part of the matrix: some kernels are not there")
    try:
        described.check_library_hash()
        for kernel in described.kernels.values():
            if kernel.cubin is not None:
                artifacts.check_sha256(kernel.cubin, kernel.cubin.read_bytes(), kernel.cubin_sha256)
    except (ArtifactError, OSError) as error:
        yield Finding(WRONG, "artifacts", str(error))
    else:
        yield Finding(OK, "artifacts", f"{state['path']}, version {state['version']}, {len(described.kernels)} kernels for "
                                       f"{', '.join(described.archs)}, every file as the manifest says")


def _gpus(facts: dict):
    if facts["driver"]["problem"]:
        yield Finding(NOTE, "GPU", f"{facts['driver']['problem']}; CPU tensors work")
        return
    for device in facts["devices"]:
        subject = f"cuda:{device['ordinal']}"
        text = f"{device['name']}, compute capability {device['compute_capability']}, driver for CUDA {facts['driver']['cuda']}"
        yield Finding(WRONG, subject, f"{text}: {device['problem']}") if device["problem"] else Finding(OK, subject, text)
    bindings = facts["cuda_bindings"]
    if bindings is not None and _version(bindings) < BINDINGS:
        yield Finding(WRONG, "cuda-bindings", f"{bindings} is too old: pip install 'cuda-bindings>={_dots(BINDINGS)}'")


def _frameworks():
    for name in ("torch", "jax", "numpy", "cupy-cuda13x", "cupy-cuda12x"):
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        if name == "torch" and _version(version) < EXCHANGE_API:
            yield Finding(NOTE, name, f"{version}: read through __dlpack__, slower by some 20 us a call than from torch {_dots(EXCHANGE_API)} on")
        elif name == "numpy" and not _installed("ml_dtypes"):
            yield Finding(NOTE, name, f"{version}, without ml_dtypes: no bfloat16 arrays (pip install ml_dtypes)")
        else:
            yield Finding(OK, name, version)


def _installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def _version(text: str) -> tuple[int, ...]:
    """The first two numbers of a version: "2.13.0+cpu" -> (2, 13)."""
    return tuple(int("".join(c for c in part if c.isdigit()) or 0) for part in text.split("+")[0].split(".")[:2])


def _dots(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
