"""The matrix: what it expands to, ids and their inverse, exclusions, filters, agreement with cula.h."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aot import matrix
from aot.archs import ARCHS, parse_archs
from aot.build.built import KernelKeys
from aot.build.header import read_header
from aot.build.params import read_params
from aot.matrix import (
    AllowedLocalMemory,
    AllowedNarrowLoads,
    Excluded,
    KernelSpec,
    MachineCode,
    MatrixError,
    OpMatrix,
    Route,
    expand,
    expand_all,
    parse_kernel_id,
    select,
)

ALL = expand_all()
HEADER = read_header(matrix.ROOT / "aot/capi/include/cula.h")


def small(**changes) -> OpMatrix:
    route = Route(("sm90", "cpu"), "cutlass", "aot/{op}_{io}.cu", "p.def")
    whole = OpMatrix("toy", dict(op=("a", "b"), arch=("cpu", "sm90"), io=("bf16", "fp16"), k=(64, 128)), (route,))
    return replace(whole, **changes)


def test_decode_and_gates_are_complete():
    by_family = {}
    for spec in ALL.specs:
        by_family.setdefault((spec.family, spec.arch), []).append(spec)
    for arch in ARCHS:
        decode = by_family["decode", arch]
        assert len(decode) == 4 * 3 * 2 * 3 * 2
        assert {spec.k for spec in decode} == {64, 128, 256} and {spec.layout for spec in decode} == {"vk", "kv"}
        assert len(by_family["gates", arch]) == 3 * 3
        assert {spec.toolchain for spec in decode} == {"cpu" if arch == "cpu" else "cute_dsl"}
        assert {spec.toolchain for spec in by_family["gates", arch]} == {"cpu" if arch == "cpu" else "cutlass"}


def test_every_kernel_has_its_sources_and_a_readable_parameter_list():
    for text in {(spec.toolchain, spec.compile) for spec in ALL.specs if spec.is_gpu}:
        file = text[1].partition(":")[0]
        path = file.replace(".", "/") + ".py" if text[0] == "cute_dsl" else file
        assert (matrix.ROOT / path).is_file(), path
    for path in {spec.params for spec in ALL.specs}:
        assert read_params(matrix.ROOT / path)


def test_ops_and_archs_have_their_numbers_in_the_header():
    assert {arch.name: arch.number for arch in ARCHS.values()} == HEADER.archs
    assert {spec.op for spec in ALL.specs} <= set(HEADER.ops)


def test_ids_are_unique_sorted_and_invertible():
    ids = [spec.kernel_id for spec in ALL.specs]
    assert ids == sorted(set(ids))
    for spec in ALL.specs:
        assert parse_kernel_id(spec.kernel_id) == spec.axes


@given(
    op=st.from_regex(r"[a-z][a-z0-9_]*", fullmatch=True), arch=st.sampled_from(list(ARCHS)), io=st.sampled_from(matrix.IO),
    state=st.sampled_from(matrix.STATE), k=st.integers(0, 512), v=st.integers(0, 512), layout=st.sampled_from(matrix.LAYOUT),
    variant=st.sampled_from(matrix.VARIANT),
)  # fmt: skip
def test_the_inverse_holds_for_every_combination_of_axes(**axes):
    spec = KernelSpec(family="toy", toolchain="cpu", compile="f", params="p", **axes)
    assert parse_kernel_id(spec.kernel_id) == axes == spec.axes


@pytest.mark.parametrize("text", [
    "", "kda_decode", "kda_decode.sm90", "kda_decode.sm91.bf16", "kda_decode.sm90.int8", "kda_decode.sm90.bf16.k0", "kda_decode.sm90.bf16.k064",
    "kda_decode.sm90.bf16.vk.k64", "kda_decode.sm90.bf16.sfp16", "KDA_decode.sm90.bf16", "kda_decode.sm90.bf16.x1", "kda_decode.sm90.bf16\n",
])  # fmt: skip
def test_what_is_no_id_is_refused(text):
    with pytest.raises(ValueError, match="is no kernel id"):
        parse_kernel_id(text)


def test_an_exclusion_removes_what_it_matches_and_keeps_the_reason():
    result = expand(small(excluded=(Excluded("spills", arch="sm90", k=128, io=("bf16",)),)))
    assert len(result.specs) == 16 - 2
    assert [(spec.kernel_id, reason) for spec, reason in result.excluded] == [
        ("a.sm90.bf16.k128", "spills"),
        ("b.sm90.bf16.k128", "spills"),
    ]


def test_a_local_memory_exception_reaches_its_kernels_only():
    result = expand(small(local_memory=(AllowedLocalMemory(64, "index array", op="b", k=64),)))
    assert {spec.max_local_bytes for spec in result.specs if (spec.op, spec.k) == ("b", 64)} == {64}
    assert {spec.max_local_bytes for spec in result.specs if (spec.op, spec.k) != ("b", 64)} == {0}


def test_what_is_said_of_machine_code_reaches_its_kernels_only():
    code = MachineCode("two products of 4 steps", op="b", k=64, arch="sm90", tensor={"HMMA": 4, "HGMMA": 8}, waits=2, registers=96)
    result = expand(
        small(machine_code=(code,), narrow_loads=(AllowedNarrowLoads(3, "scalars", op="b"), AllowedNarrowLoads(5, "more", op="b", k=64)))
    )
    chosen = [spec for spec in result.specs if (spec.op, spec.k, spec.arch) == ("b", 64, "sm90")]
    assert {(spec.tensor, spec.waits, spec.max_registers, spec.max_narrow_loads) for spec in chosen} == {
        ((("HGMMA", 8), ("HMMA", 4)), 2, 96, 5)
    }
    others = [spec for spec in result.specs if spec not in chosen]
    assert {(spec.tensor, spec.waits, spec.max_registers) for spec in others} == {((), 0, 0)}
    assert {spec.max_narrow_loads for spec in others if spec.op == "a"} == {0}


def test_what_only_judges_a_kernel_is_not_in_its_key():
    keys, spec = KernelKeys(matrix.ROOT), next(spec for spec in ALL.specs if spec.arch == "sm90" and spec.op == "l2norm")
    other = dict(max_local_bytes=8, tensor=(("HMMA", 1),), waits=3, max_registers=9, max_narrow_loads=7)
    assert set(other) == set(matrix.JUDGED)
    assert keys(spec) == keys(replace(spec, **other)) and keys(spec)[0] != keys(replace(spec, dynamic_smem=16))[0]


@pytest.mark.parametrize("changes, message", [
    (dict(machine_code=(MachineCode("old", k=96),)), r"MachineCode\(k=96\) matches no kernel: remove it"),
    (dict(machine_code=(MachineCode("", k=64),)), r"MachineCode\(k=64\) needs a reason"),
    (dict(machine_code=(MachineCode("all", registers=64),)), "at least one axis"),
    (dict(machine_code=(MachineCode("a", k=64), MachineCode("b", op="a"))), "has 2 MachineCode: k=64; op=a; it may have one"),
    (dict(machine_code=(MachineCode("a", k=64, tensor={"wgmma": 4}),)), "tensor 'wgmma': 4 must be an instruction like HGMMA and its number"),
    (dict(machine_code=(MachineCode("a", k=64, tensor={"HMMA": 0}),)), "tensor 'HMMA': 0 must be"),
    (dict(machine_code=(MachineCode("a", k=64, tensor={"HGMMA": 4}),)), r"waits 0, but only wgmma \(HGMMA\) has waits, and always"),
    (dict(machine_code=(MachineCode("a", k=64, tensor={"HMMA": 4}, waits=1),)), "waits 1, but only wgmma"),
    (dict(machine_code=(MachineCode("a", k=64, registers=256),)), "registers 256 must be 1 to 255"),
    (dict(narrow_loads=(AllowedNarrowLoads(4, "old", k=96),)), r"AllowedNarrowLoads\(k=96\) matches no kernel: remove it"),
    (dict(narrow_loads=(AllowedNarrowLoads(4, "typing mistake", dim=64),)), "unknown axis dim"),
    (dict(excluded=(Excluded("old", k=96),)), r"Excluded\(k=96\) matches no kernel: remove it"),
    (dict(excluded=(Excluded("twice", k=64), Excluded("", k=128))), "needs a reason"),
    (dict(excluded=(Excluded("everything"),)), "at least one axis"),
    (dict(excluded=(Excluded("typing mistake", dim=64),)), "unknown axis dim"),
    (dict(local_memory=(AllowedLocalMemory(8, "old", k=96),)), "matches no kernel"),
    (dict(axes=dict(op=("a",), arch=("sm90",), io=["bf16"])), "must be a tuple of different values"),
    (dict(axes=dict(op=("a",), arch=("sm90",), io=("bf16", "bf16"))), "must be a tuple of different values"),
    (dict(axes=dict(op=("a",), arch=("sm90",), io=())), "must be a tuple of different values"),
    (dict(axes=dict(op=("a",), arch=("sm91",), io=("bf16",))), "arch 'sm91' does not exist; allowed: 'cpu', 'sm90'"),
    (dict(axes=dict(op=("a",), arch=("sm90",), io=("bfloat16",))), "io 'bfloat16' does not exist"),
    (dict(axes=dict(op=("a",), arch=("sm90",))), "axis io is missing"),
    (dict(axes=dict(op=("a",), arch=("sm90",), io=("bf16",), heads=(1,))), "unknown axis 'heads'"),
    (dict(axes=dict(op=("a",), arch=("sm100",), io=("bf16",))), "arch sm100 has 0 routes"),
    (dict(routes=(Route(("sm90",), "triton", "f", "p"),)), "toolchain 'triton' does not exist"),
])  # fmt: skip
def test_a_matrix_that_contradicts_itself_is_an_error(changes, message):
    with pytest.raises(MatrixError, match=message):
        expand(small(**changes))


def test_an_exclusion_that_another_one_shadows_entirely_still_counts_as_matching():
    assert len(expand(small(excluded=(Excluded("a", k=64), Excluded("b", k=64, arch="sm90")))).specs) == 8


def test_select_by_globs_and_lists():
    chosen = select(ALL.specs, op="kda_*,l2norm", io="bf16", arch="sm90", k=None)
    assert {spec.op for spec in chosen} == {"kda_decode", "kda_prefill", "kda_gate", "l2norm"}
    assert {(spec.io, spec.arch) for spec in chosen} == {("bf16", "sm90")}
    assert {spec.k for spec in select(ALL.specs, k="64")} == {64}


@pytest.mark.parametrize("axis, value, message", [
    ("op", "kda_decod", "no kernel has op 'kda_decod'; there are: .*kda_decode"),
    ("k", "96", "no kernel has k '96'; there are: 64, 128, 256"),
    ("layout", "vk,xy", "no kernel has layout 'xy'; there are: kv, vk"),
])  # fmt: skip
def test_a_filter_that_matches_nothing_names_what_there_is(axis, value, message):
    with pytest.raises(ValueError, match=message):
        select(ALL.specs, **{axis: value})


@pytest.mark.parametrize("text, archs", [
    ("sm90", ("cpu", "sm90")), ("cpu", ("cpu",)), ("all", tuple(ARCHS)), ("sm120,sm90", ("cpu", "sm90", "sm120")), ("SM90, cpu", ("cpu", "sm90")),
    ("sm100 sm103", ("cpu", "sm100", "sm103")),
])  # fmt: skip
def test_archs_of_a_request(text, archs):
    assert parse_archs(text) == archs


@pytest.mark.parametrize("text", ["", ",", "sm91", "sm90,hopper", "sm_90a"])
def test_unknown_archs_are_named_with_those_allowed(text):
    with pytest.raises(ValueError, match="allowed: cpu, sm90, sm100, sm103, sm120, all"):
        parse_archs(text)
