"""python -m cula doctor: each thing that can be wrong is found, and named with what to do."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cula import _query, doctor
from cula.doctor import NOTE, OK, WRONG, Finding
from cula_loader import artifacts
from tests.loader import fake_gpu

ROOT = Path(__file__).parents[2]
FACTS = {
    "version": "0.1.0", "cuda_bindings": "13.0.3", "driver": {"cuda": "13.0", "problem": ""},
    "artifacts": {"path": "/a", "error": "", "version": "0.1.0", "complete": True, "kernels": {}},
    "devices": [{"ordinal": 0, "name": "H200", "compute_capability": "9.0", "arch": "sm90", "sm_count": 132, "problem": ""}],
}
NO_LIBCUDA = {"cuda": "", "problem": "no NVIDIA driver on this machine (libcuda.so.1: cannot open shared object file)"}


@pytest.fixture(autouse=True)
def no_gpu_hardware(monkeypatch):
    """Whatever machine the tests run on."""
    monkeypatch.setattr(doctor, "_gpus_of_the_machine", lambda: 0)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def driver(problem: str, cuda: str = "13.0") -> dict:
    return FACTS | {"driver": {"cuda": cuda, "problem": problem}, "devices": []}


def error(code: int) -> dict:
    return driver(f"the driver cannot be used: CUDA error {code} (some text)")


def levels(findings, subject: str) -> list[str]:
    return [finding.level for finding in findings if finding.subject == subject]


# ---------------------------------------------------------------------------------------------------------- the command


def test_this_installation_is_sound():
    findings = doctor.examine("cpu")
    assert not [finding for finding in findings if finding.level == WRONG], findings
    assert levels(findings, "artifacts") == [OK] and levels(findings, "machine") == [OK]
    assert not [finding for finding in findings if finding.subject.startswith(("cuda", "GPU"))]


def test_the_exit_code_and_the_last_line(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "examine", lambda device: [Finding(OK, "a", "b"), Finding(NOTE, "c", "d")])
    assert doctor.doctor() == 0 and "nothing is wrong; `python -m cula selftest` runs" in capsys.readouterr().out
    assert doctor.doctor("cuda") == 0 and "python -m cula selftest --device cuda" in capsys.readouterr().out
    monkeypatch.setattr(doctor, "examine", lambda device: [Finding(WRONG, "a", "b", "turn it off and on"), Finding(OK, "c", "d")])
    assert doctor.doctor() == 1
    assert capsys.readouterr().out == "WRONG  a: b\n         -> turn it off and on\nok     c: d\ndoctor: 1 to put right\n"


def command(*words, **environment):
    env = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"}
    env |= {"CULA_ARTIFACTS": str(artifacts.find()), "PYTHONPATH": os.pathsep.join(map(str, (ROOT / "loader", ROOT / "python")))} | environment
    return subprocess.run([sys.executable, "-m", "cula", "doctor", *words], env=env, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def driver_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("driver")
    fake_gpu.build(folder, artifacts.find() / "include")
    return str(folder)


def test_with_a_driver_and_its_gpu(driver_folder):
    """The whole command on a libcuda.so.1 that shows one GPU of compute capability 9.0."""
    done = command("--device", "cuda", LD_LIBRARY_PATH=driver_folder)
    (line,) = [line for line in done.stdout.splitlines() if " cuda:0: " in line]
    assert "Fake GPU 0, compute capability 9.0, 132 SMs, driver for CUDA 13.0" in line
    if "sm90" in artifacts.read(artifacts.find()).archs:
        assert line.startswith("ok ") and done.returncode == 0, done.stdout
        assert "`python -m cula selftest --device cuda`" in done.stdout
    else:
        assert line.startswith("WRONG") and "no sm90 kernels here" in line and done.returncode == 1


def test_without_artifacts(tmp_path):
    done = command(CULA_ARTIFACTS=str(tmp_path))
    assert done.returncode == 1 and "WRONG  artifacts: CULA_ARTIFACTS=" in done.stdout and "make artifacts" in done.stdout


def test_a_file_that_is_no_library(tmp_path):
    shutil.copytree(artifacts.find(), tmp_path / "artifacts")
    library = tmp_path / "artifacts/lib/libcula.so"
    library.write_bytes(b"x" * library.stat().st_size)
    done = command("--device", "cpu", CULA_ARTIFACTS=str(tmp_path / "artifacts"))
    assert done.returncode == 1 and "does not open" in done.stdout and "-> the file is no library for this machine" in done.stdout


def test_a_device_that_is_none():
    done = command("--device", "tpu")
    assert done.returncode == 2 and "allowed: all, cpu, cuda" in done.stderr


# ------------------------------------------------------------------------------------------------ machine and artifacts


@pytest.mark.parametrize("libc, level", [(("glibc", "2.28"), OK), (("glibc", "2.39"), OK), (("glibc", "2.17"), WRONG), (("", ""), WRONG)])
def test_c_library(monkeypatch, libc, level):
    monkeypatch.setattr(doctor.platform, "libc_ver", lambda: libc)
    (finding,) = doctor._machine()
    assert finding.level == level and (level == OK or "glibc 2.28" in finding.text and finding.do)


def test_old_python_and_another_machine(monkeypatch):
    monkeypatch.setattr(doctor.sys, "version_info", (3, 9, 2))
    assert [f.subject for f in doctor._machine() if f.level == WRONG] == ["Python"]
    monkeypatch.setattr(doctor.sys, "version_info", (3, 11, 0))
    monkeypatch.setattr(doctor.platform, "machine", lambda: "aarch64")
    (finding,) = doctor._machine()
    assert finding.level == WRONG and "aarch64" in finding.text


@pytest.fixture
def copy(tmp_path, monkeypatch):
    """A copy of the artifacts that the doctor is led to; the library that this process has open stays the original."""
    shutil.copytree(artifacts.find(), tmp_path / "artifacts")
    monkeypatch.setenv("CULA_ARTIFACTS", str(tmp_path / "artifacts"))
    return tmp_path / "artifacts"


def test_a_changed_library_is_found(copy):
    with open(copy / "lib/libcula.so", "ab") as file:
        file.write(b"x")
    assert "sha256" in next(f.text for f in doctor._artifacts(_query.info()) if f.level == WRONG)


def test_a_changed_and_a_missing_cubin_are_found(copy):
    cubins = sorted(copy.rglob("*.cubin"))
    if not cubins:
        pytest.skip("these artifacts have no GPU arch")
    cubins[0].write_bytes(cubins[0].read_bytes()[:-1])
    assert cubins[0].name in next(f.text for f in doctor._artifacts(_query.info()) if f.level == WRONG)
    cubins[0].unlink()
    found = next(f for f in doctor._artifacts(_query.info()) if f.level == WRONG)
    assert cubins[0].name in found.text and "again" in found.do


@pytest.mark.parametrize("text, do", [
    ("no artifacts: do this", ""),
    ("/a/libcula.so does not open: /lib/libc.so.6: version `GLIBC_2.34' not found (required by /a/libcula.so); x", "GLIBC_2.34 is needed"),
    ("/a/libcula.so does not open: /a/libcula.so: wrong ELF class: ELFCLASS32; x", "no library for this machine"),
    ("/a/libcula.so does not open: /a/libcula.so: failed to map segment from shared object; x", "noexec"),
])
def test_artifacts_that_cannot_be_used(text, do):
    (finding,) = doctor._artifacts(FACTS | {"artifacts": {"path": None, "error": text}})
    assert finding[:3] == (WRONG, "artifacts", text) and do in finding.do and bool(do) == bool(finding.do)


def test_a_part_of_the_matrix_and_another_release(copy):
    state = _query.info()["artifacts"]
    found = list(doctor._artifacts(FACTS | {"artifacts": state | {"complete": False, "version": "0.1.9"}}))
    assert [f.level for f in found] == [NOTE, NOTE, OK] and "make artifacts" in found[0].do and "0.1.9" in found[1].text
    assert "named by CULA_ARTIFACTS" in found[2].text


class Distribution:
    def __init__(self, name: str, version: str):
        self.metadata, self.version = {"Name": name}, version


def test_wheels_of_another_version(monkeypatch):
    installed = [Distribution("cula-artifacts-sm90", "0.0.9"), Distribution("numpy", "2.0"), Distribution("cula", "0.0.9")]
    monkeypatch.setattr(doctor.metadata, "distributions", lambda: installed)
    old_artifacts, old_cula = doctor._wheels()
    assert old_artifacts.level == WRONG and old_artifacts.do == "pip install cula_artifacts_sm90==0.1.0"
    assert old_cula.level == WRONG and "cula 0.0.9 is installed, but 0.1.0 is imported from" in old_cula.text
    same = [Distribution("cula_artifacts_sm90", doctor.__version__), Distribution("cula", doctor.__version__)]
    monkeypatch.setattr(doctor.metadata, "distributions", lambda: same)
    assert [f.level for f in doctor._wheels()] == [OK]


# ------------------------------------------------------------------------------------------------------ driver and GPUs


def test_a_gpu_that_can_run_and_some_that_cannot():
    (finding,) = doctor._gpus(FACTS)
    assert finding[:2] == (OK, "cuda:0") and "compute capability 9.0" in finding.text
    bad = FACTS["devices"][0] | {"ordinal": 1, "problem": "no arch of cula has its compute capability"}
    assert [f.level for f in doctor._gpus(FACTS | {"devices": [bad]})] == [WRONG]
    assert [f.level for f in doctor._gpus(FACTS | {"devices": [FACTS["devices"][0], bad]})] == [OK, NOTE]


def test_gpus_that_this_process_does_not_see(monkeypatch):
    monkeypatch.setattr(doctor, "_gpus_of_the_machine", lambda: 8)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    found = list(doctor._gpus(FACTS))
    assert [f.level for f in found] == [OK, NOTE] and "7 of the 8 GPUs" in found[1].text and "'3'" in found[1].text


@pytest.mark.parametrize("there, device, level", [(0, "all", NOTE), (0, "cuda", WRONG), (2, "all", WRONG)])
def test_no_driver(monkeypatch, there, device, level):
    monkeypatch.setattr(doctor, "_gpus_of_the_machine", lambda: there)
    (finding,) = doctor._gpus(FACTS | {"driver": NO_LIBCUDA, "devices": []}, device)
    assert finding.level == level and "CPU tensors work" in finding.text
    assert ("docker run --gpus all" in finding.do) == (level == WRONG)
    assert ("but this machine has 2 NVIDIA GPUs" in finding.text) == bool(there)


@pytest.mark.parametrize("facts", [error(100), driver("the driver shows no GPU (is CUDA_VISIBLE_DEVICES set?)")], ids=["error 100", "count 0"])
def test_hidden_gpus(monkeypatch, facts):
    monkeypatch.setattr(doctor, "_gpus_of_the_machine", lambda: 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (finding,) = doctor._gpus(facts)
    assert finding.level == WRONG and "CUDA_VISIBLE_DEVICES is ''" in finding.text and finding.do.startswith("unset CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(doctor, "_gpus_of_the_machine", lambda: 0)
    assert [f.level for f in doctor._gpus(facts)] == [NOTE]


@pytest.mark.parametrize("code, do", [(34, "stubs"), (802, "nvidia-fabricmanager"), (803, "reboot"), (804, "cuda-compat"), (999, "nvidia-smi")])
def test_driver_errors(code, do):
    (finding,) = doctor._gpus(error(code))
    assert finding.level == WRONG and f"CUDA error {code}" in finding.text and do in finding.do


def test_an_error_100_without_a_gpu():
    (finding,) = doctor._gpus(error(100))
    assert finding.level == NOTE and "finds no GPU" in finding.text
    (finding,) = doctor._gpus(error(100), "cuda")
    assert finding.level == WRONG and "docker run --gpus all" in finding.do


def test_gpus_of_the_machine(tmp_path, monkeypatch):
    monkeypatch.undo()  # the fixture's stand-in
    for i, (vendor, kind) in enumerate((("0x10de", "0x030200"), ("0x10de", "0x040300"), ("0x8086", "0x030000"), ("0x10de", "0x068000"))):
        device = tmp_path / f"sys/bus/pci/devices/0000:0{i}:00.0"
        device.mkdir(parents=True)
        (device / "vendor").write_text(vendor + "\n")
        (device / "class").write_text(kind + "\n")
    assert doctor._gpus_of_the_machine(tmp_path) == 1, "one 3D controller; audio, another vendor and an NVSwitch do not count"
    for i in range(3):
        (tmp_path / f"proc/driver/nvidia/gpus/0000:0{i}:00.0").mkdir(parents=True)
    assert doctor._gpus_of_the_machine(tmp_path) == 3
    assert doctor._gpus_of_the_machine(tmp_path / "nothing") == 0


@pytest.mark.parametrize("version, cuda, import_problem, level, do", [
    ("13.0.3", "13.0", "", OK, ""), ("12.8.0", "13.0", "", OK, ""), ("12.6.2", "13.0", "", WRONG, "pip install 'cuda-bindings>=12.8'"),
    ("13.0.3", "12.9", "", NOTE, "pip install 'cuda-bindings==12.*'"), ("13.0.3", "13.0", "ImportError: x", WRONG, "module named `cuda`"),
])
def test_cuda_bindings(monkeypatch, version, cuda, import_problem, level, do):
    monkeypatch.setattr(doctor, "_import_problem", lambda: import_problem)
    (finding,) = doctor._bindings(FACTS | {"cuda_bindings": version, "driver": {"cuda": cuda, "problem": ""}})
    assert finding.level == level and do in finding.do and import_problem in finding.text


def test_cuda_bindings_where_there_is_nothing_to_say():
    assert not list(doctor._bindings(FACTS | {"cuda_bindings": None}))  # the device's problem says it
    assert not list(doctor._bindings(FACTS | {"driver": NO_LIBCUDA}))


def test_a_broken_cuda_bindings(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    assert doctor._import_problem().startswith("ModuleNotFoundError")


# ---------------------------------------------------------------------------------------------------------- frameworks


@pytest.mark.parametrize("versions, expected", [
    ({"torch": "2.9.1"}, [NOTE]), ({"torch": "2.10.0+cu130"}, [OK]), ({"torch": "2.13.0a0"}, [OK]), ({"torch": "2.13.0+cpu"}, [NOTE]),
    ({"numpy": "2.4.6"}, [NOTE]), ({"numpy": "2.4.6", "ml_dtypes": "0.6.0"}, [OK]), ({}, []),
])
def test_frameworks(monkeypatch, versions, expected):
    def version(name):
        if name not in versions:
            raise doctor.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(doctor.metadata, "version", version)
    assert [f.level for f in doctor._frameworks(FACTS)] == expected
    if versions.get("torch", "").endswith("+cpu"):
        assert [f.level for f in doctor._frameworks(FACTS | {"devices": []})] == [OK]
