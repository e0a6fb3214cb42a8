"""The device axis of the tests: one list of cases for the cpu arch and, marked gpu, for the GPU of this machine."""

from __future__ import annotations

import functools

import pytest
import torch

# The expectations are many small torch operations: with threads they cost five times as much on a busy machine.
torch.set_num_threads(1)

DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))

_ARCH = {(9, 0): "sm90", (10, 0): "sm100", (10, 3): "sm103", (12, 0): "sm120"}


@functools.cache
def arch_of(device: str) -> str:
    """The arch whose kernels must run for tensors on this device."""
    return "cpu" if device == "cpu" else _ARCH[torch.cuda.get_device_capability()]
