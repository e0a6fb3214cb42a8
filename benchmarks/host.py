"""Host-side costs: a call from C++, the import, and the cold start of a process that has no framework."""

from __future__ import annotations

import ctypes
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]


def cpp_host_us(calls, n: int = 60) -> float:
    """Median over five loops of compiled code calling cula_run. calls: tests.numerics.cabi.Call objects, rotated."""
    import torch

    from tests.numerics import cabi

    artifacts = cabi.LIBRARY.parents[1]
    with tempfile.TemporaryDirectory() as folder:
        built = Path(folder, "libhost_call.so")
        subprocess.run([os.environ.get("CXX", "g++"), "-std=c++17", "-O2", "-shared", "-fPIC", f"-I{artifacts / 'include'}",
                        str(Path(__file__).with_name("host_call.cpp")), "-o", str(built), f"-L{artifacts / 'lib'}", "-lcula",
                        f"-Wl,-rpath,{artifacts / 'lib'}"], check=True)
        loop = ctypes.CDLL(str(built)).cula_bench_host_us
    loop.restype = ctypes.c_double
    pointers = (ctypes.c_void_p * len(calls))(*(ctypes.addressof(c.args) for c in calls))
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    cabi.raise_for(cabi.library().cula_prepare(torch.cuda.current_device()))
    loops = []
    for i in range(6):
        us = loop(calls[0].op, pointers, len(calls), n, stream)
        if us < 0:
            cabi.raise_for(int(-us))
        torch.cuda.synchronize()
        if i:
            loops.append(us)
    return statistics.median(loops)


def _child(code_or_file: list[str]) -> dict:
    path = os.pathsep.join([str(ROOT), str(ROOT / "loader"), str(ROOT / "python"), os.environ.get("PYTHONPATH", "")])
    env = dict(os.environ, PYTHONPATH=path, CULA_BENCH_T0=repr(time.time()))
    done = subprocess.run([sys.executable, *code_or_file], env=env, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{code_or_file}: {done.stderr.strip()[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


_IMPORT = """
import json, sys, time
start = time.perf_counter()
import cula
ms = (time.perf_counter() - start) * 1e3
maps = open("/proc/self/maps").read()
print(json.dumps({"ms": ms, "torch": "torch" in sys.modules, "libcuda": "libcuda.so" in maps}))
"""


def import_ms(repeats: int = 7) -> dict:
    """Median of `import cula` in fresh processes, after one that fills the byte-code cache; and what it dragged in."""
    runs = [_child(["-c", _IMPORT]) for _ in range(repeats + 1)][1:]
    return {"ms": statistics.median(r["ms"] for r in runs), "imports_torch": any(r["torch"] for r in runs),
            "loads_libcuda": any(r["libcuda"] for r in runs)}


def cold_start(repeats: int = 5) -> dict:
    """Seconds from process start to the first result on the GPU, with and without the decode call (see cold.py)."""
    script = str(Path(__file__).with_name("cold.py"))
    runs = {"cuda_only": [], "cula": []}
    for _ in range(repeats + 1):
        for mode, times in runs.items():
            times.append(_child([script, mode])["seconds"])
    base, full = (statistics.median(times[1:]) for times in runs.values())
    return {"cuda_only_s": base, "first_result_s": full, "beyond_cuda_s": full - base}
