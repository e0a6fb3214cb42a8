"""Two builds in two folders give the same bytes: cubins of both toolchains, library, manifest."""

from __future__ import annotations

from aot.build.assemble import files_in
from aot.build.pipeline import build
from aot.build.sources import include_closure
from aot.matrix import ROOT
from tests.build.conftest import make_project, request_of


def test_two_folders_one_result(built, tmp_path, monkeypatch):
    root = make_project(tmp_path / "another folder" / ("with a long name " * 4).strip())
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("CPATH", "/nowhere")  # what compilers would take from the environment
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "-O0")
    monkeypatch.setenv("CUTE_DSL_LINEINFO", "1")
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1")
    assert build(request_of(root)) == 0
    first, second = built / "artifacts", root / "artifacts"
    assert files_in(first) == files_in(second)
    assert [path for path in files_in(first) if (first / path).read_bytes() != (second / path).read_bytes()] == []


def test_no_source_of_the_library_has_a_date_in_it():
    for source in ROOT.glob("aot/**/*.cpp"):
        for path in include_closure(source, (ROOT,)):
            assert not {b"__DATE__", b"__TIME__", b"__TIMESTAMP__"} & set(path.read_bytes().split()), path
