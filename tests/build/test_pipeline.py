"""The build as a whole, on the toy project: what is compiled when, what is refused, what is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from aot.build.assemble import files_in
from aot.build.pipeline import build
from aot.build.verify import verify
from aot.matrix import ROOT
from tests.build.conftest import CPU, CUTE_DSL, CUTLASS, SPECS, make_project, request_of


def misbehaving(function: str):
    return replace(CUTE_DSL, op="gdn_decode", compile=f"toy.misbehave:{function}")


def test_a_build_makes_exactly_the_promised_files(built, capsys):
    assert files_in(built / "artifacts") == sorted([
        "include/cula.h", "include/dlpack.h", "lib/libcula.so", "lib/cmake/cula/culaConfig.cmake", "lib/cmake/cula/culaConfigVersion.cmake",
        "lib/pkgconfig/cula.pc", "manifest.json", "sm90/l2norm/l2norm.sm90.bf16.cubin", "sm90/kda_decode/kda_decode.sm90.fp32.sfp32.k64.vk.cubin",
    ])  # fmt: skip
    manifest = json.loads((built / "artifacts/manifest.json").read_text())
    assert manifest["complete"] and manifest["archs"] == ["cpu", "sm90"]
    by_id = {kernel["id"]: kernel for kernel in manifest["kernels"]}
    assert by_id["l2norm.sm90.bf16"]["launch"] == {"block": [128, 1, 1], "max_dynamic_smem": 0, "smem_carveout": 0}
    assert by_id["kda_decode.sm90.fp32.sfp32.k64.vk"]["launch"]["block"] == [64, 1, 1]
    assert by_id["l2norm.sm90.bf16"]["params"] == [
        {"name": "x", "kind": "ptr", "offset": 0, "size": 8}, {"name": "y", "kind": "ptr", "offset": 8, "size": 8},
        {"name": "n", "kind": "i32", "offset": 16, "size": 4}, {"name": "stride", "kind": "i64", "offset": 24, "size": 8},
        {"name": "scale", "kind": "f32", "offset": 32, "size": 4},
    ]  # fmt: skip
    text = (built / "artifacts/manifest.json").read_text()
    assert str(built) not in text and str(ROOT) not in text


def test_nothing_changed_compiles_nothing_and_writes_nothing(project, capsys):
    before = {path: os.stat(project / "artifacts" / path).st_mtime_ns for path in files_in(project / "artifacts")}
    assert build(request_of(project)) == 0
    said = capsys.readouterr().out
    assert "0 to do" in said and "unchanged" in said
    assert before == {path: os.stat(project / "artifacts" / path).st_mtime_ns for path in files_in(project / "artifacts")}


def test_an_unchanged_build_imports_no_compiler(project):
    """What keeps it within its two seconds."""
    script = (
        "import sys; from pathlib import Path; from tests.build.conftest import request_of; from aot.build.pipeline import build\n"
        f"assert build(request_of(Path({str(project)!r}))) == 0\n"
        "heavy = {'cutlass', 'numpy', 'cuda', 'torch'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def compiled(text: str) -> set[str]:
    """Names in the progress lines."""
    return {line.split("s  ", 1)[1].split("  ")[0] for line in text.splitlines() if line.startswith("[")}


@pytest.mark.parametrize("path, names", [
    ("toy/type.cuh", {CUTLASS.kernel_id}),  # only what includes it
    ("toy/dsl.py", {CUTE_DSL.kernel_id}),
    ("toy/misbehave.py", set()),  # nothing imports it
    ("aot/capi/src/stub.cpp", {"aot/capi/src/stub.cpp"}),
    ("aot/common/cpu/glibc_compat.h", {"aot/capi/src/stub.cpp"}),
])  # fmt: skip
def test_a_changed_source_rebuilds_what_reads_it(project, capsys, path, names):
    comment = "# changed\n" if path.endswith(".py") else "// changed\n"
    (project / path).write_text((project / path).read_text() + comment)
    assert build(request_of(project)) == 0
    assert compiled(capsys.readouterr().out) == names


def test_a_change_of_parameters_that_the_kernels_do_not_follow_is_refused(project, capsys):
    path = project / "toy/params.def"
    path.write_text(path.read_text().replace("i64, stride", "i32, stride"))
    before = (project / "artifacts/manifest.json").read_bytes()
    assert build(request_of(project)) == 1
    said = capsys.readouterr()
    assert "parameter 3 (stride, i32): 8 bytes at offset 24 in the cubin, 4 bytes at offset 20 declared" in said.out
    assert "nothing was written" in said.err
    assert (project / "artifacts/manifest.json").read_bytes() == before


def test_local_memory_is_refused_unless_an_exception_allows_it(project, capsys):
    path = project / "toy/scale.cu"
    path.write_text("#define TOY_LOCAL\n" + path.read_text())
    assert build(request_of(project)) == 1
    said = capsys.readouterr().out
    assert "REFUSED" in said and "bytes of local memory a thread (spills or local arrays), allowed 0" in said
    assert build(request_of(project)) == 1, "a refused kernel is refused from the cache too"
    allowed = (replace(CUTLASS, max_local_bytes=1024, max_narrow_loads=16), CUTE_DSL, CPU)
    assert build(request_of(project, allowed)) == 0
    assert not verify(project / "artifacts", allowed, project)
    assert {v.kind for v in verify(project / "artifacts", SPECS, project)} == {"spills"}


@pytest.mark.parametrize("function, message", [
    ("compile_raise", "ArithmeticError: the toy does not like this"),
    ("compile_crash", "the compiler process was killed by signal 11 (SIGSEGV)"),
    ("compile_nonsense", "the compiler's output is no cubin"),
    ("compile_lazily", "imported toy/hidden.py, which its cache key does not cover"),
    ("compile_absent", "has no attribute 'compile_absent'"),
])  # fmt: skip
def test_a_failed_kernel_fails_the_build_and_not_the_others(project, capsys, function, message):
    (project / "toy/hidden.py").write_text("")
    (project / "toy/dsl.py").write_text((project / "toy/dsl.py").read_text() + "# compile again\n")
    bad = misbehaving(function)
    assert build(request_of(project, (*SPECS, bad))) == 1
    said = capsys.readouterr().out
    assert message in said and "1 failed" in said
    assert {bad.kernel_id, CUTE_DSL.kernel_id} <= compiled(said)
    log = project / "build/logs" / f"{bad.kernel_id}.log"
    assert log.is_file()
    if function == "compile_raise":
        assert "printed before the failure" in log.read_text(), "what a compiler prints belongs to its failure"
    assert build(request_of(project)) == 0 and "0 to do" in capsys.readouterr().out


def test_a_partial_build_is_written_only_on_request_and_says_so(project, capsys):
    partial = (CUTLASS, CPU)
    assert build(request_of(project, partial, matrix=SPECS)) == 0
    assert "stays as it is" in capsys.readouterr().out
    assert (project / f"artifacts/sm90/kda_decode/{CUTE_DSL.kernel_id}.cubin").is_file()
    assert build(request_of(project, partial, matrix=SPECS, allow_partial=True)) == 0
    assert "PARTIAL" in capsys.readouterr().out
    assert not (project / "artifacts/sm90/kda_decode").exists(), "leftovers of the whole build"
    assert not json.loads((project / "artifacts/manifest.json").read_text())["complete"]
    assert [v.kind for v in verify(project / "artifacts", SPECS, project)] == ["matrix"]
    assert not verify(project / "artifacts", SPECS, project, allow_partial=True)


def test_a_folder_of_somebody_else_is_not_touched(project):
    from aot.build.assemble import AssembleError

    other = project / "home"
    other.mkdir()
    (other / "thesis.txt").write_text("precious")
    with pytest.raises(AssembleError, match="not empty and is no artifact folder"):
        build(request_of(project, out=other))
    assert files_in(other) == ["thesis.txt"]


def test_a_library_that_does_not_link_says_what_is_undefined(project, capsys):
    specs = (*SPECS, replace(CPU, op="kda_gate", compile="cula_cpu_not_written"))
    assert build(request_of(project, specs)) == 1
    assert "undefined reference to `cula_cpu_not_written'" in capsys.readouterr().out


def test_an_op_without_a_number_in_the_header_is_named(project, capsys):
    assert build(request_of(project, (*SPECS, replace(CPU, op="mystery")))) == 1
    assert "cula.h has no CULA_OP_MYSTERY" in capsys.readouterr().out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_build_leaves_no_process_and_goes_on_later(tmp_path, number):
    root = make_project(tmp_path / "project")
    script = (
        "import sys; from pathlib import Path; from tests.build.conftest import *; from tests.build.test_pipeline import misbehaving\n"
        "from aot.build.pipeline import build\n"
        f"sys.exit(build(request_of(Path({str(root)!r}), (*SPECS, misbehaving('compile_slowly')))))\n"
    )
    (root / "build").mkdir()
    with open(root / "build/said", "w") as said:
        process = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=said, stderr=said)
        deadline = time.monotonic() + 60
        while CUTLASS.kernel_id not in compiled((root / "build/said").read_text()):
            assert time.monotonic() < deadline and process.poll() is None, (root / "build/said").read_text()
            time.sleep(0.05)
        children = _descendants(process.pid)
        assert len(children) >= 2, "two workers"
        process.send_signal(number)
        assert process.wait(20) == 130
    assert "goes on from here" in (root / "build/said").read_text()
    time.sleep(0.2)
    assert not [pid for pid in children if _alive(pid)]
    assert not (root / "artifacts").exists()
    again = subprocess.run(
        [sys.executable, "-c", script.replace("(*SPECS, misbehaving('compile_slowly'))", "SPECS")], cwd=ROOT, capture_output=True, text=True
    )
    assert again.returncode == 0, again.stdout + again.stderr
    assert CUTLASS.kernel_id not in compiled(again.stdout), "the finished kernel was kept"


def _descendants(pid: int) -> list[int]:
    found = []
    for child in (int(word) for word in open(f"/proc/{pid}/task/{pid}/children").read().split()):
        found += [child, *_descendants(child)]
    return found


def _alive(pid: int) -> bool:
    try:
        return open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_two_builds_of_one_folder_wait_for_each_other(project):
    import fcntl

    with open(project / "build/lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        script = f"from pathlib import Path; from tests.build.conftest import *; build(request_of(Path({str(project)!r})))"
        process = subprocess.Popen([sys.executable, "-u", "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert "another build is running" in process.stdout.readline()
        fcntl.flock(lock, fcntl.LOCK_UN)
        assert "unchanged" in process.communicate(timeout=30)[0] and process.returncode == 0
