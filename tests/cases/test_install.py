"""Field case 53 and its neighbours: what an import and a first call do to a machine, and what the binaries contain."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.numerics import cabi

ROOT = Path(__file__).parents[2]

# Audit events of everything that would compile, spawn or write. The hook is in place before anything is imported.
PROBE = """
import json, os, sys, time
seen = []
def hook(event, args):
    if event in ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.mkdir", "os.remove", "os.rename"):
        seen.append([event, str(args)[:200]])
    elif event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        seen.append([event, str(args)[:200]])
sys.addaudithook(hook)
start = time.perf_counter()
import cula
seconds = time.perf_counter() - start
modules = [m for m in ("torch", "jax", "cupy", "triton", "cutlass", "aot") if m in sys.modules]
libcuda = "libcuda.so" in open("/proc/self/maps").read()
BODY
print(json.dumps(dict(seconds=seconds, modules=modules, libcuda=libcuda, seen=seen)))
"""


def probe(body: str, tmp_path: Path) -> dict:
    env = {"PATH": "", "HOME": str(tmp_path), "TMPDIR": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path),
           "PYTHONDONTWRITEBYTECODE": "1", "CULA_ARTIFACTS": str(cabi.ARTIFACTS), "PYTHONPATH": os.pathsep.join(map(str, (ROOT / "loader", ROOT / "python", ROOT)))}
    done = subprocess.run([sys.executable, "-c", PROBE.replace("BODY", body)], env=env, cwd=tmp_path, capture_output=True,
                          text=True)
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.iterdir()), "files were written"
    return json.loads(done.stdout.splitlines()[-1])


def test_case_53_import(tmp_path):
    """Under a second even on a cold machine, no framework, no driver, no file, no process. (The benchmark has the 100 ms.)"""
    seen = probe("", tmp_path)
    assert seen["seconds"] < 1 and not seen["modules"] and not seen["libcuda"] and not seen["seen"]


def test_case_53_first_call_compiles_and_writes_nothing(tmp_path):
    """A decode with numpy rows in a process without PATH and with an empty home: no compiler, no cache, no child."""
    body = """
import numpy as np
rows = np.ones((2, 1, 64), np.float32)
state = np.ones((2, 1, 64, 64), np.float32)
out = cula.gla.gla_decode(rows, rows, rows, None, state)
assert np.allclose(state, 2) and np.allclose(out, 2 * 64 / 8)
"""
    seen = probe(body, tmp_path)
    assert not seen["seen"], seen["seen"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: tests/gpu runs on it")
def test_case_53_a_gpu_call_without_a_driver_says_so():
    with pytest.raises(cabi.CulaError) as caught:
        cabi.raise_for(cabi.library().cula_prepare(0))
    assert caught.value.status == "CULA_ERR_CUDA" and "libcuda" in caught.value.message


def test_case_47_a_query_says_no_with_a_reason():
    """Without the GPU, from any machine: what is built for an arch, and what is not."""
    q, v = torch.zeros(2, 2, 96), torch.zeros(2, 2, 64)
    call = cabi.Call("gdn", dict(q=q, k=q, v=v, out=v.clone(), gate=torch.zeros(2, 2), beta=torch.zeros(2, 2),
                                 state=torch.zeros(2, 2, 64, 96)), gate_kind="log_head")
    with pytest.raises(cabi.CulaError) as caught:
        call.query("cpu")
    assert caught.value.status == "CULA_ERR_UNSUPPORTED"
    for word in ("96", "64", "128", "256"):
        assert word in caught.value.message


def test_local_memory_of_every_gpu_kernel():
    """A kernel that spills takes gigabytes of stack on a large GPU (seen in the field: 3.65 GiB)."""
    manifest = json.loads((cabi.ARTIFACTS / "manifest.json").read_text())
    kernels = [k for k in manifest["kernels"] if k["arch"] != "cpu"]
    spilled = [k["id"] for k in kernels if k["resources"]["local_bytes"] > k.get("limits", {}).get("max_local_bytes", 0)]
    assert not spilled


def test_library_needs_neither_cudart_nor_libcuda():
    """`ldd`: what the dynamic loader would have to find on a user's machine."""
    needed = subprocess.run(["ldd", str(cabi.LIBRARY)], capture_output=True, text=True, check=True).stdout
    assert "cuda" not in needed and "stdc++" not in needed and "not found" not in needed
