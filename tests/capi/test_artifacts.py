"""The library that was built: every kernel of the manifest is reached by a plan, with the block and the parameters that it was
compiled for. (`make test` runs after `make artifacts`; build_kernels.py verify checks the files themselves.)"""

import ctypes
import json

import pytest

from tests.capi import abi, standin
from tests.capi.abi import CPU, GPU, OK, tensor
from tests.capi.calls import decode, gate, l2norm, prefill
from tests.capi.test_decode_rules import with_

ARTIFACTS = standin.ROOT / "artifacts"
pytestmark = pytest.mark.skipif(not (ARTIFACTS / "manifest.json").exists(), reason="no artifacts/: run `make artifacts`")


@pytest.fixture(scope="module")
def built():
    return abi.load(ARTIFACTS / "lib/libcula.so")


@pytest.fixture(scope="module")
def kernels():
    entries = json.loads((ARTIFACTS / "manifest.json").read_text())["kernels"]
    return [k for k in entries if k["op"] in abi.OPS]


def call_for(k):
    device = (CPU if k["arch"] == "cpu" else GPU, 0)
    if k["family"] == "decode":
        return decode(k["op"], io=k["io"], state=k["state"], layout=k["layout"], k=k["k"], v=64, device=device)
    if k["op"] == "kda_prefill" and k["arch"] == "cpu":
        return prefill(io=k["io"], state=k["state"], layout=k["layout"], k=k["k"], v=64, device=device)
    if k["op"] == "kda_prefill":  # with two segments every kernel has a part
        io = "bf16" if k["variant"] == "carry" else k["io"]
        gate_dtype = "fp32" if k["variant"] == "prep_gf32" else "fp16"
        call = prefill(io=io, state=k["state"] or "fp32", layout=k["layout"] or "vk", gate_dtype=gate_dtype, segments=2, device=device)
        if k["variant"] == "state_checkpoints":
            call.args.checkpoint_interval = 64
            call = with_(call, checkpoints=tensor([9, 4, 128, 128], k["state"], device=device), checkpoint_index=tensor([2, 1], "i32", device=device))
        return call
    if k["op"] == "l2norm":
        return l2norm(io=k["io"], device=device)
    return gate(k["op"], (5, 4, 128) if k["op"] == "kda_gate" else (5, 64), io=k["io"], device=device)


def test_every_kernel_is_reached(built, kernels):
    for k in kernels:
        status, r = call_for(k).query(built, k["arch"])
        assert status == OK, abi.last_error(built)
        assert k["id"] in [abi.kernel_id(built, index) for index in r.kernels[: r.launch_count]]


def test_plans_fit_the_compiled_kernels(built, kernels):
    """Block, shared memory, and the size of every parameter, against what was read back from the cubin."""
    checked = 0
    for k in kernels:
        if k["arch"] == "cpu":
            continue
        status, b = call_for(k).bind(built, k["arch"], workspace=0x1000, bytes=1 << 30)
        assert status == OK
        (launch,) = [launch for launch in b.launch[: b.count] if abi.kernel_id(built, launch.kernel) == k["id"]]
        assert list(launch.config.block) == k["launch"]["block"]
        assert launch.config.dynamic_smem <= k["launch"]["max_dynamic_smem"]
        names = standin.params(standin.family_of(k["id"]))
        assert [(p["name"], p["kind"], p["size"]) for p in k["params"]] == [(name, kind, standin.KIND_SIZE[kind]) for name, kind in names]
        desc = abi.sized(abi.KernelDesc)
        built.cula_kernel_info(launch.kernel, ctypes.byref(desc))
        assert (desc.max_dynamic_smem, desc.smem_carveout) == (k["launch"]["max_dynamic_smem"], k["launch"]["smem_carveout"])
        assert desc.param_sizes[: desc.param_count] == [p["size"] for p in k["params"]] and launch.param_count == len(names)
        checked += 1
    assert checked > 0 or all(k["arch"] == "cpu" for k in kernels)


def test_library_is_built_from_this_header(built):
    assert (ARTIFACTS / "include/cula.h").read_bytes() == (standin.ROOT / "aot/capi/include/cula.h").read_bytes()
    info = json.loads(built.cula_build_info())
    assert info["kernel_count"] == built.cula_kernel_count() and "cpu" in info["archs"]
