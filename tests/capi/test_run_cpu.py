"""cula_run for CPU tensors: the right kernel gets every work item once, with the parameters of the call, on the threads asked for."""

import ctypes
import random
import threading

import pytest

from tests.capi import abi, standin
from tests.capi.abi import CPU, INVALID, OK
from tests.capi.calls import decode, gate, l2norm
from tests.capi.test_decode_plan import address, expected, random_problem

HOST = dict(device=(CPU, 0))


def run(lib, call):
    """(kernel id, ranges, parameters by name) of one cula_run."""
    lib.test_reset_calls()
    assert call.run(lib) == OK, abi.last_error(lib)
    begin, end, data = ctypes.c_int64(), ctypes.c_int64(), (ctypes.c_ubyte * 4096)()
    ranges, rows, seen = [], set(), set()
    family = standin.family_of(call.op)
    size = sum(standin.KIND_SIZE[kind] for _, kind in standin.params(family))
    for i in range(lib.test_call_count()):
        rows.add(lib.test_call(i, ctypes.byref(begin), ctypes.byref(end), data))
        ranges.append((begin.value, end.value))
        seen.add(bytes(data)[:size])
    (row,), (raw,) = rows, seen
    values, at = {}, 0
    kinds = {"ptr": ctypes.c_uint64, "i64": ctypes.c_int64, "i32": ctypes.c_int32, "f32": ctypes.c_float}
    for name, kind in standin.params(family):
        values[name] = kinds[kind].from_buffer_copy(raw, at).value
        at += standin.KIND_SIZE[kind]
    for name, (shift, bits) in standin.modes(family).items():
        values[f"mode.{name}"] = (values["modes"] >> shift) & ((1 << bits) - 1)
    return abi.kernel_id(lib, row), sorted(ranges), values


def covers(ranges, items):
    return [a for a, _ in ranges] == [0, *(b for _, b in ranges[:-1])] and ranges[-1][1] == items and all(a < b for a, b in ranges)


def to_host(call):
    for t in call.tensors.values():
        if t is not None:
            t.device_type, t.device_id = CPU, 0
    return call


def test_decode(lib):
    rng = random.Random(1)
    for _ in range(300):
        call, (n, h, hv, k, v), (io, state, layout) = random_problem(rng)
        call = to_host(call)
        call.args.num_threads = rng.choice([0, 1, 2, 64])
        kernel, ranges, got = run(lib, call)
        assert kernel == f"{call.op}.cpu.{io}.s{state}.k{k}.{layout}"
        assert covers(ranges, n * hv)
        want = expected(call, n, h, hv, k, v)
        assert {name: got[name] for name in want} == want and got["steps"] == 1


@pytest.mark.parametrize("call, items", [
    (lambda: gate(shape=(7, 4, 128), beta=True, **HOST), 28), (lambda: gate(shape=(3, 7, 4, 64), **HOST), 84),
    (lambda: gate("gdn_gate", (7, 64), beta=True, **HOST), 7), (lambda: gate("gdn_gate", (3, 500, 2), **HOST), 1500),
    (lambda: l2norm((7, 4, 128), rstd=True, **HOST), 28), (lambda: l2norm((100000, 128), **HOST), 100000),
])  # fmt: skip
def test_gates_and_norm(lib, call, items):
    call = call()
    kernel, ranges, got = run(lib, call)
    assert kernel == f"{call.op}.cpu.bf16" and covers(ranges, items) and got["x"] == address(call.tensors["x"])


def test_threads(lib):
    """One thread: one range. Several: the work is split where it is large enough."""
    big = lambda threads: decode(n=4096, num_threads=threads, **HOST)
    assert run(lib, big(1))[1] == [(0, 4096 * 4)]
    assert len(run(lib, big(2))[1]) > 1
    assert run(lib, decode(n=1, h=1, hv=1, k=64, v=64, num_threads=8, **HOST))[1] == [(0, 1)]


def test_stream_must_be_null(lib):
    assert (decode(**HOST).run(lib, 0x10), abi.last_error(lib)) == (INVALID, "kda_decode: stream is 0x10; CPU tensors take a NULL stream")


def test_many_heads_and_rows(lib):
    """No grid on the CPU: HV and N have no such limits."""
    assert covers(run(lib, decode("gdn_decode", n=1, h=1, hv=70000, k=64, v=64, **HOST))[1], 70000)
    assert covers(run(lib, decode("gdn_decode", n=600000, h=1, hv=1, k=64, v=64, **HOST))[1], 600000)


def test_calls_from_many_threads(lib):
    statuses = []
    work = lambda: statuses.extend(decode(n=512, **HOST).run(lib) for _ in range(20))
    threads = [threading.Thread(target=work) for _ in range(6)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert statuses == [OK] * 120
