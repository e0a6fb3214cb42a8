"""cula.h through ctypes, for tests: torch tensors in, cula_run out. Written from the header, shares nothing with the loader."""

from __future__ import annotations

import ctypes
import functools
import os
from ctypes import POINTER, byref, c_char_p, c_float, c_int32, c_int64, c_size_t, c_uint8, c_uint16, c_uint32, c_uint64, c_void_p
from pathlib import Path

import torch

ARTIFACTS = Path(os.environ.get("CULA_ARTIFACTS") or Path(__file__).parents[2] / "artifacts")  # as the loader looks for them
LIBRARY = ARTIFACTS / "lib" / "libcula.so"

STATUS = ("CULA_OK", "CULA_ERR_INVALID_ARGUMENT", "CULA_ERR_UNSUPPORTED", "CULA_ERR_NOT_FOUND", "CULA_ERR_ARTIFACT",
          "CULA_ERR_VERSION", "CULA_ERR_WORKSPACE", "CULA_ERR_CUDA", "CULA_ERR_OUT_OF_MEMORY", "CULA_ERR_INTERNAL")
OPS = {"kda": 1, "gdn": 2, "gla": 3, "lightning": 4}
ARCHS = {"cpu": 1, "sm90": 90, "sm100": 100, "sm103": 103, "sm120": 120}
GATE_KINDS = {"none": 0, "log_head": 1, "log_channel": 2, "raw": 3, "const_head": 4}
BETA_KINDS = {"value": 0, "logit": 1, "logit_twice": 2}
LAYOUTS = {"vk": 0, "kv": 1}
DLPACK_DTYPE = {torch.bfloat16: (4, 16), torch.float16: (2, 16), torch.float32: (2, 32), torch.float64: (2, 64),
                torch.int16: (0, 16),
                torch.int32: (0, 32), torch.int64: (0, 64), torch.uint8: (1, 8)}


class DLTensor(ctypes.Structure):
    _fields_ = [("data", c_void_p), ("device_type", c_int32), ("device_id", c_int32), ("ndim", c_int32), ("code", c_uint8),
                ("bits", c_uint8), ("lanes", c_uint16), ("shape", POINTER(c_int64)), ("strides", POINTER(c_int64)),
                ("byte_offset", c_uint64)]


TENSORS = ("q", "k", "v", "mixed_qkv", "out", "gate", "A_log", "dt_bias", "beta", "state", "state_out", "read_index",
           "write_index")


class DecodeArgs(ctypes.Structure):
    _fields_ = [("struct_size", c_size_t), *((name, POINTER(DLTensor)) for name in TENSORS), ("null_slot", c_int64),
                ("has_null_slot", c_int32), ("gate_kind", c_int32), ("beta_kind", c_int32), ("state_layout", c_int32),
                ("l2norm", c_int32), ("has_scale", c_int32), ("scale", c_float), ("lower_bound", c_float),
                ("num_threads", c_int32), ("reserved0", c_int32)]


class Requirements(ctypes.Structure):
    _fields_ = [("struct_size", c_size_t), ("arch", c_int32), ("sm_count", c_int32), ("workspace_bytes", c_size_t),
                ("workspace_align", c_size_t), ("launch_count", c_int32), ("kernels", c_int32 * 8)]


class KernelDesc(ctypes.Structure):
    _fields_ = [("struct_size", c_size_t), ("id", c_char_p), ("entry_symbol", c_char_p), ("cubin", c_void_p),
                ("cubin_bytes", c_size_t), ("param_sizes", POINTER(c_uint16)), ("op", c_int32), ("arch", c_int32),
                ("param_count", c_int32), ("registers", c_int32), ("static_smem", c_int32), ("max_dynamic_smem", c_int32)]


def sized(struct_type):
    """A zeroed struct with struct_size as CULA_SIZEOF has it: through the last field, without tail padding."""
    name, field_type = struct_type._fields_[-1]
    x = struct_type()
    x.struct_size = getattr(struct_type, name).offset + ctypes.sizeof(field_type)
    return x


class CulaError(Exception):
    def __init__(self, status: int, message: str):
        super().__init__(f"{STATUS[status]}: {message}")
        self.status, self.message = STATUS[status], message


@functools.cache
def library() -> ctypes.CDLL:
    lib = ctypes.CDLL(str(LIBRARY))
    lib.cula_version.restype = c_uint32
    lib.cula_last_error.argtypes, lib.cula_last_error.restype = [c_char_p, c_size_t], c_size_t
    lib.cula_kernel_info.argtypes = [c_int32, POINTER(KernelDesc)]
    lib.cula_query.argtypes = [c_int32, c_void_p, POINTER(Requirements)]
    lib.cula_prepare.argtypes = [c_int32]
    lib.cula_run.argtypes = [c_int32, c_void_p, c_void_p, c_size_t, c_void_p]
    return lib


def raise_for(status: int) -> None:
    if status:
        text = ctypes.create_string_buffer(2048)
        library().cula_last_error(text, len(text))
        raise CulaError(status, text.value.decode())


def kernel_ids(requirements: Requirements) -> list[str]:
    ids = []
    for i in range(requirements.launch_count):
        desc = sized(KernelDesc)
        raise_for(library().cula_kernel_info(requirements.kernels[i], byref(desc)))
        ids.append(desc.id.decode())
    return ids


class Call:
    """The args struct of one decode call and what it points to; kept alive together."""

    def __init__(self, op: str, tensors: dict[str, torch.Tensor | None], *, gate_kind="none", beta_kind="value", l2norm=False,
                 scale=None, layout="vk", lower_bound=0.0, null_slot=None, num_threads=0):
        self.op, self.keep = OPS[op], []
        a = self.args = sized(DecodeArgs)
        for name, x in tensors.items():
            if x is not None:
                setattr(a, name, self.describe(x))
        a.gate_kind, a.beta_kind, a.state_layout = GATE_KINDS[gate_kind], BETA_KINDS[beta_kind], LAYOUTS[layout]
        a.l2norm, a.lower_bound, a.num_threads = int(l2norm), lower_bound, num_threads
        a.has_scale, a.scale = (0, 0.0) if scale is None else (1, scale)
        a.has_null_slot, a.null_slot = (0, 0) if null_slot is None else (1, null_slot)

    def describe(self, x: torch.Tensor):
        shape, strides = (c_int64 * x.ndim)(*x.shape), (c_int64 * x.ndim)(*x.stride())
        code, width = DLPACK_DTYPE[x.dtype]
        device = (2, x.device.index or 0) if x.is_cuda else (1, 0)
        d = DLTensor(x.data_ptr(), *device, x.ndim, code, width, 1, shape, strides, 0)
        self.keep += [x, shape, strides, d]
        return ctypes.pointer(d)

    def query(self, arch: str | None = None, sm_count: int = 0) -> Requirements:
        r = sized(Requirements)
        r.arch, r.sm_count = ARCHS[arch] if arch else 0, sm_count
        raise_for(library().cula_query(self.op, byref(self.args), byref(r)))
        return r

    def run(self, stream: int = 0, workspace: int = 0, workspace_bytes: int = 0) -> None:
        raise_for(library().cula_run(self.op, byref(self.args), workspace, workspace_bytes, stream))
