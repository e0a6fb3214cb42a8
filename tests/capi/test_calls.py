"""The calls that have no operator: versions, names, errors, kernels; and what all calls do with structs of another version."""

import ctypes
import json
import threading
from ctypes import byref

import pytest

from tests.capi import abi, standin
from tests.capi.abi import ARTIFACT, CUDA, INTERNAL, INVALID, NOT_FOUND, OK, OUT_OF_MEMORY, UNSUPPORTED, VERSION, WORKSPACE
from tests.capi.calls import VALID, decode


def test_version_and_build_info(lib):
    assert lib.cula_version() == 0 << 16 | 1 << 8 | 0
    assert json.loads(lib.cula_build_info()) == {"version": "test"}


def test_names(lib):
    names = ["CULA_OK"] + [f"CULA_ERR_{x}" for x in ("INVALID_ARGUMENT", "UNSUPPORTED", "NOT_FOUND", "ARTIFACT", "VERSION", "WORKSPACE", "CUDA",
                                                     "OUT_OF_MEMORY", "INTERNAL")]
    assert [lib.cula_status_name(i).decode() for i in range(10)] == names
    assert [OK, INVALID, UNSUPPORTED, NOT_FOUND, ARTIFACT, VERSION, WORKSPACE, CUDA, OUT_OF_MEMORY, INTERNAL] == list(range(10))
    for number in (-1, 10, 2**31 - 1, -(2**31)):
        assert lib.cula_status_name(number) == b"CULA_ERR_UNKNOWN"
    assert {op: lib.cula_op_name(number).decode() for op, number in abi.OPS.items()} == {op: op for op in abi.OPS}
    for number in (0, -1, 5, 15, 19, 2**31 - 1):
        assert lib.cula_op_name(number) is None


def test_kernel_table(lib):
    """Every row as the table has it, in its order."""
    rows = standin.table_rows()
    assert lib.cula_kernel_count() == len(rows)
    for index, (key, kernel_id) in enumerate(rows):
        d = abi.sized(abi.KernelDesc)
        assert lib.cula_kernel_info(index, byref(d)) == OK
        sizes = [standin.KIND_SIZE[kind] for _, kind in standin.params(standin.family_of(kernel_id))]
        assert (d.id.decode(), d.arch, d.op, d.registers, d.static_smem) == (kernel_id, key[0], key[1], 32, 0)
        assert d.param_sizes[: d.param_count] == sizes
        gpu = key[0] != 1
        assert (d.entry_symbol.decode(), d.cubin_bytes, d.cubin is not None) == (f"entry_{index}" if gpu else "", 64 if gpu else 0, gpu)
        if gpu:
            assert bytes((ctypes.c_ubyte * 2).from_address(d.cubin)) == index.to_bytes(2, "little")
    for index in (-1, len(rows), 2**31 - 1, -(2**31)):
        d = abi.sized(abi.KernelDesc)
        assert lib.cula_kernel_info(index, byref(d)) == NOT_FOUND
        assert abi.last_error(lib) == f"cula_kernel_info: there is no kernel {index}; this library has {len(rows)}"
        assert d.id is None
    assert lib.cula_kernel_info(0, None) == INVALID


# -------------------------------------------------------------------------------------------------------------- errors

def test_last_error_is_cut_and_terminated(lib):
    decode(l2norm=5).query(lib)
    whole = "kda_decode: l2norm is 5; must be 0 or 1"
    for n in (0, 1, 2, 10, len(whole), len(whole) + 1, 100):
        buffer = ctypes.create_string_buffer(b"#" * 100, 100)
        assert lib.cula_last_error(buffer, n) == len(whole)
        kept = whole[: max(n - 1, 0)].encode()
        assert buffer.raw == (kept + b"\0" if n else b"") + b"#" * (100 - (len(kept) + 1 if n else 0))
    assert lib.cula_last_error(None, 0) == lib.cula_last_error(None, 10) == len(whole)


def test_success_leaves_the_message_alone(lib):
    decode(l2norm=5).query(lib)
    before = abi.last_error(lib)
    assert decode().query(lib)[0] == OK
    assert abi.last_error(lib) == before != ""


def test_message_belongs_to_the_thread(lib):
    decode(l2norm=5).query(lib)
    seen = {}

    def other(number):
        seen[number, "first"] = abi.last_error(lib)
        for _ in range(200):
            decode(l2norm=number).query(lib)
            seen[number, "last"] = abi.last_error(lib)

    threads = [threading.Thread(target=other, args=(i,)) for i in range(10, 14)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert abi.last_error(lib) == "kda_decode: l2norm is 5; must be 0 or 1"
    for i in range(10, 14):
        assert (seen[i, "first"], seen[i, "last"]) == ("", f"kda_decode: l2norm is {i}; must be 0 or 1")


@pytest.mark.parametrize("kind, status, message", [
    (0, OUT_OF_MEMORY, "test_throw: out of host memory"), (1, INTERNAL, "test_throw: what it says"), (2, INTERNAL, "test_throw: an exception of unknown type"),
])  # fmt: skip
def test_no_exception_leaves(lib, kind, status, message):
    assert (lib.test_throw(kind), abi.last_error(lib)) == (status, message)


# -------------------------------------------------------------------------------------------------- ops, archs, structs

@pytest.mark.parametrize("op", [0, -1, 5, 15, 19, 2**31 - 1])
def test_unknown_op(lib, op):
    r, b = abi.sized(abi.Requirements), abi.sized(abi.Launches)
    args = abi.sized(abi.DecodeArgs)
    for name, status in (("cula_query", lib.cula_query(op, byref(args), byref(r))), ("cula_bind", lib.cula_bind(op, byref(args), None, 0, byref(b))),
                         ("cula_run", lib.cula_run(op, byref(args), None, 0, None))):
        if name == "cula_run":
            assert (status, abi.last_error(lib)) == (NOT_FOUND, f"cula_run: there is no op {op}")
        assert status == NOT_FOUND


@pytest.mark.parametrize("arch", [-1, 2, 80, 91, 2**31 - 1])
def test_unknown_arch(lib, arch):
    assert decode().query(lib, arch)[0] == NOT_FOUND
    assert abi.last_error(lib) == f"cula_query: there is no arch {arch}"
    assert decode().bind(lib, arch)[0] == NOT_FOUND


def test_sm_count(lib):
    status, _ = decode().query(lib, "sm90", -1)
    assert (status, abi.last_error(lib)) == (INVALID, "cula_query: sm_count is -1; must be 0 or more")
    assert decode().query(lib, "sm90", 2**31 - 1)[0] == OK


def test_null_structs(lib):
    args = decode().args
    assert (lib.cula_query(1, None, byref(abi.sized(abi.Requirements))), abi.last_error(lib)) == (INVALID, "cula_query: cula_decode_args is NULL")
    assert (lib.cula_query(1, byref(args), None), abi.last_error(lib)) == (INVALID, "cula_query: cula_requirements is NULL")
    assert (lib.cula_run(1, None, None, 0, None), abi.last_error(lib)) == (INVALID, "cula_run: cula_decode_args is NULL")
    assert (lib.cula_bind(1, byref(args), None, 0, None), abi.last_error(lib)) == (INVALID, "cula_bind: cula_launches is NULL")
    assert lib.cula_bind(1, None, None, 0, byref(abi.sized(abi.Launches))) == INVALID


class Guarded:
    """A copy of a struct at the very end of a page, with nothing mapped behind it."""

    def __init__(self, data: bytes):
        import mmap

        page = mmap.PAGESIZE
        pages = -(-len(data) // page)
        self.map = mmap.mmap(-1, (pages + 1) * page)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        libc = ctypes.CDLL(None)
        libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        assert libc.mprotect(start + pages * page, page, 0) == 0
        self.address = start + pages * page - len(data)
        ctypes.memmove(self.address, data, len(data))


def struct_bytes(struct, size, tail=b""):
    data = bytes(struct) + bytes(size)
    known = abi.size_of(type(struct))
    data = bytearray(data[:known] + bytes(max(size - known, 0)))[:max(size, 8)]
    data[:8] = size.to_bytes(8, "little")
    if tail:
        data[-len(tail):] = tail
    return bytes(data)


ODD_SIZES = [0, 1, 7, 8, 16, 100, 1 << 16 | 8, 1 << 32, 1 << 40, 2**63, 2**64 - 1]


@pytest.mark.parametrize("op, size", [(op, size) for op in abi.OPS for size in ODD_SIZES if size < abi.size_of(abi.ARGS[op]) or size > 1 << 16])
def test_args_of_a_size_that_no_version_had(lib, op, size):
    """Refused, and not a byte behind struct_size is looked at."""
    guarded = Guarded(size.to_bytes(8, "little"))
    name = {"kda_gate": "cula_gate_args", "gdn_gate": "cula_gate_args", "l2norm": "cula_l2norm_args", "kda_prefill": "cula_prefill_args"}.get(op, "cula_decode_args")
    status = lib.cula_query(abi.OPS[op], guarded.address, byref(abi.sized(abi.Requirements)))
    known = abi.size_of(abi.ARGS[op])
    assert (status, abi.last_error(lib)) == (VERSION, f"cula_query: struct_size of {name} is {size}; expected {known} (set struct_size = CULA_SIZEOF({name}))")


@pytest.mark.parametrize("op", list(abi.OPS))
def test_args_of_a_newer_header(lib, op):
    """A longer struct is accepted while its tail is zero; the struct ends at the end of a page, so reading past it would crash."""
    call = VALID[op]()
    known = abi.size_of(abi.ARGS[op])
    for more in (4, 8, 24, 1000):
        r = abi.sized(abi.Requirements)
        r.arch = 90
        guarded = Guarded(struct_bytes(call.args, known + more))
        assert lib.cula_query(abi.OPS[op], guarded.address, byref(r)) == OK, abi.last_error(lib)
        assert r.launch_count == (2 if op == "kda_prefill" else 1)
        guarded = Guarded(struct_bytes(call.args, known + more, b"\1"))
        assert lib.cula_query(abi.OPS[op], guarded.address, byref(r)) == VERSION
        assert f"this library knows {known}, and byte {known + more - 1} is not zero: a field of a newer version is set" in abi.last_error(lib)
    assert lib.cula_query(abi.OPS[op], Guarded(struct_bytes(call.args, known)).address, byref(r)) == OK
    for less in (1, 4, 8):
        assert lib.cula_query(abi.OPS[op], Guarded(struct_bytes(call.args, known - less)).address, byref(r)) == VERSION


def test_args_of_an_older_header(lib):
    """What a later library will do: bytes that the caller does not have are zero."""
    copy = (ctypes.c_ubyte * 512)(*[0xEE] * 512)
    data = (24).to_bytes(8, "little") + bytes(range(1, 17))
    assert lib.test_read_args(ctypes.c_size_t(24), ctypes.c_size_t(40), ctypes.c_void_p(Guarded(data).address), copy) == OK
    assert bytes(copy) == data + bytes(512 - 24)
    assert lib.test_read_args(ctypes.c_size_t(32), ctypes.c_size_t(40), ctypes.c_void_p(Guarded(data).address), copy) == VERSION
    longer = (64).to_bytes(8, "little") + bytes(range(1, 33)) + bytes(24)
    assert lib.test_read_args(ctypes.c_size_t(24), ctypes.c_size_t(40), ctypes.c_void_p(Guarded(longer).address), copy) == OK
    assert bytes(copy) == longer[:40] + bytes(512 - 40)


def test_outputs_are_written_as_far_as_the_caller_knows_them(lib):
    for size, known in ((24, 40), (40, 40), (64, 40)):
        given = (ctypes.c_ubyte * 80)()
        ctypes.memmove(given, size.to_bytes(8, "little"), 8)
        lib.test_write_struct(ctypes.c_size_t(known), given)
        end = min(size, known)
        assert bytes(given) == size.to_bytes(8, "little") + b"\xab" * (end - 8) + bytes(80 - end)


@pytest.mark.parametrize("size", [0, 8, 56, 1 << 40])
def test_output_structs_of_a_size_that_no_version_had(lib, size):
    call = decode()
    r, b, d = abi.Requirements(), abi.Launches(), abi.KernelDesc()
    for struct, status in ((r, lambda: lib.cula_query(1, byref(call.args), byref(r))), (b, lambda: lib.cula_bind(1, byref(call.args), None, 0, byref(b))),
                           (d, lambda: lib.cula_kernel_info(0, byref(d)))):
        struct.struct_size = size
        before = bytes(struct)
        assert status() == VERSION
        assert bytes(struct) == before


def test_failing_calls_leave_their_outputs_alone(lib):
    call = decode(l2norm=9)
    r, b = abi.sized(abi.Requirements), abi.sized(abi.Launches)
    r.workspace_bytes, r.launch_count, r.arch, b.count, b.device_id, b.arch = 77, 78, 90, 79, 80, 90
    before = bytes(r), bytes(b)
    assert lib.cula_query(1, byref(call.args), byref(r)) == INVALID and lib.cula_bind(1, byref(call.args), None, 0, byref(b)) == INVALID
    assert (bytes(r), bytes(b)) == before


def test_bind_touches_only_what_it_uses(lib):
    b = abi.sized(abi.Launches)
    ctypes.memset(ctypes.addressof(b) + abi.Launches.launch.offset, 0xEE, ctypes.sizeof(b) - abi.Launches.launch.offset)
    b.arch = 90
    assert lib.cula_bind(1, byref(decode().args), None, 0, byref(b)) == OK and b.count == 1
    assert bytes(b.launch[1]) == b"\xee" * ctypes.sizeof(abi.Launch)
    assert bytes(b.storage)[b.storage_used :] == b"\xee" * (4096 - b.storage_used)
    storage = ctypes.addressof(b) + abi.Launches.storage.offset
    count = b.launch[0].param_count
    assert all(storage <= b.launch[0].params[i] < storage + b.storage_used for i in range(count))


def test_bind_refuses_cpu_tensors(lib):
    status, b = decode(device=(abi.CPU, 0)).bind(lib, "device")
    assert (status, abi.last_error(lib)) == (UNSUPPORTED, "kda_decode: cula_bind describes launches on a GPU; use cula_run for CPU tensors")
    assert b.count == 0


def test_many_threads_bind_at_once(lib):
    """Nothing is shared: every thread gets its own problem's launches."""
    wrong = []

    def work(seed):
        for i in range(300):
            n = seed * 1000 + i + 1
            status, b = decode(n=n).bind(lib)
            if status != OK or b.launch[0].config.grid[2] != n or abi.launch_params("kda_decode", b.launch[0])["n"] != n:
                wrong.append(n)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert not wrong
