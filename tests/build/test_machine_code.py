"""The checks of machine code: for each rule a kernel that breaks it, assembled here, next to one that does not."""

from __future__ import annotations

import subprocess
from dataclasses import replace

import pytest

from aot.archs import ARCHS
from aot.build import lint, sass, toolchain
from aot.build.cache import Cache
from aot.build.cubin_info import read_cubin
from aot.build.pipeline import build
from aot.build.verify import lint_artifacts, verify
from tests.build.conftest import CPU, CUTE_DSL, CUTLASS, request_of


def assemble(folder, body: str, arch: str = "sm90", functions: str = "") -> bytes:
    """The cubin of a kernel k(x, y, n). Registers: %p 64 bits, %r 32 bits, %h 16 bits, %f float, %q predicates."""
    ptx, cubin, target = folder / "k.ptx", folder / "k.cubin", ARCHS[arch].target
    ptx.write_text(f"""
.version 8.8
.target {target}
.address_size 64
{functions}
.visible .entry k(.param .u64 x, .param .u64 y, .param .u32 n) .reqntid 128
{{
  .reg .b64 %p<9>; .reg .b32 %r<99>; .reg .b16 %h<9>; .reg .f32 %f<99>; .reg .pred %q<9>;
  ld.param.u64 %p1, [x]; ld.param.u64 %p2, [y]; ld.param.u32 %r1, [n];
  {body}
  ret;
}}
""")
    subprocess.run([toolchain.ptxas(), f"-arch={target}", "-O3", ptx, "-o", cubin], check=True, capture_output=True)
    return cubin.read_bytes()


def facts_of(cubin: bytes, arch: str = "sm90") -> dict:
    (entry,) = read_cubin(cubin).kernels
    return sass.read_facts([(arch, cubin, entry)])[0]


def loop(load: str, end: str = "setp.lt.u32 %q1, %r2, %r1; @%q1 bra again;") -> str:
    return f"""
  mov.u64 %p3, %p1; mov.u32 %r2, 0;
again: .pragma "nounroll";
  {load}
  add.u64 %p3, %p3, 512; add.u32 %r2, %r2, 1;
  {end}
  st.global.u32 [%p2], %r3;"""


WIDE = "ld.global.u32 %r4, [%p3]; add.u32 %r3, %r3, %r4;"
NARROW = "ld.global.u16 %h1, [%p3]; cvt.u32.u16 %r4, %h1; add.u32 %r3, %r3, %r4;"
BYTE = "ld.global.s8 %r4, [%p3]; add.u32 %r3, %r3, %r4;"
GENERIC = "ld.u32 %r4, [%p3]; add.u32 %r3, %r3, %r4;"
MMA = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f1,%f2,%f3,%f4}, {%r1,%r1,%r1,%r1}, {%r1,%r1}, {%f1,%f2,%f3,%f4};"
ZEROS = " ".join(f"mov.f32 %f{i}, 0f00000000;" for i in range(1, 9))


def wgmma(touched_in_flight: bool) -> str:
    """Two groups of wgmma and one wait in a loop. An accumulator of the first is changed under the second or, as it should be, after
    the wait."""
    touch = "add.f32 %f1, %f1, 0f3F800000;"
    group = "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {{%f{0},%f{1},%f{2},%f{3}}}, %p1, %p1, 1, 1, 1, 0, 0; wgmma.commit_group.sync.aligned;"
    return f"""
  {ZEROS} mov.u32 %r2, 0;
again: .pragma "nounroll";
  wgmma.fence.sync.aligned;
  {group.format(1, 2, 3, 4)}
  {touch if touched_in_flight else ""}
  {group.format(5, 6, 7, 8)}
  wgmma.wait_group.sync.aligned 0;
  {"" if touched_in_flight else touch}
  add.u32 %r2, %r2, 1; setp.lt.u32 %q1, %r2, %r1;
  @%q1 bra again;
  add.f32 %f1, %f1, %f8; st.global.f32 [%p2], %f1;"""


WGMMA = replace(CUTLASS, tensor=(("HGMMA", 2),), waits=1)
ONE_MMA = f"{ZEROS} {MMA} st.global.f32 [%p2+4], %f1;"


@pytest.mark.parametrize("body, spec", [
    (loop(WIDE), CUTLASS),
    ("ld.global.u16 %h1, [%p1]; st.global.u16 [%p2], %h1;", CUTLASS),  # once a thread
    ("ld.u32 %r3, [%p1]; st.global.u32 [%p2], %r3;", CUTLASS),
    (loop(NARROW), replace(CUTLASS, max_narrow_loads=1)),
    (ONE_MMA, replace(CUTLASS, tensor=(("HMMA", 1),))),
    (wgmma(False), WGMMA),
], ids=["wide", "narrow_once", "generic_once", "narrow_allowed", "mma", "wgmma"])  # fmt: skip
def test_code_that_is_as_its_matrix_says(tmp_path, body, spec):
    assert lint.lint_code(spec, facts_of(assemble(tmp_path, body))) == []


@pytest.mark.parametrize("body, spec, message, instruction", [
    (loop(NARROW), CUTLASS, "1 global loads of 1 or 2 bytes in loops, allowed 0", "LDG.E.U16 R"),
    (loop(BYTE), CUTLASS, "1 global loads of 1 or 2 bytes in loops, allowed 0", "LDG.E.S8 R"),
    (loop(NARROW + NARROW.replace("[%p3]", "[%p3+2]")), replace(CUTLASS, max_narrow_loads=1), "2 global loads of 1 or 2 bytes in loops, allowed 1", "LDG"),
    (loop(GENERIC), CUTLASS, "1 generic loads or stores in loops", "LD.E R"),
    (loop("st.u32 [%p3], %r2;"), CUTLASS, "1 generic loads or stores in loops", "ST.E "),
    (ONE_MMA, CUTLASS, "1 HMMA, but its matrix.py says 0", ""),
    (loop(WIDE), replace(CUTLASS, tensor=(("HMMA", 48),)), "0 HMMA, but its matrix.py says 48", ""),
    (ONE_MMA, WGMMA, "0 HGMMA, but its matrix.py says 2", ""),
    (wgmma(True), WGMMA, "2 waits for wgmma, but its matrix.py says 1", "WARPGROUP.DEPBAR"),
    (wgmma(False), replace(WGMMA, waits=2), "1 waits for wgmma, but its matrix.py says 2", "WARPGROUP.DEPBAR"),
    ("t: .branchtargets a, b, c; brx.idx %r1, t; a: st.global.u32 [%p2], 1; b: st.global.u32 [%p2], 2; bar.sync 0; c: st.global.u32 [%p2], 3;",
     CUTLASS, "machine code cannot be checked: 0x", "BRX"),
], ids=["narrow", "byte", "one_more_than_allowed", "generic", "generic_store", "undeclared", "lost", "other_instruction", "injected", "lost_wait",
        "computed_branch"])  # fmt: skip
def test_code_that_is_not(tmp_path, body, spec, message, instruction):
    problems = lint.lint_code(spec, facts_of(assemble(tmp_path, body)))
    (problem,) = [problem for problem in problems if problem.startswith(message)]
    if instruction:
        assert instruction in problem and "0x" in problem


def test_local_memory_shows_in_the_code_too(tmp_path):
    body = loop("and.b32 %r4, %r2, 60; cvt.u64.u32 %p4, %r4; add.u64 %p4, %p4, %p5; st.local.u32 [%p4], %r2; ld.local.u32 %r5, [%p4+4]; "
                "add.u32 %r3, %r3, %r5;")  # fmt: skip
    found = facts_of(assemble(tmp_path, f".local .align 4 .b8 array[128]; mov.u64 %p5, array; {body}"))
    (problem,) = lint.lint_code(CUTLASS, found)
    assert "accesses of local memory, allowed 0\n    0x" in problem and "[R" in problem
    assert lint.lint_code(replace(CUTLASS, max_local_bytes=128), found) == []


@pytest.mark.parametrize("arch", [arch for arch in ARCHS if arch != "cpu"])
def test_every_arch_is_read(tmp_path, arch):
    narrow, generic = (facts_of(assemble(tmp_path, loop(load) + ONE_MMA, arch), arch) for load in (NARROW, GENERIC))
    assert narrow["tensor"] == generic["tensor"] == {"HMMA": 1}
    assert [(found["narrow_loads"]["count"], found["generic"]["count"]) for found in (narrow, generic)] == [(1, 0), (0, 1)]


# ---------------------------------------------------------------------------------------------------------------- loops


@pytest.mark.parametrize("text, looped", [
    ("NOP; NOP; EXIT; BRA 0x30", []),  # the trap behind the end is never reached
    ("NOP; @P0 BRA 0x0; EXIT", [0, 1]),
    ("NOP; @P0 BRA 0x10; EXIT", [1]),
    ("@P0 BRA 0x30; NOP; EXIT; SHFL; BRA 0x10", []),  # backward, out of code that is behind the end: no loop
    ("BRA.DIV UR4, 0x30; NOP; EXIT; SHFL; BRA 0x10", []),
    ("@P0 BRA 0x40; NOP; @P1 BRA 0x0; EXIT; SHFL; BRA 0x10", [0, 1, 2, 4, 5]),  # the same in a loop: part of it
    ("@P0 BRA 0x20; NOP; NOP; @P1 BRA 0x10; EXIT", [1, 2, 3]),  # entered at two places
    ("NOP; BRA.U !UP0, 0x0; EXIT", [0, 1]),  # conditional without a guard
    ("BRA P1, 0x20; NOP; @!P0 BRA 0x0; EXIT", [0, 1, 2]),
    ("CALL.REL.NOINC 0x30; NOP; EXIT; NOP; RET.REL.NODEC R2 0x0", []),
    ("CALL.REL.NOINC 0x30; @P0 BRA 0x0; EXIT; NOP; RET.REL.NODEC R2 0x0", [0, 1, 3, 4]),  # a function that a loop calls
    ("@P0 BRA 0x20; EXIT; CALL.REL.NOINC 0x40; @P0 BRA 0x20; CALL.REL.NOINC 0x60; RET.REL.NODEC R2 0x0; NOP; RET.REL.NODEC R4 0x0",
     [2, 3, 4, 5, 6, 7]),  # and one that this one calls
    ("NOP; @!P3 EXIT; BRA 0x0", [0, 1, 2]),
    ("NOP; BSSY B0, 0x20; BSYNC B0; WARPSYNC.COLLECTIVE R9, 0x10; EXIT", []),
])  # fmt: skip
def test_what_is_in_a_loop(text, looped):
    lines = [f"        /*{16 * number:04x}*/    {part.strip()} ;" for number, part in enumerate(text.split(";"))]
    instructions = sass.parse("\n".join(lines))
    assert len(instructions) == len(lines)
    assert sorted(sass.in_loops(instructions)) == looped


@pytest.mark.parametrize("text", ["BRX R2 -0x80", "JMP 0x1230", "BRA 0x1230", "CALL.ABS.NOINC R4"])
def test_control_that_cannot_be_followed_is_an_error(text):
    with pytest.raises(sass.SassError, match=text.split()[0]):
        sass.in_loops(sass.parse(f"        /*0000*/    NOP ;\n        /*0010*/    {text} ;\n        /*0020*/    EXIT ;"))


def test_kernels_that_are_read_together_are_those_read_alone(tmp_path):
    cubins = [assemble(tmp_path, body) for body in (loop(NARROW), wgmma(False), loop(GENERIC), loop(NARROW))]
    together = sass.read_facts([("sm90", cubin, "k") for cubin in cubins])
    assert together == [facts_of(cubin) for cubin in cubins] and together[0] == together[3] != together[2]


def test_code_in_another_section_is_not_overlooked(tmp_path):
    with pytest.raises(sass.SassError, match=r"code in other sections than \.text\.other: \.text\.k"):
        sass.code_of(assemble(tmp_path, loop(WIDE)), "other")


def test_a_tool_that_prints_something_else_is_an_error(tmp_path, monkeypatch):
    cubin, fake = assemble(tmp_path, loop(WIDE)), tmp_path / "nvdisasm"
    fake.write_text("#!/bin/sh\necho '        /*0000*/    NOP ;'\n")
    fake.chmod(0o755)
    monkeypatch.setattr(toolchain, "nvdisasm", lambda: fake)
    with pytest.raises(sass.SassError, match="printed 1 instructions of"):
        facts_of(cubin)
    fake.write_text("#!/bin/sh\necho 'no such architecture' >&2\nexit 3\n")
    with pytest.raises(sass.SassError, match="nvdisasm -b SM90a failed with exit code 3: no such architecture"):
        facts_of(cubin)


# ---------------------------------------------------------------------------------------------------------------- build


def narrow_project(project):
    path = project / "toy/scale.cu"
    path.write_text("#define TOY_NARROW\n" + path.read_text())
    return project


def test_the_build_refuses_it_names_the_instruction_and_does_so_again_from_the_cache(project, capsys, monkeypatch):
    before = (project / "artifacts/manifest.json").read_bytes()
    narrow_project(project)
    for attempt in ("compiled", "cached"):
        assert build(request_of(project)) == 1
        said = capsys.readouterr()
        assert "global loads of 1 or 2 bytes in loops, allowed 0" in said.out and CUTLASS.kernel_id in said.out and "1 failed" in said.out
        assert "LDG.E.U16" in said.out and "0x" in said.out
        assert "nothing was written" in said.err
        if attempt == "compiled":
            monkeypatch.setattr(sass, "disassemble", lambda *_: pytest.fail("disassembled what the cache has"))
    assert (project / "artifacts/manifest.json").read_bytes() == before
    allowed = (replace(CUTLASS, max_narrow_loads=9), CUTE_DSL, CPU)
    assert build(request_of(project, allowed)) == 0, "an exception compiles nothing again"
    said = capsys.readouterr().out
    assert "0 to do" in said and "1 excepted" in said and "clean" in said
    monkeypatch.undo()
    assert lint_artifacts(project / "artifacts", allowed) == ([], 0)
    lines, refused = lint_artifacts(project / "artifacts", (CUTLASS, CUTE_DSL, CPU), explain=True)
    assert refused == 1 and lines[-1].startswith(CUTLASS.kernel_id) and "narrow loads in loops" in lines[-1]


def test_registers_over_the_budget_are_refused_and_found_by_verify(project, capsys):
    tight = (replace(CUTLASS, max_registers=4), CUTE_DSL, CPU)
    assert {v.kind for v in verify(project / "artifacts", tight, project)} == {"registers"}
    assert build(request_of(project, tight)) == 1
    assert "registers a thread; the budget in its matrix.py is 4" in capsys.readouterr().out


def test_remarks_of_ptxas_on_wgmma_fail_a_kernel(project, capsys):
    (project / "toy/wgmma.cu").write_text("""
#ifdef CULA_IO_BF16
#define GROUP(a, b, c, d) asm volatile( \\
  "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0,%1,%2,%3}, %4, %4, 1, 1, 1, 0, 0; wgmma.commit_group.sync.aligned;" \\
  : "+f"(a), "+f"(b), "+f"(c), "+f"(d) : "l"(descriptor))
extern "C" __global__ void __launch_bounds__(128) cula_toy(const void* x, float* y, int n, long long stride, float scale) {
  const unsigned long long descriptor = stride;
  float a[8] = {};
#pragma unroll 1
  for (int i = 0; i < n; ++i) {
    asm volatile("wgmma.fence.sync.aligned;");
    GROUP(a[0], a[1], a[2], a[3]);
    a[0] += scale;
    GROUP(a[4], a[5], a[6], a[7]);
    asm volatile("wgmma.wait_group.sync.aligned 0;" : "+f"(a[0]));
  }
  y[threadIdx.x] = a[0] + a[7];
}
#endif
""")
    bad = replace(WGMMA, op="gdn_gate", compile="toy/wgmma.cu:cula_toy")
    assert build(request_of(project, (CUTLASS, CUTE_DSL, CPU, bad))) == 1
    said = capsys.readouterr().out
    assert "wgmma serialised or with waits of ptxas's own" in said and bad.kernel_id in said
    assert "(C75" in (project / f"build/logs/{bad.kernel_id}.log").read_text()


def test_a_missing_disassembler_is_named_before_anything_is_compiled(project, monkeypatch):
    pins = toolchain.pins()
    monkeypatch.setattr(toolchain, "pins", lambda: pins | {"nvidia-cuda-nvdisasm": "0.0.1"})
    toolchain._distribution.cache_clear()
    (project / "toy/scale.cu").write_text("not C++")
    try:
        with pytest.raises(toolchain.ToolError, match=r"nvidia-cuda-nvdisasm \S+ is installed in .*, but 0\.0\.1 is pinned"):
            build(request_of(project))
    finally:
        toolchain._distribution.cache_clear()


def test_a_damaged_cache_entry_of_facts_is_read_again(tmp_path):
    cubin, cache = assemble(tmp_path, loop(NARROW)), Cache(tmp_path / "cache")
    first = sass.read_facts([("sm90", cubin, "k")], cache)
    (entry,) = (tmp_path / "cache").rglob("result.json")
    entry.write_text("{")
    assert sass.read_facts([("sm90", cubin, "k")], cache) == first
