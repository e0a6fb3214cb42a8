"""Cases of test_fake_gpu.py: python -m tests.loader.fake_gpu_cases <driver> <folder> runs each in a forked child, prints JSON.

Forked, because the driver is opened once a process and importing torch takes seconds.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import threading
import traceback
from pathlib import Path

from tests.loader import fake_gpu

N, H, K, V = 3, 2, 64, 64
GPU: fake_gpu.FakeGpu


def raises(kind, text, function, *args, **kw):
    try:
        function(*args, **kw)
    except kind as error:
        assert text in str(error), f"{error!s} lacks {text!r}"
        return error
    raise AssertionError(f"no {kind.__name__}")


def setup(op="kda_decode"):
    """The fake GPU, and operands of a KDA decode on it."""
    import torch

    from cula_loader.library import library

    gpu, lib = GPU, library()
    kernels = [lib.kernel(i) for i in range(lib.kernel_count)]
    gpu.set_param_sizes(next(k for k in kernels if k.arch == "sm90" and k.op == op).param_sizes)
    make = lambda *shape: gpu.tensor(torch.zeros(shape, dtype=torch.bfloat16))  # noqa: E731
    rows = dict(q=make(N, H, K), k=make(N, H, K), v=make(N, H, V), out=make(N, H, V), beta=make(N, H), gate=make(N, H, K),
                state=gpu.tensor(torch.zeros(N, H, V, K)), gate_kind="raw")
    return gpu, rows


def parameters(gpu):
    """The last launch's parameters by name."""
    import re

    text = Path(__file__).parents[2].joinpath("aot/ops/decode/params.def").read_text()
    names = re.findall(r"^CULA_PARAM\(\w+, (\w+)\)", text, re.M)
    return dict(zip(names, gpu.launches()[-1].params))


def case_a_launch_has_the_plans_config_and_parameters():
    gpu, rows = setup()
    gpu.make_current(0)
    gpu.set(current_stream=0x777)
    import cula

    out = cula.kda.kda_decode(**rows)
    assert out is rows["out"]
    assert cula.last_kernels() == ("kda_decode.sm90.bf16.sfp32.k64.vk",)
    launch, = gpu.launches()
    got = parameters(gpu)
    assert got["q"] == rows["q"].data_ptr() and got["state_out"] == rows["state"].data_ptr() and got["n"] == N and got["hv"] == H
    assert launch.stream == 0x777 and launch.device == 0
    assert launch.attribute_count == 1 and launch.attribute_id == 6 and launch.attribute_value == 1, "programmatic stream serialization"
    assert list(launch.block)[1:] == [1, 1] and launch.block[0] % 32 == 0 and launch.grid[0] > 0


def case_a_kernel_is_loaded_once_and_checked_against_its_hash():
    gpu, rows = setup()
    gpu.make_current(0)
    import cula

    for _ in range(3):
        cula.kda.kda_decode(**rows)
    assert (gpu.load_count, gpu.launch_count, gpu.function_count) == (1, 3, 1)
    cula.kda.kda_decode(**{**rows, "gate_kind": "log"})
    assert gpu.load_count == 1, "gate forms are modes of one kernel"
    cula.kda.kda_decode(**{**rows, "state_layout": "kv"})
    assert gpu.load_count == 2


def case_options_are_not_mixed_up_between_calls():
    """Option sets are kept; a call must get its own, whatever came before."""
    gpu, rows = setup()
    gpu.make_current(0)
    import struct

    import cula

    for scale in (None, 0.0, 1.0, None, 0.25, 0.0, *[1 / i for i in range(2, 90)], None):
        cula.kda.kda_decode(**rows, scale=scale)
        got = struct.unpack("f", struct.pack("I", parameters(gpu)["scale"] & 0xFFFFFFFF))[0] if gpu.launch_count <= 64 else None
        if got is not None:
            assert got == struct.unpack("f", struct.pack("f", K**-0.5 if scale is None else scale))[0], scale


def case_absent_operands_do_not_stay():
    """The args struct is kept between calls: an operand that the last call had and this one has not must be gone."""
    gpu, rows = setup()
    gpu.make_current(0)
    import torch

    import cula

    cula.kda.kda_decode(**rows, A_log=gpu.tensor(torch.zeros(H)), read_index=gpu.tensor(torch.zeros(N, dtype=torch.int32)))
    assert parameters(gpu)["a_log"] and parameters(gpu)["read_index"]
    cula.kda.kda_decode(**rows)
    assert not parameters(gpu)["a_log"] and not parameters(gpu)["read_index"]


def case_an_explicit_stream_wins():
    gpu, rows = setup()
    gpu.make_current(0)
    gpu.set(current_stream=0x777)
    import types

    import cula

    for stream, handle in ((0, 0), (0x99, 0x99), (types.SimpleNamespace(__cuda_stream__=lambda: (0, 0x88)), 0x88), (None, 0x777)):
        cula.kda.kda_decode(**rows, stream=stream)
        assert gpu.launches()[-1].stream == handle


def case_without_a_current_context_the_primary_one_is_used_and_put_back():
    """A new thread has none. The launch fails first, and is done again."""
    gpu, rows = setup()
    import cula

    assert gpu.context() == 0
    for _ in range(2):
        cula.kda.kda_decode(**rows)
        assert gpu.context() == 0 and gpu.launches()[-1].device == 0
    assert gpu.launch_count == 2


def case_the_device_of_the_tensors_counts_not_the_current_one():
    gpu, rows = setup()
    gpu.set(device_count=2, tensor_device=1)
    gpu.make_current(0)
    import cula

    for _ in range(2):
        cula.kda.kda_decode(**rows)
        assert gpu.launches()[-1].device == 1
        assert gpu.context() == 1, "device 0 is current again"
    gpu.set(tensor_device=0, context_sets=0)
    cula.kda.kda_decode(**rows)
    assert gpu.launches()[-1].device == 0 and gpu.context_sets == 0, "no switch where none is needed"
    assert gpu.load_count == 1 and gpu.function_count == 2, "one load for both devices, one function each"


def case_a_first_call_under_a_capture():
    """Another thread captures in global mode: loading is legal in relaxed mode only, and the mode is put back."""
    import ctypes

    gpu, rows = setup()
    gpu.make_current(0)
    gpu.set(capturing=1)
    import cula

    cula.kda.kda_decode(**rows)
    mode = ctypes.c_int(2)
    gpu.c.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    assert gpu.load_count == 1 and mode.value == 0


def case_threads_load_once_and_launch_their_own():
    gpu, rows = setup()
    import cula

    failures, barrier = [], threading.Barrier(8)

    def work(i):
        try:
            gpu.make_current(0)
            barrier.wait()
            for _ in range(5):
                cula.kda.kda_decode(**rows, stream=1000 + i)
            assert len(cula.last_kernels()) == 1
        except BaseException as error:  # noqa: BLE001
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    [t.start() for t in threads], [t.join() for t in threads]
    assert not failures, failures
    assert gpu.load_count == 1 and gpu.launch_count == 40
    streams = [launch.stream for launch in gpu.launches()]
    assert all(streams.count(1000 + i) == 5 for i in range(8))
    assert cula.last_kernels() == (), "another thread's calls are not this one's"


def case_prepare_loads_everything_for_the_arch():
    gpu, rows = setup()
    gpu.make_current(0)
    import cula
    from cula_loader.library import library

    lib = library()
    gate_ops = [k for k in (lib.kernel(i) for i in range(lib.kernel_count)) if k.arch == "sm90" and len(k.param_sizes) != gpu.param_count]
    try:
        cula.prepare(0)
    except cula.ArtifactError:
        assert gate_ops, "one set of sizes in the fake: kernels of other families do not fit it"
    from cula_loader import cuda

    cuda._check_parameters = lambda info, kernel: None
    cula.prepare(0)
    count = sum(lib.kernel(i).arch == "sm90" for i in range(lib.kernel_count))
    assert len(set(gpu.loaded())) == min(count, len(set(gpu.loaded()))) and len(cuda.gpus[0].functions) == count
    before = gpu.load_count
    cula.prepare(0), cula.kda.kda_decode(**rows)
    assert gpu.load_count == before, "nothing is loaded after prepare"


def case_prepare_refuses_what_is_not_there():
    gpu, _ = setup()
    import cula

    raises(cula.CudaError, "there is no CUDA device 1: the process sees 1", cula.prepare, 1)
    raises(cula.InvalidArgumentError, "prepare: device='cuda'", cula.prepare, "cuda")
    gpu.set(compute_capability=120)
    if "sm120" not in cula.info()["artifacts"]["kernels"]:
        raises(cula.UnsupportedError, "needs sm120 kernels", cula.prepare, 0)
    gpu.set(compute_capability=89)
    raises(cula.UnsupportedError, "compute capability 8.9) is of no arch", cula.prepare, 0)


def prefill(tokens=100):
    """The fake GPU, and operands of a KDA prefill on it. Parameters of its kernels differ, so that only their first nine, all pointers, are kept."""
    import torch

    from cula_loader import cuda

    gpu = GPU
    cuda._check_parameters = lambda info, kernel: None
    gpu.set_param_sizes([8] * 9)
    gpu.make_current(0)
    gpu.set(current_stream=0x777)
    make = lambda *shape, dtype=torch.bfloat16: gpu.tensor(torch.zeros(shape, dtype=dtype))  # noqa: E731
    call = dict(q=make(1, tokens, 2, 128), k=make(1, tokens, 2, 128), v=make(1, tokens, 4, 128), gate=make(1, tokens, 4, 128), beta=make(1, tokens, 4),
                out=make(1, tokens, 4, 128), gate_kind="log")
    return gpu, call


def case_prefill_launches_its_kernels_in_order_with_memory_of_their_own():
    gpu, call = prefill()
    import cula

    assert cula.kda.kda_prefill(**call) is call["out"]
    assert cula.last_kernels() == ("kda_prefill.sm90.bf16.k128.v128.prep", "kda_prefill.sm90.bf16.sfp32.k128.v128.vk.state")
    prep, state = gpu.launches()
    assert prep.stream == state.stream == 0x777
    assert (prep.attribute_count, state.attribute_count, state.attribute_id, state.attribute_value) == (0, 1, 6, 1), "prep waits, state overlaps it"
    assert (prep.grid[0], prep.block[0], prep.dynamic_smem) == (4 * 4, 256, 60464) and (state.grid[0], state.block[0], state.dynamic_smem) == (8, 128, 107648)
    records, flags = prep.params[7], prep.params[8]
    assert (state.params[0], state.params[1]) == (records, flags) and records % 128 == 0 and flags - records == 16 * 29184
    assert state.params[3] == call["v"].data_ptr() and state.params[4] == call["out"].data_ptr() and prep.params[0] == call["q"].data_ptr()
    log = gpu.memory_log()
    assert log == [f"attribute {a} = {v} on 0" for v, a in ((60464, 8), (100, 9), (107648, 8), (100, 9))], "torch's memory, no other"
    needs = cula.query(cula.kda.kda_prefill, **call)
    assert needs.workspace_align == 128 and needs.workspace_bytes == 16 * 29184 + 128


def case_memory_on_a_stream_of_the_caller_is_taken_and_given_back_in_its_order():
    gpu, call = prefill()
    import cula

    cula.kda.kda_prefill(**call)
    gpu.memory_log()
    size = cula.query(cula.kda.kda_prefill, **call).workspace_bytes + 127
    cula.kda.kda_prefill(**call, stream=0x99)
    assert gpu.memory_log() == ["pool on 0", "pool 77 attribute 4 = ffffffffffffffff", f"2: take {size} of pool 77 on 99, device 0", "4: give back on 99, device 0"]
    assert [launch.stream for launch in gpu.launches()[2:]] == [0x99, 0x99]
    cula.kda.kda_prefill(**call, stream=0x777)
    assert not gpu.memory_log(), "the stream that torch works on: torch's memory"
    cula.kda.kda_prefill(**call, stream=0)
    assert gpu.memory_log() == [f"6: take {size} of pool 77 on 0, device 0", "8: give back on 0, device 0"]


def case_a_prefill_that_fails_gives_its_memory_back():
    gpu, call = prefill()
    import torch

    import cula

    gpu.set(launch_result=719)
    raises(cula.CudaError, "kda_prefill.sm90.bf16.k128.v128.prep: cuLaunchKernelEx", cula.kda.kda_prefill, **call, stream=0x99)
    assert [line.split()[1] for line in gpu.memory_log() if " device 0" in line] == ["take", "give"]
    gpu.set(launch_result=0, allocation_result=2)
    raises(cula.CudaError, "cuMemAllocFromPoolAsync of", cula.kda.kda_prefill, **call, stream=0x99)
    assert not gpu.memory_log() and cula.last_kernels() == ()
    gpu.set(allocation_result=0)
    b, t, hv, _ = call["v"].shape
    narrow = {name: gpu.tensor(torch.zeros(b, t, hv, 64, dtype=torch.bfloat16)) for name in ("q", "k", "v", "gate", "out")}
    raises(cula.UnsupportedError, "head_dim_k is 64 and head_dim_v 64", cula.kda.kda_prefill, **call | narrow)
    assert not gpu.memory_log()


def case_a_first_prefill_under_a_capture():
    """Making the pool is no call for a captured stream either."""
    gpu, call = prefill()
    gpu.set(capturing=1)
    import cula

    cula.kda.kda_prefill(**call, stream=0x99)
    assert "pool on 0" in gpu.memory_log() and gpu.launch_count == 2


def case_prefill_without_tokens_takes_no_memory():
    gpu, call = prefill()
    import torch

    import cula

    empty = {name: gpu.tensor(x[:, :0]) if hasattr(x, "shape") else x for name, x in call.items()}
    cula.kda.kda_prefill(**empty, stream=0x99)
    assert not gpu.launch_count and not gpu.memory_log()
    states = gpu.tensor(torch.zeros(1, 4, 128, 128))
    cula.kda.kda_prefill(**empty, state_out=states, stream=0x99)
    assert gpu.launch_count == 1 and cula.last_kernels() == ("kda_prefill.sm90.bf16.sfp32.k128.v128.vk.state",)
    assert not [line for line in gpu.memory_log() if "take" in line]


def case_a_gpu_of_no_arch():
    gpu, rows = setup()
    gpu.make_current(0)
    gpu.set(compute_capability=80)
    import cula

    raises(cula.UnsupportedError, "8.0", cula.kda.kda_decode, **rows)
    assert cula.info()["devices"][0]["problem"].startswith("no arch of cula has its compute capability")


def case_info_names_the_reason_for_each_gpu():
    gpu, _ = setup()
    gpu.set(device_count=2)
    import cula

    facts = cula.info()
    assert [d["name"] for d in facts["devices"]] == ["Fake GPU 0", "Fake GPU 1"] and facts["driver"]["cuda"] == "13.0"
    assert all(d["problem"] == "" and d["arch"] == "sm90" for d in facts["devices"])
    gpu.set(driver_version=12040)
    assert "driver is for CUDA 12.4, the kernels were made with CUDA 13" in cula.info()["devices"][0]["problem"]
    gpu.set(compute_capability=120)
    if "sm120" not in facts["artifacts"]["kernels"]:
        assert "make artifacts ARCH=sm120" in cula.info()["devices"][0]["problem"]


def case_a_failing_launch_is_an_error_once():
    gpu, rows = setup()
    gpu.make_current(0)
    import cula

    cula.kda.kda_decode(**rows)
    gpu.set(launch_result=719)
    error = raises(cula.CudaError, "kda_decode.sm90.bf16.sfp32.k64.vk: cuLaunchKernelEx: CUDA_ERROR_LAUNCH_FAILED (719): unspecified launch failure",
                   cula.kda.kda_decode, **rows)
    assert error.status == "CULA_ERR_CUDA" and isinstance(error, RuntimeError)
    assert cula.last_kernels() == ()
    gpu.set(launch_result=0)
    cula.kda.kda_decode(**rows)
    assert gpu.launch_count == 2 and len(cula.last_kernels()) == 1


def _copied_artifacts() -> Path:
    folder = Path(tempfile.mkdtemp(dir=sys.argv[2])) / "artifacts"
    shutil.copytree(os.environ["CULA_ARTIFACTS"], folder)
    os.environ["CULA_ARTIFACTS"] = str(folder)
    return folder


def case_a_damaged_cubin_is_refused():
    folder = _copied_artifacts()
    gpu, rows = setup()
    gpu.make_current(0)
    import cula

    path = folder / "sm90" / "kda_decode" / "kda_decode.sm90.bf16.sfp32.k64.vk.cubin"
    good = path.read_bytes()
    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    raises(cula.ArtifactError, "sha256", cula.kda.kda_decode, **rows)
    path.unlink()
    raises(cula.ArtifactError, "No such file", cula.kda.kda_decode, **rows)
    path.write_bytes(good)
    cula.kda.kda_decode(**rows)
    assert gpu.launch_count == 1


def case_a_manifest_of_another_build_is_refused():
    folder = _copied_artifacts()
    manifest = json.loads((folder / "manifest.json").read_text())
    entry = next(k for k in manifest["kernels"] if k["id"] == "kda_decode.sm90.bf16.sfp32.k64.vk")
    entry["params"].pop()
    manifest["kernels"] = [k for k in manifest["kernels"] if k["id"] != "kda_decode.sm90.bf16.sfp32.k128.vk"]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    gpu, rows = setup()
    gpu.make_current(0)
    import torch

    import cula

    raises(cula.ArtifactError, "disagree", cula.kda.kda_decode, **rows)
    wide = {n: gpu.tensor(torch.zeros(*x.shape[:-1], 128, dtype=x.dtype)) if n in ("q", "k", "gate", "state") else x for n, x in rows.items()}
    raises(cula.ArtifactError, "has no kernel kda_decode.sm90.bf16.sfp32.k128.vk", cula.kda.kda_decode, **wide)


def case_parameters_of_the_cubin_are_checked():
    gpu, rows = setup()
    gpu.make_current(0)
    import cula

    count = gpu.param_count
    gpu.set(param_count=count - 1)
    raises(cula.CudaError, f"cuKernelGetParamInfo({count - 1})", cula.kda.kda_decode, **rows)
    gpu.set(param_count=count + 1)
    raises(cula.ArtifactError, "more than the plan's", cula.kda.kda_decode, **rows)
    gpu.set_param_sizes([2] * count)
    raises(cula.ArtifactError, "parameter 0 has 2 bytes in the cubin, 8 in the plan", cula.kda.kda_decode, **rows)
    assert gpu.launch_count == 0


def case_a_forked_child_gets_a_clear_error_and_can_use_the_cpu():
    gpu, rows = setup()
    gpu.make_current(0)
    import torch

    import cula

    cula.kda.kda_decode(**rows)
    cpu = {n: torch.ones(x.shape, dtype=x.dtype) if isinstance(x, torch.Tensor) else x for n, x in rows.items()}
    expected = cula.kda.kda_decode(**{n: x.clone() if isinstance(x, torch.Tensor) else x for n, x in cpu.items()}, num_threads=1)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            raises(cula.CudaError, "CUDA does not survive a fork", cula.kda.kda_decode, **rows)
            raises(cula.CudaError, "CUDA does not survive a fork", cula.prepare, 0)
            assert torch.equal(cula.kda.kda_decode(**cpu, num_threads=1), expected)
            assert cula.last_kernels() == ("kda_decode.cpu.bf16.sfp32.k64.vk",)
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    cula.kda.kda_decode(**rows)
    assert gpu.launch_count == 2


def case_a_fork_before_the_first_gpu_call_is_fine():
    gpu, rows = setup()
    import cula

    cula.info()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            cula.kda.kda_decode(**rows)
            code = 0 if gpu.launch_count == 1 else 2
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0


def case_a_call_inside_a_call():
    """A finaliser or signal handler that runs between planning and launch must not disturb the outer call."""
    gpu, rows = setup()
    gpu.make_current(0)
    import torch

    import cula
    from cula_loader import cuda, dispatch

    cula.kda.kda_decode(**rows)
    real, inner = dispatch._launch_kernel, {**rows, "q": gpu.tensor(torch.zeros_like(torch.zeros(N, H, K, dtype=torch.bfloat16)))}

    def interrupted(*args):
        dispatch._launch_kernel = real
        cula.kda.kda_decode(**inner, stream=5)
        return real(*args)

    dispatch._launch_kernel = interrupted
    cula.kda.kda_decode(**rows, stream=4)
    first, nested, outer = gpu.launches()
    assert (nested.stream, outer.stream) == (5, 4)
    assert (nested.params[0], outer.params[0]) == (inner["q"].data_ptr(), rows["q"].data_ptr())
    assert cuda.gpus[0].sole


class Buffer:
    """__cuda_array_interface__ and nothing else."""

    def __init__(self, shape, typestr, pointer=1 << 20, **more):
        self.shape = shape
        self.__cuda_array_interface__ = {"version": 3, "shape": shape, "typestr": typestr, "data": (pointer, False), "strides": None} | more


def _buffers(**more):
    rows = dict(q=((N, H, K), "<f2"), k=((N, H, K), "<f2"), v=((N, H, V), "<f2"), out=((N, H, V), "<f2"), beta=((N, H), "<f4"),
                state=((N, H, V, K), "<f4"))
    return {name: Buffer(shape, typestr, (i + 1) << 24, **more) for i, (name, (shape, typestr)) in enumerate(rows.items())}


def case_bare_buffers_without_a_framework():
    gpu, _ = setup()
    gpu.make_current(0)
    import cula

    rows = _buffers()
    raises(cula.InvalidArgumentError, "pass stream=", cula.kda.kda_decode, **rows)
    cula.kda.kda_decode(**rows, stream=7)
    assert gpu.launches()[-1].stream == 7 and parameters(gpu)["k"] == 2 << 24
    cula.kda.kda_decode(**_buffers(stream=9))
    assert gpu.launches()[-1].stream == 9, "the stream that the interface names"
    raises(cula.InvalidArgumentError, "differ: q (cuda_array) 0x5", cula.kda.kda_decode, **{**_buffers(stream=9), "q": Buffer((N, H, K), "<f2", stream=5)})
    del rows["out"]
    raises(cula.InvalidArgumentError, "offers no allocator that cula knows; pass out=", cula.kda.kda_decode, **rows, stream=7)
    rows = _buffers()
    rows["k"] = Buffer((N, H, K), "<f2", 0xDEAD)
    raises(cula.InvalidArgumentError, "kda_decode: k: address 0xdead is no memory that CUDA knows", cula.kda.kda_decode, **rows, stream=7)
    rows["k"] = Buffer((N, H, K), "<f2", 0xB057)
    raises(cula.InvalidArgumentError, "kda_decode: k is on", cula.kda.kda_decode, **rows, stream=7)


def case_frameworks_may_be_mixed():
    gpu, rows = setup()
    gpu.make_current(0)
    gpu.set(current_stream=0x777)
    import cula

    cula.kda.kda_decode(**{**rows, "beta": Buffer((N, H), "<f4")})
    assert gpu.launches()[-1].stream == 0x777 and parameters(gpu)["beta"] == 1 << 20


def case_cpu_and_gpu_operands_are_refused_by_name():
    gpu, rows = setup()
    gpu.make_current(0)
    import torch

    import cula

    for name in ("beta", "state", "q"):  # a plain out would be read by torch's own API, for which all of these are on the CPU
        raises(cula.InvalidArgumentError, "all tensors of a call must be on one device", cula.kda.kda_decode,
               **{**rows, name: torch.zeros(rows[name].shape, dtype=rows[name].dtype)})
    assert gpu.launch_count == 0


def case_nothing_to_do_launches_nothing():
    gpu, rows = setup()
    gpu.make_current(0)
    import cula

    empty = {n: x[:0] if n not in ("gate_kind",) else x for n, x in rows.items()}
    cula.kda.kda_decode(**empty)
    assert gpu.launch_count == 0 and gpu.load_count == 0 and cula.last_kernels() == ()


def case_gradients_are_refused():
    gpu, rows = setup()
    gpu.make_current(0)
    import torch

    import cula

    gated = {**rows, "A_log": gpu.tensor(torch.zeros(H)).requires_grad_()}
    error = raises(cula.UnsupportedError, "kda_decode: A_log: requires grad, and cula's kernels are forward only", cula.kda.kda_decode, **gated)
    assert isinstance(error, NotImplementedError)
    with torch.no_grad():
        cula.kda.kda_decode(**gated)
    assert gpu.launch_count == 1


def case_importing_opens_no_driver():
    gpu = GPU
    before = gpu.init_count  # torch may ask whether there is a GPU
    import cula

    assert gpu.init_count == before
    cula.query(cula.kda.kda_decode, q=cula.Spec((1, 1, 64), "bf16"), k=cula.Spec((1, 1, 64), "bf16"), v=cula.Spec((1, 1, 64), "bf16"),
               beta=cula.Spec((1, 1), "fp32"), arch="sm90")
    assert gpu.init_count == before


def run_forked(case) -> str:
    """The traceback of a case that failed, "" else."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        text = ""
        try:
            case()
        except BaseException:  # noqa: BLE001  reported by the parent
            text = traceback.format_exc()
        os.write(write, text.encode()[-60000:])
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    status = os.waitpid(child, 0)[1]
    return text or (f"ended with wait status {status}" if status else "")


if __name__ == "__main__":
    GPU = fake_gpu.install(Path(sys.argv[1]))
    import torch

    torch.set_num_threads(1)  # its pool would not survive the forks
    print(json.dumps({name: run_forked(case) for name, case in list(globals().items()) if name.startswith("case_")}))
