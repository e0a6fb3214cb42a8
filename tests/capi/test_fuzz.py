"""Hypothesis over the args structs: any shapes, strides, dtypes, devices, enums, sizes. Never a crash; OK only for what an
independent reading of the rules accepts.

Pointers to DLTensors and their shape and stride arrays are always good: the interface has to read them. Everything else is free.
"""

import ctypes
import math
from ctypes import byref

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.capi import abi, standin
from tests.capi.abi import INVALID, NOT_FOUND, OK, UNSUPPORTED, VERSION, WORKSPACE
from tests.capi.calls import VALID, decode
from tests.capi.test_run_cpu import to_host

ALLOWED = {OK, INVALID, UNSUPPORTED}
SETTINGS = settings(max_examples=1500, deadline=None, suppress_health_check=list(HealthCheck))

extents = st.one_of(st.sampled_from([0, 1, 2, 3, 4, 64, 96, 128, 256, 512]), st.sampled_from([-1, 2**31 - 1, 2**31, 2**62, 2**63 - 1, -(2**63)]))
strides = st.one_of(st.sampled_from([0, 1, 2, 64, 128, 256, 512, 16384, 65536]), st.integers(-(2**63), 2**63 - 1))
i32s = st.one_of(st.integers(-2, 6), st.sampled_from([2**31 - 1, -(2**31)]))
floats = st.one_of(st.sampled_from([0.0, -0.0, -5.0, 1.0]), st.floats(width=32))
dtypes = st.one_of(st.sampled_from(list(abi.DTYPES.values())), st.tuples(st.integers(0, 255), st.integers(0, 255)))
devices = st.one_of(st.just((abi.GPU, 0)), st.just((abi.CPU, 0)), st.tuples(st.integers(-1, 20), st.integers(-2, 70)))


@st.composite
def tensors(draw):
    ndim = draw(st.integers(0, 9))
    shape = draw(st.lists(extents, min_size=ndim, max_size=ndim))
    t = abi.tensor([0] * ndim, draw(dtypes), data=0x1000, device=draw(devices), byte_offset=draw(st.sampled_from([0, 2, 16, 2**64 - 1])),
                   lanes=draw(st.sampled_from([1, 1, 1, 0, 2, 65535])))
    t.shape = (ctypes.c_int64 * 10)(*shape)
    t.data = draw(st.one_of(st.just(0x7F0000000000), st.just(0), st.integers(0, 2**64 - 1)))
    if draw(st.booleans()):
        t.strides = (ctypes.c_int64 * 10)(*draw(st.lists(strides, min_size=ndim, max_size=ndim)))
    t.ndim = draw(st.sampled_from([ndim, ndim, ndim, ndim, -1, 10, 2**31 - 1])) if ndim < 9 else ndim
    return t


def everything(lib, call, arch, sm_count=0):
    """Query, bind and run answer alike; returns the status."""
    r, b = abi.sized(abi.Requirements), abi.sized(abi.Launches)
    r.arch, r.sm_count, b.arch, b.sm_count = arch, sm_count, arch, sm_count
    status = lib.cula_query(abi.OPS[call.op], byref(call.args), byref(r))
    if status == OK and r.workspace_bytes:
        assert lib.cula_bind(abi.OPS[call.op], byref(call.args), 0x1000, r.workspace_bytes - 1, byref(b)) == WORKSPACE
    bound = lib.cula_bind(abi.OPS[call.op], byref(call.args), 0x1000, r.workspace_bytes, byref(b))
    message = abi.last_error(lib)
    assert bound == status or (status == OK and bound == UNSUPPORTED and "use cula_run for CPU tensors" in message)
    if status == OK:
        assert 0 <= r.launch_count <= 8 and all(0 <= r.kernels[i] < lib.cula_kernel_count() for i in range(r.launch_count))
    if bound == OK:
        assert b.count == r.launch_count
        for launch in b.launch[: b.count]:
            grid = launch.config.grid
            assert 1 <= grid[0] < 2**31 and 1 <= grid[1] <= 65535 and 1 <= grid[2] <= 65535 and 32 <= launch.config.block[0] <= 1024
            abi.launch_params(abi.kernel_id(lib, launch.kernel), launch)
    return status


@settings(SETTINGS, max_examples=400)
@given(data=st.data())
def test_any_args(lib, data):
    op = data.draw(st.sampled_from(list(abi.OPS)))
    struct = abi.ARGS[op]
    given_tensors = {name: data.draw(st.one_of(st.none(), tensors())) for name, kind in struct._fields_ if kind is abi.T}
    call = abi.Call(op, given_tensors)
    for name, kind in struct._fields_:
        if kind is ctypes.c_int32:
            setattr(call.args, name, data.draw(i32s))
        elif kind is ctypes.c_float:
            setattr(call.args, name, data.draw(floats))
        elif kind is ctypes.c_int64:
            setattr(call.args, name, data.draw(st.integers(-(2**63), 2**63 - 1)))
    status = everything(lib, call, data.draw(st.sampled_from([90, 100, 1])), data.draw(st.sampled_from([0, 1, 2**31 - 1])))
    assert status in ALLOWED


@SETTINGS
@given(data=st.data())
def test_one_thing_wrong_in_a_valid_call(lib, data):
    """Random calls rarely get past the first check; this one changes a single field of a tensor or of the struct."""
    op = data.draw(st.sampled_from(list(abi.OPS)))
    call = VALID[op]()
    assert everything(lib, call, 90) == OK
    if data.draw(st.booleans()):
        name = data.draw(st.sampled_from([name for name, kind in abi.ARGS[op]._fields_ if kind is abi.T]))
        what = data.draw(st.sampled_from(["none", "tensor", "data", "shape", "strides", "dtype", "device", "byte_offset", "ndim"]))
        t = call.tensors.get(name)
        if what == "none":
            setattr(call.args, name, None)
        elif what == "tensor" or t is None:
            t = call.tensors[name] = data.draw(tensors())
            setattr(call.args, name, ctypes.pointer(t))
        elif what == "data":
            t.data = data.draw(st.integers(0, 2**64 - 1))
        elif what == "shape":
            t.shape[data.draw(st.integers(0, t.ndim - 1))] = data.draw(extents)
        elif what == "strides":
            t.strides = (ctypes.c_int64 * 10)(*data.draw(st.lists(strides, min_size=t.ndim, max_size=t.ndim)))
        elif what == "dtype":
            t.code, t.bits = data.draw(dtypes)
        elif what == "device":
            t.device_type, t.device_id = data.draw(devices)
        elif what == "byte_offset":
            t.byte_offset = data.draw(st.integers(0, 2**64 - 1))
        else:
            t.ndim = data.draw(st.sampled_from([-1, 0, 1, 2, t.ndim - 1]))
    else:
        name, kind = data.draw(st.sampled_from([(name, kind) for name, kind in abi.ARGS[op]._fields_ if kind in (ctypes.c_int32, ctypes.c_float)]))
        setattr(call.args, name, data.draw(i32s if kind is ctypes.c_int32 else floats))
    assert everything(lib, call, 90) in ALLOWED


@SETTINGS
@given(n=st.integers(0, 6), h=st.integers(0, 4), hv=st.integers(0, 8), k=st.sampled_from([0, 32, 64, 96, 128, 256]), v=st.sampled_from([0, 32, 64, 96, 128, 448, 512, 576]),
       op=st.sampled_from(list(standin.DECODE_OPS)), gate=st.sampled_from(list(abi.GATES)), beta=st.sampled_from(list(abi.BETAS)), io=st.sampled_from(list(standin.IO)),
       state=st.sampled_from(["fp32", "bf16", "fp16"]), layout=st.sampled_from(["vk", "kv"]), slots=st.integers(0, 8), rows=st.sampled_from(["n", "n1", "1n"]),
       mixed=st.booleans(), lower_bound=floats, scale=floats, has_scale=st.integers(0, 1), threads=st.integers(-1, 2), pools=st.booleans(), host=st.booleans())
def test_verdict(lib, n, h, hv, k, v, op, gate, beta, io, state, layout, slots, rows, mixed, lower_bound, scale, has_scale, threads, pools, host):  # fmt: skip
    """OK, INVALID or UNSUPPORTED: against the rules as this function has them."""
    call = decode(op, n, h, hv, k, v, io, state, layout, gate, rows=rows, mixed=mixed, pools=pools, slots=slots, lower_bound=lower_bound, scale=scale,
                  has_scale=has_scale, num_threads=threads)
    call.args.beta_kind = abi.BETAS[beta]
    if host:
        to_host(call)
    channel, delta = op in ("kda_decode", "gla_decode"), op in ("kda_decode", "gdn_decode")
    allowed = {"kda_decode": ("NONE", "LOG_CHANNEL", "RAW"), "gdn_decode": ("NONE", "LOG_HEAD", "RAW"), "gla_decode": ("NONE", "LOG_CHANNEL"),
               "lightning_decode": ("NONE", "LOG_HEAD", "CONST_HEAD")}[op]
    lower_bound, scale = ctypes.c_float(lower_bound).value, ctypes.c_float(scale).value
    ok = gate in allowed and (delta or beta == "VALUE") and (math.isfinite(scale) if has_scale else scale == 0) and threads >= 0 and (host or threads == 0)
    ok = ok and (lower_bound == 0 or (op == "kda_decode" and gate == "RAW" and -5 <= lower_bound < 0))
    ok = ok and min(h, hv, k, v) > 0 and hv % h == 0 and (not pools or (state != "fp16" and slots >= n and (slots > 0 or n == 0)))
    ok = ok and (not mixed or pools or (channel and gate != "NONE"))
    # "1n" with N = 1 and "n1" with N = 0 read the same from both sides; nothing to refuse
    want = INVALID if not ok else OK if n == 0 or (k in (64, 128, 256) and v % 64 == 0 and 64 <= v <= 512) else UNSUPPORTED
    status, _ = call.query(lib, "cpu" if host else "sm90")
    assert status == want, abi.last_error(lib)


@SETTINGS
@given(op=st.sampled_from(list(abi.OPS)), size=st.one_of(st.integers(0, 400), st.integers(0, 2**64 - 1)), tail=st.binary(min_size=400, max_size=400))
def test_any_struct_size(lib, op, size, tail):
    call = VALID[op]()
    known = abi.size_of(abi.ARGS[op])
    buffer = ctypes.create_string_buffer(bytes(call.args)[:known] + tail, 66000)
    buffer[:8] = size.to_bytes(8, "little")
    r = abi.sized(abi.Requirements)
    r.arch = 90
    status = lib.cula_query(abi.OPS[op], buffer, byref(r))
    extra = bytes(buffer.raw[known:size]) if size <= 1 << 16 else b"x"
    assert status == (OK if size >= known and not any(extra) else VERSION)


@SETTINGS
@given(op=st.integers(-(2**31), 2**31 - 1), arch=st.integers(-(2**31), 2**31 - 1), sm_count=st.integers(-(2**31), 2**31 - 1))
def test_any_numbers(lib, op, arch, sm_count):
    call = decode(n=3)
    r = abi.sized(abi.Requirements)
    r.arch, r.sm_count = arch, sm_count
    status = lib.cula_query(op, byref(call.args), byref(r))
    if op not in abi.OPS.values():
        assert status == NOT_FOUND
    status = lib.cula_query(1, byref(call.args), byref(r))
    if arch not in abi.ARCHS.values():
        assert status == NOT_FOUND
    elif sm_count < 0:
        assert status == INVALID
