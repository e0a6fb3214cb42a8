"""The C and C++ examples as a user builds them: through CMake and through pkg-config, against a copy of artifacts/."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ARTIFACTS = Path(os.environ.get("CULA_ARTIFACTS", ROOT / "artifacts"))


def run(*command, check=True, **options):
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=600, **options)
    if check and done.returncode != 0:
        pytest.fail(f"{' '.join(map(str, command))} gave {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done


def need(tool: str) -> str:
    path = shutil.which(tool)
    if path is None:
        pytest.skip(f"{tool} is not installed")
    return path


@pytest.fixture(scope="module")
def prefix(tmp_path_factory) -> Path:
    """A copy with a space in its path: the files for CMake and pkg-config must not hold the place where they were built."""
    if not (ARTIFACTS / "lib/libcula.so").exists():
        pytest.fail("artifacts/lib/libcula.so is missing: run `make artifacts` first")
    target = tmp_path_factory.mktemp("moved here") / "cula"
    for name in ("lib", "include"):
        shutil.copytree(ARTIFACTS / name, target / name)
    return target


@pytest.fixture(scope="module")
def cmake_build(prefix, tmp_path_factory) -> Path:
    cmake = need("cmake")
    build = tmp_path_factory.mktemp("build")
    run(cmake, "-S", ROOT / "examples/engine", "-B", build, f"-DCMAKE_PREFIX_PATH={prefix}", "-DCMAKE_CXX_FLAGS=-Werror")
    run(cmake, "--build", build, "--parallel", "2")
    return build


@pytest.fixture(scope="module")
def make_build(prefix, tmp_path_factory) -> Path:
    need("pkg-config")
    source = tmp_path_factory.mktemp("source") / "examples"
    shutil.copytree(ROOT / "examples", source)
    run("make", "-C", source / "engine", f"PKG_CONFIG_PATH={prefix}/lib/pkgconfig")
    return source / "engine"


def check_engine(output: str):
    assert output.splitlines()[-1] == "OK", output
    assert re.search(r"\d+ tokens/s", output), output
    match = re.search(r"(\d+) tokens against float64: out (\S+) .*state (\S+) ", output)
    assert int(match.group(1)) > 10
    assert 0 < float(match.group(2)) < 2.5e-3  # an error of exactly 0 would mean that nothing was compared
    assert 0 < float(match.group(3)) < 1e-6


def test_cmake_build_runs(cmake_build):
    check_engine(run(cmake_build / "engine").stdout)
    assert run(cmake_build / "minimal").stdout.splitlines()[-1] == "OK"


def test_every_request_is_right_and_the_work_does_not_depend_on_the_capacity(cmake_build):
    tokens = set()
    for capacity in (1, 5, 64):
        output = run(cmake_build / "engine", "--device", "cpu", "--check-all", "--requests", 10, "--capacity", capacity, "--seed", 7).stdout
        check_engine(output)
        tokens.add(re.search(r"10 requests, (\d+) tokens", output).group(1))
    assert len(tokens) == 1


def test_pkg_config_build_runs(make_build):
    check_engine(run(make_build / "engine", "--device", "cpu").stdout)
    assert run(make_build / "minimal").stdout.splitlines()[-1] == "OK"


def test_the_engine_notices_a_library_that_does_nothing(cmake_build, tmp_path):
    """The check of the example can fail: with a cula_run that computes nothing it must."""
    shim = tmp_path / "shim.c"
    shim.write_text("int cula_run(int op, const void* a, void* w, unsigned long n, void* s) { return 0; }\n")
    run(os.environ.get("CC", "cc"), "-shared", "-fPIC", shim, "-o", tmp_path / "shim.so")
    environment = dict(os.environ, LD_PRELOAD=str(tmp_path / "shim.so"))
    for program in ("engine", "minimal"):
        done = run(cmake_build / program, *(["--device", "cpu"] if program == "engine" else []), check=False, env=environment)
        assert done.returncode == 1, done.stdout
        assert "MISMATCH" in done.stdout


def test_cuda_without_a_driver_says_so(cmake_build):
    if Path("/dev/nvidiactl").exists():
        pytest.skip("this machine has a GPU")
    done = run(cmake_build / "engine", "--device", "cuda", check=False)
    assert done.returncode == 1
    assert "no CUDA driver" in done.stderr or "cuInit" in done.stderr
    assert "no GPU is used: " in run(cmake_build / "engine", "--requests", 2).stdout


@pytest.mark.parametrize("words", [["--device", "tpu"], ["--requests"], ["--requests", "0"], ["--layers", "x"], ["--fast"]])
def test_bad_options_are_refused(cmake_build, words):
    done = run(cmake_build / "engine", *words, check=False)
    assert done.returncode == 2
    assert words[0] in done.stderr


def configure(prefix: Path, tmp_path: Path, request: str):
    (tmp_path / "CMakeLists.txt").write_text(
        f"cmake_minimum_required(VERSION 3.16)\nproject(t LANGUAGES C)\nfind_package(cula {request} CONFIG)\n"
        'message(STATUS "found ${cula_FOUND} ${cula_VERSION} [${cula_ARCHS}] sm999 ${cula_sm999_FOUND}")\n'
    )
    return run(need("cmake"), "-S", tmp_path, "-B", tmp_path / "b", f"-DCMAKE_PREFIX_PATH={prefix}", check=False)


@pytest.mark.parametrize("request_", ["REQUIRED", "0.1 REQUIRED", "0.1...0.9 REQUIRED", "0.1.0 EXACT REQUIRED COMPONENTS cpu",
                                      "REQUIRED OPTIONAL_COMPONENTS sm999"])
def test_find_package_accepts(prefix, tmp_path, request_):
    done = configure(prefix, tmp_path, request_)
    assert done.returncode == 0, done.stderr
    assert re.search(r"found (?:1|TRUE) \d+\.\d+\.\d+ \[cpu\b.*\]", done.stdout), done.stdout


@pytest.mark.parametrize("request_, message", [
    ("0.99 REQUIRED", "0.99"),
    ("1.0 REQUIRED", "1.0"),
    ("0.0...0.0.5 REQUIRED", "0.0...0.0.5"),
    ("REQUIRED COMPONENTS cpu sm999", "make artifacts ARCH=sm999"),
])
def test_find_package_refuses(prefix, tmp_path, request_, message):
    done = configure(prefix, tmp_path, request_)
    assert done.returncode != 0
    assert message in " ".join(done.stderr.split()), done.stderr


def test_find_package_refuses_an_incomplete_folder(prefix, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(prefix, broken)
    (broken / "include/dlpack.h").unlink()
    (tmp_path / "t").mkdir()
    done = configure(broken, tmp_path / "t", "REQUIRED")
    assert done.returncode != 0
    assert "dlpack.h is missing" in " ".join(done.stderr.split())


def test_nothing_names_the_build_folder(prefix):
    for path in [*prefix.glob("lib/cmake/cula/*"), *prefix.glob("lib/pkgconfig/*")]:
        text = path.read_text()
        assert "@CULA" not in text and str(ROOT) not in text, path


def test_versions_agree(prefix):
    header = (prefix / "include/cula.h").read_text()
    version = ".".join(re.search(rf"CULA_VERSION_{part} (\d+)", header).group(1) for part in ("MAJOR", "MINOR", "PATCH"))
    assert f'set(cula_VERSION "{version}")' in (prefix / "lib/cmake/cula/culaConfig.cmake").read_text()
    assert f'set(PACKAGE_VERSION "{version}")' in (prefix / "lib/cmake/cula/culaConfigVersion.cmake").read_text()
    assert f"Version: {version}\n" in (prefix / "lib/pkgconfig/cula.pc").read_text()
