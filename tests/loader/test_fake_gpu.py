"""The GPU side of the loader on a machine without one: a libcuda.so.1 that records what it is asked (fake_cuda.c).

Each test is a function of fake_gpu_cases.py, run in a forked child of one process that has the fake driver in place.
What only a GPU can show is in test_gpu_*.py.
"""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cula_loader import artifacts
from tests.loader import fake_gpu, fake_gpu_cases

ROOT = Path(__file__).parents[2]
CASES = [name for name, value in inspect.getmembers(fake_gpu_cases, inspect.isfunction) if name.startswith("case_")]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> dict[str, str]:
    if "sm90" not in artifacts.read(artifacts.find()).archs:
        pytest.skip("the artifacts have no sm90 kernels")
    folder = tmp_path_factory.mktemp("driver")
    driver = fake_gpu.build(folder, artifacts.find() / "include")
    env = dict(os.environ, CULA_ARTIFACTS=str(artifacts.find()), PYTHONPATH=os.pathsep.join(map(str, (ROOT / "loader", ROOT / "python", ROOT))))
    done = subprocess.run([sys.executable, "-m", "tests.loader.fake_gpu_cases", str(driver), str(folder)], env=env, cwd=ROOT, capture_output=True,
                          text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("case", CASES)
def test_fake_gpu(case, outcomes):
    assert not outcomes[case], outcomes[case]
