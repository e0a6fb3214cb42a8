"""build_kernels.py and the Makefile as their users meet them: lists, help, and errors that say what is allowed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys

import pytest

from aot.build import toolchain
from aot.matrix import ROOT, expand_all


def run(*arguments, **environment):
    return subprocess.run(
        [sys.executable, ROOT / "build_kernels.py", *map(str, arguments)],
        cwd="/",
        capture_output=True,
        text=True,
        env=os.environ | environment,
    )


def test_list_is_the_matrix():
    assert run("list").stdout.split() == [spec.kernel_id for spec in expand_all().specs]


def test_list_filters():
    lines = run("list", "--arch", "sm90", "--op", "kda_*,l2norm", "--io", "bf16", "--toolchain", "cutlass").stdout.split()
    assert lines == [
        "kda_gate.sm90.bf16",
        *(f"kda_prefill.sm90.bf16.k128.v128.{name}" for name in ("prep", "prep_gf32")),
        "l2norm.sm90.bf16",
    ]


def test_list_explains():
    text = run("list", "--arch", "sm90", "--k", "128", "--layout", "vk", "--explain").stdout
    assert "aot.ops.decode.kernel:compile_decode" in text and "cula_cpu_decode_bf16_sfp32_vk" in text
    assert re.search(r"^\d+ kernels, \d+ excluded by the matrix$", text, re.M)


def test_a_closed_pipe_is_no_error():
    done = subprocess.run(f"{sys.executable} {ROOT}/build_kernels.py list | head -1", shell=True, capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == ""


def test_help_explains():
    for words in (["--help"], ["build", "--help"], ["list", "--help"], ["verify", "--help"], ["lint", "--help"], ["clean", "--help"]):
        done = run(*words)
        assert done.returncode == 0 and len(done.stdout) > 150
    assert "kda_decode.sm90.bf16.sfp32.k128.vk" in run("--help").stdout


@pytest.mark.parametrize("words, message", [
    (["build", "--arch", "sm91"], "unknown arch 'sm91'; allowed: cpu, sm90, sm100, sm103, sm120, all"),
    (["build", "--arch", ""], "no arch in ''; allowed: "),
    (["build", "--op", "mamba"], "no kernel has op 'mamba'; there are: "),
    (["build", "--k", "96"], "no kernel has k '96'; there are: 64, 128, 256"),
    (["list", "--state", "fp16"], "no kernel has state 'fp16'; there are: bf16, fp32"),
    (["list", "--op", "l2norm", "--k", "64"], "matches all of --op 'l2norm', --k '64', though each of them matches some"),
    (["build", "--op", "l2norm", "--layout", "vk"], "no kernel of cpu, sm90 matches all of --op 'l2norm', --layout 'vk'"),
    (["build", "-j", "0"], "'0' is no number of parallel compiles; allowed: 1 to 1024"),
    (["build", "-j", "-2"], "'-2' is no number of parallel compiles"),
    (["build", "-j", "two"], "'two' is no number of parallel compiles"),
    (["build", "-j", "2.5"], "'2.5' is no number of parallel compiles"),
    (["make"], "invalid choice: 'make'"),
    ([], "required"),
    (["lint", "--artifacts", "/nonexistent"], "/nonexistent/manifest.json does not exist: run `make artifacts ARCH=sm90`"),
    (["verify", "--artifacts", "/nonexistent"], "/nonexistent/manifest.json does not exist: run `make artifacts ARCH=sm90`"),
])  # fmt: skip
def test_mistakes_are_named_with_what_is_allowed(words, message):
    done = run(*words)
    assert done.returncode != 0
    assert message in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_no_compiler(tmp_path):
    for environment, message in (
        (dict(PATH=str(tmp_path), CXX=""), "no C++ compiler: looked for c++, g++, clang++ on PATH. Install one"),
        (dict(CXX="g++-99"), "no C++ compiler: looked for g++-99 on PATH"),
        (dict(CXX="/bin/false"), "/bin/false --version failed with exit code 1"),
    ):
        done = run("build", "--out", tmp_path / "out", "--build-dir", tmp_path / "build", **environment)
        assert done.returncode == 1 and message in done.stderr and "Traceback" not in done.stderr
        assert not (tmp_path / "out").exists()


def test_no_nvcc(tmp_path):
    """With a Python that has none of the pinned packages."""
    done = subprocess.run(
        [sys.executable, "-I", "-S", ROOT / "build_kernels.py", "build", "--out", tmp_path / "out", "--build-dir", tmp_path / "build"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert re.search(r"ToolError: \S+ is not installed in .*; run `make artifacts`, which makes .venv", done.stderr)


def test_a_tool_of_another_version_is_refused(monkeypatch):
    monkeypatch.setattr(toolchain, "pins", lambda: {"nvidia-cuda-nvcc": "12.0.1"})
    toolchain._distribution.cache_clear()
    with pytest.raises(toolchain.ToolError, match=r"nvidia-cuda-nvcc \S+ is installed in .*, but 12\.0\.1 is pinned"):
        toolchain.nvcc()
    with pytest.raises(toolchain.ToolError, match=r"nvidia-cutlass is not pinned"):
        toolchain.cutlass_include()
    toolchain._distribution.cache_clear()


def test_every_tool_is_pinned_exactly():
    for name in ("build", "test", "lint"):
        for line in (ROOT / f"requirements/{name}.txt").read_text().splitlines():
            text = line.partition("#")[0].strip()
            assert not text or re.fullmatch(r'[A-Za-z0-9_.-]+(\[\w+\])?==[0-9][A-Za-z0-9.]*(; python_version (<|>=) "3\.\d+")?', text), line
    assert set(toolchain.DSL + toolchain.NVCC + toolchain.NVDISASM + toolchain.HOST) <= set(toolchain.pins())


# ---------------------------------------------------------------------------------------------------------- Makefile


@pytest.fixture
def checkout(tmp_path):
    """A Makefile alone, with a fake Python, so that nothing is installed."""
    (tmp_path / "requirements").mkdir()
    for path in ("Makefile", "requirements/build.txt"):
        shutil.copy(ROOT / path, tmp_path / path)
    return tmp_path


def make(folder, *words):
    return subprocess.run(["make", "-C", folder, *words], capture_output=True, text=True)


def test_make_help_lists_the_targets():
    text = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for word in ("artifacts", "test", "test-gpu", "bench", "lint", "clean", "ARCH", "JOBS", "PYTHON"):
        assert re.search(rf"^{word}\s", text, re.M), word


def test_make_refuses_an_old_python(checkout):
    old = checkout / "python"
    old.write_text('#!/bin/sh\ncase "$1" in --version) echo Python 3.8.1;; *) exit 1;; esac\n')
    old.chmod(0o755)
    done = make(checkout, "artifacts", f"PYTHON={old}")
    assert done.returncode != 0 and f"Python 3.10 or newer is needed; `{old}` is Python 3.8.1" in done.stderr


def test_make_says_when_there_is_no_python(checkout):
    done = make(checkout, "artifacts", "PYTHON=python3.99")
    assert done.returncode != 0 and "Python 3.10 or newer is needed" in done.stderr


def test_make_says_when_venv_is_missing(checkout):
    bare = checkout / "python"
    bare.write_text('#!/bin/sh\ncase "$1" in -c) exit 0;; *) echo "No module named venv" >&2; exit 1;; esac\n')
    bare.chmod(0o755)
    done = make(checkout, "artifacts", f"PYTHON={bare}")
    assert done.returncode != 0 and "apt install python3-venv" in done.stderr
    assert not (checkout / ".venv").exists()
