"""Scenarios of test_driver.py, each run in a process of its own: python -m tests.capi.driver_scenarios NAME.

With FAKE=1 the driver is fake_libcuda.c, and `fake` talks to it.
"""

import ctypes
import os
import sys
import threading

from tests.capi import abi, standin
from tests.capi.abi import ARTIFACT, CUDA, GPU, INVALID, OK, OUT_OF_MEMORY, UNSUPPORTED
from tests.capi.calls import decode, gate, l2norm

lib = abi.load(standin.build())
fake = ctypes.CDLL("libcuda.so.1") if os.environ.get("FAKE") else None
if fake:
    fake.fake_log.restype = ctypes.c_char_p
    fake.fake_push.argtypes = [ctypes.c_size_t]
    for number, (_, kernel) in enumerate(standin.table_rows()):
        of = [standin.KIND_SIZE[kind] for _, kind in standin.params(standin.family_of(kernel))]
        fake.fake_params(number, len(of), (ctypes.c_uint16 * len(of))(*of))
ROWS = {name: row for row, (_, name) in enumerate(standin.table_rows())}
SM90 = [row for name, row in ROWS.items() if ".sm90." in name]


def attributes_of(name: str, row: int) -> list[str]:
    """What a kernel is prepared with: shared memory above 48 KB is opted into, and prefill kernels are to run side by side."""
    if "_prefill." in name:
        return [f"8 = {standin.PREFILL_SMEM[name.split('.')[1]][name.split('.')[-1]]} of {row} on 0", f"9 = 100 of {row} on 0"]
    return [f"8 = {110 * 1024} of {row} on 0"] if "_decode." in name and name.endswith(".vk") else []


def log():
    """What was called since the last time."""
    lines = fake.fake_log().decode().splitlines()
    fake.fake_clear()
    return lines


def calls(lines, name):
    return [line[len(name) + 1 :] for line in lines if line.split()[0] == name]


def message():
    return abi.last_error(lib)


def without_a_driver():
    """Queries for a named arch work, everything that needs the device says what is missing."""
    assert decode().query(lib, "sm90")[0] == OK
    for status in (decode().query(lib, "device")[0], decode().bind(lib, "device")[0], decode().run(lib), lib.cula_prepare(0)):
        assert status == CUDA and "the CUDA driver is not there (libcuda.so.1: cannot open shared object file" in message(), message()
    assert message().startswith("cula_prepare: ")


def driver_that_is_too_old():
    assert lib.cula_prepare(0) == CUDA
    assert message() == "cula_prepare: the CUDA driver has no cuKernelGetParamInfo; a driver for CUDA 12.4 or newer is needed"
    assert decode().query(lib, "device")[0] == CUDA


def prepare_without_a_context():
    """The primary context is retained and current only during the call; everything of the arch is loaded, nothing else."""
    fake.fake_set_mode(0)
    assert lib.cula_prepare(0) == OK, message()
    lines = log()
    assert fake.fake_depth() == 0 and fake.fake_mode() == 0 and fake.fake_retained(0) == 1
    assert [int(x) for x in calls(lines, "cuLibraryLoadData")] == SM90
    assert calls(lines, "cuKernelGetFunction") == [f"{row} in 0x1000, mode 2" for row in SM90]
    assert calls(lines, "cuKernelSetAttribute") == [line for name, row in ROWS.items() if ".sm90." in name for line in attributes_of(name, row)]
    assert calls(lines, "cuThreadExchangeStreamCaptureMode") == ["2", "0"]
    assert lines.count("cuInit") == 1 and fake.fake_loaded() == len(SM90)
    # again: loads nothing, makes sure of the functions
    assert lib.cula_prepare(0) == OK
    lines = log()
    assert not calls(lines, "cuLibraryLoadData") and len(calls(lines, "cuKernelGetFunction")) == len(SM90)
    assert fake.fake_depth() == 0 and fake.fake_retained(0) == 1 and fake.fake_loaded() == len(SM90)


def prepare_in_the_primary_context():
    """As under torch: the context is current already, so nothing is pushed."""
    fake.fake_activate(0), fake.fake_push(0x1000), fake.fake_set_mode(1)
    assert lib.cula_prepare(0) == OK
    lines = log()
    assert not calls(lines, "cuCtxPushCurrent_v2") and fake.fake_current() == 0x1000 and fake.fake_mode() == 1
    assert fake.fake_retained(0) == 1  # for threads that have none current
    assert decode().run(lib, 0x77) == OK
    assert not calls(log(), "cuCtxPushCurrent_v2")
    statuses = []
    t = threading.Thread(target=lambda: statuses.append((decode().run(lib), fake.fake_depth())))
    t.start(), t.join()
    lines = log()
    assert statuses == [(OK, 0)] and calls(lines, "cuCtxPushCurrent_v2") == ["0x1000"] and "in 0x1000" in calls(lines, "cuLaunchKernelEx")[0]


def context_of_the_programs_own():
    """No primary context is made beside it; a thread without a context is told so."""
    fake.fake_push(0x5000)
    assert lib.cula_prepare(0) == OK
    assert fake.fake_retained(0) == 0 and fake.fake_current() == 0x5000
    assert calls(log(), "cuKernelGetFunction")[0].endswith("in 0x5000, mode 2")
    assert decode().run(lib) == OK and "in 0x5000" in calls(log(), "cuLaunchKernelEx")[0]
    fake.fake_pop()
    assert decode().run(lib) == INVALID
    assert message() == ("kda_decode: no context of device 0 is current; cula_prepare was called with a context of the program's own, so the calling "
                         "thread must have one current")
    assert not log()


def context_of_another_device_is_restored():
    fake.fake_devices(2), fake.fake_device(1, 9, 0, 132), fake.fake_activate(0), fake.fake_push(0x1000)
    assert lib.cula_prepare(1) == OK and fake.fake_current() == 0x1000 and fake.fake_depth() == 1
    log()
    assert decode(device=(GPU, 1)).run(lib) == OK
    lines = log()
    assert fake.fake_current() == 0x1000 and fake.fake_depth() == 1
    assert [line.split()[0] for line in lines] == ["cuCtxPushCurrent_v2", "cuLaunchKernelEx", "cuCtxPopCurrent_v2"] and "in 0x1001" in lines[1]
    assert decode().run(lib) == INVALID and message() == "kda_decode: cula_prepare(0) has not been called, or failed"


def launch():
    """What arrives at the driver is what cula_bind describes."""
    assert decode().run(lib) == INVALID and message() == "kda_decode: cula_prepare(0) has not been called, or failed"
    assert lib.cula_prepare(0) == OK
    log()
    for call in (decode(), decode(layout="kv"), decode("gdn_decode", n=150000, h=1, hv=1, k=64, v=64), gate(beta=True), gate("gdn_gate", (7, 64)), l2norm(rstd=True)):
        status, b = call.bind(lib, "device", stream=0xabc0)
        assert status == OK and not log()
        assert call.run(lib, 0xabc0) == OK, message()
        lines = log()
        assert [line.split()[0] for line in lines] == ["cuCtxPushCurrent_v2"] + ["cuLaunchKernelEx"] * b.count + ["cuCtxPopCurrent_v2"]
        for line, launch in zip(calls(lines, "cuLaunchKernelEx"), b.launch):
            c = launch.config
            sizes = [standin.KIND_SIZE[kind] for _, kind in standin.params(standin.family_of(call.op))]
            raw = [int.from_bytes((ctypes.c_ubyte * size).from_address(launch.params[i]), "little") for i, size in enumerate(sizes)]
            triple = lambda x: ",".join(map(str, x))
            assert line == (f"{launch.kernel} grid {triple(c.grid)} block {triple(c.block)} smem {c.dynamic_smem} stream 0xabc0 attributes [6:1] in 0x1000 params "
                            + " ".join(f"{x:x}" for x in raw))
    assert decode(n=0).run(lib) == OK and not log()


def device_arch_and_multiprocessors_are_asked_once():
    fake.fake_device(0, 9, 0, 7)
    status, b = decode("gdn_decode", n=4, h=1, hv=1, k=128, v=128).bind(lib, "device")  # 16 blocks on 7: more than 2 each
    assert status == OK and b.launch[0].config.dynamic_smem == 0
    assert len(calls(log(), "cuDeviceGetAttribute")) == 3
    status, b = decode("gdn_decode", n=3, h=1, hv=1, k=128, v=128).bind(lib, "device")  # 12 blocks
    assert status == OK and b.launch[0].config.dynamic_smem == 110 * 1024 and not log()
    status, b = decode("gdn_decode", n=3, h=1, hv=1, k=128, v=128).bind(lib, "device", 1)
    assert b.launch[0].config.dynamic_smem == 0


def devices_that_do_not_fit():
    fake.fake_devices(4), fake.fake_device(1, 8, 0, 108), fake.fake_device(2, 10, 0, 148), fake.fake_device(3, 12, 0, 188)
    assert lib.cula_prepare(1) == UNSUPPORTED
    assert message() == ("cula_prepare: device 1 has compute capability 8.0; archs exist for 9.0 (sm90), 10.0 (sm100), 10.3 (sm103) and 12.0 (sm120)")
    assert lib.cula_prepare(2) == UNSUPPORTED and message() == "cula_prepare: device 2 is sm100, and this library has no sm100 kernels"
    assert lib.cula_prepare(4) == INVALID and message() == "cula_prepare: there is no CUDA device 4; this machine has 4"
    for device in (-1, 64, 2**31 - 1):
        assert lib.cula_prepare(device) == INVALID and message() == f"cula_prepare: device {device}; must be from 0 to 63"
    assert decode(device=(GPU, 70)).run(lib) == INVALID and message() == "kda_decode: device 70; must be from 0 to 63"
    assert decode(device=(GPU, 2)).query(lib, "device")[0] == UNSUPPORTED
    assert message() == "kda_decode: no sm100 kernels in this library; built archs: cpu, sm90, sm120"
    assert lib.cula_prepare(3) == OK and fake.fake_retained(1) == fake.fake_retained(2) == 0
    assert decode(device=(GPU, 3)).run(lib) == OK


def driver_errors():
    fake.fake_fail(b"cuInit", 100, 0)
    assert lib.cula_prepare(0) == CUDA and message() == "cula_prepare: cuInit failed: CUDA_ERROR_NO_DEVICE (100)"
    for call, code, status, text in (
        (b"cuDevicePrimaryCtxRetain", 2, OUT_OF_MEMORY, "cula_prepare: cuDevicePrimaryCtxRetain failed: CUDA_ERROR_OUT_OF_MEMORY (2)"),
        (b"cuCtxPushCurrent_v2", 700, CUDA, "cula_prepare: cuCtxPushCurrent failed: CUDA_ERROR_ILLEGAL_ADDRESS (700)"),
        (b"cuLibraryLoadData", 2, OUT_OF_MEMORY, f"cula_prepare: cuLibraryLoadData of {standin.table_rows()[SM90[5]][1]} failed: CUDA_ERROR_OUT_OF_MEMORY (2)"),
        (b"cuLibraryLoadData", 209, ARTIFACT, f"cula_prepare: the cubin of {standin.table_rows()[SM90[5]][1]} does not load: cuLibraryLoadData: CUDA_ERROR_NO_BINARY_FOR_GPU (209)"),
        (b"cuLibraryGetKernel", 500, ARTIFACT, f"cula_prepare: the cubin of {standin.table_rows()[SM90[5]][1]} does not load: cuLibraryGetKernel: unknown error (500)"),
        (b"cuKernelGetFunction", 209, ARTIFACT, f"cula_prepare: the cubin of {standin.table_rows()[SM90[5]][1]} does not load: cuKernelGetFunction: CUDA_ERROR_NO_BINARY_FOR_GPU (209)"),
        (b"cuKernelSetAttribute", 1, CUDA, None),
    ):
        fake.fake_fail(call, code, 0 if call.startswith((b"cuDevice", b"cuCtx")) else 5)
        assert lib.cula_prepare(0) == status, message()
        assert text is None or message() == text, message()
        assert fake.fake_loaded() == 0 and fake.fake_depth() == 0 and fake.fake_mode() == 0  # nothing half done is left
        assert decode().run(lib) == INVALID
    fake.fake_fail(b"", 0, 0)
    assert lib.cula_prepare(0) == OK and decode().run(lib) == OK
    for code, status, text in ((700, CUDA, "CUDA_ERROR_ILLEGAL_ADDRESS (700)"), (999, CUDA, "unknown error (999)"), (2, OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY (2)")):
        fake.fake_fail(b"cuLaunchKernelEx", code, 0)
        assert decode().run(lib) == status
        assert message() == f"kda_decode: cuLaunchKernelEx of kda_decode.sm90.bf16.sfp32.k128.vk failed: {text}"
        assert fake.fake_depth() == 0


def parameters_of_a_cubin_that_do_not_fit():
    row = SM90[7]
    name = standin.table_rows()[row][1]
    sizes = [standin.KIND_SIZE[kind] for _, kind in standin.params("decode")]
    for changed, text in (
        (sizes[:-1], f"the cubin of {name} has {len(sizes) - 1} parameters, expected {len(sizes)}"),
        (sizes + [4], f"the cubin of {name} has more than {len(sizes)} parameters"),
        ([4] + sizes[1:], f"parameter 0 of the cubin of {name} has 4 bytes, expected 8"),
    ):
        fake.fake_params(row, len(changed), (ctypes.c_uint16 * len(changed))(*changed))
        assert lib.cula_prepare(0) == ARTIFACT and message() == "cula_prepare: " + text
        assert fake.fake_loaded() == 0


def threads_prepare_once():
    fake.fake_devices(2), fake.fake_device(1, 12, 0, 188)
    statuses = []
    def work(i):
        statuses.append(lib.cula_prepare(i % 2))
        statuses.append(decode(device=(GPU, i % 2)).run(lib, 0x40 + i))
    threads = [threading.Thread(target=work, args=(i,)) for i in range(16)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert statuses == [OK] * 32
    lines = log()
    sm120 = [name for name in ROWS if ".sm120." in name]
    assert len(calls(lines, "cuLibraryLoadData")) == len(SM90) + len(sm120) and lines.count("cuInit") == 1
    launches = calls(lines, "cuLaunchKernelEx")
    assert len(launches) == 16
    for i in range(16):
        (line,) = [x for x in launches if f"stream {0x40 + i:#x} " in x]
        assert f"in {0x1000 + i % 2:#x} " in line


def forked_child_is_told():
    assert lib.cula_prepare(0) == OK
    child = os.fork()
    if child == 0:
        ok = decode().run(lib) == CUDA and message().endswith(
            "CUDA_ERROR_NOT_INITIALIZED (3); this process was forked after CUDA was initialised, and a forked child cannot use CUDA")
        os._exit(0 if ok and decode().query(lib, "sm90")[0] == OK else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert decode().run(lib) == OK


if __name__ == "__main__":
    globals()[sys.argv[1]]()
