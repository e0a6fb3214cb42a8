"""What the library asks of the CUDA driver, without one: contexts, loading, launches, errors; against fake_libcuda.c.

Each test is a process of its own, because a library loads the driver once.
"""

from __future__ import annotations

import ctypes.util
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.capi import standin
from tests.capi.test_header import CC

HERE = Path(__file__).parent


@cache
def fake_driver(*flags: str) -> Path:
    """Folder with a libcuda.so.1."""
    folder = standin.build().parent / "_".join(["fake", *(flag.strip("-") for flag in flags)])
    folder.mkdir(exist_ok=True)
    standin.run(CC, "-std=gnu11", "-O1", "-Wall", "-Wextra", "-shared", "-fPIC", *flags, HERE / "fake_libcuda.c", "-o", folder / "libcuda.so.1")
    return folder


SCENARIOS = re.findall(r"^def (\w+)\(\):\n", (HERE / "driver_scenarios.py").read_text(), re.M)
SCENARIOS = [name for name in SCENARIOS if name not in ("log", "message")]
DRIVERS = {"without_a_driver": None, "driver_that_is_too_old": ("-DcuKernelGetParamInfo=cuSomethingElse",)}  # the others: the fake as it is


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario(name):
    flags = DRIVERS.get(name, ())
    if flags is None and ctypes.util.find_library("cuda"):
        pytest.skip("this machine has a CUDA driver")
    env = dict(os.environ, PYTHONPATH=str(standin.ROOT), PYTHONDONTWRITEBYTECODE="1", FAKE="1" if flags == () else "",
               LD_LIBRARY_PATH="/nonexistent" if flags is None else str(fake_driver(*flags)))
    command = [sys.executable, "-m", "tests.capi.driver_scenarios", name]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=standin.ROOT)
    assert done.returncode == 0, done.stderr


def test_scenarios_fail_when_they_should():
    """A scenario is another process: its failed assertion must arrive here."""
    env = dict(os.environ, PYTHONPATH=str(standin.ROOT), FAKE="1", LD_LIBRARY_PATH=str(fake_driver()))
    code = "from tests.capi.driver_scenarios import *; assert lib.cula_prepare(0) == OK; assert fake.fake_retained(0) == 2"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, cwd=standin.ROOT)
    assert done.returncode == 1 and "fake_retained(0) == 2" in code and "AssertionError" in done.stderr
