"""The layer of examples/python/torch_kimi_layer.py with flash-linear-attention's naive functions in the place of cula's."""

import importlib.util
import inspect
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("fla")

import cula

PATH = Path(__file__).resolve().parents[2] / "examples/python/torch_kimi_layer.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("torch_kimi_layer", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def naive(q, k, v, g, beta, *, A_log, dt_bias, initial_state, lower_bound, output_final_state, state_v_first, **flags):
    from fla.ops.kda.naive import naive_recurrent_kda

    assert state_v_first and all(flags.pop(f"use_{x}_in_kernel") for x in ("qk_l2norm", "gate", "beta_sigmoid")) and not set(flags) - {"safe_gate"}
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    g = lower_bound * torch.sigmoid(A_log.exp()[:, None] * (g + dt_bias.view(g.shape[2:])))
    state = None if initial_state is None else initial_state.transpose(-1, -2)
    o, state = naive_recurrent_kda(q, k, v, g, beta.sigmoid(), initial_state=state, output_final_state=output_final_state)
    return o, state.transpose(-1, -2)


def counted(function, ran):
    def call(*args, **kw):
        result = function(*args, **kw)
        ran.append(cula.last_kernels())
        return result
    return call


@torch.inference_mode()
def test_layer_with_cula_is_the_layer_with_fla_s_naive_functions(example):
    torch.manual_seed(1)
    layer, ran = example.KimiLayer(), []
    x = torch.randn(2, 44, 256)
    y, state = example.generate(layer, x, 40, prefill=counted(example.chunk_kda, ran), step=counted(example.fused_recurrent_kda, ran))
    assert ran == [("kda_prefill.cpu.fp32.sfp32.k128.vk",)] + 4 * [("kda_decode.cpu.fp32.sfp32.k128.vk",)]
    want, final = example.generate(layer, x, 40, prefill=naive, step=naive)
    limit = 2**0.5 * example.LIMITS[torch.float32]  # both sides are float32
    for got, ref in ((y, want), (state, final)):
        assert float((got - ref).norm() / ref.norm()) < limit


def test_the_one_line_that_changes(example):
    """The imports of the example and of the comment beside them exist in both packages, and FLA's functions take the layer's call."""
    import fla.ops.kda

    line = next(x for x in PATH.read_text().splitlines() if x.startswith("from cula.torch import"))
    ours, theirs = line.split("  # was: ")
    assert ours.split(" import ")[1] == theirs.split(" import ")[1] and theirs.startswith("from fla.ops.kda import")
    seen = {}

    def record(name):
        def call(*args, **kw):
            inspect.signature(inspect.unwrap(getattr(fla.ops.kda, name))).bind(*args, **kw)
            seen[name] = True
            return getattr(example, name)(*args, **kw)
        return call

    with torch.inference_mode():
        example.generate(example.KimiLayer(), torch.randn(1, 4, 256), 3, prefill=record("chunk_kda"), step=record("fused_recurrent_kda"))
    assert set(seen) == set(theirs.split(" import ")[1].split(", "))
