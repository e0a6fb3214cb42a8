"""The stand-alone benchmark is no part of the library, so only this compiles it."""

import platform

import pytest

from tests.cpu.build import compile_source


@pytest.mark.skipif(platform.machine() != "x86_64", reason="its copies are of AVX2 intrinsics")
def test_benchmark_compiles(tmp_path):
    (path,) = compile_source("tests/cpu/bench_decode.cpp", tmp_path)
    assert path.stat().st_size > 0
