"""cula.torch.kda_prefill: its custom ops, torch.compile, tracing, gradients; numbers against the float64 token recurrence.

LIMIT: io is float32 here. A float32 rounding is a relative error of RMS 2^-24 / sqrt(3) = 3.4e-8. Norms, scores, the inverse, the state and the output
are sums of up to 128 products, in vectors of 8 or 16 that take 8 to 16 roundings each: with gate and scale about 60 independent ones,
sqrt(60) 3.4e-8 = 2.7e-7. LIMIT is twice that; a bf16 product anywhere would be 1e-3.
"""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import cula
import cula.torch as ct
from tests.gpu import prefill as problems

LIMIT = 5.4e-7
f32, NAN = torch.float32, float("nan")
KERNEL = ("kda_prefill.cpu.fp32.sfp32.k128.vk",)


def problem(lens=(5, 0, 70, 33), **kw):
    return problems.make(list(lens), H=2, HV=4, device="cpu", **dict(dict(io=f32, gate_dtype=f32, beta_dtype=f32, seed=1), **kw))


def operands(p):
    return (p.q, p.k, p.v, p.gate, p.beta)


def keywords(p):
    return dict(cu_seqlens=problems.cu_seqlens(p), **p.raw, **p.options)


def checked(p, out, states):
    problems.check(p, out, states, LIMIT)


def test_every_form_of_a_call_is_the_recurrence():
    p = problem()
    out, states = torch.full_like(p.v, NAN), torch.full((4, 4, 128, 128), NAN)
    assert ct.kda_prefill(*operands(p), p.h0, state_out=states, out=out, **keywords(p)) is out
    assert cula.last_kernels() == KERNEL
    checked(p, out, states)

    pool = torch.full((9, 4, 128, 128), NAN)
    slots = torch.tensor([7, 0, 3, 5])
    pool[slots] = p.h0
    again = ct.kda_prefill(*operands(p), pool, state_out=pool, read_index=slots, write_index=slots, **keywords(p))
    assert torch.equal(again, out) and torch.equal(pool[slots], states) and pool[[1, 2, 4, 6, 8]].isnan().all()

    functional = torch.ops.cula.kda_prefill(*operands(p), p.raw["A_log"], p.raw["dt_bias"], problems.cu_seqlens(p), p.h0, "raw", "logit", True, None,
                                            "vk", -5.0, "auto", 0, False, 0)
    assert torch.equal(functional[0], out) and torch.equal(functional[1], states)


def test_rows_of_no_sequence_are_zeros_compiled_and_not():
    p = problem((5, 33), before=3, after=4)
    call = lambda: ct.kda_prefill(*operands(p), p.h0, **keywords(p))  # noqa: E731
    torch.full_like(p.v, NAN)  # what the allocator then has for the next tensor of this size
    eager = call()
    assert not eager[0, :3].any() and not eager[0, 41:].any() and torch.equal(eager, torch.compile(call, fullgraph=True)())
    eager[0, :3] = eager[0, 41:] = NAN
    checked(p, eager, None)


@pytest.mark.parametrize("fixed", [False, True])
def test_compiled_calls_are_the_eager_ones(fixed):
    p = problem((37, 37, 37) if fixed else (5, 0, 70, 33), fixed=fixed)
    n = len(p.lens)
    slots = torch.tensor([4, 0, 5, 2][:n])
    others = keywords(p)

    def in_place(q, k, v, gate, beta, pool):
        return ct.kda_prefill(q * 1, k, v, gate, beta, pool, state_out=pool, read_index=slots, write_index=slots, **others) * 2

    def apart(q, k, v, gate, beta, pool):
        final = torch.zeros(n, 4, 128, 128)
        out = ct.kda_prefill(q * 1, k, v, gate, beta, pool, state_out=final, read_index=slots, write_index=torch.arange(n), **others)
        return out, final * 2

    start = torch.full((6, 4, 128, 128), NAN)
    start[slots] = p.h0
    eager, compiled = start.clone(), start.clone()
    a = in_place(*operands(p), eager)
    b = torch.compile(in_place, fullgraph=True)(*operands(p), compiled)
    checked(p, a / 2, eager[slots])
    assert torch.equal(a, b) and torch.equal(eager.nan_to_num(9), compiled.nan_to_num(9)) and compiled[[1, 3]].isnan().all()

    kept = start.clone()
    a = apart(*operands(p), start)
    b = torch.compile(apart, fullgraph=True)(*operands(p), start)
    assert all(torch.equal(x, y) for x, y in zip(a, b)) and torch.equal(start.nan_to_num(9), kept.nan_to_num(9))
    checked(p, b[0], b[1] / 2)


def test_checkpoints_under_compile():
    p = problem((64, 40))
    index = torch.tensor([[1, 0], [2, -1]])

    def run(pool):
        out = ct.kda_prefill(*operands(p), p.h0, checkpoints=pool, checkpoint_index=index, checkpoint_interval=32, **keywords(p))
        return out, pool * 1

    eager = run(torch.zeros(4, 4, 128, 128))
    compiled = torch.compile(run, fullgraph=True)(torch.zeros(4, 4, 128, 128))
    assert all(torch.equal(a, b) for a, b in zip(eager, compiled))
    short = problem((64, 40))
    short.lens[:] = [32, 32]
    for name in ("q", "k", "v", "gate", "beta"):
        x = getattr(short, name)
        setattr(short, name, torch.cat([x[:, :32], x[:, 64:96]], 1))
    _, states = problems.reference(short)
    assert problems.error(eager[1][[1, 2]], states) <= LIMIT and not eager[1][3].any()
    with pytest.raises(Exception, match="checkpoints is the tensor of state"):
        torch.compile(lambda pool: ct.kda_prefill(*operands(p), pool, checkpoints=pool, checkpoint_index=index, checkpoint_interval=32,
                                                  **keywords(p)))(torch.zeros(4, 4, 128, 128))


def test_custom_ops_pass_opcheck():
    p = problem()
    scalars = ("raw", "logit", True, None, "kv", -5.0)
    head = (*operands(p), p.raw["A_log"], p.raw["dt_bias"], problems.cu_seqlens(p))
    for state in (p.h0, None):
        torch.library.opcheck(torch.ops.cula.kda_prefill.default, (*head, state, *scalars, "auto", 0, False, 0))
    slots = torch.tensor([0, 3, 1, 2])
    out = torch.zeros_like(p.v)
    for state, read, final, in_place in ((p.h0, None, torch.zeros_like(p.h0), False), (None, slots, p.h0.clone(), True), (p.h0, None, None, False)):
        write = None if final is None else slots
        torch.library.opcheck(torch.ops.cula.kda_prefill_out.default,
                              (*head, state, read, write, None, final, None, out, in_place, *scalars, None, 0, "auto", 0, False, 0))
    fixed = problem((20, 20), fixed=True)
    torch.library.opcheck(torch.ops.cula.kda_prefill.default,
                          (*operands(fixed), fixed.raw["A_log"], None, None, None, *scalars, "auto", 0, False, 0))


def test_in_place_needs_its_pool():
    p = problem()
    with pytest.raises(cula.InvalidArgumentError, match="in_place=True reads initial states from state_out"):
        torch.ops.cula.kda_prefill_out(*operands(p), None, None, problems.cu_seqlens(p), p.h0, None, None, None, torch.zeros_like(p.h0), None,
                                       torch.empty_like(p.v), True, "raw", "logit", True, None, "vk", None, None, 0, "auto", 0, False, 0)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("which", range(5))
def test_a_gradient_is_refused_at_the_call(which, compiled):
    p = problem((5, 9))
    x = list(operands(p))
    x[which] = x[which].clone().requires_grad_()
    call = torch.compile(ct.kda_prefill) if compiled else ct.kda_prefill
    with pytest.raises(Exception, match="requires grad"):
        call(*x, **keywords(p))
    with torch.no_grad():
        checked(p, call(*x, p.h0, out=torch.full_like(p.v, NAN), **keywords(p)), None)


def test_fake_tensors_are_traced_and_never_launched():
    e = torch.empty
    with FakeTensorMode():
        q, v, gate, beta = e(1, 50, 2, 128, dtype=torch.bfloat16), e(1, 50, 4, 128, dtype=torch.bfloat16), e(1, 50, 4, 128), e(1, 50, 4)
        out = ct.kda_prefill(q, q, v, gate, beta, gate_kind="log", cu_seqlens=e(4, dtype=torch.int32))
        both = torch.ops.cula.kda_prefill(q, q, v, gate, beta, None, None, e(4, dtype=torch.int32), None, "log", "value", True, None, "kv", None, "auto", 0, False, 0)
    assert out.shape == v.shape and out.dtype is torch.bfloat16
    assert both[0].shape == v.shape and both[1].shape == (3, 4, 128, 128) and both[1].dtype is f32


def test_one_graph_for_all_lengths():
    """A number of tokens that changes makes one graph with a symbol in it, not one a length."""
    p, counter = problem((5, 9)), torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(lambda *x: ct.kda_prefill(*x, gate_kind="log"), backend=counter, fullgraph=True, dynamic=True)
    for tokens in (3, 40, 7):
        q, k, v, gate, beta = (x[:, :tokens] for x in operands(p))
        beta = beta.sigmoid()
        a, b = compiled(q, k, v, -gate.abs(), beta), ct.kda_prefill(q, k, v, -gate.abs(), beta, gate_kind="log")
        assert torch.equal(a, b) and torch.isfinite(a).all()
    assert counter.frame_count == 1


def test_a_missing_v_is_said_compiled_and_not():
    p = problem((5, 9))
    for call in (ct.kda_prefill, torch.compile(ct.kda_prefill, backend="eager")):
        with pytest.raises(Exception, match="kda_prefill: v is missing"):
            call(p.q, p.k, None, p.gate, p.beta, **keywords(p))


def test_a_stream_has_no_meaning_in_a_trace():
    p = problem((5, 9))
    with pytest.raises(Exception, match="stream= has no meaning in a traced graph"):
        torch.compile(lambda: ct.kda_prefill(*operands(p), stream=1, **keywords(p)))()
