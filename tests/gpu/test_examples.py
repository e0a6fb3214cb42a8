"""The examples on the GPU: the C++ engine with its step as a captured graph, and the torch example."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.examples.test_engine import ARTIFACTS, ROOT, check_engine

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def engine(tmp_path_factory) -> Path:
    """Built with the compiler alone: a machine that only runs kernels may have neither CMake nor pkg-config."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler on this machine")
    program, library = tmp_path_factory.mktemp("engine") / "engine", ARTIFACTS / "lib"
    sources = [str(path) for path in sorted((ROOT / "examples/engine").glob("*.cpp"))]
    subprocess.run([compiler, "-std=c++17", "-O2", f"-I{ARTIFACTS / 'include'}", *sources, f"-L{library}", "-lcula", f"-Wl,-rpath,{library}",
                    "-ldl", "-o", str(program)], check=True, timeout=300)
    return program


@pytest.mark.parametrize("options", [["--check-all"], ["--capacity", "1", "--requests", "5"], ["--capacity", "256", "--requests", "600"],
                                     ["--layers", "24", "--capacity", "32"]], ids=" ".join)
def test_engine(engine, options):
    done = subprocess.run([str(engine), "--device", "cuda", *options], capture_output=True, text=True, timeout=300)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    check_engine(done.stdout)
    assert ", kernel kda_decode.sm" in done.stdout


def test_torch_example():
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join([str(ROOT / "python"), str(ROOT / "loader")]))
    done = subprocess.run([sys.executable, str(ROOT / "examples/python/torch_decode.py")], env=environment, capture_output=True, text=True,
                          timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "device cuda" in done.stdout and done.stdout.splitlines()[-1] == "OK"
