"""README's support table against the kernel matrix, so that neither promises what the other does not have."""

import re
from pathlib import Path

import pytest

import cula
from aot.archs import ARCHS
from aot.matrix import expand_all

README = (Path(__file__).resolve().parents[2] / "README.md").read_text()
SECTION = README[README.index("## What is supported") : README.index("## Figures")]
SPECS = expand_all().specs
LONG = {"fp32": "float32", "bf16": "bf16", "fp16": "fp16"}


def row(name: str) -> str:
    return re.search(rf"^\| {name} \| (.*) \|$", SECTION, flags=re.M).group(1)


def test_ops():
    listed = {op for line in re.findall(r"^\| (`.*?) \|", SECTION, flags=re.M) for op in re.findall(r"`(\w+)`", line)}
    assert listed == {spec.op for spec in SPECS}


def test_archs():
    assert set(re.findall(r"\b(sm\d+|cpu)\b", row("archs"))) == set(ARCHS) == {spec.arch for spec in SPECS}


PREFILL = [spec for spec in SPECS if spec.op == "kda_prefill" and spec.variant != "carry"]  # carry has no rows: its io is that of the states between segments
COLUMNS = {  # heading: the kernels that it speaks of
    "decode": [spec for spec in SPECS if spec.family == "decode"],
    "`kda_prefill` on a GPU": [spec for spec in PREFILL if spec.arch != "cpu"],
    "`kda_prefill` on the CPU": [spec for spec in PREFILL if spec.arch == "cpu"],
    "`kda_gate`, `gdn_gate`, `l2norm`": [spec for spec in SPECS if spec.family == "gates"],
}


def cells(label: str) -> dict[str, str]:
    table = SECTION[SECTION.index("| | decode |") :]
    headings = re.match(r"\| \| (.*) \|$", table, flags=re.M).group(1).split(" | ")
    assert headings == list(COLUMNS)
    found = [cell.strip() for cell in re.search(rf"^\| {re.escape(label)} \|(.*)\|$", table, flags=re.M).group(1).split("|")]
    return dict(zip(headings, found, strict=True))


@pytest.mark.parametrize("heading", COLUMNS)
def test_archs_dtypes_and_head_dims(heading):
    specs = COLUMNS[heading]
    archs = cells("archs")[heading]
    assert {spec.arch for spec in specs} == (set(ARCHS) if archs == "all" else set(re.findall(r"\b(?:sm\d+|cpu)\b", archs)))
    if heading.endswith("on a GPU"):
        assert set(re.findall(r"sm\d+", archs.removesuffix(": compiled and checked offline, not run").split("; ")[1])) == {"sm100", "sm103", "sm120"}
    assert set(re.findall(r"bf16|fp16|float32", cells("rows: q, k, v, out (x)")[heading])) == {LONG[spec.io] for spec in specs}
    assert set(re.findall(r"bf16|fp16|float32", cells("states")[heading])) == {LONG[spec.state] for spec in specs if spec.state}
    for dim in "kv":
        text, built = cells(dim.upper())[heading], {getattr(spec, dim) for spec in specs}
        if built == {0}:  # a run-time parameter
            assert text in ("", "any", "multiples of 64 from 64 to 512")
        else:
            assert set(map(int, re.findall(r"\d+", text))) == built


@pytest.mark.parametrize("heading, v", [("decode", 64), ("decode", 512), ("`kda_prefill` on the CPU", 64), ("`kda_prefill` on the CPU", 512)])
def test_the_ends_of_the_value_dims_are_taken_and_nothing_beyond(heading, v):
    assert cells("V")[heading] == "multiples of 64 from 64 to 512"
    rows = lambda *shape: cula.Spec(shape, "bf16", (1, 0))  # noqa: E731
    ask = (lambda v: cula.query(cula.kda.kda_decode, rows(2, 1, 64), rows(2, 1, 64), rows(2, 1, v), beta=rows(2, 1))) if heading == "decode" else (
        lambda v: cula.query(cula.kda.kda_prefill, rows(1, 2, 1, 64), rows(1, 2, 1, 64), rows(1, 2, 1, v), rows(1, 2, 1, 64), rows(1, 2, 1), gate_kind="log"))
    assert len(ask(v).kernels) == 1
    with pytest.raises(cula.UnsupportedError, match="multiple of 64 from 64 to 512"):
        ask(v + 64 if v == 512 else v - 32)


def test_every_arch_has_every_decode_kernel():
    """The table has one line for all archs, which is only true while no arch lacks a kernel that another has."""
    per_arch = {arch: {spec.kernel_id.replace(arch, "") for spec in SPECS if spec.arch == arch and spec.family in ("decode", "gates")} for arch in ARCHS}
    assert all(kernels == per_arch["cpu"] for kernels in per_arch.values())
