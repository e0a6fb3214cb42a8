"""The thread pool: every item once, limits, many callers, nested calls, fork, exit, unloading, a child that inherits a lock."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading

import numpy as np
import pytest

from tests.cpu import native


def cover(items, item_bytes=native.GRAIN_BYTES, threads=0, spin=0):
    counts = np.zeros(max(items, 1), np.int32)
    took_part = native.library().harness_cover(items, item_bytes, threads, spin, counts.ctypes.data)
    assert (counts[:items] == 1).all()
    return took_part


def script(code: str, *, env=None, timeout=60) -> str:
    """Runs code in a process of its own, with the harness as `lib`."""
    prelude = f"""
import ctypes, os, sys, threading, time
lib = ctypes.CDLL({native.library()._name!r})
lib.harness_cover.argtypes = [ctypes.c_int64, ctypes.c_int64, ctypes.c_int32, ctypes.c_int32, ctypes.c_void_p]
def cover(items, item_bytes={native.GRAIN_BYTES}, threads=0, spin=0):
    counts = (ctypes.c_int32 * items)()
    took_part = lib.harness_cover(items, item_bytes, threads, spin, counts)
    assert list(counts) == [1] * items
    return took_part
def comm(task):
    with open(f"/proc/self/task/{{task}}/comm") as f:
        return f.read().strip()
def helpers(count):  # ids of the helpers, once there are as many: a new thread first has to name itself
    end = time.monotonic() + 10
    while len(found := [t for t in os.listdir("/proc/self/task") if comm(t) == "cula-cpu"]) != count:
        assert time.monotonic() < end, found
    return found
"""
    done = subprocess.run([sys.executable, "-c", prelude + code], env={**os.environ, **(env or {})}, text=True, timeout=timeout,
                          capture_output=True)  # fmt: skip
    assert done.returncode == 0, (done.returncode, done.stderr)
    return done.stdout


@pytest.mark.parametrize("items", (0, 1, 2, 3, 5, 64, 1000, 4097))
@pytest.mark.parametrize("grain", (1, 3, 1000))
@pytest.mark.parametrize("threads", (0, 1, 2, 7))
def test_every_item_once(items, grain, threads):
    took_part = cover(items, native.GRAIN_BYTES // grain, threads)
    assert took_part <= max(1, native.library().harness_default_threads() if threads == 0 else threads)
    if items <= 3 * grain:
        assert took_part == (1 if items else 0), "small work belongs to the caller"


def test_other_threads_help():
    out = script("print(max(cover(64, spin=2_000_000) for _ in range(5)), min(cover(64, threads=1, spin=1000) for _ in range(3)), "
                 "max(cover(64, threads=2, spin=2_000_000) for _ in range(5)))", env={"CULA_NUM_THREADS": "3"})  # fmt: skip
    assert out.split() == ["3", "1", "2"]


@pytest.mark.parametrize("value, want", (("1", 1), ("5", 5), ("4097", None), ("0", None), ("-2", None), ("two", None), ("", None), ("3x", None)))
def test_environment(value, want):
    found = int(script("print(lib.harness_default_threads())", env={"CULA_NUM_THREADS": value}))
    assert found == (want or int(script("print(lib.harness_default_threads())")))


def test_affinity():
    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("no affinity masks here")
    one = min(os.sched_getaffinity(0))
    assert script(f"os.sched_setaffinity(0, {{{one}}}); print(lib.harness_default_threads())").strip() == "1"


@pytest.mark.parametrize("text, cpus", ((b"max 100000", 0), (b"150000 100000", 2), (b"100000 100000\n", 1), (b"1000 100000", 1),
                                        (b"0 100000", 0), (b"-1 100000", 0), (b"", 0), (b"99999999999999 1", 4096)))  # fmt: skip
def test_quota(text, cpus):
    assert native.library().harness_quota(text) == cpus


@pytest.mark.parametrize("items, item_bytes, threads", [
    (2, 8 << 20, 2), (3, 8 << 20, 3), (2, 2**62, 2),  # long: one thread each
    (2, 1 << 20, 1), (3, 512 << 10, 1), (1, 2**62, 1), (0, 2**62, 0),  # not worth a wake-up; nothing to share
    (9, (128 << 10) // 3, 1), (500, 256, 1), (500, 0, 1), (500, -1, 1),  # three ranges of many items
])
def test_cost_of_an_item_decides_who_works(items, item_bytes, threads):
    spin = 1000 if items > 3 else 20_000_000  # long enough for two helpers to get a core
    out = script(f"print(max(cover({items}, {item_bytes}, spin={spin}) for _ in range(5)))", env={"CULA_NUM_THREADS": "3"})
    assert int(out) == threads


def test_bytes_of_a_grain():
    text = (native.ROOT / "aot/common/cpu/parallel.h").read_text()
    assert "kGrainBytes = 128 << 10" in text and native.GRAIN_BYTES == 128 << 10


def test_many_callers():
    failures = []

    def caller(seed):
        try:
            for i in range(200):
                cover(1 + (seed * 131 + i * 17) % 300, native.GRAIN_BYTES // (1 + i % 3), threads=(0, 2, 3)[i % 3], spin=20)
        except BaseException as error:  # noqa: BLE001
            failures.append(error)

    threads = [threading.Thread(target=caller, args=(s,)) for s in range(12)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures


def test_nested():
    for outer, inner in ((4, 4), (9, 33), (100, 5)):
        counts = np.zeros(outer * inner, np.int32)
        native.library().harness_nested(outer, inner, counts.ctypes.data)
        assert (counts == 1).all()


def test_busy_pool_does_not_stop_a_caller():
    """One call keeps every helper for about a second; another one is done long before."""
    out = script("""
import time
slow = threading.Thread(target=cover, args=(6,), kwargs=dict(spin=300_000_000))
slow.start()
time.sleep(0.05)
start = time.monotonic()
for _ in range(100):
    cover(50)
took, running = time.monotonic() - start, slow.is_alive()
slow.join()
print(took < 0.5 * (time.monotonic() - start), running)
""", env={"CULA_NUM_THREADS": "2"})  # fmt: skip
    assert out.split() == ["True", "True"]


def test_fork():
    """The child has a pool of its own, also when a thread of the parent was inside the pool at the fork, and grandchildren too."""
    out = script("""
cover(64, spin=1000)
stop = False
def work():
    while not stop:
        cover(100, spin=50)
threads = [threading.Thread(target=work) for _ in range(3)]
for t in threads: t.start()
for generation in range(40):
    pid = os.fork()
    if pid == 0:
        ok = max(cover(64, spin=200_000) for _ in range(20)) == 2
        inner = os.fork()
        if inner == 0:
            cover(64, spin=1000)
            os._exit(0)
        ok = ok and os.waitstatus_to_exitcode(os.waitpid(inner, 0)[1]) == 0
        os._exit(0 if ok else 3)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
stop = True
for t in threads: t.join()
print("done")
""", env={"CULA_NUM_THREADS": "2"}, timeout=120)  # fmt: skip
    assert out == "done\n"


def test_exit_while_threads_work():
    """exit() with daemon threads inside parallel_for, from a process and from a forked child: no hang, no crash."""
    for _ in range(5):
        script("""
cover(64, spin=1000)
def work():
    while True:
        cover(100, spin=50)
for _ in range(3): threading.Thread(target=work, daemon=True).start()
pid = os.fork()
if pid == 0:
    cover(64, spin=1000)
    libc = ctypes.CDLL(None)
    libc.exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
ctypes.CDLL(None).exit(0)
""", env={"CULA_NUM_THREADS": "4"})  # fmt: skip


def test_unload():
    """dlclose ends the helpers before their code goes away; a second load starts anew."""
    out = script("""
import _ctypes
path = lib._name
for i in range(20):
    cover(64, spin=1000)
    helpers(2)
    _ctypes.dlclose(lib._handle)
    assert not [t for t in os.listdir("/proc/self/task") if comm(t) == "cula-cpu"]
    assert path not in open("/proc/self/maps").read()
    lib = ctypes.CDLL(path)
    lib.harness_cover.argtypes = [ctypes.c_int64, ctypes.c_int64, ctypes.c_int32, ctypes.c_int32, ctypes.c_void_p]
print("done")
""", env={"CULA_NUM_THREADS": "3"})  # fmt: skip
    assert out == "done\n"


def test_helpers_block_signals():
    out = script("""
cover(64, spin=1000)
for t in helpers(1):
    status = dict(line.split(":", 1) for line in open(f"/proc/self/task/{t}/status"))
    print(int(status["SigBlk"], 16) & (1 << 14 | 1 << 1) == 1 << 14 | 1 << 1)  # SIGTERM, SIGINT
""", env={"CULA_NUM_THREADS": "2"})  # fmt: skip
    assert out == "True\n"


def test_level_objects_share_nothing(tmp_path):
    """A function that the linker may merge with another file's copy could be the AVX-512 one on a machine without: no weak
    symbols, and nothing defined outside of the level's namespace."""
    if shutil.which("nm") is None:
        pytest.skip("no nm")
    from tests.cpu.build import ROOT, compile_source

    for source in ROOT.glob("aot/ops/*/cpu_isa_*.cpp"):
        for level, path in zip(native.LEVEL_NAMES, compile_source(source.relative_to(ROOT).as_posix(), tmp_path)):
            symbols = [line.split(None, 2)[-2:] for line in subprocess.run(["nm", "-C", path], check=True, text=True, capture_output=True)
                       .stdout.splitlines()]  # fmt: skip
            outside = [s for kind, s in symbols if kind in "WVuTDBR" and not s.startswith(f"cula::cpu::{level}::")]
            weak = [s for kind, s in symbols if kind in "WVuvw"]
            assert not outside and not weak, (level, outside, weak)
