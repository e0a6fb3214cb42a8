"""cula.h through ctypes: the structs, and a small way to make calls. Written from the header; test_header checks it against a compiler."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, byref, c_char_p, c_float, c_int32, c_int64, c_size_t, c_uint8, c_uint16, c_uint32, c_uint64, c_void_p

from tests.capi import standin

OK, INVALID, UNSUPPORTED, NOT_FOUND, ARTIFACT, VERSION, WORKSPACE, CUDA, OUT_OF_MEMORY, INTERNAL = range(10)
OPS = {**standin.DECODE_OPS, **standin.PREFILL_OPS, **standin.GATE_OPS}
ARCHS = {"device": 0, "cpu": 1, "sm90": 90, "sm100": 100, "sm103": 103, "sm120": 120}
CPU, GPU, CUDA_HOST, CUDA_MANAGED, ROCM = 1, 2, 3, 13, 10
DTYPES = {"fp32": (2, 32), "bf16": (4, 16), "fp16": (2, 16), "i32": (0, 32), "i64": (0, 64), "fp64": (2, 64), "u8": (1, 8), "bool": (6, 8),
          "i16": (0, 16)}
ITEMSIZE = {"fp32": 4, "bf16": 2, "fp16": 2, "i32": 4, "i64": 8, "fp64": 8, "u8": 1, "bool": 1, "i16": 2}
GATES = {"NONE": 0, "LOG_HEAD": 1, "LOG_CHANNEL": 2, "RAW": 3, "CONST_HEAD": 4}
BETAS = {"VALUE": 0, "LOGIT": 1, "LOGIT_TWICE": 2}
VARIANTS = {"AUTO": 0, "SERIAL": 1, "OVERLAP": 2, "CHAIN": 3}


class DLTensor(ctypes.Structure):
    _fields_ = [("data", c_void_p), ("device_type", c_int32), ("device_id", c_int32), ("ndim", c_int32), ("code", c_uint8),
                ("bits", c_uint8), ("lanes", c_uint16), ("shape", POINTER(c_int64)), ("strides", POINTER(c_int64)),
                ("byte_offset", c_uint64)]


T = POINTER(DLTensor)
DECODE_TENSORS = ("q", "k", "v", "mixed_qkv", "out", "gate", "A_log", "dt_bias", "beta", "state", "state_out", "read_index",
                  "write_index")
PREFILL_TENSORS = ("q", "k", "v", "out", "gate", "A_log", "dt_bias", "beta", "cu_seqlens", "state", "state_out", "read_index", "write_index",
                   "checkpoints", "checkpoint_index")
GATE_TENSORS = ("x", "g", "A_log", "dt_bias", "beta", "beta_out")
NORM_TENSORS = ("x", "y", "rstd")


class DecodeArgs(ctypes.Structure):
    _fields_ = [("struct_size", c_size_t), *((name, T) for name in DECODE_TENSORS), ("null_slot", c_int64), ("has_null_slot", c_int32),
                ("gate_kind", c_int32), ("beta_kind", c_int32), ("state_layout", c_int32), ("l2norm", c_int32), ("has_scale", c_int32),
                ("scale", c_float), ("lower_bound", c_float), ("num_threads", c_int32), ("reserved0", c_int32)]


class PrefillArgs(ctypes.Structure):
    _fields_ = [("struct_size", c_size_t), *((name, T) for name in PREFILL_TENSORS), ("null_slot", c_int64), ("checkpoint_interval", c_int64),
                ("has_null_slot", c_int32), ("gate_kind", c_int32), ("beta_kind", c_int32), ("state_layout", c_int32), ("l2norm", c_int32),
                ("has_scale", c_int32), ("scale", c_float), ("lower_bound", c_float), ("variant", c_int32), ("segments", c_int32),
                ("num_threads", c_int32), ("exact", c_int32)]


class GateArgs(ctypes.Structure):
    _fields_ = [("struct_size", c_size_t), *((name, T) for name in GATE_TENSORS), ("beta_kind", c_int32), ("lower_bound", c_float),
                ("num_threads", c_int32), ("reserved0", c_int32)]


class NormArgs(ctypes.Structure):
    _fields_ = [("struct_size", c_size_t), *((name, T) for name in NORM_TENSORS), ("eps", c_float), ("num_threads", c_int32)]


class Requirements(ctypes.Structure):
    _fields_ = [("struct_size", c_size_t), ("arch", c_int32), ("sm_count", c_int32), ("workspace_bytes", c_size_t),
                ("workspace_align", c_size_t), ("launch_count", c_int32), ("kernels", c_int32 * 8)]


class KernelDesc(ctypes.Structure):
    _fields_ = [("struct_size", c_size_t), ("id", c_char_p), ("entry_symbol", c_char_p), ("cubin", c_void_p), ("cubin_bytes", c_size_t),
                ("param_sizes", POINTER(c_uint16)), ("op", c_int32), ("arch", c_int32), ("param_count", c_int32), ("registers", c_int32),
                ("static_smem", c_int32), ("max_dynamic_smem", c_int32), ("smem_carveout", c_int32)]


class LaunchConfig(ctypes.Structure):
    _fields_ = [("grid", c_uint32 * 3), ("block", c_uint32 * 3), ("dynamic_smem", c_uint32), ("stream", c_void_p), ("attributes", c_void_p),
                ("attribute_count", c_uint32)]


class AttributeValue(ctypes.Union):
    _fields_ = [("bytes", ctypes.c_char * 64), ("i32", c_int32 * 16), ("u32", c_uint32 * 16), ("u64", c_uint64 * 8)]


class LaunchAttribute(ctypes.Structure):
    _fields_ = [("id", c_int32), ("pad", c_int32), ("value", AttributeValue)]


class Launch(ctypes.Structure):
    _fields_ = [("config", LaunchConfig), ("params", c_void_p * 64), ("attributes", LaunchAttribute * 2), ("kernel", c_int32),
                ("param_count", c_int32)]


class Launches(ctypes.Structure):
    _fields_ = [("struct_size", c_size_t), ("arch", c_int32), ("sm_count", c_int32), ("stream", c_void_p), ("count", c_int32),
                ("device_type", c_int32), ("device_id", c_int32), ("storage_used", c_int32), ("launch", Launch * 8),
                ("storage", c_uint64 * 512)]


STRUCTS = {"cula_decode_args": DecodeArgs, "cula_prefill_args": PrefillArgs, "cula_gate_args": GateArgs, "cula_l2norm_args": NormArgs, "cula_requirements": Requirements,
           "cula_kernel_desc": KernelDesc, "cula_launch_config": LaunchConfig, "cula_launch_attribute": LaunchAttribute,
           "cula_launch": Launch, "cula_launches": Launches}
ARGS = {**dict.fromkeys(standin.DECODE_OPS, DecodeArgs), "kda_prefill": PrefillArgs, "kda_gate": GateArgs, "gdn_gate": GateArgs, "l2norm": NormArgs}
FUNCTIONS = {
    "cula_version": (c_uint32, []),
    "cula_build_info": (c_char_p, []),
    "cula_status_name": (c_char_p, [c_int32]),
    "cula_op_name": (c_char_p, [c_int32]),
    "cula_last_error": (c_size_t, [c_char_p, c_size_t]),
    "cula_kernel_count": (c_int32, []),
    "cula_kernel_info": (c_int32, [c_int32, c_void_p]),
    "cula_query": (c_int32, [c_int32, c_void_p, c_void_p]),
    "cula_prepare": (c_int32, [c_int32]),
    "cula_run": (c_int32, [c_int32, c_void_p, c_void_p, c_size_t, c_void_p]),
    "cula_bind": (c_int32, [c_int32, c_void_p, c_void_p, c_size_t, c_void_p]),
    "cula_bind_objects": (c_int32, [c_int32, c_void_p, c_void_p, c_void_p, c_int32, c_void_p, c_void_p, c_void_p, c_void_p, c_size_t,
                                    c_void_p]),
    "cula_xla_cpu": (c_void_p, [c_void_p]),
    "cula_xla_cuda": (c_void_p, [c_void_p]),
    "cula_xla_cuda_initialize": (c_void_p, [c_void_p]),
}  # fmt: skip


def size_of(struct_type) -> int:
    """CULA_SIZEOF: through the last field."""
    name, field_type = struct_type._fields_[-1]
    return getattr(struct_type, name).offset + ctypes.sizeof(field_type)


def sized(struct_type):
    x = struct_type()
    x.struct_size = size_of(struct_type)
    return x


def load(path, kind=ctypes.CDLL):
    lib = kind(str(path))
    for name, (result, arguments) in FUNCTIONS.items():
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    return lib


def last_error(lib) -> str:
    text = ctypes.create_string_buffer(4096)
    lib.cula_last_error(text, len(text))
    return text.value.decode()


def compact(shape) -> list[int]:
    strides, step = [0] * len(shape), 1
    for i in reversed(range(len(shape))):
        strides[i] = step
        step *= max(shape[i], 1)
    return strides


_next_address = [0x7F0000000000]


def tensor(shape, dtype="fp32", strides=None, data=None, device=(GPU, 0), byte_offset=0, lanes=1) -> DLTensor:
    """A description of memory that nothing looks at. data None: a made-up address, apart from all others."""
    shape = [int(x) for x in shape]
    code, bits = DTYPES[dtype] if isinstance(dtype, str) else dtype
    if data is None:
        used = strides if strides is not None else compact(shape)
        reach = sum((n - 1) * abs(s) for n, s in zip(shape, used) if n > 1)
        reach = min(reach, 1 << 40)
        data = _next_address[0] + (reach * 8 // 256 + 1) * 256  # room below, for negative strides
        _next_address[0] = data + (reach * 8 // 256 + 2) * 256
        if _next_address[0] > 0x7FFF00000000:
            _next_address[0] = 0x100000000000
    t = DLTensor(data, *device, len(shape), code, bits, lanes, (c_int64 * max(len(shape), 1))(*shape), None, byte_offset)
    if strides is not None:
        t.strides = (c_int64 * max(len(shape), 1))(*strides)
    return t


class Call:
    """One call's args struct with its tensors kept alive."""

    def __init__(self, op: str, tensors: dict, **fields):
        self.op, self.tensors = op, tensors
        self.args = sized(ARGS[op])
        for name, t in tensors.items():
            if t is not None:
                setattr(self.args, name, ctypes.pointer(t))
        for name, value in fields.items():
            setattr(self.args, name, value)

    def query(self, lib, arch="sm90", sm_count=0):
        r = sized(Requirements)
        r.arch, r.sm_count = ARCHS.get(arch, arch), sm_count
        return lib.cula_query(OPS[self.op], byref(self.args), byref(r)), r

    def bind(self, lib, arch="sm90", sm_count=0, stream=0x1234, workspace=None, bytes=0):
        b = sized(Launches)
        b.arch, b.sm_count, b.stream = ARCHS.get(arch, arch), sm_count, stream
        return lib.cula_bind(OPS[self.op], byref(self.args), workspace, bytes, byref(b)), b

    def run(self, lib, stream=None, workspace=None, bytes=0):
        return lib.cula_run(OPS[self.op], byref(self.args), workspace, bytes, stream)


def launch_params(op: str, launch: Launch) -> dict:
    """op: a kernel id, or for ops of one kernel the op's name. The parameter values of a launch by name, `modes` unpacked into 'mode.<name>'."""
    family = standin.family_of(op)
    kinds = {"ptr": c_uint64, "i64": c_int64, "i32": c_int32, "f32": c_float}
    names = standin.params(family)
    assert launch.param_count == len(names)
    values = {name: kinds[kind].from_address(launch.params[i]).value for i, (name, kind) in enumerate(names)}
    for name, (shift, bits) in standin.modes(family).items():
        values[f"mode.{name}"] = (values["modes"] >> shift) & ((1 << bits) - 1)
    return values


def kernel_id(lib, index: int) -> str:
    desc = sized(KernelDesc)
    assert lib.cula_kernel_info(index, byref(desc)) == OK, last_error(lib)
    return desc.id.decode()
