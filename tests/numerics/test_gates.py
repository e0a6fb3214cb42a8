"""kda_gate, gdn_gate and l2norm on the cpu arch; tests/gpu/test_gates.py runs the same cases on a GPU."""

import pytest
import torch

import cula
from tests.numerics import gates

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("case", gates.gate_cases(), ids=lambda c: c.id)
def test_gate(case):
    gates.run_gate(case, "cpu")


@pytest.mark.parametrize("case", gates.norm_cases(), ids=lambda c: c.id)
def test_l2norm(case):
    gates.run_norm(case, "cpu")


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_special_values(dtype):
    gates.run_special("cpu", dtype)


def test_gate_extremes():
    gates.run_extremes("cpu")


@pytest.mark.parametrize("shape", [(0, 4, 8), (2, 0, 4, 8)])
def test_no_tokens(shape):
    gates.run_empty("cpu", shape)


def test_new_results_have_the_asked_dtype():
    x = torch.randn(5, 2, 8).bfloat16()
    assert cula.kda.kda_gate(x).dtype == torch.float32
    g, beta = cula.kda.kda_gate(x, beta=torch.randn(5, 2).half(), dtype="bf16")
    assert (g.dtype, beta.dtype, g.shape, beta.shape) == (torch.bfloat16, torch.bfloat16, x.shape, (5, 2))
    assert cula.norm.l2norm(x).dtype == torch.bfloat16 and cula.norm.l2norm(x, dtype="fp32").dtype == torch.float32
