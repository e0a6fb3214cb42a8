"""The loader on a GPU with torch: streams, threads, capture, contexts, fork, several devices. Kernel numerics: tests/numerics."""

from __future__ import annotations

import threading
import types

import numpy as np
import pytest
import torch

import cula
from tests.loader.gpu import HV, OPTIONS, K, N, V, check, problem, run_python

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


def on_gpu(rows: dict[str, np.ndarray], device="cuda") -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(x.copy()).to(device) for name, x in rows.items()}


def arch() -> str:
    return {(9, 0): "sm90", (10, 0): "sm100", (10, 3): "sm103", (12, 0): "sm120"}[torch.cuda.get_device_capability()]


def warm() -> None:
    """Loads the kernel, so that a later call is nothing but a launch."""
    cula.kda.kda_decode(**on_gpu(problem()), **OPTIONS)
    torch.cuda.synchronize()


def slept(stream: torch.cuda.Stream) -> None:
    """Keeps the stream busy for about a tenth of a second."""
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)


@pytest.mark.parametrize(("dtype", "limit"), [("float32", 4e-6), ("float16", 4e-4), ("bfloat16", 2.5e-3)])
def test_values_and_kernel(dtype, limit):
    rows = problem("float32")
    given = on_gpu(rows)
    for name in ("q", "k", "v", "gate"):
        given[name] = given[name].to(getattr(torch, dtype))
        rows[name] = given[name].float().cpu().numpy()
    out = cula.kda.kda_decode(**given, **OPTIONS)
    assert out.dtype == getattr(torch, dtype) and out.device == given["v"].device and out.shape == (N, HV, V)
    short = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}[dtype]
    assert cula.last_kernels() == (f"kda_decode.{arch()}.{short}.sfp32.k{K}.vk",)
    check(out.float().cpu(), given["state"].cpu(), rows, limit)


def test_the_slow_reader_launches_the_same(monkeypatch):
    from cula_loader import dispatch

    results = []
    for slow in (False, True):
        if slow:
            monkeypatch.setattr(dispatch, "_bind_objects", lambda *a: 1)
        given = on_gpu(problem())
        results += [cula.kda.kda_decode(**given, **OPTIONS), given["state"]]
    assert torch.equal(results[0], results[2]) and torch.equal(results[1], results[3])


# --------------------------------------------------------------------------------------------------------------- streams


def test_the_current_stream_is_used_and_not_waited_for():
    """Work queued before the call, on the same stream, delays its result; the call returns at once and no other stream is touched."""
    warm()
    rows, stream = problem(), torch.cuda.Stream()
    given = on_gpu(rows)
    out = torch.full((N, HV, V), float("nan"), dtype=torch.float16, device="cuda")
    torch.cuda.synchronize()
    slept(stream)
    with torch.cuda.stream(stream):
        cula.kda.kda_decode(**given, out=out, **OPTIONS)
        assert not stream.query(), "the call waited, or went elsewhere"
    other = torch.cuda.Stream()
    with torch.cuda.stream(other):
        seen = out.clone()
    other.synchronize()
    assert seen.isnan().all(), "the kernel ran before the work that its stream had queued: on another stream"
    stream.synchronize()
    check(out.cpu(), given["state"].cpu(), rows)


@pytest.mark.parametrize("form", ["int", "torch", "protocol"])
def test_an_explicit_stream(form):
    warm()
    rows, stream = problem(), torch.cuda.Stream()
    given = on_gpu(rows)
    out = torch.full((N, HV, V), float("nan"), dtype=torch.float16, device="cuda")
    torch.cuda.synchronize()
    slept(stream)
    argument = {"int": stream.cuda_stream, "torch": stream, "protocol": types.SimpleNamespace(__cuda_stream__=lambda: (0, stream.cuda_stream))}[form]
    cula.kda.kda_decode(**given, out=out, stream=argument, **OPTIONS)
    assert out.isnan().all() and not stream.query()  # read on the current stream, which is another
    stream.synchronize()
    check(out.cpu(), given["state"].cpu(), rows)


def test_many_threads_with_a_stream_each():
    problems = [problem(seed=seed) for seed in range(8)]
    failures, barrier = [], threading.Barrier(len(problems))

    def work(rows):
        try:
            stream = torch.cuda.Stream()
            barrier.wait()
            with torch.no_grad(), torch.cuda.stream(stream):
                for _ in range(25):
                    given = on_gpu(rows)
                    out = cula.kda.kda_decode(**given, **OPTIONS)
                    stream.synchronize()
                    check(out.cpu(), given["state"].cpu(), rows)
        except BaseException as error:  # noqa: BLE001
            failures.append(error)
            barrier.abort()

    threads = [threading.Thread(target=work, args=(rows,)) for rows in problems]
    [t.start() for t in threads], [t.join() for t in threads]
    assert not failures, failures


def test_a_thread_whose_context_was_taken_away():
    """No context is current in the thread; it has none afterwards either."""
    from cuda.bindings import driver

    warm()
    rows = problem()
    given, out, found = on_gpu(rows), torch.empty(N, HV, V, dtype=torch.float16, device="cuda"), []
    torch.cuda.synchronize()

    def work():
        driver.cuCtxSetCurrent(driver.CUcontext(0))
        try:
            cula.kda.kda_decode(**given, out=out, stream=0, **OPTIONS)
            found.append(int(driver.cuCtxGetCurrent()[1]))
        except BaseException as error:  # noqa: BLE001
            found.append(error)

    thread = threading.Thread(target=work)
    thread.start(), thread.join()
    assert found == [0]
    torch.cuda.synchronize()
    check(out.cpu(), given["state"].cpu(), rows)


# --------------------------------------------------------------------------------------------------------------- capture

CAPTURE = """
import sys, threading, torch, cula
from tests.loader.gpu import OPTIONS, check, problem
mode, where = sys.argv[1:]
def on_gpu(rows):
    return {name: torch.from_numpy(x.copy()).cuda() for name, x in rows.items()}
first, second = problem(), problem(seed=1)
given = on_gpu(first)
out = torch.empty(given["v"].shape, dtype=torch.float16, device="cuda")
other = on_gpu(problem(seed=2))
other_out, side = torch.empty_like(out), torch.cuda.Stream()
torch.cuda.synchronize()
graph, failures = torch.cuda.CUDAGraph(), []
with torch.no_grad(), torch.cuda.graph(graph, capture_error_mode=mode):
    if where == "other thread":  # whose stream captures nothing; its first call loads the kernel
        def work():
            try:
                with torch.no_grad(), torch.cuda.stream(side):
                    cula.kda.kda_decode(**other, out=other_out, **OPTIONS)
            except BaseException as error:
                failures.append(error)
        thread = threading.Thread(target=work)
        thread.start(), thread.join()
    cula.kda.kda_decode(**given, out=out, **OPTIONS)
assert not failures, failures
for rows in (first, second):
    for name, x in rows.items():
        given[name].copy_(torch.from_numpy(x))
    graph.replay()
    torch.cuda.synchronize()
    check(out.cpu(), given["state"].cpu(), rows)
if where == "other thread":
    check(other_out.cpu(), other["state"].cpu(), problem(seed=2))
print("done")
"""


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_the_first_call_of_a_process_inside_a_capture(mode):
    """The kernel is loaded while the stream captures; replays read new contents of the same buffers."""
    assert "done" in run_python(CAPTURE, mode, "this thread")


def test_a_first_call_while_another_thread_captures():
    assert "done" in run_python(CAPTURE, "global", "other thread")


# ----------------------------------------------------------------------------------------------- prepare, fork, devices


def test_nothing_is_loaded_after_prepare(monkeypatch):
    from cula_loader import cuda
    from cula_loader.library import library

    cula.prepare(torch.cuda.current_device())
    cula.prepare(torch.cuda.current_device())
    lib = library()
    assert sum(lib.kernel(i).arch == arch() for i in range(lib.kernel_count)) == len(cuda.gpus[torch.cuda.current_device()].functions)
    monkeypatch.setattr(cuda, "_load", lambda *a: pytest.fail("a kernel was loaded"))
    warm()
    cula.norm.l2norm(torch.ones(3, 64, device="cuda"))


FORK = """
import os, numpy, torch, cula
x = torch.ones(3, 64, device="cuda")
with torch.no_grad():
    cula.norm.l2norm(x)
torch.cuda.synchronize()
child = os.fork()
if child == 0:
    code = 1
    try:
        try:
            cula.norm.l2norm(x, out=x)
        except cula.CudaError as error:
            assert "CUDA does not survive a fork" in str(error), error
            y = cula.norm.l2norm(numpy.ones((3, 64), "float32"))
            code = 0 if abs(float(y[0, 0]) - 0.125) < 1e-6 else 2
    finally:
        os._exit(code)
assert os.waitpid(child, 0)[1] == 0
assert abs(float(cula.norm.l2norm(x)[0, 0]) - 0.125) < 1e-6
print("done")
"""


def test_a_forked_child():
    assert "done" in run_python(FORK)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_the_device_of_the_tensors_counts():
    """Device 0 is current, the tensors are on device 1: the call goes there, and device 0 stays current."""
    rows = problem()
    with torch.cuda.device(0):
        for device in (1, 0, 1):
            given = on_gpu(rows, f"cuda:{device}")
            out = cula.kda.kda_decode(**given, **OPTIONS)
            assert torch.cuda.current_device() == 0 and out.device.index == device
            torch.cuda.synchronize(device)
            check(out.cpu(), given["state"].cpu(), rows)
    mixed = {**on_gpu(rows, "cuda:1"), "beta": torch.from_numpy(rows["beta"]).to("cuda:0")}
    with pytest.raises(cula.InvalidArgumentError, match="one device"):
        cula.kda.kda_decode(**mixed, **OPTIONS)


# -------------------------------------------------------------------------------------------------------------- refusals


def test_refusals_launch_nothing():
    rows = problem()
    given = on_gpu(rows)
    with pytest.raises(cula.InvalidArgumentError, match="one device"):
        cula.kda.kda_decode(**{**given, "read_index": torch.from_numpy(rows["read_index"])}, **OPTIONS)
    with pytest.raises(cula.InvalidArgumentError, match="beta"):
        cula.kda.kda_decode(**{**given, "beta": given["beta"][:2]}, **OPTIONS)
    with torch.enable_grad(), pytest.raises(cula.UnsupportedError, match="A_log: requires grad"):
        cula.kda.kda_decode(**{**given, "A_log": given["A_log"].requires_grad_()}, **OPTIONS)
    with pytest.raises(cula.InvalidArgumentError, match="num_threads"):
        cula.kda.kda_decode(**given, **OPTIONS, num_threads=2)
    assert cula.last_kernels() == ()
    torch.cuda.synchronize()
    assert np.array_equal(given["state"].cpu(), rows["state"])


def test_empty_calls():
    given = {name: x[:0] if x.shape[0] == N else x for name, x in on_gpu(problem()).items()}
    out = cula.kda.kda_decode(**given, **OPTIONS)
    assert out.shape == (0, HV, V) and cula.last_kernels() == ()
