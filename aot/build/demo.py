"""The calls that end a build: `python -m cula selftest` on the new artifacts, in a process of its own, as a user would run it.

Every op on the CPU and on each GPU that can run it, checked against the recurrence in float64.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from aot.build.progress import error, say
from aot.matrix import ROOT


def run(artifacts: Path) -> int:
    """Prints the KDA decode and prefill lines and the verdict, or everything if something is wrong. Returns an exit code."""
    paths = os.pathsep.join(str(ROOT / folder) for folder in ("loader", "python"))
    environment = os.environ | {"CULA_ARTIFACTS": str(artifacts), "PYTHONPATH": paths}
    done = subprocess.run(
        [sys.executable, "-m", "cula", "selftest"], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    lines = done.stdout.splitlines()
    shown = lines if done.returncode else [x for x in lines if " kda_decode " in x or " kda_prefill " in x or x.startswith("selftest:")]
    for line in shown:
        say(line)
    if done.returncode:
        error(f"the artifacts in {artifacts} give wrong results on this machine")
    return done.returncode
