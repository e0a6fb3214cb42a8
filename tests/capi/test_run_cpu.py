"""cula_run for CPU tensors: the right kernel gets every work item once, with the parameters of the call, on the threads asked for."""

import ctypes
import random
import threading

import pytest

from tests.capi import abi, standin, test_prefill_plan
from tests.capi.abi import CPU, INVALID, OK, tensor
from tests.capi.calls import decode, gate, l2norm, prefill
from tests.capi.test_decode_plan import CODE, address, expected, f32, name_of, random_problem, strides_of
from tests.capi.test_decode_rules import with_

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


def expected_prefill(call, k, v) -> dict:
    """Every parameter, from cula.h and params_cpu.def."""
    x, a = call.tensors, call.args
    packed, cu = x["q"].ndim == 3, x.get("cu_seqlens")
    h, hv = x["q"].shape[1 if packed else 2], x["v"].shape[1 if packed else 2]
    index = lambda name: {None: 0, "i32": 1, "i64": 2}[name_of(x.get(name))]
    p = {name.lower(): address(x.get(name)) for name in ("q", "k", "v", "out", "gate", "A_log", "dt_bias", "beta", "cu_seqlens", "state_out", "checkpoints",
                                                         "read_index", "write_index", "checkpoint_index")}
    p["state_in"] = address(x.get("state"))
    for name in ("q", "k", "v", "out", "gate", "beta"):
        s = strides_of(x[name])
        p |= dict(zip((f"{name}_b", f"{name}_t", f"{name}_h"), [0, *s] if packed else s))
    for name, names in (("state", ("in_slot", "in_h", "in_slots")), ("state_out", ("out_slot", "out_state_h", "out_slots")),
                        ("checkpoints", ("checkpoint_slot", "checkpoint_h", "checkpoint_slots"))):
        pool = x.get(name)
        p |= dict(zip(names, (0, 0, 0) if pool is None else (*strides_of(pool)[:2], pool.shape[0])))
    p |= dict(checkpoint_interval=a.checkpoint_interval, checkpoint_columns=x["checkpoint_index"].shape[1] if "checkpoint_index" in x else 0)
    p |= dict(null_slot=a.null_slot if a.has_null_slot else -(2**63), tokens=x["q"].shape[0 if packed else 1], group=hv // h, head_dim_k=k, head_dim_v=v)
    p |= dict(sequences=cu.shape[0] - 1 if cu is not None else x["q"].shape[0], columns=128, blocks=-(-v // 128))
    p |= dict(scale=a.scale if a.has_scale else f32(k**-0.5), lower_bound=a.lower_bound)
    p |= {"mode.gate_raw": int(a.gate_kind == 3), "mode.beta_kind": a.beta_kind, "mode.l2norm": a.l2norm, "mode.cu_dtype": index("cu_seqlens")}
    p |= {f"mode.{name.lower()}_dtype": CODE[name_of(x.get(name))] for name in ("gate", "A_log", "dt_bias", "beta")}
    return p | {f"mode.{name}_dtype": index(f"{name}_index") for name in ("read", "write", "checkpoint")}


def check_prefill(lib, call, n, hv, k, v, kinds):
    io, state, layout = kinds
    call.args.variant, call.args.segments = 0, call.args.segments % 2
    kernel, ranges, got = run(lib, to_host(call))
    assert kernel == f"kda_prefill.cpu.{io}.s{state}.k{k}.{layout}" and covers(ranges, n * hv * -(-v // 128))
    want = expected_prefill(call, k, v)
    names = {name for name, _ in standin.params("prefill_cpu")} | {f"mode.{name}" for name in standin.modes("prefill_cpu")}
    assert set(want) == names - {"modes"} and {name: got[name] for name in want} == want
    return ranges


def test_prefill(lib):
    rng = random.Random(2)
    for _ in range(300):
        call, (n, t, h, hv), kinds = test_prefill_plan.random_problem(rng)
        call.args.num_threads = rng.choice([0, 1, 2, 64])
        check_prefill(lib, call, n, hv, 128, 128, kinds)


@pytest.mark.parametrize("k, v", [(64, 64), (128, 192), (256, 256), (256, 512)])
@pytest.mark.parametrize("io, state, layout", [("fp32", "fp32", "vk"), ("fp16", "bf16", "kv"), ("bf16", "fp32", "kv")])
def test_prefill_dims_and_checkpoints(lib, k, v, io, state, layout):
    call = prefill(2, 100, 2, 4, k, v, io=io, state=state, layout=layout, gate="RAW", checkpoint_interval=32)
    with_(call, checkpoints=tensor([9, 4, *((v, k) if layout == "vk" else (k, v))], state), checkpoint_index=tensor([2, 3], "i64"))
    check_prefill(lib, call, 2, 4, k, v, (io, state, layout))


def test_prefill_of_two_heads_uses_two_threads(lib):
    """Few long items are shared, few short ones are not."""
    ranges = lambda t, **options: run(lib, prefill(1, t, 2, 2, num_threads=2, **options, **HOST))[1]
    assert ranges(4096) == ranges(64) == [(0, 1), (1, 2)]
    assert ranges(16) == ranges(1) == [(0, 2)]
    # with cu_seqlens the mean is all that is known
    assert len(run(lib, prefill(64, 64, 2, 2, cu="i32", num_threads=2, **HOST))[1]) > 1
    assert run(lib, prefill(2, 8, 1, 1, cu="i32", num_threads=2, **HOST))[1] == [(0, 2)]


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
