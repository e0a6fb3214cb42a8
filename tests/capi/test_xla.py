"""The handlers of XLA's typed FFI, without XLA. tests/jax has them under JAX."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest

from tests.capi import abi, standin, xla
from tests.capi.calls import VALID, decode, gate, l2norm
from tests.capi.test_driver import fake_driver

CPU = dict(device=(abi.CPU, 0))
HANDLERS = ("cula_xla_cpu", "cula_xla_cuda", "cula_xla_cuda_initialize")


def recorded(lib) -> list[tuple[int, bytes]]:
    """(row, parameters) of each CPU kernel that ran since the last time, in pieces, sorted."""
    found, begin, end, params = [], ctypes.c_int64(), ctypes.c_int64(), ctypes.create_string_buffer(4096)
    for i in range(lib.test_call_count()):
        row = lib.test_call(i, ctypes.byref(begin), ctypes.byref(end), params)
        found.append((row, begin.value, end.value, params.raw))
    lib.test_reset_calls()
    return sorted(found)


@pytest.mark.parametrize("handler", HANDLERS)
def test_metadata(lib, handler):
    """The newest version that both sides know; XLA 0.1 is the oldest, and may ask without an api."""
    newest = xla.runtime().newest_minor()
    traits = 0 if handler == "cula_xla_cpu" else xla.COMMAND_BUFFER_COMPATIBLE
    for minor, answer in ((-1, 1), (1, 1), (newest, newest), (newest + 5, newest)):
        assert xla.metadata(lib, handler, minor) == (answer, traits)


CALLS = {
    **{op: (lambda op=op: decode(op, **CPU), ("out",), "state") for op in standin.DECODE_OPS},
    "mixed": (lambda: decode(mixed=True, io="fp16", **CPU), ("out",), "state"),
    "no pool": (lambda: decode("gla_decode", pools=False, io="fp32", **CPU), ("out",), None),
    "kda_gate": (lambda: gate(beta=True, **CPU), ("g", "beta_out"), None),
    "gdn_gate": (lambda: gate("gdn_gate", (5, 64), **CPU), ("g",), None),
    "l2norm": (lambda: l2norm(rstd=True, **CPU), ("y", "rstd"), None),
}


@pytest.mark.parametrize("name", CALLS)
def test_cpu_handler_makes_the_call_of_cula_run(lib, name):
    make, results, in_place = CALLS[name]
    made = make()
    recorded(lib)
    assert made.run(lib) == abi.OK, abi.last_error(lib)
    want = recorded(lib)
    assert xla.call(lib, "cula_xla_cpu", made, results, in_place) == (xla.OK, "")
    assert recorded(lib) == want != []


def test_every_op_is_covered():
    """Prefill has no CPU kernel; on_cuda has it."""
    assert {make().op for make, _, _ in CALLS.values()} == set(VALID) - {"kda_prefill"}


def test_separate_result_pool(lib):
    made = decode("gla_decode", **CPU)
    made.tensors["state_out"] = abi.tensor([4, 4, 128, 128], **CPU)
    made.args.state_out = ctypes.pointer(made.tensors["state_out"])
    recorded(lib)
    assert made.run(lib) == abi.OK
    want = recorded(lib)
    # aliased: the written pool is an argument too
    assert xla.call(lib, "cula_xla_cpu", made, ("out",), "state_out") == (xla.OK, "") and recorded(lib) == want
    assert xla.call(lib, "cula_xla_cpu", made, ("out", "state_out")) == (xla.OK, "") and recorded(lib) == want


def test_addresses_in_the_args_are_not_looked_at(lib):
    """They are of the process that made the program."""
    made = decode("gla_decode", **CPU)
    recorded(lib)
    assert made.run(lib) == abi.OK
    want = recorded(lib)

    def stale(c, raw, fields, buffers):
        for name in abi.DECODE_TENSORS:
            at = getattr(abi.DecodeArgs, name).offset
            raw[at : at + 8] = (0x10 + at).to_bytes(8, "little")

    assert xla.call(lib, "cula_xla_cpu", made, ("out",), "state", edit=stale) == (xla.OK, "")
    assert recorded(lib) == want


def change(**values):
    def edit(c, *_):
        for name, value in values.items():
            setattr(c, name, value)

    return edit


def another_buffer(c, raw, fields, buffers):
    buffers[c.argument_count + c.result_count - 1].data += 64


def field(i, value):
    def edit(c, raw, fields, buffers):
        fields[i] = value

    return edit


def byte_dtype(c, raw, fields, buffers):
    buffers[0].dtype = xla.U8


def struct_size(c, raw, fields, buffers):
    raw[0] += 8


REFUSED = {
    "op": (dict(edit=change(op=99)), xla.NOT_FOUND, "cula_xla_cpu: there is no op 99"),
    "no op": (dict(attributes=6), xla.INVALID, "cula_xla_cpu: the attributes must be op (an s32), args (an array of u8) and fields (an array of s32)"),
    "another attribute": (dict(attributes=15), xla.INVALID, "cula_xla_cpu: the attributes must be op"),
    "op is s64": (dict(op_dtype=xla.S64), xla.INVALID, "cula_xla_cpu: the attributes must be op"),
    "no args": (dict(edit=change(args_bytes=0)), xla.PRECONDITION, "kda_decode: the attribute args has 0 bytes and struct_size 0; it must be a whole cula_decode_args"),
    "cut args": (dict(edit=change(args_bytes=100)), xla.PRECONDITION, "kda_decode: the attribute args has 100 bytes and struct_size 160;"),
    "args of a newer version": (dict(edit=struct_size), xla.PRECONDITION, "kda_decode: the attribute args has 160 bytes and struct_size 168;"),
    "fields": (dict(edit=change(field_count=3)), xla.INVALID, "kda_decode: the attribute fields has 3 numbers for 8 buffers"),
    "field below": (dict(edit=field(0, -1)), xla.INVALID, "kda_decode: buffer 0 is for field -1; cula_decode_args has tensors 0 to 12"),
    "field above": (dict(edit=field(7, 13)), xla.INVALID, "kda_decode: buffer 7 is for field 13; cula_decode_args has tensors 0 to 12"),
    "not aliased": (dict(edit=another_buffer), xla.INTERNAL, "kda_decode: field 9 is updated in place, and XLA gave its argument and its result different memory"),
    "dtype": (dict(edit=byte_dtype), xla.INVALID, "kda_decode: buffer 0 has XLA's dtype 6, which no operand takes"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(lib, name):
    keywords, code, message = REFUSED[name]
    recorded(lib)
    got = xla.call(lib, "cula_xla_cpu", decode(**CPU), ("out",), "state", **keywords)
    assert got[0] == code and got[1].startswith(message), got
    assert recorded(lib) == []


def test_errors_of_the_call_have_their_codes(lib):
    for made, code, message in ((decode(k=96, **CPU), xla.UNIMPLEMENTED, "kda_decode: head_dim_k 96 is not built"),
                                (decode(lower_bound=3.0, **CPU), xla.INVALID, "kda_decode: lower_bound"),
                                (decode(gate_dtype="fp64", **CPU), xla.INVALID, "kda_decode: gate")):
        got = xla.call(lib, "cula_xla_cpu", made, ("out",), "state")
        assert got[0] == code and got[1].startswith(message), got
        assert got[1] == abi.last_error(lib)


@pytest.mark.parametrize("scenario", ["on_cuda", "kernels_missing"])
def test_on_a_cuda_device(scenario):
    xla.runtime()  # compiled here, where a failure is this test's
    env = dict(os.environ, PYTHONPATH=str(standin.ROOT), PYTHONDONTWRITEBYTECODE="1", FAKE="1", LD_LIBRARY_PATH=str(fake_driver()))
    done = subprocess.run([sys.executable, "-m", "tests.capi.xla", scenario], capture_output=True, text=True, env=env, cwd=standin.ROOT)
    assert done.returncode == 0, done.stderr
