"""Finding the artifacts, and the strict manifest reader: what is wrong is named, with what to do."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from cula_loader import ArtifactError, CulaError, VersionError, artifacts
from cula_loader.library import Library


@pytest.fixture(scope="module")
def real() -> Path:
    return artifacts.find()


@pytest.fixture
def copied(real, tmp_path) -> Path:
    """Manifest and library of the real artifacts, to damage."""
    (tmp_path / "lib").mkdir()
    shutil.copy(real / "lib" / "libcula.so", tmp_path / "lib")
    shutil.copy(real / "manifest.json", tmp_path)
    return tmp_path


def small_manifest() -> dict:
    return {"schema": 1, "package_version": "0.1.0", "abi": {"major": 0, "minor": 1}, "complete": True,
            "library": {"file": "lib/libcula.so", "sha256": "0" * 64, "size": 5}, "unknown_key": 3,
            "kernels": [{"id": "kda_gate.cpu.fp32", "op": "kda_gate", "arch": "cpu", "params": []},
                        {"id": "kda_gate.sm90.fp32", "op": "kda_gate", "arch": "sm90", "entry_symbol": "e", "params": [{"size": 8}, {"size": 4}],
                         "cubin": {"file": "sm90/kda_gate/kda_gate.sm90.fp32.cubin", "sha256": "1" * 64, "toolkit_version": 130}}]}


def write(folder: Path, manifest) -> Path:
    (folder / "manifest.json").write_text(manifest if isinstance(manifest, str) else json.dumps(manifest))
    return folder


def test_the_environment_comes_first(monkeypatch, tmp_path):
    monkeypatch.setenv("CULA_ARTIFACTS", str(write(tmp_path, small_manifest())))
    assert artifacts.find() == tmp_path.resolve()


def test_an_environment_without_a_manifest_is_refused(monkeypatch, tmp_path):
    """Not skipped: a wrong path must not silently give other artifacts."""
    monkeypatch.setenv("CULA_ARTIFACTS", str(tmp_path))
    with pytest.raises(ArtifactError, match=r"CULA_ARTIFACTS=.*no manifest.json there.*make artifacts"):
        artifacts.find()


@pytest.fixture
def elsewhere(monkeypatch, tmp_path):
    """The loader as installed: no source tree around it, and nothing in the environment."""
    monkeypatch.delenv("CULA_ARTIFACTS", raising=False)
    monkeypatch.setattr(artifacts, "__file__", str(tmp_path / "site-packages" / "cula_loader" / "artifacts.py"))
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))
    sys.modules.pop("cula_artifacts", None)
    return site


def test_nothing_there(elsewhere):
    with pytest.raises(ArtifactError, match=r"no artifacts: CULA_ARTIFACTS is not set.*cula_artifacts.*make artifacts ARCH="):
        artifacts.find()


def test_the_source_tree(elsewhere, tmp_path):
    tree = tmp_path / "artifacts"
    tree.mkdir()
    write(tree, small_manifest())
    assert artifacts.find() == tree


def test_an_installed_package(elsewhere):
    folder = elsewhere / "cula_artifacts" / "sm90"
    folder.mkdir(parents=True)
    write(folder, small_manifest())
    assert artifacts.find() == folder


@pytest.mark.parametrize(("gpu", "chosen"), [("sm120", "sm120"), ("sm90", "sm90"), (None, "sm120")])
def test_of_several_packages_the_one_that_fits_the_gpu(elsewhere, monkeypatch, gpu, chosen):
    from cula_loader import devices

    for arch in ("sm90", "sm120"):
        folder = elsewhere / "cula_artifacts" / arch
        folder.mkdir(parents=True)
        manifest = small_manifest()
        manifest["kernels"][1]["arch"] = arch
        write(folder, manifest)
    cc = next((cc for cc, arch in devices._BY_CC.items() if arch == gpu), None)
    found = (devices.Device(0, "a GPU", cc, 1),) if cc else ()
    monkeypatch.setattr(devices, "devices", lambda: devices.Devices("13.0", "", found))
    assert artifacts.find().name == chosen


def test_read(tmp_path):
    got = artifacts.read(write(tmp_path, small_manifest()))
    assert got.archs == ["cpu", "sm90"] and got.complete and got.library == tmp_path / "lib" / "libcula.so"
    gpu = got.kernels["kda_gate.sm90.fp32"]
    assert gpu.param_sizes == (8, 4) and gpu.cubin == tmp_path / "sm90/kda_gate/kda_gate.sm90.fp32.cubin" and gpu.toolkit_version == 130
    assert got.kernels["kda_gate.cpu.fp32"].cubin is None


def change(path: str, value):
    """A manifest with one entry replaced, or removed for None."""
    manifest = small_manifest()
    *parents, last = path.split(".")
    at = manifest
    for key in parents:
        at = at[int(key)] if key.isdigit() else at[key]
    last = int(last) if last.isdigit() else last
    if value is None:
        del at[last]
    else:
        at[last] = value
    return manifest


@pytest.mark.parametrize(("manifest", "kind", "text"), [
    ("{", ArtifactError, "not JSON"),
    ("[]", ArtifactError, "top level is list, not an object"),
    (change("schema", None), ArtifactError, "schema is missing"),
    (change("schema", 2), VersionError, "schema 2, this loader reads 1"),
    (change("schema", True), ArtifactError, "schema is bool, not int"),
    (change("schema", "1"), ArtifactError, "schema is str, not int"),
    (change("abi.major", 1), VersionError, "ABI 1.1, this loader needs 0.1"),
    (change("abi.minor", 0), VersionError, "ABI 0.0, this loader needs 0.1"),
    (change("abi", 1), ArtifactError, "abi is int, not dict"),
    (change("package_version", None), ArtifactError, "package_version is missing"),
    (change("complete", None), ArtifactError, "complete is missing"),
    (change("library", None), ArtifactError, "library is missing"),
    (change("library.sha256", 5), ArtifactError, "library.sha256 is int"),
    (change("library.file", "/etc/passwd"), ArtifactError, "not inside the artifacts folder"),
    (change("library.file", "lib/../../x.so"), ArtifactError, "not inside the artifacts folder"),
    (change("kernels", {}), ArtifactError, "kernels is dict, not list"),
    (change("kernels.0", "x"), ArtifactError, r"kernels\[0\] is str"),
    (change("kernels.1.cubin", None), ArtifactError, r"kernels\[1\].cubin is missing"),
    (change("kernels.1.cubin.sha256", None), ArtifactError, r"kernels\[1\].cubin.sha256 is missing"),
    (change("kernels.1.params.0", 8), ArtifactError, r"params\[0\] is int"),
    (change("kernels.1.params.0.size", "8"), ArtifactError, r"params\[0\].size is str"),
    (change("kernels.1.arch", "sm91"), ArtifactError, "'sm91' is none of"),
    (change("kernels.1.id", "kda_gate.cpu.fp32"), ArtifactError, "appears twice"),
])
def test_a_wrong_manifest_is_named(tmp_path, manifest, kind, text):
    with pytest.raises(kind, match=text) as caught:
        artifacts.read(write(tmp_path, manifest))
    assert str(tmp_path / "manifest.json") in str(caught.value) and "install" in str(caught.value)


def test_no_manifest(tmp_path):
    with pytest.raises(ArtifactError, match="make artifacts"):
        artifacts.read(tmp_path)


def test_the_real_library_opens(copied):
    assert Library(artifacts.read(copied)).kernel_count > 0


@pytest.mark.parametrize(("damage", "text"), [
    (lambda path: path.unlink(), "does not open"),
    (lambda path: path.write_bytes(b"\x7fELF" + bytes(path.stat().st_size - 4)), "does not open"),
    (lambda path: path.write_bytes(path.read_bytes()[:5000]), "has 5000 bytes, but the manifest says"),
], ids=["missing", "no library", "truncated"])
def test_a_damaged_library(copied, damage, text):
    damage(copied / "lib" / "libcula.so")
    with pytest.raises(ArtifactError, match=f"libcula.so {text}.*build or install the artifacts again"):
        Library(artifacts.read(copied))


def test_another_library_with_the_functions_missing(copied):
    import _ctypes

    library = copied / "lib" / "libcula.so"
    shutil.copy(_ctypes.__file__, library)
    manifest = json.loads((copied / "manifest.json").read_text())
    manifest["library"]["size"] = library.stat().st_size
    with pytest.raises(VersionError, match="has no cula_"):
        Library(artifacts.read(write(copied, manifest)))


def test_library_and_manifest_of_different_versions(copied):
    manifest = json.loads((copied / "manifest.json").read_text())
    manifest["package_version"] = "0.1.7"
    with pytest.raises(ArtifactError, match="is version 0.1.0, but manifest.json beside it describes 0.1.7"):
        Library(artifacts.read(write(copied, manifest)))


def test_the_library_hash(copied):
    described = artifacts.read(copied)
    described.check_library_hash()
    library = copied / "lib" / "libcula.so"
    content = bytearray(library.read_bytes())
    content[-1] ^= 1
    library.write_bytes(content)
    with pytest.raises(ArtifactError, match="sha256 .* but the manifest says"):
        described.check_library_hash()


def test_every_error_is_a_cula_error():
    assert issubclass(VersionError, ArtifactError) and issubclass(ArtifactError, CulaError)
