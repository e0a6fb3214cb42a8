"""Builds libcula.so's C++ with a stand-in kernel table: no compiled kernel is needed, and every launch can be looked at.

The table has cpu, sm90 and sm120 rows for every op (so sm100 and sm103 are archs that are not built); prefill has those of its matrix for
these archs. Its CPU kernels record what they were called with; its cubins are 64 bytes that hold the row's number, which the fake driver of
test_driver reads back.
The library is cached in build/tests/capi by the contents of all sources, so a stale one cannot be tested.

CULA_TEST_SANITIZE=1 builds with address and undefined-behaviour sanitizers; see conftest.py for how to run it.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
SOURCES = [
    *sorted(ROOT.glob("aot/capi/src/*.cpp")),
    *sorted(ROOT.glob("aot/ops/*/plan*.cpp")),
    ROOT / "aot/common/cpu/parallel.cpp", ROOT / "aot/common/cpu/cpu_count.cpp", HERE / "hooks.cpp",
]  # fmt: skip
HEADERS = [
    *ROOT.glob("aot/capi/include/*.h"), *ROOT.glob("aot/capi/src/*.h"), *ROOT.glob("aot/capi/src/*.inc"),
    *ROOT.glob("aot/ops/*/*.h"), *ROOT.glob("aot/ops/*/*.def"), *ROOT.glob("aot/common/cpu/*.h"),
]  # fmt: skip
SANITIZE = bool(os.environ.get("CULA_TEST_SANITIZE"))
FLAGS = ["-std=c++17", "-O2", "-g", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror"]
if SANITIZE:
    FLAGS += ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]

ARCHS = {"cpu": 1, "sm90": 90, "sm120": 120}
DECODE_OPS = {"kda_decode": 1, "gdn_decode": 2, "gla_decode": 3, "lightning_decode": 4}
PREFILL_OPS = {"kda_prefill": 8}
GATE_OPS = {"kda_gate": 16, "gdn_gate": 17, "l2norm": 18}
VARIANT = ("none", "prep", "prep_gf32", "state", "scan", "carry", "state_checkpoints")
PREFILL_SMEM = {
    "sm90": {"prep": 60464, "prep_gf32": 60464, "state": 107648, "state_checkpoints": 107648, "scan": 107648, "carry": 70144},
    "sm120": {"prep": 60464, "prep_gf32": 60464, "state": 73856, "state_checkpoints": 73856, "scan": 73856, "carry": 70144},
}
IO = {"fp32": 0, "bf16": 1, "fp16": 2}
STATE = {"fp32": 0, "bf16": 1}
LAYOUT = {"vk": 0, "kv": 1}
DEFS = {
    "decode": ROOT / "aot/ops/decode/params.def",
    "gate": ROOT / "aot/ops/gates/params_gate.def",
    "l2norm": ROOT / "aot/ops/gates/params_l2norm.def",
    "prep": ROOT / "aot/ops/chunk/params_prep.def",
    "state": ROOT / "aot/ops/chunk/params_state.def",
    "carry": ROOT / "aot/ops/chunk/params_carry.def",
    "prefill_cpu": ROOT / "aot/ops/chunk/params_cpu.def",
}
KIND_SIZE = {"ptr": 8, "i64": 8, "i32": 4, "f32": 4}


@functools.cache
def params(family: str) -> list[tuple[str, str]]:
    """(name, kind) of each parameter, read from the .def by other means than the C preprocessor."""
    return [(name, kind) for kind, name in re.findall(r"^CULA_PARAM\((\w+), (\w+)\)", DEFS[family].read_text(), re.M)]


@functools.cache
def modes(family: str) -> dict[str, tuple[int, int]]:
    found = re.findall(r"^CULA_MODE\((\w+), (\d+), (\d+)\)", DEFS[family].read_text(), re.M)
    return {name: (int(shift), int(bits)) for name, shift, bits in found}


def family_of(kernel_id: str) -> str:
    """Whose parameters a kernel takes: a name of DEFS. For ops of one kernel (on the CPU) the op's name will do."""
    op, last = kernel_id.split(".")[0], kernel_id.split(".")[-1]
    if op in PREFILL_OPS:
        return {"prep_gf32": "prep", "scan": "state", "state_checkpoints": "state", "vk": "prefill_cpu", "kv": "prefill_cpu", op: "prefill_cpu"}.get(last, last)
    return "decode" if op in DECODE_OPS else "l2norm" if op == "l2norm" else "gate"


def compiler() -> str:
    found = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")
    assert found, "these tests need a C++ compiler"
    return found


def dlpack_include() -> Path:
    """Of the cuda-core package, where the build takes it from."""
    return Path(importlib.util.find_spec("cuda.core").origin).parent / "_include"


def xla_include() -> Path:
    """Of the jaxlib package, likewise."""
    return Path(importlib.util.find_spec("jaxlib").origin).parent / "include"


def include_flags() -> list[str]:
    folders = [ROOT / "aot/capi/include", ROOT / "aot/capi/src", ROOT / "aot/common/cpu", ROOT, dlpack_include(), xla_include()]
    return [word for folder in folders for word in ("-I", str(folder))]


def table_rows() -> list[tuple[tuple, str]]:
    """(key in table order, kernel id)."""
    rows = []
    for arch, a in ARCHS.items():
        for op, o in DECODE_OPS.items():
            for io, i in IO.items():
                for state, s in STATE.items():
                    for layout, lay in LAYOUT.items():
                        for k in (64, 128, 256):
                            rows.append(((a, o, i, s, lay, 0, k, 0), f"{op}.{arch}.{io}.s{state}.k{k}.{layout}"))
        if arch == "cpu":
            rows += [((a, 8, i, s, lay, 0, k, 0), f"kda_prefill.cpu.{io}.s{state}.k{k}.{layout}")
                     for io, i in IO.items() for state, s in STATE.items() for layout, lay in LAYOUT.items() for k in (64, 128, 256)]
        else:
            name = f"kda_prefill.{arch}"
            for io in ("bf16", "fp16"):
                rows += [((a, 8, IO[io], 0, 0, code, 128, 128), f"{name}.{io}.k128.v128.{VARIANT[code]}") for code in (1, 2)]
                rows += [((a, 8, IO[io], s, lay, code, 128, 128), f"{name}.{io}.s{state}.k128.v128.{layout}.{VARIANT[code]}")
                         for state, s in STATE.items() for layout, lay in LAYOUT.items() for code in (3, 4, 6)]
            rows.append(((a, 8, 0, 0, 0, 5, 128, 128), f"{name}.fp32.k128.v128.carry"))
        for op, o in GATE_OPS.items():
            rows += [((a, o, i, 0, 0, 0, 0, 0), f"{op}.{arch}.{io}") for io, i in IO.items()]
    return sorted(rows)


def table_source() -> str:
    arrays = "\n".join(
        f"constexpr uint16_t kSizes_{family}[] = {{{', '.join(str(KIND_SIZE[kind]) for _, kind in params(family))}}};" for family in DEFS
    )
    rows, cubins = [], []
    for index, ((arch, op, io, state, layout, variant, k, v), kernel_id) in enumerate(table_rows()):
        family = family_of(kernel_id)
        smem = 110 * 1024 if family == "decode" and arch == 90 and layout == 0 else PREFILL_SMEM[kernel_id.split(".")[1]][VARIANT[variant]] if variant else 0
        cubins.append(f"{{{index & 255}, {index >> 8}}}")
        gpu = arch != 1
        where = f"kCubins[{index}], 64" if gpu else "nullptr, 0"
        entry, cpu = (f"entry_{index}", "nullptr") if gpu else ("", f"record<{index}>")
        rows.append(
            f'{{{{{op}, {arch}, {io}, {state}, {layout}, Variant::{VARIANT[variant]}, {k}, {v}}}, "{kernel_id}", "{entry}", {where}, kSizes_{family}, '
            f"{len(params(family))}, 32, 0, {smem}, {100 if variant else 0}, {cpu}}},"
        )
    newline = "\n"
    return f"""#include "kernel_table.h"
namespace cula {{
void record_call(int row, void* const* params, int64_t begin, int64_t end);
namespace {{
template <int Row> void record(void* const* params, int64_t begin, int64_t end) {{ record_call(Row, params, begin, end); }}
{arrays}
constexpr unsigned char kCubins[][64] = {{{", ".join(cubins)}}};
}}
const KernelRow kKernels[] = {{
{newline.join(rows)}
}};
const int32_t kKernelCount = {len(rows)};
const char kBuildInfo[] = "{{\\"version\\": \\"test\\"}}";
}}
"""


def run(*command) -> str:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}"
    return done.stdout


@functools.cache
def build() -> Path:
    table = table_source()
    digest = hashlib.sha256(table.encode() + " ".join([compiler(), *FLAGS]).encode())
    for path in [*SOURCES, *sorted(HEADERS)]:
        digest.update(str(path).encode() + path.read_bytes())
    folder = ROOT / "build/tests/capi" / digest.hexdigest()[:16]
    library = folder / "libcula_test.so"
    if library.exists():
        return library
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="building-", dir=folder.parent))
    (work / "kernel_table.cpp").write_text(table)

    def compile_one(item):
        index, source = item
        run(compiler(), *FLAGS, *include_flags(), "-c", source, "-o", work / f"{index}.o")
        return work / f"{index}.o"

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compile_one, enumerate([*SOURCES, work / "kernel_table.cpp"])))
    run(compiler(), *FLAGS, "-shared", *objects, "-o", work / "libcula_test.so", "-ldl", "-lpthread")
    try:
        work.rename(folder)
    except OSError:  # another process was faster
        shutil.rmtree(work)
    return library
