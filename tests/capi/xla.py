"""Handlers of XLA's typed FFI, called without XLA: xla_runtime.cpp through ctypes.

python -m tests.capi.xla runs the scenarios on a CUDA device against fake_libcuda.c, which test_xla.py starts in a process of its own.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, byref, c_char_p, c_int32, c_int64, c_size_t, c_uint32, c_void_p
from functools import cache

from tests.capi import abi, standin

S32, S64, U8, F32, F16, BF16, F64 = 4, 5, 6, 11, 10, 16, 12  # XLA_FFI_DataType
DTYPE = {(0, 32): S32, (0, 64): S64, (2, 32): F32, (2, 16): F16, (4, 16): BF16, (2, 64): F64}
OK, INVALID, NOT_FOUND, EXHAUSTED, PRECONDITION, UNIMPLEMENTED, INTERNAL = 0, 3, 5, 8, 9, 12, 13  # XLA_FFI_Error_Code
COMMAND_BUFFER_COMPATIBLE = 1


class Buffer(Structure):
    _fields_ = [("dtype", c_int32), ("rank", c_int32), ("data", c_void_p), ("dims", POINTER(c_int64))]


class Call(Structure):
    _fields_ = [("op", c_int32), ("op_dtype", c_int32), ("args", c_void_p), ("args_bytes", c_size_t), ("fields", c_void_p),
                ("field_count", c_size_t), ("attributes", c_int32), ("argument_count", c_int32), ("result_count", c_int32),
                ("buffers", POINTER(Buffer)), ("stage", c_int32), ("device", c_int32), ("stream", c_void_p), ("broken", c_int32)]


@cache
def runtime():
    library = standin.build().parent / "libxla_runtime.so"
    source = standin.HERE / "xla_runtime.cpp"
    if not library.exists() or library.stat().st_mtime < source.stat().st_mtime:
        temporary = library.with_suffix(".new")
        standin.run(standin.compiler(), "-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-isystem", standin.xla_include(), source, "-o", temporary)
        temporary.rename(library)
    lib = ctypes.CDLL(str(library))
    lib.call.argtypes = [c_void_p, POINTER(Call), c_char_p, c_size_t]
    lib.metadata.argtypes = [c_void_p, c_int32, POINTER(c_uint32)]
    return lib


def address(lib, handler: str) -> int:
    return ctypes.cast(getattr(lib, handler), c_void_p).value


def metadata(lib, handler: str, minor: int) -> tuple[int, int]:
    """(API version, traits) that a handler tells an XLA of version 0.minor; minor -1: one that asks without an api."""
    traits = c_uint32(77)
    return runtime().metadata(address(lib, handler), minor, byref(traits)), traits.value


def call(lib, handler: str, made: abi.Call, results: tuple[str, ...], in_place: str | None = None, stage=3, device=0, stream=None, broken=0,
         attributes=7, op_dtype=S32, edit=None, workspace=None) -> tuple[int, str]:
    """The call `made` as a custom call. results: its fields that are results; in_place: an operand that is also a result.
    workspace: (address, bytes), one more result. edit: changes the Call before it is made. Returns (XLA_FFI_Error_Code, message)."""
    order = abi.DECODE_TENSORS if made.op in standin.DECODE_OPS else abi.PREFILL_TENSORS if made.op in standin.PREFILL_OPS else abi.NORM_TENSORS if made.op == "l2norm" else abi.GATE_TENSORS
    arguments = [name for name in made.tensors if name not in results]
    outputs = [name for name in made.tensors if name in results] + ([in_place] if in_place else [])
    buffers = (Buffer * 32)()
    for i, name in enumerate((*arguments, *outputs)):
        t = made.tensors[name]
        buffers[i] = Buffer(DTYPE.get((t.code, t.bits), 1), t.ndim, t.data, t.shape)
    numbers = [order.index(name) for name in (*arguments, *outputs)]
    if workspace:
        buffers[len(numbers)] = Buffer(U8, 1, workspace[0], (ctypes.c_int64 * 1)(workspace[1]))
        numbers.append(-1)
    fields = (c_int32 * 32)(*numbers)
    raw = (ctypes.c_uint8 * made.args.struct_size).from_buffer_copy(made.args)  # with the tensor addresses, which must not be looked at
    c = Call(abi.OPS[made.op], op_dtype, ctypes.addressof(raw), len(raw), ctypes.addressof(fields), len(numbers), attributes,
             len(arguments), len(numbers) - len(arguments), buffers, stage, device, stream, broken)
    if edit:
        edit(c, raw, fields, buffers)
    text = ctypes.create_string_buffer(4096)
    code = runtime().call(address(lib, handler), byref(c), text, len(text))
    assert runtime().alive() == 0, "an error was leaked, or destroyed twice"
    return code, text.value.decode()


def on_cuda():
    """The handlers of a CUDA device: loading at `initialize`, launches on XLA's stream, errors."""
    from tests.capi.calls import decode, l2norm, prefill
    from tests.capi.driver_scenarios import SM90, calls, fake, lib, log

    fake.fake_devices(2), fake.fake_device(1, 12, 0, 170)
    fake.fake_activate(0), fake.fake_push(0x1000)  # XLA has its primary context current
    assert call(lib, "cula_xla_cuda_initialize", l2norm(), ("y",), stage=2) == (OK, "")
    assert [int(x) for x in calls(log(), "cuLibraryLoadData")] == SM90
    for _ in range(2):  # before every run of the program
        assert call(lib, "cula_xla_cuda_initialize", l2norm(), ("y",), stage=2) == (OK, "")
    assert log() == []

    made = decode(layout="kv")
    assert made.run(lib, 0x77) == abi.OK
    want = calls(log(), "cuLaunchKernelEx")
    assert call(lib, "cula_xla_cuda", made, ("out",), "state", stream=0x77) == (OK, "")
    lines = log()
    assert len(lines) == 1 and calls(lines, "cuLaunchKernelEx") == want and "stream 0x77" in want[0]

    # prefill, with its workspace as a result
    for held in (prefill(), prefill(gate="RAW", segments=3)):
        status, needs = held.query(lib)
        room = (0x7000000, needs.workspace_bytes)
        assert status == abi.OK and held.run(lib, 0x77, *room) == abi.OK
        want = calls(log(), "cuLaunchKernelEx")
        assert call(lib, "cula_xla_cuda", held, ("out", "state_out"), stream=0x77, workspace=room) == (OK, "")
        assert calls(log(), "cuLaunchKernelEx") == want and len(want) == needs.launch_count
        for small in (None, (0x7000000, needs.workspace_bytes - 1)):
            code, message = call(lib, "cula_xla_cuda", held, ("out", "state_out"), stream=0x77, workspace=small)
            assert code == PRECONDITION and f"needed are {needs.workspace_bytes} bytes, aligned to 128" in message
    wide = lambda c, raw, fields, buffers: setattr(buffers[c.argument_count + c.result_count - 1], "dtype", S32)
    assert call(lib, "cula_xla_cuda", held, ("out", "state_out"), workspace=room, edit=wide) == (INVALID, "kda_prefill: the workspace must be of dtype u8 and of rank 1")
    assert not calls(log(), "cuLaunchKernelEx")

    # a program whose `initialize` stage was not run loads at its first call; another arch's device has its own kernels
    fake.fake_pop(), fake.fake_push(0x1001)
    other = l2norm(device=(abi.GPU, 1))
    assert call(lib, "cula_xla_cuda", other, ("y",), device=1, stream=0x88) == (OK, "")
    lines = log()
    assert calls(lines, "cuLibraryLoadData") and "in 0x1001" in calls(lines, "cuLaunchKernelEx")[0]

    failures = [(dict(device=9), INVALID, "cula_prepare: there is no CUDA device 9; this machine has 2"),
                (dict(broken=1), INTERNAL, "cula_xla_cuda: XLA does not tell the device of the call"),
                (dict(broken=2), INTERNAL, "cula_xla_cuda: XLA does not tell the stream of the call"),
                (dict(broken=4), PRECONDITION, "cula_xla_cuda: this XLA is too old: it has no XLA_FFI_DeviceOrdinal_Get")]
    for keywords, code, message in failures:
        assert call(lib, "cula_xla_cuda", made, ("out",), "state", **keywords) == (code, message)
    assert call(lib, "cula_xla_cuda", decode(num_threads=3), ("out",), "state")[0] == INVALID
    assert not calls(log(), "cuLaunchKernelEx")
    fake.fake_fail(b"cuLaunchKernelEx", 700, 0)
    code, message = call(lib, "cula_xla_cuda", made, ("out",), "state")
    assert code == INTERNAL and "CUDA_ERROR_ILLEGAL_ADDRESS" in message


def kernels_missing():
    """A GPU that the library has no kernels for: said before the program runs."""
    from tests.capi.calls import l2norm
    from tests.capi.driver_scenarios import fake, lib

    fake.fake_device(0, 10, 3, 148)
    assert call(lib, "cula_xla_cuda_initialize", l2norm(), ("y",), stage=2) == (UNIMPLEMENTED, "cula_prepare: device 0 is sm103, and this library has no sm103 kernels")


if __name__ == "__main__":
    import sys

    globals()[sys.argv[1]]()
