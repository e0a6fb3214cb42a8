"""`python -m cula doctor`: what is wrong with this installation, in words, and what to do about it; from the Python up to the frameworks.

Looks at files, versions and the driver; runs no kernel (`python -m cula selftest` does) and imports no framework. The answer is for this
process's environment: CUDA_VISIBLE_DEVICES, LD_LIBRARY_PATH and CULA_ARTIFACTS count.

    cula.doctor.examine()         the same as data
    cula.doctor.explain(tensor)   why an operand does not fit
"""

from __future__ import annotations

import os
import platform
import re
import sys
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from cula_loader import ArtifactError, artifacts

from . import __version__
from ._explain import explain
from ._query import info

__all__ = ["Finding", "doctor", "examine", "explain"]

OK, NOTE, WRONG = "ok", "note", "WRONG"
PYTHON = (3, 10)
GLIBC = (2, 28)  # what libcula.so is linked for
BINDINGS = (12, 8)  # the first cuda-bindings with the launch that the loader uses
EXCHANGE_API = (2, 10)  # the first torch whose tensors are read without a Python call each
# CUresult of cuInit -> what it means here. From the driver's documentation of its error codes.
DRIVER_ERRORS = {
    34: ("libcuda.so.1 is the stub of the toolkit, which is for linking only", "take the toolkit's lib64/stubs out of LD_LIBRARY_PATH"),
    100: ("the driver finds no GPU", "check `nvidia-smi`; in a container, start it with the GPUs (docker run --gpus all)"),
    802: ("the GPUs are not ready yet; on NVSwitch systems the fabric manager makes them so", "systemctl start nvidia-fabricmanager"),
    803: ("libcuda.so.1 and the kernel module are of different drivers", "reboot after a driver update; in a container, do not mount or set "
          "LD_LIBRARY_PATH to another libcuda.so.1"),
    804: ("a forward-compatibility libcuda.so.1 is in use on a GPU that does not allow it", "take the cuda-compat folder out of LD_LIBRARY_PATH"),
}


class Finding(NamedTuple):
    level: str  # OK, NOTE or WRONG
    subject: str
    text: str
    do: str = ""  # what to do, where the text does not say it


def doctor(device: str = "all") -> int:
    """Prints every finding; returns 0 if this machine can run what is installed, else 1.

    device "all": a machine without a GPU is all right, it runs the cpu arch; a GPU that is there and cannot be used is wrong. "cuda": no
    GPU that can run is wrong. "cpu": nothing about GPUs is.
    """
    findings = examine(device)
    for finding in findings:
        print(f"{finding.level:5}  {finding.subject}: {finding.text}")
        if finding.do:
            print(f"         -> {finding.do}")
    wrong = sum(finding.level == WRONG for finding in findings)
    selftest = "python -m cula selftest" + ("" if device == "all" else f" --device {device}")
    print(f"doctor: {wrong} to put right" if wrong else f"doctor: nothing is wrong; `{selftest}` runs every op")
    return 1 if wrong else 0


def examine(device: str = "all") -> list[Finding]:
    facts = info()
    gpus = list(_gpus(facts, device)) + list(_bindings(facts)) if device != "cpu" else []
    return [*_machine(), *_wheels(), *_artifacts(facts), *gpus, *_frameworks(facts)]


# ------------------------------------------------------------------------------------------------ interpreter and wheels


def _machine():
    libc, version = platform.libc_ver()
    text = f"Python {platform.python_version()}, {platform.system()} {platform.machine()}, {libc or 'C library not glibc'} {version}".rstrip()
    if sys.version_info < PYTHON or platform.python_implementation() != "CPython":
        yield Finding(WRONG, "Python", f"{platform.python_implementation()} {platform.python_version()}", f"use CPython {_dots(PYTHON)} or later")
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        yield Finding(WRONG, "machine", f"{text}; libcula.so is built for Linux on x86-64", "run on such a machine; there is no other build")
    elif libc != "glibc" or _version(version) < GLIBC:
        yield Finding(WRONG, "machine", f"{text}; libcula.so needs glibc {_dots(GLIBC)} or later",
                      "use a distribution that has it (Debian 10, Ubuntu 20.04, RHEL 8 or later; Alpine has another C library)")
    else:
        yield Finding(OK, "machine", text)


def _wheels():
    """Installed distributions that do not belong together. A source tree has none, and nothing to say."""
    for found in metadata.distributions():
        name = (found.metadata["Name"] or "").replace("-", "_")
        if name == "cula" and found.version != __version__:
            yield Finding(WRONG, "wheel", f"cula {found.version} is installed, but {__version__} is imported from {Path(__file__).parent}",
                          "take the other copy out of PYTHONPATH or the working directory, or uninstall one")
        elif name.startswith("cula_artifacts_"):
            if found.version == __version__:
                yield Finding(OK, "wheel", f"{name} {found.version}")
            else:
                yield Finding(WRONG, "wheel", f"{name} is {found.version}, cula is {__version__}", f"pip install {name}=={__version__}")


# ----------------------------------------------------------------------------------------------------------- artifacts


def _artifacts(facts: dict):
    state = facts["artifacts"]
    if state["error"]:
        yield Finding(WRONG, "artifacts", state["error"], _why_it_does_not_open(state["error"]))
        return
    described = artifacts.read(artifacts.find())
    if not state["complete"]:
        yield Finding(NOTE, "artifacts", "made by a build of a part of the matrix: some kernels are not there",
                      "`make artifacts ARCH=<arch>` without a filter builds all of them")
    if state["version"] != __version__:
        yield Finding(NOTE, "artifacts", f"version {state['version']}, cula is {__version__}: they fit, but are not of one release")
    try:
        described.check_library_hash()
        for kernel in described.kernels.values():
            if kernel.cubin is not None:
                artifacts.check_sha256(kernel.cubin, kernel.cubin.read_bytes(), kernel.cubin_sha256)
    except (ArtifactError, OSError) as error:
        yield Finding(WRONG, "artifacts", str(error), "" if isinstance(error, ArtifactError) else artifacts.AGAIN)
    else:
        named = ", named by CULA_ARTIFACTS" if os.environ.get("CULA_ARTIFACTS") else ""
        yield Finding(OK, "artifacts", f"{state['path']}{named}, version {state['version']}, {len(described.kernels)} kernels for "
                                       f"{', '.join(described.archs)}, every file as the manifest says")


def _why_it_does_not_open(error: str) -> str:
    """What the dynamic linker's message means for whoever installed the wheel; "" where the message says what to do itself."""
    if needed := re.search(r"version `(GLIBC_[\d.]+)' not found", error):
        return f"this system's C library is too old, {needed[1]} is needed: use a newer distribution or container image"
    if "wrong ELF class" in error or "invalid ELF header" in error:
        return "the file is no library for this machine; a Git LFS pointer or an interrupted copy looks like this"
    if "failed to map segment" in error or "Operation not permitted" in error:
        return "the file system is mounted noexec: copy the artifacts elsewhere and set CULA_ARTIFACTS"
    return ""


# ------------------------------------------------------------------------------------------------------ driver and GPUs


def _gpus(facts: dict, device: str = "all"):
    driver, devices = facts["driver"], facts["devices"]
    there = _gpus_of_the_machine()
    if driver["problem"]:
        yield _no_gpu(driver, there, device)
        return
    usable = [d for d in devices if not d["problem"]]
    for d in devices:
        subject = f"cuda:{d['ordinal']}"
        text = f"{d['name']}, compute capability {d['compute_capability']}, {d['sm_count']} SMs, driver for CUDA {driver['cuda']}"
        if not d["problem"]:
            yield Finding(OK, subject, text)
        else:
            yield Finding(NOTE if usable else WRONG, subject, f"{text}: {d['problem']}")
    if there > len(devices):
        yield Finding(NOTE, "GPU", f"{there - len(devices)} of the {there} GPUs of this machine are not visible to this process{_visible()}")


def _no_gpu(driver: dict, there: int, device: str) -> Finding:
    """Why there is no GPU to use. Wrong where the machine has one, or one was asked for."""
    hidden = "CUDA_VISIBLE_DEVICES" in os.environ
    code = int(found[1]) if (found := re.search(r"CUDA error (\d+)", driver["problem"])) else None
    level = WRONG if there or device == "cuda" or code not in (None, 100) else NOTE
    if not driver["cuda"]:
        do = ("in a container, start it with the GPUs (docker run --gpus all, the NVIDIA container toolkit); else install the NVIDIA driver, and see "
              "that libcuda.so.1 is where the dynamic linker looks")
        text = f"{driver['problem']}, but this machine has {there} NVIDIA GPU{'s' * (there > 1)}" if there else driver["problem"]
    elif code in (None, 100) and hidden:
        text = f"no GPU is visible to this process{_visible()}"
        do = "unset CUDA_VISIBLE_DEVICES, or name GPUs of `nvidia-smi -L` in it"
    else:
        meaning, do = DRIVER_ERRORS.get(code, ("", "check `nvidia-smi` and the kernel log (dmesg | grep NVRM)"))
        text = f"{driver['problem']}{'; ' * bool(meaning)}{meaning}"
    return Finding(level, "GPU", f"{text}; CPU tensors work", do if level == WRONG else "")


def _visible() -> str:
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    return "" if value is None else f": CUDA_VISIBLE_DEVICES is {value!r}"


def _gpus_of_the_machine(root: Path = Path("/")) -> int:
    """NVIDIA GPUs that the kernel knows, whatever this process may see of them: from the kernel module, or from PCI without one."""
    known = list(root.glob("proc/driver/nvidia/gpus/*"))
    return len(known) or sum(_is_nvidia_gpu(device) for device in root.glob("sys/bus/pci/devices/*"))


def _is_nvidia_gpu(device: Path) -> bool:
    try:
        vendor, kind = ((device / name).read_text().strip() for name in ("vendor", "class"))
    except OSError:
        return False
    return vendor == "0x10de" and kind.startswith("0x03")  # a display or 3D controller; NVSwitches and audio functions are not


def _bindings(facts: dict):
    """cuda-bindings, where there is a GPU to use it for; that it is missing is said of each GPU."""
    version, driver = facts["cuda_bindings"], facts["driver"]
    if version is None or driver["problem"]:
        return
    problem = _import_problem()
    if _version(version) < BINDINGS:
        yield Finding(WRONG, "cuda-bindings", f"{version} is too old", f"pip install 'cuda-bindings>={_dots(BINDINGS)}'")
    elif problem:
        yield Finding(WRONG, "cuda-bindings", f"{version} is installed and does not import: {problem}",
                      "pip install --force-reinstall cuda-bindings; a folder or module named `cuda` on the path is in its way too")
    elif _version(version)[0] > _version(driver["cuda"])[0]:
        yield Finding(NOTE, "cuda-bindings", f"{version} is for CUDA {_version(version)[0]}, the driver for CUDA {driver['cuda']}",
                      f"update the driver, or pip install 'cuda-bindings=={_version(driver['cuda'])[0]}.*'")
    else:
        yield Finding(OK, "cuda-bindings", version)


def _import_problem() -> str:
    """Imports the module that the loader uses, which initialises nothing; why that fails, "" if it does not."""
    try:
        from cuda.bindings import driver  # noqa: F401
    except Exception as error:  # noqa: BLE001  a broken extension module may raise anything
        return f"{type(error).__name__}: {error}"
    return ""


# ---------------------------------------------------------------------------------------------------------- frameworks


def _frameworks(facts: dict):
    for name in ("torch", "jax", "numpy", "cupy-cuda13x", "cupy-cuda12x"):
        version = _installed(name)
        if version is None:
            continue
        if name == "torch" and version.endswith("+cpu") and any(not d["problem"] for d in facts["devices"]):
            yield Finding(NOTE, name, f"{version} is a build for the CPU: its tensors cannot be on the GPU", "install a CUDA build of torch")
        elif name == "torch" and _version(version) < EXCHANGE_API:
            yield Finding(NOTE, name, f"{version}: read through __dlpack__, slower by some 20 us a call than from torch {_dots(EXCHANGE_API)} on")
        elif name == "numpy" and not _installed("ml_dtypes"):
            yield Finding(NOTE, name, f"{version}, without ml_dtypes: no bfloat16 arrays", "pip install ml_dtypes")
        else:
            yield Finding(OK, name, version)


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _version(text: str) -> tuple[int, ...]:
    """The first two numbers of a version: "2.13.0+cpu" -> (2, 13)."""
    return tuple(int("".join(c for c in part if c.isdigit()) or 0) for part in text.split("+")[0].split(".")[:2])


def _dots(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
