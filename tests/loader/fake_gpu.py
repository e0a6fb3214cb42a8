"""Builds and preloads fake_cuda.c as libcuda.so.1, and makes torch tensors that claim to be on it. For a process of its own.

    gpu = fake_gpu.install(library)     before anything opens the real driver
    gpu.tensor(torch.zeros(4))          a tensor on "cuda:0"
    gpu.launches()                      what was launched
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


class Launch(ctypes.Structure):
    _fields_ = [("device", ctypes.c_int32), ("grid", ctypes.c_uint32 * 3), ("block", ctypes.c_uint32 * 3), ("dynamic_smem", ctypes.c_uint32),
                ("attribute_count", ctypes.c_uint32), ("attribute_id", ctypes.c_int32), ("attribute_value", ctypes.c_int32),
                ("stream", ctypes.c_uint64), ("function", ctypes.c_uint64), ("params", ctypes.c_uint64 * 64)]


def build(folder: Path, include: Path) -> Path:
    library = folder / "libcuda.so.1"
    subprocess.run([os.environ.get("CC", "cc"), "-std=c11", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", f"-I{include}",
                    str(HERE / "fake_cuda.c"), "-o", str(library), "-Wl,-soname,libcuda.so.1", "-ldl"], check=True)
    return library


class FakeGpu:
    def __init__(self, library: Path):
        # Its soname is libcuda.so.1, so that every later dlopen of that name in this process finds it.
        self.c = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
        self.type = None

    def __getattr__(self, name):
        return ctypes.c_int.in_dll(self.c, f"fake_{name}").value

    def set(self, **values):
        for name, value in values.items():
            ctypes.c_int.in_dll(self.c, f"fake_{name}").value = value

    def set_param_sizes(self, sizes):
        array = (ctypes.c_uint16 * 64).in_dll(self.c, "fake_param_sizes")
        array[: len(sizes)] = sizes
        self.set(param_count=len(sizes))

    def launches(self) -> list[Launch]:
        array = (Launch * 64).in_dll(self.c, "fake_launches")
        return [array[i] for i in range(self.launch_count)]

    def loaded(self) -> list[str]:
        return (ctypes.c_char * 4096).in_dll(self.c, "fake_log").value.decode().split()

    def memory_log(self) -> list[str]:
        """Since the last time."""
        text = (ctypes.c_char * 4096).in_dll(self.c, "fake_memory_log")
        lines = text.value.decode().splitlines()
        text.value = b""
        return lines

    def context(self) -> int:
        """The thread's current context: device + 1, 0 for none."""
        current = ctypes.c_size_t()
        self.c.cuCtxGetCurrent(ctypes.byref(current))
        return current.value

    def make_current(self, device: int | None) -> None:
        self.c.cuCtxSetCurrent(ctypes.c_size_t(0 if device is None else device + 1))

    def tensor_type(self):
        import torch

        python = ctypes.pythonapi
        python.PyCapsule_GetPointer.restype = ctypes.c_void_p
        python.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
        python.PyCapsule_New.restype = ctypes.py_object
        python.PyCapsule_New.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        self.c.fake_exchange_api.restype = ctypes.c_void_p
        self.c.fake_exchange_api.argtypes = [ctypes.c_void_p]
        api = self.c.fake_exchange_api(python.PyCapsule_GetPointer(torch.Tensor.__dlpack_c_exchange_api__, b"dlpack_exchange_api"))
        gpu = self

        class CudaTensor(torch.Tensor):
            __torch_function__ = torch._C._disabled_torch_function_impl  # attributes as fast as a plain tensor's
            __dlpack_c_exchange_api__ = python.PyCapsule_New(api, b"dlpack_exchange_api", None)

            def __dlpack_device__(self):
                return (2, gpu.tensor_device)

        ctypes.c_void_p.in_dll(self.c, "fake_tensor_type").value = id(CudaTensor)
        return CudaTensor

    def tensor(self, x):
        if self.type is None:
            self.type = self.tensor_type()
        return x.as_subclass(self.type)


def install(library: Path) -> FakeGpu:
    assert not any(name in sys.modules for name in ("torch", "cuda")), "they may have opened the real driver"
    return FakeGpu(library)
