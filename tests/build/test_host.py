"""The C++ side of the build: flags, instruction-set levels, the stand-ins for newer glibc symbols, and the direction of imports."""

from __future__ import annotations

import ast
import ctypes
import re
import subprocess

import pytest

from aot.build import exports, host, link, toolchain
from aot.build.elf import Elf
from aot.build.header import read_header
from aot.matrix import ROOT

THROWS = r"""
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>
#define API extern "C" __attribute__((visibility("default")))
__attribute__((noinline)) static void deep(int n) {
  std::string local(100, 'x');  // has a destructor that the unwinder must run
  if (n == 0) throw std::runtime_error("from " + local.substr(0, 3));
  deep(n - 1);
}
API int cula_catch(int depth) {
  try { deep(depth); } catch (const std::exception& error) { return std::string(error.what()) == "from xxx" ? 1 : 2; }
  return 3;
}
API int cula_no_memory(size_t n) {
  try { std::vector<char> much(n); return much[n / 2]; } catch (const std::bad_alloc&) { return 1; } catch (...) { return 2; }
}
API long cula_number(const char* text) {
  int a = 0; std::sscanf(text, "%d", &a);
  auto shared = std::make_shared<int>(a);  // reference counts look at __libc_single_threaded
  auto copy = shared;
  return std::strtol(text, nullptr, 10) + *copy;
}
"""


@pytest.fixture(scope="module")
def throwing(tmp_path_factory):
    """A library that throws, compiled and linked as libcula.so is."""
    folder = tmp_path_factory.mktemp("throwing")
    (folder / "throws.cpp").write_text(THROWS)
    for source, path in ((host.Source("throws.cpp"), folder / "throws.cpp"), (host.Source(host.COMPAT), ROOT / host.COMPAT)):
        subprocess.run(
            [*map(str, host.command(source, ROOT, True, toolchain.system_dirs())), "-c", path, "-o", folder / f"{path.stem}.o"], check=True
        )
    objects = [folder / "throws.o", folder / "glibc_compat.o"]
    subprocess.run([toolchain.cxx().path, *link.LINK_FLAGS, *objects, *link.LIBRARIES, "-o", folder / "libthrows.so"], check=True)
    return folder / "libthrows.so"


def test_exceptions_are_thrown_and_caught_inside_the_library(throwing):
    library = ctypes.CDLL(str(throwing))
    assert [library.cula_catch(depth) for depth in (0, 1, 50)] == [1, 1, 1]
    library.cula_no_memory.argtypes = [ctypes.c_size_t]
    assert library.cula_no_memory(1 << 62) == 1
    assert library.cula_number(b"21") == 42


def test_what_the_runtime_imports_is_old_enough(throwing):
    assert exports.check_system(Elf(throwing.read_bytes())) == []


def test_an_isa_source_is_compiled_once_a_level(tmp_path):
    for path in (
        "aot/ops/toy/cpu_isa_k.cpp",
        "aot/ops/toy/cpu_k.cpp",
        "aot/ops/toy/plan.cpp",
        "aot/ops/toy/other.cpp",
        "aot/capi/src/a.cpp",
    ):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("")
    found = host.find_sources(tmp_path)
    assert [source.name for source in found] == [
        "aot/capi/src/a.cpp", "aot/ops/toy/cpu_isa_k.cpp (base)", "aot/ops/toy/cpu_isa_k.cpp (avx2)", "aot/ops/toy/cpu_isa_k.cpp (avx512)",
        "aot/ops/toy/cpu_k.cpp", "aot/ops/toy/plan.cpp",
    ]  # fmt: skip
    assert "-DCULA_ISA=avx2" in host.flags(found[2], False) and "-mavx2" in host.flags(found[2], False)
    assert not [flag for flag in host.flags(found[1], False) + host.flags(found[4], False) if flag.startswith("-mavx")]
    assert "-Werror" in host.flags(found[0], True) and "-Werror" not in host.flags(found[0], False)


def test_header_facts():
    header = read_header(ROOT / "aot/capi/include/cula.h")
    assert {"cula_version", "cula_run", "cula_bind_objects"} <= set(header.exports)
    assert header.ops["l2norm"] == 18 and header.archs == {"cpu": 1, "sm90": 90, "sm100": 100, "sm103": 103, "sm120": 120}
    text = (ROOT / "aot/capi/include/cula.h").read_text()
    assert len(header.exports) == len(re.findall(r"^CULA_API ", text, re.M)), "every exported function is in the version script"


def test_one_version_everywhere():
    header = read_header(ROOT / "aot/capi/include/cula.h")
    assert re.search(r'^version = "(.*?)"', (ROOT / "pyproject.toml").read_text(), re.M)[1] == header.version


@pytest.mark.parametrize("folder, forbidden", [("loader", {"aot", "cula", "torch"}), ("aot", {"cula_loader", "cula", "torch"})])
def test_what_builds_and_what_loads_never_import_each_other(folder, forbidden):
    found = []
    for path in (ROOT / folder).rglob("*.py"):
        if "dev" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_bytes())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            found += [f"{path.relative_to(ROOT)}: {name}" for name in names if name.partition(".")[0] in forbidden]
    assert found == []
