"""Kernels of the product, compiled here for every arch: the ones with the most registers, and one of each CUDA C++ op."""

from __future__ import annotations

import pytest

from aot.archs import ARCHS
from aot.build import lint, sass
from aot.build.built import KernelKeys, gpu_kernel
from aot.build.cache import Cache
from aot.build.job import Job
from aot.build.params import read_params
from aot.build.scheduler import run_jobs
from aot.matrix import ROOT, expand_all

SPECS = [
    spec
    for spec in expand_all().specs
    if spec.is_gpu
    and (
        (spec.family == "decode" and (spec.op, spec.io, spec.k) in {("kda_decode", "bf16", 256), ("lightning_decode", "fp32", 64)})
        or (spec.family == "gates" and spec.io == "bf16" and (spec.op == "l2norm" or spec.arch == "sm120"))
    )
]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """kernel id -> (kernel, what makes it unfit to ship), or the compiler's message."""
    cache, keys = Cache(tmp_path_factory.mktemp("cache")), KernelKeys(ROOT)
    jobs = [Job(spec.kernel_id, spec.toolchain, *keys(spec)[:1], spec, ROOT, keys(spec)[1]) for spec in SPECS]
    outcomes = run_jobs(jobs, cache, workers=2)
    return {
        outcome.job.name: outcome.error
        or gpu_kernel(outcome.job.payload, read_params(ROOT / outcome.job.payload.params), outcome.job.key, cache.load(outcome.job.key))
        for outcome in outcomes
    }


def test_every_arch_is_among_them():
    assert {spec.arch for spec in SPECS} == set(ARCHS) - {"cpu"} and len(SPECS) >= 4 * 9


@pytest.fixture(scope="module")
def code(compiled):
    """kernel id -> facts of its machine code."""
    kernels = [result[0] for result in compiled.values() if not isinstance(result, str)]
    found = sass.read_facts([(kernel.spec.arch, kernel.cubin, kernel.entry) for kernel in kernels])
    return {kernel.spec.kernel_id: facts for kernel, facts in zip(kernels, found)}


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.kernel_id)
def test_it_compiles_and_is_fit_to_ship(compiled, spec):
    result = compiled[spec.kernel_id]
    assert not isinstance(result, str), result
    kernel, problems = result
    assert problems == []
    assert kernel.info.local_bytes == kernel.spill_stores == kernel.spill_loads == 0
    assert kernel.info.entry == kernel.entry and len(kernel.info.params) == len(kernel.declared)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.kernel_id)
def test_its_machine_code_is_as_the_matrix_says(code, spec):
    assert lint.lint_code(spec, code[spec.kernel_id]) == []
    narrow = code[spec.kernel_id]["narrow_loads"]["count"]
    assert bool(narrow) == bool(spec.max_narrow_loads), "an exception that the kernel does not need is stale"
