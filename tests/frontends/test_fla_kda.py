"""chunk_kda and fused_recurrent_kda of cula.torch against flash-linear-attention's naive recurrence, and what they refuse.

Both sides are float32, so that they differ by the roundings of both: twice the LIMIT of test_prefill. (The signatures: test_torch.)
"""

import pytest
import torch
from fla.ops.kda.gate import naive_kda_gate
from fla.ops.kda.naive import naive_recurrent_kda

import cula
import cula.torch as ct

from .rows import error
from .test_prefill import KERNEL
from .test_prefill import LIMIT as ONE_SIDE

LIMIT = 2 * ONE_SIDE
FUNCTIONS = (ct.chunk_kda, ct.fused_recurrent_kda)
LENS = (3, 0, 65, 1)
CU = torch.tensor([0, 3, 3, 68, 69])


def tokens(batch=1, t=69, heads=2, value_heads=4, seed=0):
    gen = torch.Generator().manual_seed(seed)
    r = lambda *shape: torch.randn(*shape, generator=gen)  # noqa: E731
    x = dict(q=r(batch, t, heads, 128), k=r(batch, t, heads, 128), v=r(batch, t, value_heads, 128), g=r(batch, t, value_heads, 128), beta=r(batch, t, value_heads))
    return x, r(value_heads) * 0.5, r(value_heads * 128), r(len(LENS), value_heads, 128, 128)


def unit(x):
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


IN_KERNEL = dict(use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True)


def naive(x, A_log, dt_bias, lower_bound=None, twice=False, **kw):
    """FLA's recurrence after the activations that IN_KERNEL asks for."""
    heads = x["v"].shape[2]
    if lower_bound is None:
        g = naive_kda_gate(x["g"], A_log, dt_bias)
    else:
        g = lower_bound * torch.sigmoid((1 if A_log is None else A_log.exp()[:, None]) * (x["g"] + dt_bias.view(heads, -1)))
    return naive_recurrent_kda(unit(x["q"]), unit(x["k"]), x["v"], g, x["beta"].sigmoid() * (2 if twice else 1), output_final_state=True, **kw)


def by_sequence(function, x, h0):
    parts = [function({key: t[:, a:b] for key, t in x.items()}, initial_state=h0[i : i + 1]) for i, (a, b) in enumerate(zip(CU.tolist(), CU.tolist()[1:]))]
    return torch.cat([o for o, _ in parts], 1), torch.cat([s for _, s in parts])


@pytest.mark.parametrize("bound", [None, -5.0])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_packed_sequences_with_everything_in_the_kernel(function, bound):
    """The call of FLA's KDA layer."""
    x, A_log, dt_bias, h0 = tokens()
    kw = dict(**IN_KERNEL, A_log=A_log, dt_bias=dt_bias, lower_bound=bound, output_final_state=True, cu_seqlens=CU)
    if function is ct.chunk_kda:
        kw |= dict(safe_gate=bound is not None, cu_seqlens_cpu=CU.clone(), use_graph=True, max_num_seqs=4, chunk_size=32)
    o, s = function(**x, initial_state=h0, **kw)
    assert cula.last_kernels() == (KERNEL[0].replace(".vk", ".kv"),)
    ref_o, ref_s = by_sequence(lambda x, **kw: naive(x, A_log, dt_bias, bound, **kw), x, h0)
    assert o.shape == ref_o.shape and error(o, ref_o) < LIMIT
    assert s.shape == ref_s.shape and error(s, ref_s) < LIMIT and torch.equal(s[1], h0[1])

    flipped, v_first = function(**x, initial_state=h0.transpose(-1, -2).contiguous(), state_v_first=True, **kw)
    assert cula.last_kernels() == KERNEL
    assert error(flipped, ref_o) < LIMIT and error(v_first.transpose(-1, -2), ref_s) < LIMIT


@pytest.mark.parametrize("function", FUNCTIONS)
def test_fixed_rows_and_every_option(function):
    x, A_log, dt_bias, h0 = tokens(batch=4, t=40)
    g, beta, q, k = -x["g"].abs(), x["beta"].sigmoid(), unit(x["q"]), unit(x["k"])
    plain = dict(q=q, k=k, v=x["v"], g=g, beta=beta)
    o, s = function(**plain, scale=0.0, initial_state=h0, output_final_state=True)
    assert not o.any() and error(s, naive_recurrent_kda(**plain, initial_state=h0, output_final_state=True)[1]) < LIMIT
    o, s = function(**plain, scale=0.3)
    assert s is None and error(o, naive_recurrent_kda(**plain, scale=0.3)[0]) < LIMIT
    o, s = function(**plain, output_final_state=True, **(dict(safe_gate=True, lower_bound=-5.0) if function is ct.chunk_kda else {}))
    ref = naive_recurrent_kda(**plain, output_final_state=True)
    assert error(o, ref[0]) < LIMIT and s.dtype is torch.float32 and error(s, ref[1]) < LIMIT

    o, s = function(**x, **IN_KERNEL, A_log=A_log, dt_bias=dt_bias, allow_neg_eigval=True, output_final_state=True)
    ref = naive(x, A_log, dt_bias, twice=True)
    # beta of up to 2: states no longer shrink along a key, so an early rounding lives for the 40 tokens: sqrt(40 / 32) and a state that is as large as its parts
    assert error(o, ref[0]) < 2 * LIMIT and error(s, ref[1]) < 2 * LIMIT
    o, s = function(**x, **IN_KERNEL, A_log=None, dt_bias=dt_bias, lower_bound=-5.0, output_final_state=True)
    ref = naive(x, None, dt_bias, -5.0)
    assert error(o, ref[0]) < LIMIT and error(s, ref[1]) < LIMIT


@pytest.mark.parametrize("function", FUNCTIONS)
def test_rows_of_no_sequence_are_zeros_and_views_are_read(function):
    x, *_, h0 = tokens(t=80)
    x["g"], x["beta"] = -x["g"].abs(), x["beta"].sigmoid()
    x["q"], x["k"] = unit(x["q"]), unit(x["k"])
    want, state = function(**{key: t[:, :69] for key, t in x.items()}, cu_seqlens=CU, initial_state=h0, output_final_state=True)
    for t in x.values():
        t[:, 69:] = float("nan")
    odd = {key: t.repeat_interleave(2, -1)[..., ::2] if t.dim() == 4 else t for key, t in x.items()}
    got, again = function(**odd, cu_seqlens=torch.stack([CU, CU], 1)[:, 0], initial_state=h0.transpose(-1, -2).contiguous().transpose(-1, -2), output_final_state=True)
    assert torch.equal(got[:, :69], want) and torch.equal(again, state) and not got[:, 69:].any()


@pytest.mark.parametrize("function", FUNCTIONS)
def test_bf16_compiled_and_in_pieces(function):
    """One call, the compiled one, and the sequence cut in two with the state handed over."""
    x, A_log, dt_bias, h0 = tokens(batch=4, t=50)
    x = {key: t.bfloat16() for key, t in x.items()}
    call = lambda x, h: function(**x, **IN_KERNEL, A_log=A_log, dt_bias=dt_bias, lower_bound=-5.0, initial_state=h, output_final_state=True)  # noqa: E731
    o, s = call(x, h0)
    compiled = torch.compile(call, fullgraph=True)(x, h0)
    assert o.dtype is torch.bfloat16 and torch.equal(compiled[0], o) and torch.equal(compiled[1], s)
    first, middle = call({key: t[:, :32] for key, t in x.items()}, h0)
    second, end = call({key: t[:, 32:] for key, t in x.items()}, middle)
    assert torch.equal(torch.cat([first, second], 1), o) and torch.equal(end, s)  # 32 is a boundary of chunks
    ref = naive({key: t.float() for key, t in x.items()}, A_log, dt_bias, -5.0, initial_state=h0)
    # Rounding an output to bf16 is an error of RMS 1.66e-3 (tests/numerics/compare.py); products of a chunk have bf16 operands: test LIMIT of tests/gpu/prefill.py
    assert error(o, ref[0]) < 5.5e-3 and error(s, ref[1]) < 5.5e-3


def test_no_tokens_is_the_initial_state():
    """FLA's own recurrent function leaves the final state uninitialised here."""
    x, *_, h0 = tokens(batch=4, t=0)
    for function in FUNCTIONS:
        o, s = function(**x, initial_state=h0, output_final_state=True)
        assert o.shape == (4, 0, 4, 128) and torch.equal(s, h0)
        assert not function(**x, output_final_state=True)[1].any()


def test_one_token_runs_the_decode_kernel():
    x, *_ = tokens(t=1)
    ct.fused_recurrent_kda(**x)
    assert cula.last_kernels() == ("kda_decode.cpu.fp32.sfp32.k128.kv",)
    ct.fused_recurrent_kda(**x, cu_seqlens=torch.tensor([0, 1]))
    assert cula.last_kernels()[0].startswith("kda_prefill.cpu.")


A = torch.zeros(4)
REFUSED_BY_BOTH = [  # what is added to a call, the error, its text
    (dict(lower_bound=-5.0), ValueError, "lower_bound is given, but it belongs to use_gate_in_kernel=True"),
    (dict(A_log=A), ValueError, "A_log is given, but it belongs to use_gate_in_kernel=True"),
    (dict(allow_neg_eigval=True), ValueError, "allow_neg_eigval=True requires use_beta_sigmoid_in_kernel=True"),
    (dict(initial_state=torch.zeros(2, 4, 128, 128)), ValueError, "one state for each of 4 sequences"),
    (dict(state_v_first=True, transpose_state_layout=True), ValueError, "both given"),
    (dict(head_first=True), TypeError, "head_first"),
    (dict(use_gate_in_kernel=True, A_log=A, lower_bound=-6.0), ValueError, r"lower_bound=-6.0: allowed: a number in \[-5, 0\)"),
    (dict(cu_seqlens=CU.float()), ValueError, "cu_seqlens has dtype float32"),
    (dict(g=torch.zeros(1, 69, 4)), ValueError, "gate has shape"),
    *((dict([(name, None)]), ValueError, f"kda: {name} is missing") for name in ("q", "k", "v", "g", "beta")),
    *((dict([(name, [0.0])]), ValueError, f"kda: {name}: builtins.list is no torch tensor")
      for name in ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state", "cu_seqlens")),
]
REFUSED_BY_CHUNK_KDA = [
    (dict(disable_recompute=True), NotImplementedError, "disable_recompute"),
    (dict(return_intermediate_states=True), NotImplementedError, "return_intermediate_states"),
    (dict(cp_context=object()), NotImplementedError, "cp_context"),
    (dict(chunk_size=16), ValueError, "chunk_size=16: allowed: 32, 64"),
    (dict(use_gate_in_kernel=True), ValueError, "use_gate_in_kernel=True requires A_log or lower_bound"),
    (dict(use_gate_in_kernel=True, safe_gate=True, A_log=A), ValueError, "safe_gate=True with use_gate_in_kernel=True requires lower_bound"),
    (dict(max_num_seqs=4), ValueError, "max_num_seqs=4: it belongs to use_graph=True"),
    (dict(max_num_seqs=3, use_graph=True), ValueError, "is the number of sequences, 4"),
    (dict(initial_state=torch.zeros(4, 4, 128, 128, dtype=torch.bfloat16)), ValueError, "initial_state is torch.bfloat16; must be torch.float32"),
    (dict(cu_seqlens=None, cu_seqlens_cpu=CU), ValueError, "cu_seqlens_cpu is given without cu_seqlens"),
    (dict(cu_seqlens_cpu=CU[:-1]), ValueError, r"cu_seqlens_cpu has shape \[4\]"),
    (dict(cu_seqlens_cpu=CU.tolist()), ValueError, "chunk_kda: cu_seqlens_cpu: builtins.list is no torch tensor"),
    (dict(cu_seqlens_cpu=CU.float()), ValueError, "cu_seqlens_cpu is torch.float32; must be torch.int32 or torch.int64"),
    (dict(cu_seqlens_cpu=torch.tensor([0, 12, 18, 26, 68])), ValueError, "expected the numbers of cu_seqlens"),
    (dict(cu_seqlens_cpu=torch.tensor([0, 12, 8, 16, 69])), ValueError, "numbers that never fall, from 0 to T = 69"),
    (dict(cu_seqlens_cpu=torch.tensor([0, 12, 18, 26, 70])), ValueError, "numbers that never fall, from 0 to T = 69"),
]


@pytest.mark.parametrize("function, change, kind, text", [(f, *row) for f in FUNCTIONS for row in REFUSED_BY_BOTH]
                         + [(ct.chunk_kda, *row) for row in REFUSED_BY_CHUNK_KDA], ids=lambda x: "-".join(x) if isinstance(x, dict) else None)
def test_refused_by_name(function, change, kind, text):
    x, *_ = tokens()
    with pytest.raises(kind, match=text):
        function(**dict(**x, cu_seqlens=CU) | change)


def test_wrong_ranks_and_batches():
    x, *_ = tokens(batch=2, t=4)
    for function in FUNCTIONS:
        with pytest.raises(ValueError, match="with cu_seqlens B must be 1"):
            function(**x, cu_seqlens=CU)
        with pytest.raises(ValueError, match=r"q has shape \[4, 2, 128\]; expected \[B,T,H,K\]"):
            function(**{key: t[0] for key, t in x.items()})


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_gradient_is_refused(function):
    x, *_ = tokens()
    with pytest.raises(cula.UnsupportedError, match="requires grad|forward only"):
        function(**(x | dict(beta=x["beta"].requires_grad_())), cu_seqlens=CU)
