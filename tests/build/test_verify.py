"""verify: every kind of damage to an artifact folder, done to a copy, is found and named."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import replace

import pytest

from aot.archs import ARCHS
from aot.build import cache, exports, toolchain
from aot.build.elf import SHT_DYNSYM, Elf
from aot.build.verify import verify
from tests.build.conftest import CPU, CUTE_DSL, CUTLASS, SPECS

CUBIN = f"sm90/l2norm/{CUTLASS.kernel_id}.cubin"
OTHER = f"sm90/kda_decode/{CUTE_DSL.kernel_id}.cubin"
LIBRARY = "lib/libcula.so"


class Tree:
    """A copy of the toy artifacts. `reseal` writes sizes and hashes of changed files into the manifest, as somebody would who
    rebuilt it around the damage: then only the deeper checks are left to find it."""

    def __init__(self, root, folder):
        self.root, self.folder = root, folder

    def read(self, path: str) -> bytes:
        return (self.folder / path).read_bytes()

    def write(self, path: str, data: bytes) -> None:
        (self.folder / path).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / path).write_bytes(data)

    def edit(self, change) -> None:
        manifest = json.loads(self.read("manifest.json"))
        change(manifest)
        self.write("manifest.json", json.dumps(manifest).encode())

    def kernel(self, spec, change) -> None:
        self.edit(lambda manifest: change(next(kernel for kernel in manifest["kernels"] if kernel["id"] == spec.kernel_id)))

    def reseal(self) -> None:
        def change(manifest):
            for entry in [manifest["library"], *(kernel["cubin"] for kernel in manifest["kernels"] if "cubin" in kernel)]:
                data = self.read(entry["file"])
                entry |= {"size": len(data), "sha256": cache.sha256(data)}

        self.edit(change)

    def found(self, specs=SPECS) -> set[tuple[str, str]]:
        return {(violation.kind, violation.where) for violation in verify(self.folder, specs, self.root)}

    def texts(self, specs=SPECS) -> str:
        return "\n".join(map(str, verify(self.folder, specs, self.root)))


@pytest.fixture
def tree(built, tmp_path) -> Tree:
    shutil.copytree(built / "artifacts", tmp_path / "artifacts")
    return Tree(built, tmp_path / "artifacts")


def test_a_whole_folder_has_no_violation(tree):
    assert tree.found() == set()
    tree.reseal()
    assert tree.found() == set()


@pytest.mark.parametrize("path", [CUBIN, LIBRARY, "include/cula.h", "include/dlpack.h", "lib/pkgconfig/cula.pc"])
def test_missing(tree, path):
    (tree.folder / path).unlink()
    assert ("missing", path) in tree.found()


def test_unknown(tree):
    tree.write("sm90/l2norm/l2norm.sm90.bf16.old.cubin", tree.read(CUBIN))
    tree.write("sm120/leftover.cubin", b"")
    assert tree.found() == {("unknown", "sm90/l2norm/l2norm.sm90.bf16.old.cubin"), ("unknown", "sm120/leftover.cubin")}


def test_a_link_instead_of_a_file(tree):
    target = tree.folder / CUBIN
    moved = tree.folder.parent / "elsewhere.cubin"
    target.rename(moved)
    target.symlink_to(moved)
    assert tree.found() == {("unknown", CUBIN)}


def test_truncated(tree):
    tree.write(CUBIN, tree.read(CUBIN)[:-8])
    assert {("truncated", CUBIN), ("changed", CUBIN)} & tree.found()
    assert "truncated" in tree.texts()


def test_truncated_with_a_manifest_to_match(tree):
    tree.write(CUBIN, tree.read(CUBIN)[: len(tree.read(CUBIN)) // 2])
    tree.reseal()
    assert ("changed", CUBIN) in tree.found() and "is no whole cubin" in tree.texts()


def test_one_flipped_bit(tree):
    data = bytearray(tree.read(LIBRARY))
    data[len(data) // 2] ^= 1
    tree.write(LIBRARY, bytes(data))
    assert ("changed", LIBRARY) in tree.found()


def test_swapped(tree):
    first, second = tree.read(CUBIN), tree.read(OTHER)
    tree.write(CUBIN, second)
    tree.write(OTHER, first)
    assert {path for _, path in tree.found()} >= {CUBIN, OTHER}
    tree.reseal()
    assert tree.found() == {("entry", CUTLASS.kernel_id), ("entry", CUTE_DSL.kernel_id)}


@pytest.fixture(scope="module")
def ptx(tmp_path_factory):
    """Compiles a kernel `cula_l2norm` with given parameters for an arch, as another build would have."""
    folder = tmp_path_factory.mktemp("ptx")

    def compile_(params: str, arch: str = "sm90") -> bytes:
        target = ARCHS[arch].target
        (folder / "k.ptx").write_text(
            f".version 8.8\n.target {target}\n.address_size 64\n.visible .entry cula_l2norm({params})\n.maxntid 128, 1, 1\n{{ ret; }}\n"
        )
        subprocess.run([toolchain.ptxas(), f"-arch={target}", folder / "k.ptx", "-o", folder / "k.cubin"], check=True)
        return (folder / "k.cubin").read_bytes()

    return compile_


RIGHT = ".param .u64 x, .param .u64 y, .param .u32 n, .param .u64 stride, .param .f32 scale"


def test_of_another_arch(tree, ptx):
    tree.write(CUBIN, ptx(RIGHT, "sm100"))
    tree.reseal()
    assert ("arch", CUTLASS.kernel_id) in tree.found()
    assert "compiled for sm_100, but the arch is sm90" in tree.texts()


@pytest.mark.parametrize("params, text", [
    (RIGHT.replace(".param .u32 n", ".param .u64 n"), "parameter 2 (n, i32): 8 bytes at offset 16 in the cubin, 4 bytes at offset 16 declared"),
    (RIGHT.replace(", .param .f32 scale", ""), "4 parameters in the cubin, 5 declared"),
])  # fmt: skip
def test_parameters_of_the_cubin(tree, ptx, params, text):
    tree.write(CUBIN, ptx(params))
    tree.reseal()
    assert ("params", CUTLASS.kernel_id) in tree.found() and text in tree.texts()


def test_parameters_of_the_manifest(tree):
    tree.kernel(CUTLASS, lambda kernel: kernel["params"][0].update(name="z"))
    assert tree.found() == {("params", CUTLASS.kernel_id)}
    assert "lists other parameters than toy/params.def" in tree.texts()


def test_spills_over_the_limit(tree):
    """A manifest and a cubin that agree on local memory which the matrix does not allow."""
    spec = replace(CUTLASS, max_local_bytes=64)
    assert tree.found((spec, CUTE_DSL, CPU)) == {("spills", CUTLASS.kernel_id)}  # the limit itself differs


def test_a_kernel_that_spills(tree, tmp_path):
    target = tmp_path / "k"
    target.with_suffix(".ptx").write_text(
        f".version 8.8\n.target sm_90a\n.address_size 64\n.visible .entry cula_l2norm({RIGHT})\n.maxntid 128, 1, 1\n{{\n"
        ".local .align 4 .b8 a[64]; .reg .u64 %p<4>; .reg .u32 %r<3>;\n"
        "ld.param.u64 %p1, [x]; ld.param.u32 %r1, [n]; mov.u64 %p2, a; cvt.u64.u32 %p3, %r1; add.u64 %p2, %p2, %p3;\n"
        "st.local.u32 [%p2], %r1; ld.local.u32 %r2, [a+16]; st.global.u32 [%p1], %r2; ret;\n}\n"
    )
    subprocess.run([toolchain.ptxas(), "-arch=sm_90a", target.with_suffix(".ptx"), "-o", target.with_suffix(".cubin")], check=True)
    tree.write(CUBIN, target.with_suffix(".cubin").read_bytes())
    tree.reseal()
    assert ("spills", CUTLASS.kernel_id) in tree.found() and "64 bytes of local memory a thread, allowed 0" in tree.texts()


@pytest.mark.parametrize("key", ["registers", "static_smem", "local_bytes"])
def test_stated_resources(tree, key):
    tree.kernel(CUTLASS, lambda kernel: kernel["resources"].update({key: 7}))
    assert tree.found() == {("resources", CUTLASS.kernel_id)}


def test_entry(tree):
    tree.kernel(CUTLASS, lambda kernel: kernel.update(entry_symbol="cula_l2norm_v2"))
    assert tree.found() == {("entry", CUTLASS.kernel_id)}


def test_a_library_of_another_build(tree, ptx):
    tree.write(CUBIN, tree.read(CUBIN) + b"\1")  # still a cubin, and not the one inside the library
    tree.reseal()
    assert tree.found() == {("embedded", CUTLASS.kernel_id)}


def test_matrix_and_manifest_differ(tree):
    more = replace(CUTLASS, io="fp32")
    assert tree.found((*SPECS, more)) == {("matrix", more.kernel_id)}
    assert tree.found((CUTLASS, CPU)) == {("matrix", CUTE_DSL.kernel_id)}
    assert tree.found((*SPECS, replace(CUTLASS, arch="sm120"))) == set(), "an arch that was not built is not missing"
    tree.kernel(CUTLASS, lambda kernel: kernel.update(io="fp16"))
    assert tree.found() == {("matrix", CUTLASS.kernel_id)}


# ------------------------------------------------------------------------------------------------------- the library


def rename_in(data: bytes, old: bytes, new: bytes) -> bytes:
    assert len(old) == len(new) and data.count(old) >= 1
    return data.replace(old, new)


def test_a_stray_and_a_missing_export(tree):
    tree.write(LIBRARY, rename_in(tree.read(LIBRARY), b"\0cula_op_name\0", b"\0cula_op_nome\0"))
    tree.reseal()
    assert {kind for kind, _ in tree.found()} == {"exports"}
    assert "exports cula_op_nome, which cula.h does not declare" in tree.texts()
    assert "does not export cula_op_name, which cula.h declares" in tree.texts()


def test_too_new_a_glibc_symbol(tree):
    elf = Elf(tree.read(LIBRARY))
    _, _, version = elf.needed_versions()[0]
    newer = version.replace("GLIBC_2", "GLIBC_9")
    name = next(symbol.name for symbol in elf.symbols(SHT_DYNSYM) if symbol.version == version)
    tree.write(LIBRARY, rename_in(tree.read(LIBRARY), f"\0{version}\0".encode(), f"\0{newer}\0".encode()))
    tree.reseal()
    assert tree.found() == {("glibc", LIBRARY)}
    assert f"needs {newer} of lib" in tree.texts() and name in tree.texts() and "the oldest supported glibc is 2.28" in tree.texts()


def test_glibc_versions_are_compared_as_numbers():
    class Fake:
        def __init__(self, *versions):
            self.versions = versions

        def symbols(self, kind):
            return []

        def needed_versions(self):
            return [("libc.so.6", 2 + i, version) for i, version in enumerate(self.versions)]

        def dynamic(self, tag):
            return ["libc.so.6"]

    assert exports.check_system(Fake("GLIBC_2.2.5", "GLIBC_2.3", "GLIBC_2.9", "GLIBC_2.28")) == []
    for newer in ("GLIBC_2.29", "GLIBC_2.100", "GLIBC_3.0", "GLIBC_ABI_DT_RELR", "GLIBCXX_3.4.29"):
        (problem,) = exports.check_system(Fake(newer))
        assert f"needs {newer} of libc.so.6" in problem


def test_another_needed_library(tree):
    tree.write(LIBRARY, rename_in(tree.read(LIBRARY), b"\0libdl.so.2\0", b"\0libdx.so.2\0"))
    tree.reseal()
    assert tree.found() == {("glibc", LIBRARY)} and "needs libdx.so.2; allowed: " in tree.texts()


# ------------------------------------------------------------------------------------------------------- the manifest


@pytest.mark.parametrize("change, text", [
    (lambda m: m.update(schema=2), "has schema 2; this version reads 1"),
    (lambda m: m.pop("kernels"), "has not the fields of schema 1"),
    (lambda m: m["kernels"][0].pop("params"), "has not the fields of schema 1"),
    (lambda m: m["library"].update(file="../libcula.so"), "names a file outside of its folder"),
])  # fmt: skip
def test_a_manifest_that_is_none(tree, change, text):
    tree.edit(change)
    assert {kind for kind, _ in tree.found()} == {"manifest"} and text in tree.texts()


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"\xff"])
def test_a_damaged_manifest(tree, data):
    tree.write("manifest.json", data)
    assert {kind for kind, _ in tree.found()} == {"manifest"}


def test_no_manifest(tree):
    (tree.folder / "manifest.json").unlink()
    assert "does not exist: run `make artifacts" in tree.texts()


def test_an_interrupted_assembly(tree):
    tree.write(".incomplete", b"")
    assert tree.found() == {("unknown", ".incomplete")}
