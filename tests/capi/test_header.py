"""cula.h as a C compiler sees it: valid C99 to C++20, and every struct where the ctypes mirror and cuda.h have it."""

import ctypes
import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.capi import abi, standin

HEADER = standin.ROOT / "aot/capi/include/cula.h"
CODE = re.sub(r"/\*.*?\*/", "", HEADER.read_text(), flags=re.S)
CC = shutil.which("gcc") or shutil.which("cc") or shutil.which("clang")
FLAGS = ["-Wall", "-Wextra", "-Werror", "-pedantic", "-Wconversion", "-I", standin.ROOT / "aot/capi/include", "-isystem", standin.dlpack_include()]


def cuda_include() -> Path:
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations if spec else ():
        for path in sorted(Path(folder).glob("*/include/cuda.h")):
            return path.parent
    pytest.fail("cuda.h of nvidia-cuda-runtime is not installed")


def compiled(tmp_path, source, compiler, *flags) -> str:
    """What the program prints."""
    tmp_path.joinpath("program.src").write_text(source)
    language = "c++" if compiler == standin.compiler() else "c"
    standin.run(compiler, *FLAGS, *flags, "-x", language, tmp_path / "program.src", "-o", tmp_path / "program")
    return subprocess.run([tmp_path / "program"], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("standard", ["c99", "c11", "c17", "c++11", "c++17", "c++20"])
def test_header_compiles_alone(tmp_path, standard):
    compiler = standin.compiler() if "++" in standard else CC
    source = '#include "cula.h"\nint main(void) { return (int)sizeof(cula_launches) < 0; }\n'
    assert compiled(tmp_path, source, compiler, f"-std={standard}") == ""


def test_layout_of_every_struct(tmp_path):
    """The compiler's sizes and offsets are those of the ctypes mirror, and no struct or field is missing in it."""
    declared = dict(re.findall(r"typedef struct (\w+) \{(.*?)\n\} \1;", CODE, flags=re.S))
    assert set(declared) == set(abi.STRUCTS)
    lines, want = [], []
    for name, struct_type in abi.STRUCTS.items():
        body = re.sub(r"union \{.*?\} (\w+);", r"u \1;", declared[name], flags=re.S)
        fields = [re.findall(r"\w+", re.sub(r"\[.*?\]", "", part))[-1] for part in body.split(";") if part.strip()]
        assert fields == [field for field, _ in struct_type._fields_]
        lines.append(f'printf("{name} %zu\\n", sizeof({name}));')
        want.append(f"{name} {ctypes.sizeof(struct_type)}")
        for field in fields:
            lines.append(f'printf("{name}.{field} %zu %zu\\n", offsetof({name}, {field}), sizeof((({name}*)0)->{field}));')
            mirror = getattr(struct_type, field)
            want.append(f"{name}.{field} {mirror.offset} {mirror.size}")
        if f"CULA_SIZEOF_{name} " in CODE:
            lines.append(f'printf("SIZEOF {name} %zu\\n", CULA_SIZEOF({name}));')
            want.append(f"SIZEOF {name} {abi.size_of(struct_type)}")
    source = f'#include <stdio.h>\n#include "cula.h"\nint main(void) {{\n{chr(10).join(lines)}\nreturn 0; }}\n'
    assert compiled(tmp_path, source, CC, "-std=c99").splitlines() == want


def test_every_versioned_struct_has_a_size_macro():
    versioned = [name for name, struct_type in abi.STRUCTS.items() if struct_type._fields_[0][0] == "struct_size"]
    assert sorted(versioned) == sorted(re.findall(r"CULA_SIZEOF_(cula_\w+) ", CODE))


def test_enumerators(tmp_path):
    """The numbers of the mirror; and frozen ones stay what they are."""
    want = {f"CULA_GATE_{name}": value for name, value in abi.GATES.items()} | {f"CULA_BETA_{name}": value for name, value in abi.BETAS.items()}
    want |= {f"CULA_PREFILL_{name}": value for name, value in abi.VARIANTS.items()}
    want |= {f"CULA_ARCH_{name.upper()}": value for name, value in abi.ARCHS.items()} | {f"CULA_OP_{name.upper()}": value for name, value in abi.OPS.items()}
    want |= dict(CULA_OK=0, CULA_ERR_INVALID_ARGUMENT=1, CULA_ERR_UNSUPPORTED=2, CULA_ERR_NOT_FOUND=3, CULA_ERR_ARTIFACT=4, CULA_ERR_VERSION=5,
                 CULA_ERR_WORKSPACE=6, CULA_ERR_CUDA=7, CULA_ERR_OUT_OF_MEMORY=8, CULA_ERR_INTERNAL=9, CULA_STATE_VK=0, CULA_STATE_KV=1,
                 CULA_MAX_LAUNCHES=8, CULA_MAX_PARAMS=64, CULA_PARAM_BYTES=4096, CULA_MAX_OBJECTS=16)
    lines = "\n".join(f'printf("{name} %d\\n", (int){name});' for name in want)
    got = compiled(tmp_path, f'#include <stdio.h>\n#include "cula.h"\nint main(void) {{\n{lines}\nreturn 0; }}\n', CC, "-std=c99")
    assert got.splitlines() == [f"{name} {value}" for name, value in want.items()]
    assert set(re.findall(r"\b(CULA_[A-Z0-9_]+) = \d+", CODE)) == set(want)


def test_launch_structs_are_those_of_the_driver(tmp_path):
    """cula_launch_config and cula_launch_attribute against cuda.h, and the numbers that driver_api.h has by hand."""
    same = {"grid": "gridDimX", "block": "blockDimX", "dynamic_smem": "sharedMemBytes", "stream": "hStream", "attributes": "attrs", "attribute_count": "numAttrs"}
    checks = [f"static_assert(offsetof(cula_launch_config, {ours}) == offsetof(CUlaunchConfig, {theirs}));" for ours, theirs in same.items()]
    numbers = {
        "kSuccess": "CUDA_SUCCESS", "kErrorInvalidValue": "CUDA_ERROR_INVALID_VALUE", "kErrorOutOfMemory": "CUDA_ERROR_OUT_OF_MEMORY",
        "kErrorInvalidImage": "CUDA_ERROR_INVALID_IMAGE",
        "kErrorNoBinaryForGpu": "CUDA_ERROR_NO_BINARY_FOR_GPU", "kErrorInvalidPtx": "CUDA_ERROR_INVALID_PTX",
        "kErrorUnsupportedPtxVersion": "CUDA_ERROR_UNSUPPORTED_PTX_VERSION", "kErrorInvalidSource": "CUDA_ERROR_INVALID_SOURCE",
        "kErrorNotFound": "CUDA_ERROR_NOT_FOUND", "kAttributeMultiprocessors": "CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT",
        "kAttributeMajor": "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR", "kAttributeMinor": "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR",
        "kMaxDynamicSharedSize": "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES",
        "kPreferredSharedCarveout": "CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT", "kClusterDimension": "CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION",
        "kProgrammaticStreamSerialization": "CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION", "kCaptureRelaxed": "CU_STREAM_CAPTURE_MODE_RELAXED",
    }  # fmt: skip
    checks += [f"static_assert(cula::driver::{ours} == static_cast<int>({theirs}));" for ours, theirs in numbers.items()]
    driver = (standin.ROOT / "aot/capi/src/driver_api.h").read_text()
    assert set(numbers) == set(re.findall(r"\b(k[A-Z]\w+) = \d+", driver))
    # Calling through cuda.h's own prototypes: pointers and integers in the same places.
    functions = re.findall(r"CULA_DRIVER\((\w+), (cu[A-Z]\w+),", driver)
    assert len(functions) == driver.count("CULA_DRIVER(") - 2  # the comment above the list and the definition in Api
    for member, symbol in functions:
        checks.append(f"static_assert(same<decltype(cula::driver::Api::{member}), decltype(&{symbol})>());")
    source = f"""
#include <cuda.h>
#include <cstddef>
#include <tuple>
#include <type_traits>
#include "driver_api.h"
// Equal to the machine: the same size and kind (address or integer) of each argument.
template <class A, class B> constexpr bool alike() {{ return sizeof(A) == sizeof(B) && (std::is_pointer_v<A> == std::is_pointer_v<B>); }}
template <class A, class B> struct Same : std::false_type {{}};
template <class RA, class... A, class RB, class... B> struct Same<RA (*)(A...), RB (*)(B...)> {{
  static constexpr bool check() {{
    if constexpr (sizeof...(A) == sizeof...(B)) return alike<RA, RB>() && (alike<A, B>() && ...);
    return false;
  }}
  static constexpr bool value = check();
}};
template <class A, class B> constexpr bool same() {{ return Same<A, B>::value; }}
static_assert(sizeof(cula_launch_config) == sizeof(CUlaunchConfig) && alignof(cula_launch_config) == alignof(CUlaunchConfig));
static_assert(sizeof(cula_launch_attribute) == sizeof(CUlaunchAttribute) && offsetof(cula_launch_attribute, value) == offsetof(CUlaunchAttribute, value));
{chr(10).join(checks)}
int main() {{ return 0; }}
"""
    compiled(tmp_path, source, standin.compiler(), "-std=c++17", "-Wno-conversion", "-Wno-pedantic", "-Wno-invalid-offsetof", "-isystem", cuda_include(), "-I",
             standin.ROOT / "aot/capi/src")


def test_exports_are_the_headers_functions():
    declared = sorted(re.findall(r"CULA_API [\w\s*]*?\b(cula_\w+)\(", CODE))
    assert declared == sorted(abi.FUNCTIONS)
    symbols = subprocess.run(["nm", "-D", "--defined-only", standin.build()], capture_output=True, text=True, check=True).stdout
    exported = sorted(line.split()[2] for line in symbols.splitlines() if line.split()[1] == "T")
    assert [name for name in exported if not name.startswith("test_")] == declared


def test_usual_multiprocessor_counts_are_those_of_the_arch_records():
    from aot.archs import ARCHS

    code = (standin.ROOT / "aot/capi/src/tensor.cpp").read_text()
    counts = dict(re.findall(r"case CULA_ARCH_(\w+): target->sm_count = (\d+)", code))
    default = re.search(r"default: target->sm_count = (\d+)", code)[1]
    for name, arch in ARCHS.items():
        if name != "cpu":
            assert int(counts.get(name.upper(), default)) == arch.default_sm_count
