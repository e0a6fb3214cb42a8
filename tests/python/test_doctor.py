"""python -m cula doctor: each thing that can be wrong is found, and named with what to do."""

import shutil

import pytest

from cula import _doctor, _query
from cula._doctor import NOTE, OK, WRONG
from cula_loader import artifacts

FACTS = {
    "version": "0.1.0", "cuda_bindings": "13.0.3", "driver": {"cuda": "13.0", "problem": ""},
    "artifacts": {"path": "/a", "error": "", "version": "0.1.0", "complete": True, "kernels": {}},
    "devices": [{"ordinal": 0, "name": "H200", "compute_capability": "9.0", "arch": "sm90", "sm_count": 132, "problem": ""}],
}


def levels(findings, subject: str) -> list[str]:
    return [finding.level for finding in findings if finding.subject == subject]


def test_this_installation_is_sound():
    findings = _doctor.examine()
    assert not [finding for finding in findings if finding.level == WRONG and not finding.subject.startswith("cuda:")], findings
    assert levels(findings, "artifacts") == [OK] and levels(findings, "machine") == [OK]


def test_the_exit_code_and_the_last_line(monkeypatch, capsys):
    monkeypatch.setattr(_doctor, "examine", lambda: [_doctor.Finding(OK, "a", "b"), _doctor.Finding(NOTE, "c", "d")])
    assert _doctor.doctor() == 0 and "nothing is wrong" in capsys.readouterr().out
    monkeypatch.setattr(_doctor, "examine", lambda: [_doctor.Finding(WRONG, "a", "b")])
    assert _doctor.doctor() == 1 and "1 to put right" in capsys.readouterr().out


@pytest.fixture
def copy(tmp_path, monkeypatch):
    """A copy of the artifacts that the doctor is led to; the library that this process has open stays the original."""
    shutil.copytree(artifacts.find(), tmp_path / "artifacts")
    monkeypatch.setenv("CULA_ARTIFACTS", str(tmp_path / "artifacts"))
    return tmp_path / "artifacts"


def test_a_changed_library_is_found(copy):
    with open(copy / "lib/libcula.so", "ab") as file:
        file.write(b"x")
    assert "sha256" in next(f.text for f in _doctor._artifacts(_query.info()) if f.level == WRONG)


def test_a_changed_and_a_missing_cubin_are_found(copy):
    cubins = sorted(copy.rglob("*.cubin"))
    if not cubins:
        pytest.skip("these artifacts have no GPU arch")
    cubins[0].write_bytes(cubins[0].read_bytes()[:-1])
    assert cubins[0].name in next(f.text for f in _doctor._artifacts(_query.info()) if f.level == WRONG)
    cubins[0].unlink()
    assert cubins[0].name in next(f.text for f in _doctor._artifacts(_query.info()) if f.level == WRONG)


def test_missing_artifacts_are_wrong():
    facts = FACTS | {"artifacts": {"path": None, "error": "no artifacts: do this"}}
    assert list(_doctor._artifacts(facts)) == [(WRONG, "artifacts", "no artifacts: do this")]


def test_gpus():
    assert list(_doctor._gpus(FACTS))[0][:2] == (OK, "cuda:0")
    no_driver = FACTS | {"driver": {"cuda": "", "problem": "no NVIDIA driver"}, "devices": []}
    assert [f.level for f in _doctor._gpus(no_driver)] == [NOTE]
    no_kernels = FACTS | {"devices": [FACTS["devices"][0] | {"problem": "no sm90 kernels here"}]}
    assert [f.level for f in _doctor._gpus(no_kernels)] == [WRONG]
    assert [f.level for f in _doctor._gpus(FACTS | {"cuda_bindings": "12.6.2"})] == [OK, WRONG]
    assert [f.level for f in _doctor._gpus(FACTS | {"cuda_bindings": "12.8.0"})] == [OK]


class Distribution:
    def __init__(self, name: str, version: str):
        self.metadata, self.version = {"Name": name}, version


def test_a_wheel_of_another_version(monkeypatch):
    monkeypatch.setattr(_doctor.metadata, "distributions", lambda: [Distribution("cula-artifacts-sm90", "0.0.9"), Distribution("numpy", "2.0")])
    (finding,) = _doctor._wheels()
    assert finding.level == WRONG and "pip install cula_artifacts_sm90==0.1.0" in finding.text
    monkeypatch.setattr(_doctor.metadata, "distributions", lambda: [Distribution("cula_artifacts_sm90", _doctor.__version__)])
    assert [f.level for f in _doctor._wheels()] == [OK]


@pytest.mark.parametrize("versions, expected", [
    ({"torch": "2.9.1"}, [NOTE]), ({"torch": "2.10.0+cu130"}, [OK]), ({"torch": "2.13.0a0"}, [OK]),
    ({"numpy": "2.4.6"}, [NOTE]), ({"numpy": "2.4.6", "ml_dtypes": "0.6.0"}, [OK]), ({}, []),
])
def test_frameworks(monkeypatch, versions, expected):
    def version(name):
        if name not in versions:
            raise _doctor.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(_doctor.metadata, "version", version)
    assert [f.level for f in _doctor._frameworks()] == expected
