"""abi.py against cula.h and dlpack.h: every size, offset, enum and function, as a C compiler and the header's text have them."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
from pathlib import Path

import pytest

from cula_loader import abi, artifacts, devices, errors
from cula_loader.library import library

ROOT = Path(__file__).parents[2]
HEADER = ROOT / "aot" / "capi" / "include" / "cula.h"

# ctypes struct: (C type, fields that have another name in C, whether CULA_SIZEOF is defined for it)
STRUCTS = {
    abi.Tensor: ("DLTensor", {"device_type": "device.device_type", "device_id": "device.device_id", "code": "dtype.code",
                              "bits": "dtype.bits", "lanes": "dtype.lanes"}, False),
    abi.ManagedTensor: ("DLManagedTensor", {"tensor": "dl_tensor"}, False),
    abi.ManagedTensorVersioned: ("DLManagedTensorVersioned", {"major": "version.major", "minor": "version.minor",
                                                              "tensor": "dl_tensor"}, False),
    abi.ExchangeAPI: ("DLPackExchangeAPI", {"major": "header.version.major", "minor": "header.version.minor",
                                            "prev_api": "header.prev_api"}, False),
    abi.DecodeArgs: ("cula_decode_args", {}, True),
    abi.PrefillArgs: ("cula_prefill_args", {}, True),
    abi.GateArgs: ("cula_gate_args", {}, True),
    abi.L2normArgs: ("cula_l2norm_args", {}, True),
    abi.Requirements: ("cula_requirements", {}, True),
    abi.KernelDesc: ("cula_kernel_desc", {}, True),
    abi.LaunchConfig: ("cula_launch_config", {}, False),
    abi.LaunchAttribute: ("cula_launch_attribute", {}, False),
    abi.Launch: ("cula_launch", {}, False),
    abi.Launches: ("cula_launches", {}, True),
}


@pytest.fixture(scope="module")
def header_text() -> str:
    return HEADER.read_text()


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> dict[str, int]:
    """What the C compiler says: "<type>" -> sizeof, "<type>.<field>" -> offset, "<type>.<field>#" -> size, "CULA_SIZEOF <type>"."""
    lines = []
    for struct, (name, renamed, sized) in STRUCTS.items():
        lines.append(f'  printf("{name} %zu\\n", sizeof({name}));')
        for field, *_ in struct._fields_:
            member = renamed.get(field, field)
            lines.append(f'  printf("{name}.{field} %zu\\n", offsetof({name}, {member}));')
            lines.append(f'  printf("{name}.{field}# %zu\\n", sizeof((({name}*)0)->{member}));')
        if sized:
            lines.append(f'  printf("CULA_SIZEOF_{name} %zu\\n", (size_t)CULA_SIZEOF({name}));')
    folder = tmp_path_factory.mktemp("abi")
    (folder / "layout.c").write_text('#include <stdio.h>\n#include "cula.h"\nint main(void) {\n' + "\n".join(lines) + "\n  return 0;\n}\n")
    dlpack = artifacts.find() / "include"
    subprocess.run([os.environ.get("CC", "cc"), "-std=c99", "-Wall", "-Werror", f"-I{HEADER.parent}", f"-I{dlpack}", str(folder / "layout.c"), "-o",
                    str(folder / "layout")], check=True)
    out = subprocess.run([str(folder / "layout")], check=True, capture_output=True, text=True).stdout
    return {key: int(value) for key, value in (line.rsplit(" ", 1) for line in out.splitlines())}


@pytest.mark.parametrize("struct", STRUCTS, ids=lambda s: s.__name__)
def test_layout(struct, compiled):
    name, _, sized = STRUCTS[struct]
    here = {name: ctypes.sizeof(struct)}
    for field, kind, *_ in struct._fields_:
        here |= {f"{name}.{field}": getattr(struct, field).offset, f"{name}.{field}#": ctypes.sizeof(kind)}
    if sized:
        here[f"CULA_SIZEOF_{name}"] = abi.size_of(struct)
    assert here == {key: compiled[key] for key in here}


@pytest.mark.parametrize("struct", [abi.DecodeArgs, abi.PrefillArgs, abi.GateArgs, abi.L2normArgs, abi.Requirements, abi.KernelDesc, abi.Launches,
                                    abi.LaunchConfig, abi.Launch], ids=lambda s: s.__name__)
def test_fields_are_those_of_the_header(struct, header_text):
    """A field that the header has and ctypes does not would pass the layout test if it were the last."""
    name = STRUCTS[struct][0]
    body = re.search(rf"typedef struct {name} \{{(.*?)\}} {name};", re.sub(r"/\*.*?\*/", "", header_text, flags=re.S), re.S)[1]
    fields = [re.search(r"(\w+)(\[[^\]]*\])?$", line.strip())[1] for line in body.split(";") if line.strip()]
    assert [field for field, *_ in struct._fields_] == fields


@pytest.mark.parametrize(("table", "prefix", "names"), [
    (abi.STATUS, "", lambda n: n), (abi.OPS, "CULA_OP_", str.upper), (abi.ARCHS, "CULA_ARCH_", str.upper),
    (abi.GATE_KINDS, "CULA_GATE_", str.upper), (abi.BETA_KINDS, "CULA_BETA_", str.upper), (abi.STATE_LAYOUTS, "CULA_STATE_", str.upper),
    (abi.PREFILL_VARIANTS, "CULA_PREFILL_", str.upper),
], ids=["status", "op", "arch", "gate_kind", "beta_kind", "state_layout", "prefill_variant"])
def test_enums(table, prefix, names, header_text):
    pattern = prefix + r"\w+" if prefix else r"CULA_(?:OK|ERR_\w+)"
    theirs = {name: int(value) for name, value in re.findall(rf"\b({pattern}) = (\d+)", header_text)}
    assert {prefix + names(name): value for name, value in table.items()} == theirs


def test_limits_and_version(header_text):
    for name, value in (("CULA_MAX_LAUNCHES", abi.MAX_LAUNCHES), ("CULA_MAX_PARAMS", abi.MAX_PARAMS), ("CULA_PARAM_BYTES", abi.PARAM_BYTES),
                        ("CULA_MAX_OBJECTS", abi.MAX_OBJECTS)):
        assert int(re.search(rf"{name} = (\d+)", header_text)[1]) == value
    parts = tuple(int(re.search(rf"#define CULA_VERSION_{p} (\d+)", header_text)[1]) for p in ("MAJOR", "MINOR", "PATCH"))
    assert parts == abi.VERSION


def test_functions(header_text):
    code = re.sub(r"/\*.*?\*/", "", header_text, flags=re.S)
    declared = {name: 0 if arguments.strip() == "void" else arguments.count(",") + 1
                for name, arguments in re.findall(r"CULA_API [^(;]*?\b(cula_\w+)\(([^)]*)\)", code)}
    assert {name: len(arguments) for name, (_, arguments) in abi.FUNCTIONS.items()} == declared


def test_every_status_has_an_exception():
    assert {kind.status: number for number, kind in errors.BY_STATUS.items()} == {k: v for k, v in abi.STATUS.items() if v}
    assert all(issubclass(kind, errors.CulaError) for kind in errors.BY_STATUS.values())


def test_every_arch_has_a_compute_capability():
    assert set(devices._BY_CC.values()) == set(abi.ARCHS) - {"device", "cpu"}


def test_the_library_agrees():
    """Names, version and kernel descriptions of the opened library."""
    lib = library()
    assert lib.version == abi.VERSION
    assert all(lib.c.cula_op_name(number).decode() == name for name, number in abi.OPS.items())
    assert all(lib.c.cula_status_name(number).decode() == name for name, number in abi.STATUS.items())
    assert lib.kernel_count == len(lib.artifacts.kernels)
    for i in range(lib.kernel_count):
        info, entry = lib.kernel(i), lib.artifacts.kernels[lib.kernel(i).id]
        assert (info.op, info.arch, info.entry_symbol) == (entry.op, entry.arch, entry.entry_symbol)
        assert info.param_sizes == entry.param_sizes or entry.arch == "cpu"
    lib.artifacts.check_library_hash()
