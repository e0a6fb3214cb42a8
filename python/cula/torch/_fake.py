"""What the library says of a call on fake tensors: its rules are checked while a graph is traced, not when the graph first runs."""

from __future__ import annotations

import torch

from cula_loader import ArtifactError, NotFoundError, Query, Spec, UnsupportedError, abi, library

_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64", torch.int32: "int32", torch.int64: "int64"}


def check(op, objects: tuple, options: tuple) -> None:
    """Raises InvalidArgumentError for operands in the order of op.tensors that break a rule.

    Sizes that are symbols, devices that cula has none for, and a machine without artifacts are not checked; whether a kernel is built is
    asked when the graph runs, since the GPU that it will run on need not be here.
    """
    device = next(x.device.type for x in objects if x is not None)
    try:
        arch = "cpu" if device == "cpu" else next((a for a in library().artifacts.archs if a != "cpu"), None) if device == "cuda" else None
        if arch is None:
            return
        specs = tuple(map(_spec, objects))
        if any(x is not None and spec is None for x, spec in zip(objects, specs)):
            return
        Query(arch).ask(op, specs, options)
    except (ArtifactError, NotFoundError, UnsupportedError):
        return


def _spec(x) -> Spec | None:
    if x is None or x.dtype not in _DTYPES or any(isinstance(n, torch.SymInt) for n in (*x.shape, *x.stride())):
        return None
    return Spec(x.shape, _DTYPES[x.dtype], (abi.CPU, 0) if x.device.type == "cpu" else (abi.CUDA, x.device.index or 0), x.stride())
