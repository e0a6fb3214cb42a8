"""python -m cula bench: the command on the CPU, the order of driver calls on a GPU that is not there, refusals, the plot."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import cula
from cula import bench
from cula.bench import prefill, problems, report
from cula.bench.cpu import UNKNOWN_CACHE, Cpu, cache_bytes
from cula.bench.problems import Problem
from cula_loader import artifacts

ROOT = Path(__file__).parents[2]


def command(*words, **environment):
    env = dict(os.environ, CULA_ARTIFACTS=str(artifacts.find()), PYTHONPATH=os.pathsep.join(map(str, (ROOT / "loader", ROOT / "python"))))
    return subprocess.run([sys.executable, "-m", "cula", "bench", *words], env=env | environment, cwd="/", capture_output=True, text=True, timeout=600)


# ------------------------------------------------------------------------------------------------------------- problems


@pytest.mark.parametrize("op", list(problems.HEADS))
@pytest.mark.parametrize("state", ["fp32", "bf16"])
def test_least_bytes_are_those_of_the_projects_own_benchmark(op, state):
    torch = pytest.importorskip("torch")
    from benchmarks import decode_inputs

    made = decode_inputs.make(op, 3, (2, 4), state, 0, device="cpu")
    problem = Problem(op, 3, (2, 4), state)
    assert problem.least_bytes == made.bytes and made.q.dtype == torch.bfloat16
    assert {name: torch.Size(shape) for name, shape in problem.row_shapes.items()} == {
        name: getattr(made, name).squeeze(1).shape for name in problem.row_shapes}


def test_which_problems():
    found = problems.enumerate_problems(("gdn",), (1, 8))
    assert len(found) == 3 * 2 * 2 and found[0] == Problem("gdn", 1, (16, 64), "fp32")
    assert len(problems.enumerate_problems(("gdn", "gla"), (1,), all_heads=False)) == 4
    assert [problems.rotations(size, *problems.GPU_ROTATE) for size in (1, 4_194_304, 200_000_000, 10**9)] == [48, 48, 3, 2]


def test_rotated_states_are_beyond_the_caches():
    """A share above 100 % would be one of a cache: all sets of the smallest problem together are four times the last-level caches."""
    total, most = Cpu().rotate
    smallest = min(problems.enumerate_problems(batches=bench.CPU_BATCHES), key=lambda p: p.state_bytes)
    assert problems.rotations(smallest.state_bytes, total, most) * smallest.state_bytes >= 4 * cache_bytes() > 0


def test_cache_bytes(tmp_path):
    def index(cpu, number, level, size, shared):
        folder = tmp_path / f"cpu{cpu}/cache/index{number}"
        folder.mkdir(parents=True)
        for name, text in (("level", level), ("size", size), ("shared_cpu_list", shared)):
            (folder / name).write_text(f"{text}\n")

    assert cache_bytes(tmp_path) == UNKNOWN_CACHE
    for cpu in range(4):  # two caches of level 3, each of two CPUs
        index(cpu, 0, 1, "48K", cpu)
        index(cpu, 2, 2, "2M", cpu)
        index(cpu, 3, 3, "32768K", "0-1" if cpu < 2 else "2-3")
    assert cache_bytes(tmp_path) == 64 << 20
    (tmp_path / "cpu3/cache/index3/size").write_text("no number")  # CPU 2 says it too
    assert cache_bytes(tmp_path) == 64 << 20


# ------------------------------------------------------------------------------------------------------------ a machine


class SmallCpu(Cpu):
    """The cpu arch with problems that take no time."""

    def copy_rate(self):
        return 100.0


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(bench, "enumerate_problems", lambda ops, batches, all_heads: [Problem(op, 2, (2, 4), "fp32") for op in ops])
    monkeypatch.setattr(bench, "rotations", lambda size, total, most: 2)
    monkeypatch.setattr(prefill, "SHAPES", ((20, 2), (33, 1)))
    monkeypatch.setattr(bench, "_machine", lambda device: SmallCpu())


def test_a_run(small, tmp_path, capsys):
    assert bench.bench("cpu", out=tmp_path) == 0
    result = json.loads((tmp_path / "bench.json").read_text())
    assert [row["op"] for row in result["rows"]] == ["kda", "gdn", "gla", "lightning"] and result["copy_GBs"] == 100
    for row in result["rows"]:
        assert row["us"] > 0 and row["kernel"].startswith(f"{row['op']}_decode.cpu.{result['io']}.sfp32.k128.")
        assert row["GBs"] == pytest.approx(row["bytes"] / row["us"] / 1e3) and row["share"] == pytest.approx(row["GBs"] / 100)
    printed = capsys.readouterr().out
    assert "copy 100 GB/s" in printed and printed.count("_decode.cpu.") == 4
    assert [(row["tokens"], row["heads"]) for row in result["prefill"]] == [(20, 2), (33, 1)] and printed.count("kda_prefill.cpu.") == 2
    for row in result["prefill"]:
        assert row["us"] > 0 and row["kernel"] == f"kda_prefill.cpu.{result['io']}.sfp32.k128.vk"
        assert row["rate"] == pytest.approx(row["tokens"] * row["heads"] / row["us"] * 1e6)
    assert ("no plot: matplotlib is not installed" in printed) != (tmp_path / "bench.png").exists()


def test_a_result_that_is_no_number_is_no_time(small, monkeypatch):
    monkeypatch.setattr(SmallCpu, "get", lambda self, x: np.array([1.0, np.nan]))
    assert bench.bench("cpu", ("gla",)) == 1
    monkeypatch.setattr(SmallCpu, "get", lambda self, x: np.zeros(3))
    row = bench.measure(Problem("gla", 2, (2, 4), "fp32"), SmallCpu(), 1.0)
    assert row["failed"] and "us" not in row and "not finite, or zero" in row["error"]


def test_prefill_is_timed_where_it_belongs(small, monkeypatch, capsys):
    """Not without KDA, one shape in a quick run, and a failure is shown and counted."""
    assert bench.bench("cpu", ("gla",)) == 0 and "prefill" not in capsys.readouterr().out
    assert len(bench.run_prefill(SmallCpu(), quick=True)) == 1
    monkeypatch.setattr(bench, "measure", lambda *a: {"op": "kda", "state": "fp32", "heads": [2, 4], "n": 1, "error": "left out"})
    monkeypatch.setattr(SmallCpu, "get", lambda self, x: np.array([1.0, np.nan]))
    assert bench.bench("cpu", ("kda",)) == 1 and capsys.readouterr().out.count("FAILED: the output is not finite, or zero") == 2


def test_prefill_of_the_benchmark_against_the_recurrence():
    """What is timed is the call that the selftest compares: here its output, through the recurrence of the tests."""
    from tests.reference import recurrence

    machine = SmallCpu()
    call, out = prefill.make(prefill.Prefill(20, 2), machine)
    call()
    q, k, v, raw, beta = (np.asarray(machine.get(x)[0], "float64") for x in call.args)
    given = call.keywords
    g = recurrence.log_decay("raw", raw, 2, 128, given["A_log"], given["dt_bias"], given["lower_bound"])
    want, final = recurrence.sequence("kda", recurrence.l2_normalise(q), recurrence.l2_normalise(k), v, g, recurrence.activate_beta("logit", beta),
                                      initial_state=given["state"][0].astype("float64").swapaxes(-1, -2))
    error = lambda got, want: np.linalg.norm(got - want) / np.linalg.norm(want)  # noqa: E731
    assert error(machine.get(out)[0], want) <= 2.5e-3 and error(given["state_out"][0].swapaxes(-1, -2), final) <= 5.4e-7


def test_another_kernel_than_the_machines_is_no_time(small, monkeypatch):
    monkeypatch.setattr(bench, "last_kernels", lambda: ("gla_decode.sm90.bf16.sfp32.k128.vk",))
    row = bench.measure(Problem("gla", 2, (2, 4), "fp32"), SmallCpu(), 1.0)
    assert row["failed"] and "the kernel that ran is gla_decode.sm90" in row["error"]


def test_what_does_not_fit_is_left_out(small, monkeypatch):
    monkeypatch.setattr(SmallCpu, "free_bytes", lambda self: 1 << 20)
    row = bench.measure(Problem("gla", 256, (64, 64), "fp32"), SmallCpu(), 1.0)
    assert "failed" not in row and "left out: needs" in row["error"] and "GB of free memory" in row["error"]
    monkeypatch.undo()
    monkeypatch.setattr(SmallCpu, "can_hold", lambda self, dtype: False)
    assert "ml_dtypes" in bench.measure(Problem("gla", 2, (2, 4), "bf16"), SmallCpu(), 1.0)["error"]


def test_a_refused_call_is_a_failure(small):
    row = bench.measure(Problem("gla", 2, (3, 4), "fp32"), SmallCpu(), 1.0)
    assert row["failed"] and "InvalidArgumentError" in row["error"] and "FAILED" in report.line(row)


# ---------------------------------------------------------------------------------------------------------- the command


def test_the_command_refuses_by_name():
    for words, text in ((("--op", "rwkv"), "allowed: all, kda, gdn, gla, lightning"), (("--device", "tpu"), "allowed: auto, cpu, cuda"),
                        (("--device", "cuda:x"), "allowed: auto, cpu, cuda")):
        done = command(*words)
        assert done.returncode == 2 and text in done.stderr


@pytest.mark.skipif(bool(cula.info()["devices"]), reason="this machine has GPUs")
def test_a_gpu_that_is_not_there():
    done = command("--device", "cuda:3")
    assert done.returncode == 1 and "bench: cuda:3 cannot run: no NVIDIA driver" in done.stderr and "doctor" in done.stderr


def test_without_artifacts(tmp_path):
    done = command("--device", "cpu", CULA_ARTIFACTS=str(tmp_path))
    assert done.returncode == 1 and "no manifest.json there" in done.stderr


# ------------------------------------------------------------------------------------------------------------------ GPU


class Driver:
    """cuda.bindings.driver as far as the benchmark uses it; memory is a dict, an event is the number of the call that recorded it."""

    def __init__(self, real):
        self.real, self.log, self.memory, self.next = real, [], {}, 0x1000
        self.CUstream_flags, self.CUstreamCaptureMode = real.CUstream_flags, real.CUstreamCaptureMode

    def __getattr__(self, name):
        assert hasattr(self.real, name), f"cuda.bindings.driver has no {name}"

        def call(*arguments):
            self.log.append(name)
            return (self.real.CUresult.CUDA_SUCCESS, *self.answer(name, arguments))

        return call

    def answer(self, name, arguments):
        if name == "cuMemAlloc":
            pointer, self.next = self.next, self.next + (arguments[0] + 511) // 512 * 512
            self.memory[pointer] = arguments[0]
            return (pointer,)
        if name == "cuMemFree":
            del self.memory[arguments[0]]
        if name == "cuMemcpyDtoD":
            target, source, size = arguments
            start = max(p for p in self.memory if p <= target)
            assert target + size <= start + self.memory[start] and source + size <= target, "a copy outside its buffer, or onto itself"
        return {"cuMemGetInfo": (8 << 30, 16 << 30), "cuEventElapsedTime": (0.5,), "cuStreamCreate": (7,), "cuEventCreate": (8,),
                "cuStreamEndCapture": ("graph",), "cuGraphInstantiate": ("exec",)}.get(name, ())


@pytest.fixture
def fake(monkeypatch):
    pytest.importorskip("cuda.bindings.driver")
    from contextlib import nullcontext

    from cula.bench import gpu
    from cula_loader import cuda

    driver = Driver(cuda.driver)
    monkeypatch.setattr(gpu, "driver", driver)
    monkeypatch.setattr(cuda, "gpu", lambda ordinal: SimpleNamespace(ordinal=ordinal))
    monkeypatch.setattr(cuda, "context_of", lambda device: nullcontext())
    return driver, gpu.Gpu({"ordinal": 0, "name": "H200", "arch": "sm90"})


def test_time_on_a_gpu_is_that_of_a_replayed_graph(fake):
    driver, gpu = fake
    calls, driver.log[:] = [lambda i=i: driver.log.append(f"call {i}") for i in range(3)], []
    assert gpu.median_us(calls) == pytest.approx(0.5e3 / 3)
    assert driver.log[:9] == ["call 0", "call 1", "cuStreamSynchronize", "cuStreamBeginCapture", "call 0", "call 1", "call 2",
                              "cuStreamEndCapture", "cuGraphInstantiate"]
    one = ["cuMemsetD8Async", "cuEventRecord", "cuGraphLaunch", "cuEventRecord", "cuStreamSynchronize", "cuEventElapsedTime"]
    assert driver.log[9:] == ["cuGraphLaunch"] * 3 + ["cuStreamSynchronize"] + one * 9 + ["cuStreamSynchronize", "cuGraphExecDestroy",
                                                                                         "cuGraphDestroy"]


def test_a_failing_call_ends_the_capture(fake):
    driver, gpu = fake

    def refuses():
        if "cuStreamBeginCapture" in driver.log:
            raise cula.CudaError("no")

    with pytest.raises(cula.CudaError):
        gpu.median_us([refuses])
    assert driver.log[-1] == "cuStreamEndCapture"


def test_copy_rate_and_memory(fake):
    driver, gpu = fake
    held = dict(driver.memory)
    assert gpu.copy_rate() == pytest.approx(2 * (2 << 30) / 0.5 / 1e6) and driver.memory == held
    buffer = gpu.put(np.ones(5, "float32"), (7, 300), "bf16")
    assert driver.memory[buffer.pointer] == 7 * 300 * 2 and buffer.dtype.name == "bfloat16"
    one = gpu.put(np.ones(1, "float32"), (3,), "fp32")
    assert driver.memory[one.pointer] == 12 and one.__cuda_array_interface__["typestr"] == "<f4"
    gpu.release()
    assert driver.memory == held


def test_operands_of_every_op_fit_the_call(fake, monkeypatch):
    """The library plans every call that the benchmark would make on an sm90 GPU."""
    if "sm90" not in cula.info()["artifacts"]["kernels"]:
        pytest.skip("the artifacts have no sm90 kernels")
    from cula.bench import calls

    _, gpu = fake
    gpu.put = lambda values, shape, dtype: cula.Spec(shape, dtype)
    for op, heads in problems.HEADS.items():
        for state in problems.STATE_BYTES:
            call = calls.make(Problem(op, 8, heads[0], state), gpu, 0)
            options = dict(call.run.keywords)
            options.pop("stream")
            needs = cula.query(call.run.func, arch="sm90", **options)
            assert needs.kernels == (f"{op}_decode.sm90.bf16.s{state}.k128.vk",) and needs.workspace_bytes == 0


def test_bits_of_bf16():
    from cula.bench.calls import bf16_bits

    assert bf16_bits(np.array([1.0, -2.0, np.nan], "float32")).tolist()[:2] == [0x3F80, 0xC000]
    assert np.isnan((bf16_bits(np.array([np.nan], "float32")).astype("uint32") << 16).view("float32"))[0]


# ----------------------------------------------------------------------------------------------------------------- plot


def test_the_plot(tmp_path):
    rows = [{"op": op, "state": state, "heads": [4, 8], "n": n, "share": 0.1 * n, "us": 1.0} for op in ("kda", "gdn") for state in ("fp32", "bf16")
            for n in (1, 8)] + [{"op": "gla", "state": "fp32", "heads": [4, 8], "n": 1, "error": "left out"}]
    result = {"version": "0", "machine": "m", "copy_GBs": 1.0, "rows": rows}
    missing = report.plot(result, tmp_path / "x.png")
    if missing:
        assert missing == "matplotlib is not installed" and not (tmp_path / "x.png").exists()
    else:
        assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    assert report.plot(result | {"rows": rows[-1:]}, tmp_path / "y.png") == "nothing was measured"
