"""cula.fla against the installed flash-linear-attention: which implementation ran, and that its results are FLA's."""

import pytest
from fla.ops.kda import fused_recurrent_kda
from fla.ops.kda.fused_recurrent import fused_recurrent_kda_fwd
from fla.ops.kda.naive import naive_recurrent_kda
from fla.ops.simple_gla import fused_recurrent_simple_gla

import cula
import cula.fla

from .rows import error, rows


@pytest.fixture(autouse=True)
def enabled():
    assert cula.fla.enable() == ("fused_recurrent_kda_fwd", "fused_recurrent_simple_gla")
    yield
    cula.fla.disable()
    assert cula.fla.status()["registered"] == ()


def ran(name):
    return cula.fla.status()["ran"].get(name, 0)


def test_a_decoding_call_of_fla_runs_cula():
    x = rows()
    before = ran("fused_recurrent_kda_fwd")
    o, s = fused_recurrent_kda(x.q, x.k, x.v, x.g, x.beta, initial_state=x.h0, output_final_state=True)
    assert ran("fused_recurrent_kda_fwd") == before + 1 and cula.last_kernels() == ("kda_decode.cpu.fp32.sfp32.k64.kv",)
    ref_o, ref_s = naive_recurrent_kda(x.q, x.k, x.v, x.g, x.beta, initial_state=x.h0, output_final_state=True)
    assert error(o, ref_o) < 1e-6 and error(s, ref_s) < 1e-6


def test_slots_in_place():
    import torch

    x = rows()
    pool = torch.zeros(5, 4, 64, 128)
    index = torch.tensor([4, 0, 2], dtype=torch.int32)
    pool[index.long()] = x.h0
    o, final = fused_recurrent_kda_fwd(x.q, x.k, x.v, x.g, x.beta, scale=0.125, initial_state=pool, ssm_state_indices=index)
    assert final is pool and cula.last_kernels() == ("kda_decode.cpu.fp32.sfp32.k64.kv",)
    ref_o, ref_s = naive_recurrent_kda(x.q, x.k, x.v, x.g, x.beta, initial_state=x.h0, output_final_state=True)
    assert error(o, ref_o) < 1e-6 and error(pool[index.long()], ref_s) < 1e-6 and not pool[[1, 3]].any()


def test_simple_gla_with_a_constant_decay():
    x = rows(value_heads=2)
    import torch

    before = ran("fused_recurrent_simple_gla")
    gamma = -torch.rand(2)
    o, s = fused_recurrent_simple_gla(x.q, x.k, x.v, g_gamma=gamma, initial_state=x.h0, output_final_state=True)
    assert ran("fused_recurrent_simple_gla") == before + 1
    ref = x.h0 * gamma.exp()[None, :, None, None] + x.k[:, 0, :, :, None] * x.v[:, 0, :, None]
    assert error(s, ref) < 1e-6 and error(o[:, 0], torch.einsum("bhk,bhkv->bhv", x.q[:, 0] * 64**-0.5, ref)) < 1e-6


@pytest.mark.parametrize("change, reason", [
    (dict(num_accepted_tokens=1), "num_accepted_tokens"), (dict(cu_seqlens=1), "cu_seqlens"), (dict(chunk_size=64), "chunk_size"),
    (dict(allow_neg_eigval=True), "allow_neg_eigval"), (dict(two_tokens=True), "T = 1"), (dict(bad_dim=True), "head_dim"),
    (dict(grad=True), "requires grad")])
def test_what_cula_does_not_take_is_left_to_fla_with_a_reason(change, reason):
    """FLA's own kernel needs a GPU and fails here, which shows that the call went to it."""
    x = rows(k=48) if change.pop("bad_dim", None) else rows()
    if change.pop("two_tokens", None):
        x.q = x.q.repeat(1, 2, 1, 1)
    if change.pop("grad", None):
        x.q.requires_grad_()
    before = ran("fused_recurrent_kda_fwd")
    with pytest.raises(Exception):  # noqa: B017  whatever FLA raises without a GPU
        fused_recurrent_kda_fwd(x.q, x.k, x.v, x.g, x.beta, scale=1.0, **change)
    assert ran("fused_recurrent_kda_fwd") == before
    assert any(reason in text for text in cula.fla.status()["refused"]["fused_recurrent_kda_fwd"])
