"""Every decode case on the cpu arch and on the GPU: which kernel ran, values against float64, and equal bits from both executors."""

from __future__ import annotations

import pytest
import torch

import cula
from tests.numerics import cabi, problem
from tests.numerics.call import decode, decode_c
from tests.numerics.cases import CASES
from tests.numerics.device import DEVICES, arch_of


def operands(p: problem.Problem) -> dict[str, torch.Tensor]:
    return {name: x.dev for name, x in p.op_args.items()}


def synchronise(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.id)
def test_decode(case, device):
    p = problem.build(case, device)
    decode(case.op, **operands(p), **p.options)
    assert cula.last_kernels() == (case.kernel_id(arch_of(device)),)
    synchronise(device)
    problem.check(p)

    from_python = [m.dev for m in p.memories]
    for m in p.memories:
        m.upload(device)
    decode_c(case.op, **operands(p), **p.options)
    synchronise(device)
    for m, expected in zip(p.memories, from_python):
        assert torch.equal(problem.bits(m.dev), problem.bits(expected)), "cula_run and the Python executor differ"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("op", ["kda", "gdn", "gla", "lightning"])
def test_query_names_the_kernel_that_runs(op, device):
    case = next(c for c in CASES if c.op == op and c.n == 7)
    p = problem.build(case, device)
    call = cabi.Call(op, operands(p), **p.options)
    need = call.query()
    assert cabi.kernel_ids(need) == [case.kernel_id(arch_of(device))] and need.workspace_bytes == 0
