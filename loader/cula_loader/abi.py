"""cula.h in ctypes: struct layouts, enums, prototypes. tests/loader/test_abi.py compares every offset with a compiled C program.

Tensor fields are plain addresses (c_void_p) here, because what fills them is an address; `Tensor` is DLPack's DLTensor.
"""

from __future__ import annotations

from ctypes import (
    Structure,
    Union,
    c_char,
    c_char_p,
    c_float,
    c_int32,
    c_int64,
    c_size_t,
    c_uint8,
    c_uint16,
    c_uint32,
    c_uint64,
    c_void_p,
    sizeof,
)

VERSION = (0, 1, 0)
MAX_LAUNCHES, MAX_PARAMS, PARAM_BYTES, MAX_OBJECTS = 8, 64, 4096, 16

STATUS = {"CULA_OK": 0, "CULA_ERR_INVALID_ARGUMENT": 1, "CULA_ERR_UNSUPPORTED": 2, "CULA_ERR_NOT_FOUND": 3,
          "CULA_ERR_ARTIFACT": 4, "CULA_ERR_VERSION": 5, "CULA_ERR_WORKSPACE": 6, "CULA_ERR_CUDA": 7,
          "CULA_ERR_OUT_OF_MEMORY": 8, "CULA_ERR_INTERNAL": 9}
OPS = {"kda_decode": 1, "gdn_decode": 2, "gla_decode": 3, "lightning_decode": 4, "kda_prefill": 8, "kda_gate": 16, "gdn_gate": 17, "l2norm": 18}
ARCHS = {"device": 0, "cpu": 1, "sm90": 90, "sm100": 100, "sm103": 103, "sm120": 120}
GATE_KINDS = {"none": 0, "log_head": 1, "log_channel": 2, "raw": 3, "const_head": 4}
BETA_KINDS = {"value": 0, "logit": 1, "logit_twice": 2}
STATE_LAYOUTS = {"vk": 0, "kv": 1}
PREFILL_VARIANTS = {"auto": 0, "serial": 1, "overlap": 2, "chain": 3}

# DLPack (dlpack.h 1.3)
CPU, CUDA, CUDA_HOST, CUDA_MANAGED = 1, 2, 3, 13
READ_ONLY = 1
DTYPES = {"fp32": (2, 32), "bf16": (4, 16), "fp16": (2, 16), "fp64": (2, 64), "int32": (0, 32), "int64": (0, 64)}


class Tensor(Structure):
    """DLTensor."""

    _fields_ = [("data", c_void_p), ("device_type", c_int32), ("device_id", c_int32), ("ndim", c_int32), ("code", c_uint8),
                ("bits", c_uint8), ("lanes", c_uint16), ("shape", c_void_p), ("strides", c_void_p), ("byte_offset", c_uint64)]


class ManagedTensor(Structure):
    """DLManagedTensor, the content of a capsule named "dltensor"."""

    _fields_ = [("tensor", Tensor), ("manager_ctx", c_void_p), ("deleter", c_void_p)]


class ManagedTensorVersioned(Structure):
    """DLManagedTensorVersioned, the content of a capsule named "dltensor_versioned"."""

    _fields_ = [("major", c_uint32), ("minor", c_uint32), ("manager_ctx", c_void_p), ("deleter", c_void_p), ("flags", c_uint64),
                ("tensor", Tensor)]


class ExchangeAPI(Structure):
    """DLPackExchangeAPI, the content of a capsule named "dlpack_exchange_api". The functions are addresses."""

    _fields_ = [("major", c_uint32), ("minor", c_uint32), ("prev_api", c_void_p), ("managed_tensor_allocator", c_void_p),
                ("managed_tensor_from_py_object_no_sync", c_void_p), ("managed_tensor_to_py_object_no_sync", c_void_p),
                ("dltensor_from_py_object_no_sync", c_void_p), ("current_work_stream", c_void_p)]


class DecodeArgs(Structure):
    TENSORS = ("q", "k", "v", "mixed_qkv", "out", "gate", "A_log", "dt_bias", "beta", "state", "state_out", "read_index",
               "write_index")
    _fields_ = [("struct_size", c_size_t), *((name, c_void_p) for name in TENSORS), ("null_slot", c_int64),
                ("has_null_slot", c_int32), ("gate_kind", c_int32), ("beta_kind", c_int32), ("state_layout", c_int32),
                ("l2norm", c_int32), ("has_scale", c_int32), ("scale", c_float), ("lower_bound", c_float),
                ("num_threads", c_int32), ("reserved0", c_int32)]


class PrefillArgs(Structure):
    TENSORS = ("q", "k", "v", "out", "gate", "A_log", "dt_bias", "beta", "cu_seqlens", "state", "state_out", "read_index", "write_index",
               "checkpoints", "checkpoint_index")
    _fields_ = [("struct_size", c_size_t), *((name, c_void_p) for name in TENSORS), ("null_slot", c_int64),
                ("checkpoint_interval", c_int64), ("has_null_slot", c_int32), ("gate_kind", c_int32), ("beta_kind", c_int32),
                ("state_layout", c_int32), ("l2norm", c_int32), ("has_scale", c_int32), ("scale", c_float), ("lower_bound", c_float),
                ("variant", c_int32), ("segments", c_int32), ("num_threads", c_int32), ("exact", c_int32)]


class GateArgs(Structure):
    TENSORS = ("x", "g", "A_log", "dt_bias", "beta", "beta_out")
    _fields_ = [("struct_size", c_size_t), *((name, c_void_p) for name in TENSORS), ("beta_kind", c_int32),
                ("lower_bound", c_float), ("num_threads", c_int32), ("reserved0", c_int32)]


class L2normArgs(Structure):
    TENSORS = ("x", "y", "rstd")
    _fields_ = [("struct_size", c_size_t), *((name, c_void_p) for name in TENSORS), ("eps", c_float), ("num_threads", c_int32)]


class Requirements(Structure):
    _fields_ = [("struct_size", c_size_t), ("arch", c_int32), ("sm_count", c_int32), ("workspace_bytes", c_size_t),
                ("workspace_align", c_size_t), ("launch_count", c_int32), ("kernels", c_int32 * MAX_LAUNCHES)]


class KernelDesc(Structure):
    _fields_ = [("struct_size", c_size_t), ("id", c_char_p), ("entry_symbol", c_char_p), ("cubin", c_void_p),
                ("cubin_bytes", c_size_t), ("param_sizes", c_void_p), ("op", c_int32), ("arch", c_int32), ("param_count", c_int32),
                ("registers", c_int32), ("static_smem", c_int32), ("max_dynamic_smem", c_int32), ("smem_carveout", c_int32)]


class LaunchConfig(Structure):
    """Bit-compatible with CUlaunchConfig."""

    _fields_ = [("grid", c_uint32 * 3), ("block", c_uint32 * 3), ("dynamic_smem", c_uint32), ("stream", c_void_p),
                ("attributes", c_void_p), ("attribute_count", c_uint32)]


class LaunchAttributeValue(Union):
    _fields_ = [("bytes", c_char * 64), ("i32", c_int32 * 16), ("u32", c_uint32 * 16), ("u64", c_uint64 * 8)]


class LaunchAttribute(Structure):
    """Bit-compatible with CUlaunchAttribute."""

    _fields_ = [("id", c_int32), ("pad", c_int32), ("value", LaunchAttributeValue)]


class Launch(Structure):
    _fields_ = [("config", LaunchConfig), ("params", c_void_p * MAX_PARAMS), ("attributes", LaunchAttribute * 2),
                ("kernel", c_int32), ("param_count", c_int32)]


class Launches(Structure):
    _fields_ = [("struct_size", c_size_t), ("arch", c_int32), ("sm_count", c_int32), ("stream", c_void_p), ("count", c_int32),
                ("device_type", c_int32), ("device_id", c_int32), ("storage_used", c_int32), ("launch", Launch * MAX_LAUNCHES),
                ("storage", c_uint64 * (PARAM_BYTES // 8))]


ARGS = {"kda_decode": DecodeArgs, "gdn_decode": DecodeArgs, "gla_decode": DecodeArgs, "lightning_decode": DecodeArgs,
        "kda_prefill": PrefillArgs, "kda_gate": GateArgs, "gdn_gate": GateArgs, "l2norm": L2normArgs}


def size_of(struct: type[Structure]) -> int:
    """CULA_SIZEOF: up to and including the last field, because tail padding may become a field."""
    name, kind = struct._fields_[-1]
    return getattr(struct, name).offset + sizeof(kind)


def new(struct: type[Structure]):
    """A zeroed struct with its struct_size written."""
    made = struct()
    made.struct_size = size_of(struct)
    return made


# function: (result, arguments). Every structure goes as an address.
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
    "cula_bind_objects": (c_int32, [c_int32, c_void_p, c_void_p, c_void_p, c_int32, c_void_p, c_void_p, c_void_p, c_void_p,
                                    c_size_t, c_void_p]),
    "cula_xla_cpu": (c_void_p, [c_void_p]),
    "cula_xla_cuda": (c_void_p, [c_void_p]),
    "cula_xla_cuda_initialize": (c_void_p, [c_void_p]),
}
