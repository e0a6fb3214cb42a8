"""cula.query, cula.info, and the commands, with and without artifacts; what an import does to a process."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import cula
from cula_loader import artifacts

ROOT = Path(__file__).parents[2]
PYTHONPATH = os.pathsep.join(map(str, (ROOT / "loader", ROOT / "python")))


def python(*words: str, **environment: str) -> subprocess.CompletedProcess:
    env = {k: v for k, v in os.environ.items() if k != "CULA_ARTIFACTS"} | {"PYTHONPATH": PYTHONPATH, "CULA_ARTIFACTS": str(artifacts.find())}
    return subprocess.run([sys.executable, *words], env=env | environment, capture_output=True, text=True, timeout=300)


# --------------------------------------------------------------------------------------------------------------- query


def specs(k=128, v=128, n=8, heads=4, io="bf16", **more):
    return dict(q=cula.Spec((n, heads, k), io), k=cula.Spec((n, heads, k), io), v=cula.Spec((n, heads, v), io),
                state=cula.Spec((n, heads, v, k), "fp32")) | more


@pytest.mark.parametrize("arch", ["sm90", "sm100", "sm103", "sm120"])
def test_query_without_a_gpu(arch):
    if arch in cula.info()["artifacts"]["kernels"]:
        answer = cula.query(cula.gla.gla_decode, **specs(), arch=arch)
        assert answer == ((f"gla_decode.{arch}.bf16.sfp32.k128.vk",), 0, 1)
    else:
        with pytest.raises(cula.UnsupportedError, match=arch):
            cula.query(cula.gla.gla_decode, **specs(), arch=arch)


def test_query_of_the_cpu_and_of_arrays():
    cpu = {name: cula.Spec(x.shape, x.dtype, (1, 0)) for name, x in specs().items()}
    assert cula.query(cula.gla.gla_decode, **cpu).kernels == ("gla_decode.cpu.bf16.sfp32.k128.vk",)
    x, state = np.zeros((2, 1, 64), "float32"), np.full((2, 1, 64, 64), 3, "float32")
    answer = cula.query(cula.kda.kda_decode, x, x, x, beta=x[..., 0], state=state)
    assert answer.kernels == ("kda_decode.cpu.fp32.sfp32.k64.vk",) and answer.workspace_bytes == 0 and (state == 3).all()
    assert cula.query(cula.norm.l2norm, cula.Spec((5, 33), "fp16", (1, 0))).kernels == ("l2norm.cpu.fp16",)
    gates = cula.query(cula.gdn.gdn_gate, cula.Spec((5, 4), "fp32", (1, 0)), beta=cula.Spec((5, 4), "fp32", (1, 0)))
    assert gates.kernels == ("gdn_gate.cpu.fp32",)


@pytest.mark.parametrize("count", [-1, 2**31, True, 1.5, "132", None])
def test_a_number_of_multiprocessors_is_one(count):
    with pytest.raises(cula.InvalidArgumentError, match=f"sm_count={re.escape(repr(count))}: allowed: a number of multiprocessors"):
        cula.query(cula.norm.l2norm, cula.Spec((5, 33), "fp16", (1, 0)), sm_count=count)
    assert cula.query(cula.norm.l2norm, cula.Spec((5, 33), "fp16", (1, 0)), sm_count=np.int64(0)).kernels == ("l2norm.cpu.fp16",)


def test_of_several_numbers_of_multiprocessors_the_one_that_needs_most():
    if "sm90" not in cula.info()["artifacts"]["kernels"]:
        pytest.skip("no GPU kernels of prefill here")
    rows, heads = cula.Spec((1, 4436, 1, 128), "bf16"), cula.Spec((1, 4436, 1), "bf16")
    ask = lambda count: cula.query(cula.kda.kda_prefill, rows, rows, rows, rows, heads, gate_kind="log", arch="sm90", sm_count=count)  # noqa: E731
    answers = {count: ask(count) for count in range(1, 193)}
    most = max(answers.values(), key=lambda answer: answer.workspace_bytes)
    assert ask(range(1, 193)) == most and most.workspace_bytes > answers[8].workspace_bytes


def test_query_says_no_with_a_reason():
    archs = [a for a in cula.info()["artifacts"]["kernels"] if a != "cpu"]
    device = dict(arch=archs[0]) if archs else {}
    where = (2, 0) if archs else (1, 0)
    wrong = {n: cula.Spec(x.shape, x.dtype, where) for n, x in specs(k=96).items()}
    with pytest.raises(cula.UnsupportedError, match="96.*64, 128"):
        cula.query(cula.gla.gla_decode, **wrong, **device)
    with pytest.raises(cula.InvalidArgumentError, match="arch='sm89': allowed"):
        cula.query(cula.gla.gla_decode, **specs(), arch="sm89")
    with pytest.raises(cula.InvalidArgumentError, match="beta"):
        cula.query(cula.kda.kda_decode, **specs(), arch="cpu")
    with pytest.raises(ValueError, match="dtype 'bfloat16' is none of fp32, bf16"):
        cula.Spec((1,), "bfloat16")


def test_a_spec_is_not_computed_with():
    for where in ((1, 0), (2, 0)):
        given = {n: cula.Spec(x.shape, x.dtype, where) for n, x in specs().items()}
        with pytest.raises(cula.InvalidArgumentError, match="gla_decode: q: a Spec has no memory"):
            cula.gla.gla_decode(**given)
        with pytest.raises(cula.InvalidArgumentError, match="gla_decode: q: a Spec has no memory"):
            cula.gla.gla_decode(**given, donate=True)


# ------------------------------------------------------------------------------------------------------------ commands


def test_info():
    facts = cula.info()
    assert facts["version"] == cula.__version__ and facts["artifacts"]["path"] == str(artifacts.find()) and not facts["artifacts"]["error"]
    manifest = json.loads((artifacts.find() / "manifest.json").read_text())
    assert sum(sum(ops.values()) for ops in facts["artifacts"]["kernels"].values()) == len(manifest["kernels"])
    printed = python("-m", "cula", "info")
    assert printed.returncode == 0, printed.stderr
    for arch, ops in facts["artifacts"]["kernels"].items():
        assert re.search(rf"^  {arch} +{sum(ops.values())} kernels: ", printed.stdout, re.M)
    assert re.search(r"^cpu: can run$", printed.stdout, re.M)
    as_json = json.loads(python("-m", "cula", "info", "--json").stdout)
    assert as_json["artifacts"] == facts["artifacts"] and set(as_json) == set(facts)


def test_info_without_artifacts(tmp_path):
    done = python("-m", "cula", "info", CULA_ARTIFACTS=str(tmp_path))
    assert done.returncode == 0 and "artifacts: none usable" in done.stdout and "make artifacts ARCH=" in done.stdout
    assert "cpu: cannot run: there are no artifacts" in done.stdout
    assert json.loads(python("-m", "cula", "info", "--json", CULA_ARTIFACTS=str(tmp_path)).stdout)["artifacts"]["path"] is None


def test_a_call_without_artifacts(tmp_path):
    code = "import numpy as np, cula\ntry:\n    cula.norm.l2norm(np.ones((2, 4), 'float32'))\nexcept cula.ArtifactError as e:\n    print(e)"
    assert "make artifacts" in python("-c", code, CULA_ARTIFACTS=str(tmp_path)).stdout


def test_selftest():
    done = python("-m", "cula", "selftest", "--device", "cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = re.findall(r"^ok   cpu (\w+) (\w+): out \S+ \(limit \S+\), state \S+ \(limit \S+\), kernel (\S+)$", done.stdout, re.M)
    assert {op for op, _, _ in lines} == {op for kernels in cula.info()["artifacts"]["kernels"].values() for op in kernels}
    assert all(kernel.startswith(f"{op}.cpu.") for op, _, kernel in lines)
    for name in ("kda_decode", "kda_prefill"):
        assert {dtype for op, dtype, _ in lines if op == name} == {"float32", "float16", "bfloat16"}


@pytest.mark.parametrize(("break_it", "shown"), [
    ("_selftest.OUT_LIMIT = dict.fromkeys(_selftest.OUT_LIMIT, 1e-12)", "FAIL cpu kda_decode"),
    ("_selftest.kda.kda_decode = lambda **kw: kw['out'].fill(float('nan'))", "FAIL cpu kda_decode"),
    ("_selftest.last_kernels = lambda: ('kda_decode.sm90.bf16',)", "FAIL cpu gdn_decode"),
    ("_selftest.last_kernels = lambda: ()", "FAIL cpu kda_prefill"),
    ("_selftest.kda.kda_prefill = lambda **kw: kw['out'].fill(0)", "FAIL cpu kda_prefill"),
    ("_selftest.PREFILL_STATE_LIMIT = 1e-12", "FAIL cpu kda_prefill"),
    ("_selftest.norm.l2norm = lambda *a, **kw: (_ for _ in ()).throw(_selftest.CulaError('broken'))", "FAIL cpu l2norm float32: CulaError: broken"),
])
def test_selftest_can_fail(break_it, shown):
    done = python("-c", f"from cula import _selftest\n{break_it}\nraise SystemExit(_selftest.selftest('cpu'))")
    assert done.returncode == 1 and shown in done.stdout, done.stdout + done.stderr


def test_selftest_asks_for_what_it_lacks(tmp_path):
    done = python("-m", "cula", "selftest", CULA_ARTIFACTS=str(tmp_path))
    assert done.returncode == 1 and "make artifacts" in done.stderr
    assert python("-m", "cula", "selftest", "--device", "tpu").returncode == 2


# -------------------------------------------------------------------------------------------------------------- import


def test_import_is_light():
    """No framework, no numpy, no driver, no artifacts; 100 ms of CPU time at most."""
    code = """
import sys, time
start = time.process_time()
import cula
ms = (time.process_time() - start) * 1e3
heavy = [m for m in ("torch", "jax", "cupy", "numpy", "cuda", "aot", "json", "hashlib", "importlib.metadata") if m in sys.modules]
maps = open("/proc/self/maps").read()
print(ms, heavy, "libcuda.so" in maps, "libcula.so" in maps)
"""
    runs = [python("-S", "-c", code).stdout.split(maxsplit=1) for _ in range(6)]
    assert {rest.strip() for _, rest in runs} == {"[] False False"}
    assert min(float(ms) for ms, _ in runs) < 100


def test_loader_and_aot_do_not_import_each_other():
    """They share cula.h and manifest.json only; and the loader names no framework in an import statement."""
    for folder, banned in ((ROOT / "loader", ("aot", "torch", "jax", "cupy", "numpy", "cula")),
                           (ROOT / "python", ("aot", "jax", "cupy")), (ROOT / "aot", ("cula_loader", "cula"))):
        for path in folder.rglob("*.py"):
            for line in path.read_text().splitlines():
                found = re.match(r"\s*(?:from|import)\s+([\w.]+)", line)
                if found and not ("python" in folder.parts and path.parent.name in ("torch", "jax", "fla")):
                    root = found[1].split(".")[0]
                    assert root not in banned or (folder.name == "python" and path.stem in ("torch", "jax", "fla")), f"{path}: {line}"


def test_versions_agree():
    from cula_loader import abi

    assert cula.__version__ == ".".join(map(str, abi.VERSION))
