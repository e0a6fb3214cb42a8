"""doctor and bench on a machine with a GPU: no framework, nothing but the installed packages."""

from __future__ import annotations

import json

import pytest

import cula
from cula.bench import problems
from tests.python.test_bench import command as bench
from tests.python.test_doctor import command as doctor

pytestmark = pytest.mark.gpu


def test_doctor_finds_nothing_wrong():
    done = doctor("--device", "cuda")
    assert done.returncode == 0, done.stdout
    assert any(line.startswith("ok ") and " cuda:0: " in line for line in done.stdout.splitlines())


def test_bench(tmp_path):
    """Every row is measured, by the kernel of the GPU's arch; no time is below what the memory allows by more than the L2 explains."""
    done = bench("--device", "cuda", "--quick", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "bench.json").read_text())
    assert result["arch"] == cula.info()["devices"][0]["arch"] and result["copy_GBs"] > 100
    assert len(result["rows"]) == len(problems.HEADS) * len(problems.STATE_BYTES) * len(problems.QUICK_BATCHES)
    for row in result["rows"]:
        assert row["kernel"].startswith(f"{row['op']}_decode.{result['arch']}.bf16.s{row['state']}."), row
        assert 0.02 < row["share"] < 1.15, row
