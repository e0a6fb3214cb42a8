"""A KDA decode problem in numpy and its float64 answer, for the GPU tests of every framework."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from tests.reference import recurrence

ROOT = Path(__file__).parents[2]
N, H, HV, K, V = 6, 2, 4, 128, 128
OPTIONS = dict(gate_kind="raw", beta_kind="logit", l2norm=True, lower_bound=-5.0)


def problem(dtype: str = "float16", k: int = K, seed: int = 0) -> dict[str, np.ndarray]:
    """Rows of `dtype`, float32 states with permuted slots; row 1 starts from zero, row 2 stores nothing, row 3 is padding."""
    random = np.random.default_rng(seed)
    normal = lambda *shape: random.standard_normal(shape).astype("float32")
    rows = dict(q=normal(N, H, k), k=normal(N, H, k), v=normal(N, HV, V), gate=normal(N, HV, k))
    return {name: x.astype(dtype) for name, x in rows.items()} | dict(
        beta=normal(N, HV), A_log=normal(HV), dt_bias=normal(HV, k), state=normal(N + 2, HV, V, k),
        read_index=np.array([6, -1, 2, -1, 0, 7], "int32"), write_index=np.array([6, 1, -1, -1, 3, 4], "int32"))


def expected(rows: dict[str, np.ndarray]) -> recurrence.Decoded:
    return recurrence.decode("kda", **{n: x if x.dtype.kind == "i" else x.astype("float64") for n, x in rows.items()}, **OPTIONS)


def check(out, state, rows, limit: float = 4e-4) -> None:
    """out, state: numpy arrays of the result. limit: relative RMS of out, the rounding of fp16 (bf16: 2.5e-3)."""
    want = expected(rows)
    out, state = np.asarray(out, "float64"), np.asarray(state, "float64")
    assert np.isfinite(out).all() and np.linalg.norm(out - want.out) <= limit * np.linalg.norm(want.out)
    assert np.linalg.norm(state - want.state) <= 3e-7 * np.linalg.norm(want.state)
    untouched = np.setdiff1d(np.arange(len(state)), want.written)
    assert np.array_equal(state[untouched], rows["state"][untouched].astype("float64"))
    assert not out[3].any(), "a padded row gives zero"


def run_python(code: str, *arguments: str) -> str:
    """Runs code in a process that has used no GPU yet; what it printed."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "loader"), str(ROOT / "python"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run([sys.executable, "-c", code, *arguments], env=dict(os.environ, PYTHONPATH=path), cwd=ROOT, capture_output=True, text=True,
                          timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
