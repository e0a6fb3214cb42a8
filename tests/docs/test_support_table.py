"""README's support table against the kernel matrix, so that neither promises what the other does not have."""

import re
from pathlib import Path

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


def test_dtypes():
    rows, states = re.match(r"rows (.*?); .*state (.*)", row("dtypes")).groups()
    decode = [spec for spec in SPECS if spec.family == "decode"]
    assert set(re.findall(r"bf16|fp16|float32", rows)) == {LONG[spec.io] for spec in decode}
    assert set(re.findall(r"bf16|fp16|float32", states)) == {LONG[spec.state] for spec in decode}


def test_head_dims():
    ks = re.match(r"K ([\d, ]+);", row("dims")).group(1)
    assert {int(k) for k in ks.split(",")} == {spec.k for spec in SPECS if spec.family == "decode"}


def test_prefill():
    """One sentence an arch that has it, with its rows and K."""
    specs = [spec for spec in SPECS if spec.op == "kda_prefill" and spec.variant != "carry"]  # carry has no rows: its io is that of the states between segments
    said = {arch: text for arch, text in re.findall(r"\b(sm\d+|cpu): (.*?)(?:\.|$)", row("prefill"))}
    assert set(said) == {spec.arch for spec in specs}
    for arch, text in said.items():
        mine = [spec for spec in specs if spec.arch == arch]
        assert set(re.findall(r"bf16|fp16|float32", text)) == {LONG[spec.io] for spec in mine}
        assert set(re.findall(r"\d+", re.search(r"K ([\d, ]+), V", text).group(1))) == {str(spec.k) for spec in mine}


def test_every_arch_has_every_decode_kernel():
    """The table has one line for all archs, which is only true while no arch lacks a kernel that another has."""
    per_arch = {arch: {spec.kernel_id.replace(arch, "") for spec in SPECS if spec.arch == arch and spec.family in ("decode", "gates")} for arch in ARCHS}
    assert all(kernels == per_arch["cpu"] for kernels in per_arch.values())
