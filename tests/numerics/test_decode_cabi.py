"""Every decode case through the C ABI: cula_query names the kernel, cula_run computes, the float64 recurrence judges."""

from __future__ import annotations

import pytest
import torch

from tests.numerics import cabi, problem
from tests.numerics.cases import CASES
from tests.numerics.device import arch_of, DEVICES


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.id)
def test_decode(case, device):
    p = problem.build(case, device)
    call = cabi.Call(case.op, {name: x.dev for name, x in p.op_args.items()}, **p.options)
    need = call.query()
    assert cabi.kernel_ids(need) == [case.kernel_id(arch_of(device))] and need.workspace_bytes == 0
    stream = 0
    if device == "cuda":
        cabi.raise_for(cabi.library().cula_prepare(torch.cuda.current_device()))
        stream = torch.cuda.current_stream().cuda_stream
    call.run(stream)
    if device == "cuda":
        torch.cuda.synchronize()
    problem.check(p)
