"""kda_gate, gdn_gate and l2norm on the GPU: the cases of tests/numerics/gates.py, and what only a GPU has."""

import pytest
import torch

import cula
from tests.numerics import gates

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("case", gates.gate_cases(), ids=lambda c: c.id)
def test_gate(case):
    gates.run_gate(case, "cuda")


@pytest.mark.parametrize("case", gates.norm_cases(), ids=lambda c: c.id)
def test_l2norm(case):
    gates.run_norm(case, "cuda")


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_special_values(dtype):
    gates.run_special("cuda", dtype)


def test_gate_extremes():
    gates.run_extremes("cuda")


@pytest.mark.parametrize("shape", [(0, 4, 8), (2, 0, 4, 8)])
def test_no_tokens(shape):
    gates.run_empty("cuda", shape)


@pytest.mark.parametrize("io", ["bf16", "fp32"])
@pytest.mark.parametrize("result", ["bf16", "fp32"])
def test_full_size(io, result):
    """Grids of more than one wave: T = 4099 tokens of 48 heads, against the formula in float64 on the GPU."""
    x = torch.randn(4099, 48, 128, device="cuda").to(gates.IO[io])
    a_log, dt_bias = torch.rand(48, device="cuda"), torch.rand(48, 128, device="cuda") - 4
    a, y = a_log.double().exp()[:, None], None
    g = cula.kda.kda_gate(x, a_log, dt_bias, dtype=result)
    y = x.double() + dt_bias.double()
    gates.assert_close("g", g, (-a * torch.nn.functional.softplus(y, threshold=1e9)).cpu())
    g = cula.kda.kda_gate(x, a_log, dt_bias, lower_bound=-5.0, dtype=result)
    gates.assert_close("g", g, (-5 * torch.sigmoid(a * y)).cpu())
    n = cula.norm.l2norm(x, dtype=result)
    gates.assert_close("y", n, (x.double() / (x.double().pow(2).sum(-1, keepdim=True) + float(torch.tensor(1e-6))).sqrt()).cpu())


def test_more_than_2_to_the_31_elements():
    """Element offsets past 2^31, in one token dimension and through a batch stride."""
    tokens, heads, dim = 2**31 // (64 * 128) + 77, 64, 128
    x = torch.zeros(tokens, heads, dim, dtype=torch.bfloat16, device="cuda")
    x[-3:] = torch.randn(3, heads, dim, device="cuda").bfloat16()
    want = -torch.nn.functional.softplus(x[-3:].double())
    norm = x[-3:].double() / (x[-3:].double().pow(2).sum(-1, keepdim=True) + float(torch.tensor(1e-6))).sqrt()
    out = torch.full_like(x, float("nan"))
    cula.kda.kda_gate(x, out=out)
    gates.assert_close("g", out[-3:], want.cpu())
    assert not out.isnan().any()
    cula.norm.l2norm(x, out=out)
    gates.assert_close("y", out[-3:], norm.cpu())
    far = x.as_strided((2, 3, heads, dim), ((tokens - 3) * heads * dim, heads * dim, dim, 1))
    far_out = out.as_strided(far.shape, far.stride()).fill_(float("nan"))
    cula.kda.kda_gate(far, out=far_out)
    gates.assert_close("g", far_out[1], want.cpu())


def test_graph_replay_reads_new_contents():
    x, g = torch.randn(64, 4, 128, device="cuda").bfloat16(), torch.empty(64, 4, 128, device="cuda")
    cula.kda.kda_gate(x, out=g)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x.clone()
        cula.norm.l2norm(y, out=y)
        cula.kda.kda_gate(y, out=g)
    for seed in range(3):
        torch.manual_seed(seed)
        x.normal_()
        graph.replay()
        want = x.double() / (x.double().pow(2).sum(-1, keepdim=True) + 1e-6).sqrt()
        gates.assert_close("g", g, -torch.nn.functional.softplus(want.bfloat16().double()).cpu(), float32=1e-3)  # bf16 ties fall either way


def test_back_to_back_launches_see_each_other():
    """Programmatic dependent launch: a chain of in-place calls, each of which must wait for the one before. With dt_bias = 20 a call
    maps y to about -(y + 20) and back, so that a call that ran too early leaves values of the other kind."""
    x = torch.randn(4096, 32, 128, device="cuda")
    y = x.double()
    bias = torch.full((32 * 128,), 20.0, device="cuda")
    for _ in range(9):
        cula.kda.kda_gate(x, dt_bias=bias, out=x)
        y = -torch.nn.functional.softplus(y + 20, threshold=1e9)
    gates.assert_close("g", x, y.cpu(), float32=2e-6)  # nine roundings of values near 20
