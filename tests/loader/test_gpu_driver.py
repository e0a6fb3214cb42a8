"""What the driver says of every kernel of this GPU's arch, against the manifest; and of the launch config that libcula.so fills."""

from __future__ import annotations

import ctypes
import json

import numpy as np
import pytest

import cula
from cula_loader import abi, artifacts

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def prepared():
    cula.prepare(0)
    from cula_loader import cuda

    with cuda.context_of(cuda.gpu(0)):
        yield cuda


def test_resources(prepared):
    from cula_loader.library import library

    lib = library()
    manifest = {k["id"]: k for k in json.loads((artifacts.find() / "manifest.json").read_text())["kernels"]}
    attribute = prepared.driver.CUfunction_attribute
    device, wrong = prepared.gpus[0].device, []
    for index, function in prepared.gpus[0].functions.items():
        info = lib.kernel(index)
        kernel = prepared.driver.CUkernel(int(function))
        ask = lambda which, kernel=kernel: prepared.check(prepared.driver.cuKernelGetAttribute(which, kernel, device), "cuKernelGetAttribute")
        entry = manifest[info.id]
        found = dict(registers=ask(attribute.CU_FUNC_ATTRIBUTE_NUM_REGS), local_bytes=ask(attribute.CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES),
                     block=ask(attribute.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK) >= np.prod(entry["launch"]["block"]))
        told = dict(registers=entry["resources"]["registers"], local_bytes=entry["resources"]["local_bytes"], block=True)
        if found != told:
            wrong.append((info.id, found, told))
    assert not wrong, wrong[:5]
    assert len(prepared.gpus[0].functions) == sum(k["arch"] == lib.kernel(next(iter(prepared.gpus[0].functions))).arch for k in manifest.values())


def test_the_launch_config_is_the_drivers(prepared):
    """cuda.bindings' CUlaunchConfig over the memory that libcula.so fills reads the same values, field by field."""
    launches = abi.new(abi.Launches)
    config = launches.launch[0].config
    config.grid[:], config.block[:], config.dynamic_smem, config.stream = (5, 6, 7), (128, 2, 1), 99, 0x1234
    attributes = launches.launch[0].attributes
    attributes[0].id, attributes[0].value.i32[0] = 6, 1
    config.attributes, config.attribute_count = ctypes.addressof(attributes), 1
    seen = prepared.driver.CUlaunchConfig(_ptr=ctypes.addressof(config))
    assert (seen.gridDimX, seen.gridDimY, seen.gridDimZ, seen.blockDimX, seen.blockDimY, seen.blockDimZ) == (5, 6, 7, 128, 2, 1)
    assert (seen.sharedMemBytes, int(seen.hStream), seen.numAttrs, seen.getPtr()) == (99, 0x1234, 1, ctypes.addressof(config))
    attribute = prepared.driver.CUlaunchAttribute(_ptr=ctypes.addressof(attributes))
    assert int(attribute.id) == int(prepared.driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION)
    assert attribute.value.programmaticStreamSerializationAllowed == 1
