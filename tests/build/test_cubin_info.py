"""The cubin reader against NVIDIA's own tools, on kernels of both toolchains, and against damaged files."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from aot.build import lint, toolchain
from aot.build.cubin_info import CubinError, read_cubin
from aot.build.elf import Elf, ElfError
from aot.build.params import ParamsError, read_params
from tests.build.conftest import CUTE_DSL, CUTLASS

KERNELS = (CUTLASS, CUTE_DSL)


@pytest.fixture(params=KERNELS, ids=lambda spec: spec.toolchain)
def cubin(request, built):
    spec = request.param
    return built / "artifacts" / spec.arch / spec.op / f"{spec.kernel_id}.cubin"


def test_the_reader_agrees_with_cuobjdump(cubin):
    found = importlib.metadata.distribution("nvidia-cuda-cuobjdump").locate_file("nvidia/cu13/bin/cuobjdump")
    text = subprocess.run([found, "--dump-resource-usage", cubin], capture_output=True, text=True, check=True).stdout
    (name,) = re.findall(r"Function (\S+):", text)
    usage = {key: int(value) for key, value in re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", text)}
    kernel = read_cubin(cubin.read_bytes()).kernels[name]
    assert (kernel.registers, kernel.local_bytes) == (usage["REG"], usage["STACK"] + usage["LOCAL"])
    assert kernel.static_smem == max(0, usage["SHARED"] - 1024)  # cuobjdump counts the system's KB in


def test_the_reader_agrees_with_ptxas(built, tmp_path):
    """Parameters, launch bounds, registers, shared and local memory of a kernel with known ones."""
    ptx = tmp_path / "k.ptx"
    ptx.write_text("""
.version 8.8
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 a, .param .u32 b, .param .align 64 .b8 map[128], .param .f32 c)
.reqntid 96, 2, 1
{
  .shared .align 16 .b8 tile[4096];
  .local .align 16 .b8 array[64];  // with unknown indices on both sides: it cannot be kept in registers
  .reg .u64 %p<6>; .reg .u32 %r<6>;
  ld.param.u64 %p1, [a];
  ld.param.u32 %r1, [b];
  st.shared.u32 [tile], %r1;
  bar.sync 0;
  ld.shared.u32 %r3, [tile+64];
  mov.u64 %p2, array;
  cvt.u64.u32 %p3, %r1;
  add.u64 %p4, %p2, %p3;
  cvt.u64.u32 %p3, %r3;
  add.u64 %p5, %p2, %p3;
  st.local.u32 [%p4], %r1;
  st.local.u32 [%p5], %r3;
  ld.local.u32 %r2, [%p4+4];
  st.global.u32 [%p1+8], %r2;
  ret;
}""")
    log = subprocess.run(
        [toolchain.ptxas(), "-arch=sm_90a", "-v", ptx, "-o", tmp_path / "k.cubin"], capture_output=True, text=True, check=True
    ).stderr
    (stack,) = map(int, re.findall(r"(\d+) bytes stack frame", log))
    (registers,) = map(int, re.findall(r"Used (\d+) registers", log))
    (shared,) = map(int, re.findall(r"(\d+) bytes smem", log))
    info = read_cubin((tmp_path / "k.cubin").read_bytes())
    kernel = info.kernels["k"]
    assert (kernel.registers, kernel.local_bytes, kernel.static_smem) == (registers, stack, shared) and (stack, shared) == (64, 4096)
    assert kernel.required_block == (96, 2, 1)
    # The map is aligned in the constant bank, where the parameters start at 0x210.
    assert [(p.ordinal, p.offset, p.size) for p in kernel.params] == [(0, 0, 8), (1, 8, 4), (2, 48, 128), (3, 176, 4)]
    assert (kernel.param_base, kernel.param_bytes) == (0x210, 180)
    (tmp_path / "p.def").write_text("CULA_PARAM(ptr, a)\nCULA_PARAM(i32, b)\nCULA_PARAM(tensor_map, map)\nCULA_PARAM(f32, c)\n")
    assert lint.compare_params(read_params(tmp_path / "p.def"), kernel) == []
    assert (info.sm, info.toolkit) == (90, 130)


@pytest.mark.parametrize("arch, sm", [("sm_90a", 90), ("sm_100a", 100), ("sm_103a", 103), ("sm_120a", 120)])
def test_the_arch_is_read(tmp_path, arch, sm):
    ptx = tmp_path / "k.ptx"
    ptx.write_text(f".version 8.8\n.target {arch}\n.address_size 64\n.visible .entry k() {{ ret; }}\n")
    subprocess.run([toolchain.ptxas(), f"-arch={arch}", ptx, "-o", tmp_path / "k.cubin"], check=True)
    assert read_cubin((tmp_path / "k.cubin").read_bytes()).sm == sm


def test_the_toy_kernels_are_what_they_declare(built):
    declared = read_params(built / CUTLASS.params)
    for spec, threads, smem in ((CUTLASS, 128, 512), (CUTE_DSL, 64, 0)):
        data = (built / "artifacts" / spec.arch / spec.op / f"{spec.kernel_id}.cubin").read_bytes()
        (kernel,) = read_cubin(data).kernels.values()
        assert [(p.offset, p.size) for p in kernel.params] == [(p.offset, p.size) for p in declared]
        assert (kernel.required_block or kernel.max_block)[0] == threads and kernel.static_smem == smem


def test_every_cut_of_a_cubin_is_an_error(cubin):
    data = cubin.read_bytes()
    for size in [*range(0, 200), *range(200, len(data), 61), len(data) - 1]:
        with pytest.raises(CubinError):
            read_cubin(data[:size])


@settings(max_examples=300, deadline=None)
@given(spots=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=8))
@example(spots=[(0.0, 0)])
def test_a_damaged_cubin_is_an_error_or_readable_but_never_a_crash(built, spots):
    data = bytearray((built / "artifacts/sm90/l2norm/l2norm.sm90.bf16.cubin").read_bytes())
    for where, value in spots:
        data[int(where * len(data))] = value
    try:
        read_cubin(bytes(data))
    except CubinError:
        pass


@pytest.mark.parametrize("data", [b"", b"\x7fELF", b"PK\x03\x04" * 40, b"\x7fELF\x01\x01" + bytes(200)])
def test_other_files_are_no_elf(data):
    with pytest.raises(ElfError):
        Elf(data)


def test_a_library_is_no_cubin(built):
    with pytest.raises(CubinError, match="ELF machine 62"):
        read_cubin((built / "artifacts/lib/libcula.so").read_bytes())


# ------------------------------------------------------------------------------------------------- params.def and lint


def test_params_take_their_natural_alignment(tmp_path):
    path = tmp_path / "p.def"
    path.write_text("/* CULA_PARAM(ptr, commented) */\nCULA_PARAM(i32, a)\nCULA_PARAM(tensor_map, b)\nCULA_PARAM( f32 , c ) /* note */\n"
                    "CULA_PARAM(ptr, d)\nCULA_MODE(m, 0, 1)\n")  # fmt: skip
    assert [(p.name, p.offset, p.size) for p in read_params(path)] == [("a", 0, 4), ("b", 64, 128), ("c", 192, 4), ("d", 200, 8)]


@pytest.mark.parametrize("text, message", [
    ("CULA_PARAM(u8, a)", "kind 'u8' does not exist; allowed: ptr, i64, i32, f32"),
    ("CULA_PARAM(i32, a)\nCULA_PARAM(i64, a)", "was not used before"),
    ("CULA_PARAM(i32)", "must be an identifier"),
    ("/* CULA_PARAM(i32, a) */", "no CULA_PARAM in it"),
])  # fmt: skip
def test_a_parameter_list_that_cannot_be_read_is_an_error(tmp_path, text, message):
    path = tmp_path / "p.def"
    path.write_text(text)
    with pytest.raises(ParamsError, match=re.escape(message)):
        read_params(path)


@pytest.mark.parametrize("changes, message", [
    (dict(entry="other"), "entry 'other' is not in the cubin, which has: cula_l2norm"),
    (dict(arch="sm100"), "compiled for sm_90, but the arch is sm100"),
    (dict(block=(256, 1, 1)), "has more threads than"),
    (dict(max_dynamic_smem=232448), "512 + 232448 bytes of shared memory; sm90 has 232448"),
    (dict(declared=()), "5 parameters in the cubin, 0 declared"),
])  # fmt: skip
def test_lint_names_what_is_wrong(built, changes, message):
    info = read_cubin((built / "artifacts/sm90/l2norm/l2norm.sm90.bf16.cubin").read_bytes())
    right = dict(
        arch="sm90", entry="cula_l2norm", block=(128, 1, 1), max_dynamic_smem=0, max_local_bytes=0, declared=read_params(built / CUTLASS.params), info=info,
    )  # fmt: skip
    assert lint.lint(**right) == []
    (problem,) = lint.lint(**right | changes)
    assert message in problem
