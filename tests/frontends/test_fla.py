"""cula.fla against the installed flash-linear-attention: which implementation ran, and that its results are FLA's."""

import collections

import pytest
import torch
from fla.ops.kda import chunk_kda, fused_recurrent_kda
from fla.ops.kda.fused_recurrent import fused_recurrent_kda_fwd
from fla.ops.kda.naive import naive_recurrent_kda
from fla.ops.simple_gla import fused_recurrent_simple_gla

import cula
import cula.fla

from . import test_fla_kda as kda
from .rows import error, rows


@pytest.fixture(autouse=True)
def enabled():
    assert cula.fla.enable() == ("fused_recurrent_kda_fwd", "chunk_kda", "fused_recurrent_simple_gla")
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
    before = ran("fused_recurrent_simple_gla")
    gamma = -torch.rand(2)
    o, s = fused_recurrent_simple_gla(x.q, x.k, x.v, g_gamma=gamma, initial_state=x.h0, output_final_state=True)
    assert ran("fused_recurrent_simple_gla") == before + 1
    ref = x.h0 * gamma.exp()[None, :, None, None] + x.k[:, 0, :, :, None] * x.v[:, 0, :, None]
    assert error(s, ref) < 1e-6 and error(o[:, 0], torch.einsum("bhk,bhkv->bhv", x.q[:, 0] * 64**-0.5, ref)) < 1e-6


@pytest.mark.parametrize("change, reason", [
    (dict(num_accepted_tokens=1), "num_accepted_tokens"), (dict(cu_seqlens=torch.tensor([0, 1])), "cu_seqlens B must be 1"), (dict(chunk_size=64), "chunk_size"),
    (dict(allow_neg_eigval=True), "allow_neg_eigval"), (dict(two_tokens=True, ssm_state_indices=torch.tensor([0, 1, 2])), "one slot a row of one token"), (dict(bad_dim=True), "head_dim"),
    (dict(grad=True), "requires grad")])
def test_what_cula_does_not_take_is_left_to_fla_with_a_reason(change, reason):
    """FLA's own kernel needs a GPU and fails here, which shows that the call went to it."""
    x = rows(k=48) if change.pop("bad_dim", None) else rows()
    if change.pop("two_tokens", None):
        for name in ("q", "k", "v", "g", "beta"):
            setattr(x, name, torch.cat([getattr(x, name)] * 2, 1))
    if change.pop("grad", None):
        x.q.requires_grad_()
    before = ran("fused_recurrent_kda_fwd")
    with pytest.raises(Exception):  # noqa: B017  whatever FLA raises without a GPU
        fused_recurrent_kda_fwd(x.q, x.k, x.v, x.g, x.beta, scale=1.0, **change)
    assert ran("fused_recurrent_kda_fwd") == before
    assert any(reason in text for text in cula.fla.status()["refused"]["fused_recurrent_kda_fwd"])


# ----------------------------------------------------------------------------------------------------------- many tokens


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("function, name", [(chunk_kda, "chunk_kda"), (fused_recurrent_kda, "fused_recurrent_kda_fwd")], ids=["chunk", "recurrent"])
def test_the_call_of_fla_s_layer_runs_cula(function, name, v_first):
    x, A_log, dt_bias, h0 = kda.tokens()
    before, stored = ran(name), h0.transpose(-1, -2).contiguous() if v_first else h0
    kw = dict(safe_gate=True, cu_seqlens_cpu=kda.CU) if function is chunk_kda else {}
    o, s = function(**x, **kda.IN_KERNEL, A_log=A_log, dt_bias=dt_bias, lower_bound=-5.0, initial_state=stored, output_final_state=True, cu_seqlens=kda.CU,
                    state_v_first=v_first, **kw)
    assert ran(name) == before + 1 and cula.last_kernels() == (f"kda_prefill.cpu.fp32.sfp32.k128.{'vk' if v_first else 'kv'}",)
    ref_o, ref_s = kda.by_sequence(lambda x, **kw: kda.naive(x, A_log, dt_bias, -5.0, **kw), x, h0)
    assert error(o, ref_o) < kda.LIMIT and error(s.transpose(-1, -2) if v_first else s, ref_s) < kda.LIMIT
    assert torch.equal(stored, h0.transpose(-1, -2) if v_first else h0), "FLA's initial state is only read"


def test_reasons_of_refusals_do_not_grow_for_ever(monkeypatch):
    """Messages name shapes and addresses, of which a server sees new ones all the time."""
    monkeypatch.setattr(cula.fla, "_refused", collections.defaultdict(collections.Counter))
    reasons = lambda: cula.fla.status()["refused"]["chunk_kda"]  # noqa: E731
    for address in (0x7F0000000001, 0x7F0000000005, 0x55):
        cula.fla._count_refusal("chunk_kda", f"kda_prefill: q is at {address:#x}; its address must be a multiple of 4 bytes")
    assert reasons() == {"kda_prefill: q is at 0x...; its address must be a multiple of 4 bytes": 3}
    for t in range(1, 121):
        with pytest.raises(Exception):  # noqa: B017  whatever FLA raises without a GPU
            chunk_kda(**{key: torch.rand(1, t, 2, 64) for key in ("q", "k", "v", "g")}, beta=torch.rand(1, t + 1, 2))
    assert len(reasons()) == 101 and reasons()["other reasons"] == 21 and sum(reasons().values()) == 123


def test_chunk_kda_without_states():
    x, *_ = kda.tokens(batch=2, t=33)
    x = dict(q=kda.unit(x["q"]), k=kda.unit(x["k"]), v=x["v"], g=-x["g"].abs(), beta=x["beta"].sigmoid())
    before = ran("chunk_kda")
    o, s = chunk_kda(**x, scale=0.5)
    assert s is None and ran("chunk_kda") == before + 1
    assert error(o, naive_recurrent_kda(**x, scale=0.5)[0]) < kda.LIMIT


def test_the_initial_state_updated_in_place():
    """fused_recurrent_kda_fwd does so unless it is told not to."""
    x, *_, h0 = kda.tokens(batch=4, t=9)
    x = dict(q=kda.unit(x["q"]), k=kda.unit(x["k"]), v=x["v"], g=-x["g"].abs(), beta=x["beta"].sigmoid())
    pool = h0.clone()
    o, s = fused_recurrent_kda_fwd(**x, scale=1.0, initial_state=pool)
    ref_o, ref_s = naive_recurrent_kda(**x, scale=1.0, initial_state=h0, output_final_state=True)
    assert s is pool and error(o, ref_o) < kda.LIMIT and error(pool, ref_s) < kda.LIMIT


@pytest.mark.parametrize("change, reason", [
    (dict(disable_recompute=True), "disable_recompute"), (dict(return_intermediate_states=True), "return_intermediate_states"), (dict(cp_context=1), "cp_context"),
    (dict(head_first=True), "head_first"), (dict(chunk_size=16), "chunk_size"), (dict(initial_state=torch.zeros(3, 4, 128, 128)), "one state for each of 4"),
    (dict(use_graph=True, max_num_seqs=9), "max_num_seqs"), (dict(use_gate_in_kernel=True), "use_gate_in_kernel"), (dict(allow_neg_eigval=True), "allow_neg_eigval"),
    (dict(use_gate_in_kernel=True, lower_bound=-7.0), "lower_bound"), (dict(beta=torch.zeros(1, 69, 4, 128)), "beta has shape"),
    (dict(initial_state=torch.zeros(4, 4, 128, 128).double()), "float32"), (dict(q=torch.zeros(1, 69, 2, 128, requires_grad=True)), "requires grad"),
    (dict(cu_seqlens_cpu=torch.tensor([0, 9, 3, 68, 69])), "never fall"), (dict(transpose_state_layout=True), "an old name")])
def test_chunk_kda_leaves_the_rest_to_fla(change, reason):
    x, *_ = kda.tokens()
    before = ran("chunk_kda")
    with pytest.raises(Exception):  # noqa: B017  whatever FLA raises without a GPU
        chunk_kda(**dict(**x, cu_seqlens=kda.CU) | change)
    assert ran("chunk_kda") == before
    assert any(reason in text for text in cula.fla.status()["refused"]["chunk_kda"])
