"""Questions instead of calls: what a call would need, and what this installation and machine can run."""

from __future__ import annotations

from cula_loader import ArtifactError, Query, Requirements


def query(function, *operands, arch: str | None = None, sm_count: int = 0, **options) -> Requirements:
    """What `function` (cula.kda.kda_decode, ...) called with these arguments would need. Validates as the call would, runs nothing.

    Operands may be cula.Spec(shape, dtype), so that no memory and no GPU is needed; then name the arch ("sm90", "cpu", ...), or it is that
    of the operands' device. sm_count: multiprocessors to plan for; 0: the device's, or the arch's usual count.
    Returns Requirements(kernels, workspace_bytes, workspace_align). Raises UnsupportedError, with what is built, where no kernel fits.
    """
    asked = Query(arch, sm_count)
    function(*operands, stream=asked, **options)
    return asked.answer


def info() -> dict:
    """What is installed and which GPUs of this machine can run it, as plain data; never raises for what is missing.

    version; artifacts: path, complete, kernels {arch: {op: count}}, toolchain, or error; driver: CUDA version and problem; cuda_bindings:
    its version or None; devices: ordinal, name, compute_capability, arch, sm_count, problem ("" if kernels for it are here).
    """
    from cula_loader.devices import devices
    from cula_loader.library import library

    result = {"version": _version(), "artifacts": {"path": None, "error": ""}, "cuda_bindings": _installed_version("cuda-bindings")}
    archs, toolkit = [], 0
    try:
        lib = library()
    except ArtifactError as error:
        result["artifacts"]["error"] = str(error)
    else:
        described = lib.artifacts
        counts: dict[str, dict[str, int]] = {}
        for kernel in described.kernels.values():
            ops = counts.setdefault(kernel.arch, {})
            ops[kernel.op] = ops.get(kernel.op, 0) + 1
        archs = described.archs
        toolkit = max((k.toolkit_version for k in described.kernels.values()), default=0)
        result["artifacts"] |= {"path": str(described.root), "version": described.package_version, "complete": described.complete,
                                "kernels": {arch: dict(sorted(counts[arch].items())) for arch in archs}, "build": lib.build_info()}
    machine = devices()
    result["driver"] = {"cuda": machine.driver, "problem": machine.problem}
    result["devices"] = [
        {"ordinal": d.ordinal, "name": d.name, "compute_capability": ".".join(map(str, d.compute_capability)), "arch": d.arch,
         "sm_count": d.sm_count, "problem": _problem(d, archs, toolkit, machine.driver, result["cuda_bindings"])}
        for d in machine.found
    ]
    return result


def _problem(device, archs: list[str], toolkit: int, driver: str, bindings: str | None) -> str:
    """Why the device cannot run what is installed, "" if it can."""
    if device.arch is None:
        return "no arch of cula has its compute capability: sm90 is 9.0, sm100 is 10.0, sm103 is 10.3, sm120 is 12.0"
    if device.arch not in archs:
        return f"no {device.arch} kernels here: build them with `make artifacts ARCH={device.arch}`, or install cula_artifacts_{device.arch}"
    if int(driver.split(".")[0]) < toolkit // 10:
        return f"its driver is for CUDA {driver}, the kernels were made with CUDA {toolkit // 10}.{toolkit % 10}: update the driver"
    if bindings is None:
        return "the Python package cuda-bindings is not installed: pip install cuda-bindings (C and C++ programs do not need it)"
    return ""


def _installed_version(name: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _version() -> str:
    from . import __version__

    return __version__
