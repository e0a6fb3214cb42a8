"""`make wheel`: what is in the packages, that they are reproducible, and that they work in an environment that has nothing else."""

import base64
import csv
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from aot.build import wheel

ROOT = Path(__file__).resolve().parents[2]
ARTIFACTS = Path(os.environ.get("CULA_ARTIFACTS", ROOT / "artifacts"))


@pytest.fixture(scope="module")
def dist(tmp_path_factory) -> Path:
    if not (ARTIFACTS / "manifest.json").exists():
        pytest.fail("artifacts/manifest.json is missing: run `make artifacts` first")
    out = tmp_path_factory.mktemp("dist")
    wheel.build(ARTIFACTS, out)
    return out


@pytest.fixture(scope="module")
def manifest() -> dict:
    return json.loads((ARTIFACTS / "manifest.json").read_text())


def the(dist: Path, pattern: str) -> Path:
    (found,) = dist.glob(pattern)
    return found


def test_names_and_sizes(dist, manifest):
    version, archs = manifest["package_version"], wheel.arch_set(manifest["archs"])
    name = f"cula_artifacts_{archs.replace('-', '_')}"
    assert sorted(path.name for path in dist.iterdir()) == sorted([
        f"cula-{version}-py3-none-any.whl", f"{name}-{version}-py3-none-manylinux_2_28_x86_64.whl", f"cula-{version}-{archs}-linux-x86_64.tar.gz"])
    assert all(path.stat().st_size < 30e6 for path in dist.iterdir())


def test_the_same_bytes_again(dist, tmp_path):
    for path in wheel.build(ARTIFACTS, tmp_path):
        assert path.read_bytes() == (dist / path.name).read_bytes(), path.name


def test_record_lists_every_file_with_its_hash(dist):
    for path in dist.glob("*.whl"):
        with zipfile.ZipFile(path) as archive:
            (record,) = [name for name in archive.namelist() if name.endswith(".dist-info/RECORD")]
            rows = {row[0]: row[1:] for row in csv.reader(io.StringIO(archive.read(record).decode()))}
            assert set(rows) == set(archive.namelist())
            for name, (digest, size) in rows.items():
                if name == record:
                    assert (digest, size) == ("", "")
                    continue
                content = archive.read(name)
                assert digest == "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
                assert int(size) == len(content)


def test_the_artifacts_are_the_manifests_files(dist, manifest):
    with zipfile.ZipFile(the(dist, "cula_artifacts_*.whl")) as archive:
        package = f"cula_artifacts/{wheel.arch_set(manifest['archs'])}"
        names = {name.removeprefix(package + "/") for name in archive.namelist() if ".dist-info/" not in name}
        library = archive.read(f"{package}/lib/libcula.so")
    cubins = {kernel["cubin"]["file"] for kernel in manifest["kernels"] if "cubin" in kernel}
    assert names == {"manifest.json", "lib/libcula.so", *manifest["files"], *cubins}
    assert hashlib.sha256(library).hexdigest() == manifest["library"]["sha256"]


def test_no_compiled_python_and_no_tests_in_the_pure_wheel(dist):
    with zipfile.ZipFile(the(dist, "cula-*.whl")) as archive:
        tops = {name.split("/")[0] for name in archive.namelist()}
        assert tops - {f"cula-{wheel.read_manifest(ARTIFACTS)['package_version']}.dist-info"} == {"cula", "cula_loader"}
        assert not [name for name in archive.namelist() if name.endswith(".pyc") or "/tests/" in name]


@pytest.mark.parametrize("damage, message", [
    (lambda folder: (folder / "manifest.json").unlink(), "does not exist"),
    (lambda folder: (folder / "lib/libcula.so").write_bytes(b"x"), "libcula.so is not what manifest.json says"),
    (lambda folder: (folder / "include/dlpack.h").unlink(), "dlpack.h: No such file"),
    (lambda folder: (folder / "manifest.json").write_text(
        (folder / "manifest.json").read_text().replace('"complete": true', '"complete": false')), "not complete"),
])
def test_damaged_artifacts_are_not_packaged(tmp_path, damage, message):
    shutil.copytree(ARTIFACTS, tmp_path / "artifacts")
    damage(tmp_path / "artifacts")
    with pytest.raises(wheel.PackagingError, match=message):
        wheel.build(tmp_path / "artifacts", tmp_path / "dist")
    assert not list(tmp_path.glob("dist/*"))


def test_a_wheel_over_the_limit_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(wheel, "LIMIT_BYTES", 1000)
    with pytest.raises(wheel.PackagingError, match="the limit is"):
        wheel.build(ARTIFACTS, tmp_path)
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------------------------- a clean environment


class Environment:
    """A virtual environment with pip-installed wheels and, linked in, numpy of the tests' own environment: no index is asked."""

    def __init__(self, folder: Path, *wheels: Path):
        venv.create(folder, with_pip=False)
        self.python = folder / "bin/python"
        self.site = Path(self.run("import sysconfig; print(sysconfig.get_path('purelib'))").strip())
        import numpy

        for package in Path(numpy.__file__).parents[1].glob("numpy*"):
            (self.site / package.name).symlink_to(package)
        if wheels:
            subprocess.run([sys.executable, "-m", "pip", "--python", str(self.python), "install", "-q", "--no-index", "--no-deps",
                            *map(str, wheels)], check=True, timeout=300)

    def run(self, *code: str, check: bool = True, **variables: str) -> str:
        command = [str(self.python), "-I", *(["-c", code[0]] if len(code) == 1 else code)]
        done = subprocess.run(command, capture_output=True, text=True, cwd="/", env={"PATH": os.environ["PATH"], **variables}, timeout=300)
        if check:
            assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr


@pytest.fixture(scope="module")
def clean(dist, tmp_path_factory) -> Environment:
    return Environment(tmp_path_factory.mktemp("clean") / "env", *dist.glob("*.whl"))


def test_info_in_a_clean_environment(clean, manifest):
    text = clean.run("-m", "cula", "info")
    assert str(clean.site / "cula_artifacts") in text
    for arch in manifest["archs"]:
        assert re.search(rf"\b{arch}\b", text)


DECODE = """
import numpy as np, cula
rng = np.random.default_rng(0)
N, H, K, V = 2, 2, 64, 64
q, k, v = (rng.standard_normal((N, H, d)).astype("f") for d in (K, K, V))
beta = rng.uniform(0.1, 0.9, (N, H)).astype("f")
state = np.full((3, H, V, K), np.nan, "f")
o = cula.kda.kda_decode(q, k, v, beta=beta, state=state, read_index=np.array([-1, -1], "i4"), write_index=np.array([2, 0], "i4"))
want = np.einsum("nh,nhk,nhk,nhv->nhv", beta, q * K**-0.5, k, v)
error = np.linalg.norm(o - want) / np.linalg.norm(want)
assert error < 1e-6, error
assert np.isnan(state[1]).all() and np.allclose(state[2], np.einsum("hv,hk->hvk", beta[0][:, None] * v[0], k[0]), rtol=1e-5)
print("decoded")
"""


def test_decode_in_a_clean_environment(clean):
    assert "decoded" in clean.run(DECODE)


def test_the_c_example_links_against_the_installed_package(clean, tmp_path):
    if shutil.which("cmake") is None:
        pytest.skip("cmake is not installed")
    prefix = clean.run("import cula; print(cula.info()['artifacts']['path'])").strip()
    assert Path(prefix).is_relative_to(clean.site)
    for command in (["cmake", "-S", ROOT / "examples/engine", "-B", tmp_path, f"-DCMAKE_PREFIX_PATH={prefix}"],
                    ["cmake", "--build", tmp_path, "--target", "minimal"], [tmp_path / "minimal"]):
        done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "OK"


def test_without_the_artifacts_wheel_it_says_what_to_install(dist, tmp_path):
    bare = Environment(tmp_path / "env", the(dist, "cula-*.whl"))
    text = bare.run(DECODE, check=False)
    assert "ArtifactError" in text and "pip install cula_artifacts_" in text, text


@pytest.mark.parametrize("old, new", [('"minor": 1', '"minor": 0'), ('"major": 0', '"major": 9'), ('"schema": 1', '"schema": 2')])
def test_artifacts_of_another_version_are_refused_with_what_to_install(clean, tmp_path, old, new):
    (installed,) = clean.site.glob("cula_artifacts/*/manifest.json")
    shutil.copytree(installed.parent, tmp_path / "other")
    text = installed.read_text()
    assert old in text
    (tmp_path / "other/manifest.json").write_text(text.replace(old, new))
    out = clean.run(DECODE, check=False, CULA_ARTIFACTS=str(tmp_path / "other"))
    assert "VersionError" in out and "pip install cula" in out, out


def test_the_tarball_builds_where_there_is_no_python_and_no_checkout(dist, tmp_path):
    with tarfile.open(the(dist, "*.tar.gz")) as archive:
        archive.extractall(tmp_path, filter="data")
    (top,) = tmp_path.iterdir()
    if shutil.which("pkg-config") is None:
        pytest.skip("pkg-config is not installed")
    subprocess.run(["make", "-s", "-C", str(top / "examples/engine"), f"PKG_CONFIG_PATH={top}/lib/pkgconfig"], check=True, timeout=300)
    done = subprocess.run([str(top / "examples/engine/engine"), "--device", "cpu", "--requests", "4"], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "OK"
