"""KDA prefill on the CPU arch against the float64 token recurrence; outputs poisoned, the kernel that ran asserted.

How far a right result may be from the recurrence. All arithmetic is float32, whose roundings have an RMS of 2^-24 / sqrt(3) = 3.4e-8. Norms,
scores, the inverse, the state and the output are sums of up to 128 products in vectors of 8 or 16, 8 to 16 roundings each: with gate and scale
about 60 independent ones, sqrt(60) 3.4e-8 = 2.7e-7. FLOAT32 is twice that. A result stored in bf16 or fp16 adds the rounding of the store: 1.66e-3
and an eighth of it, and a tenth for the sample. Where keys repeat and beta is 1 or 2, u is a difference of nearly equal terms: errors of the state
come in once more, CORRELATED.
"""

from __future__ import annotations

import itertools

import pytest
import torch

import cula
from tests.cpu.native import PREFILL_FLOAT32
from tests.gpu import prefill as pf
from tests.gpu.prefill import NAN, arguments, bf16, check, f32, fp16, kernels_of, laid_out, make

prefill = cula.kda.kda_prefill
FLOAT32, CORRELATED = PREFILL_FLOAT32, 2e-6
STORED = {f32: FLOAT32, bf16: 1.83e-3, fp16: 2.3e-4}
TAILS = [*range(67), 0, 0, 127, 128, 129]


def run(p, layout="vk", state=f32, cu=torch.int32, limit=None, l2norm=True, scale=None, **kw):
    """From an initial state into a poisoned pool; the pool's and the outputs' limits are those of their dtypes."""
    initial = laid_out(p.h0, layout, state)
    p.h0 = laid_out(initial, layout, f32)  # what the call is given, so that rounding it is no error of the call
    final = torch.full_like(initial, NAN)
    a = arguments(p, state=initial, state_out=final, state_layout=layout, cu_seqlens=pf.cu_seqlens(p, cu), scale=scale, **kw)
    a["l2norm"] = l2norm
    assert prefill(**a) is a["out"]
    if a["out"].numel():
        assert cula.last_kernels() == kernels_of(p, pf.NAMES[state], layout)
    check(p, a["out"], None, limit or STORED[p.v.dtype], l2norm, scale)
    _, want = pf.reference(p, l2norm, scale)
    got = laid_out(final, layout, f32)
    bound = max(limit or 0, STORED[state])
    for i, length in enumerate(p.lens):
        assert pf.error(got[i], want[i]) <= 2 * bound, f"state of sequence {i} with {length} tokens"
    return a["out"], final


def exact(**kw):
    """Everything float32: the limit is then that of the arithmetic."""
    return dict(io=f32, gate_dtype=f32, beta_dtype=f32) | kw


# name: (problem, options of run)
CASES = {
    "every length": (exact(lens=TAILS, H=1, HV=2), {}),
    "every length, int64, kv": (exact(lens=TAILS, H=1, HV=2, seed=1), dict(cu=torch.int64, layout="kv")),
    "fixed batch": (exact(lens=[100] * 3, fixed=True, seed=4), {}),
    "fixed batch of whole chunks": (exact(lens=[64] * 5, H=4, fixed=True, seed=5), {}),
    "four value heads a head": (exact(lens=[65, 130], HV=8, seed=6), {}),
    "tokens of no sequence around": (exact(lens=[65, 30, 0], before=37, after=100, seed=8), {}),
    "bf16, float32 gate and beta": (dict(lens=[200], gate_dtype=f32, beta_dtype=f32, seed=9), {}),
    "fp16 gate, beta, A_log, dt_bias": (dict(lens=[200], io=fp16, gate_dtype=fp16, beta_dtype=fp16, params=fp16, seed=10), {}),
    "bf16 gate, beta, A_log, dt_bias": (exact(lens=[200], gate_dtype=bf16, beta_dtype=bf16, params=bf16, seed=10), {}),
    "slow decay": (exact(lens=[1500], gate="slow", seed=11), {}),
    "softplus": (exact(lens=[300], gate="softplus", seed=12), {}),
    "softplus A 16": (exact(lens=[300], gate="softplus A 16", seed=13), {}),
    "log gate": (exact(lens=[300], gate="log mix", seed=14), {}),
    "log gate -20": (exact(lens=[300], gate="log -20", seed=15), {}),
    "log gate -50": (exact(lens=[300], gate="log -50", seed=16), {}),
    "no decay": (exact(lens=[300], gate="log 0", seed=17), {}),
    "gates at their bound": (exact(lens=[300], gate="bound", seed=26), {}),
    "identical keys, no decay, beta 1": (exact(lens=[300], gate="log 0", keys="identical", beta="1", seed=18), dict(limit=CORRELATED)),
    "correlated keys, beta 1": (exact(lens=[300], gate="slow", keys="correlated", beta="1", seed=19), dict(limit=CORRELATED)),
    # Slow: without additions a state is the product of all decays, whose relative errors of |g| 3.4e-8 a token add up
    "beta 0": (exact(lens=[300], gate="slow", beta="0", seed=20), {}),
    "beta 2": (exact(lens=[300], beta="2", seed=21), dict(limit=CORRELATED)),
    "beta twice": (exact(lens=[300], beta="twice", seed=22), {}),
    "not normalised, scale 1": (exact(lens=[300], keys="short", gate="log mix", seed=23), dict(l2norm=False, scale=1.0)),
    "scale 0": (exact(lens=[64], seed=24), dict(scale=0.0)),
}


@pytest.mark.parametrize("name", CASES)
def test_against_the_recurrence(name):
    problem, options = CASES[name]
    run(make(**problem, device="cpu"), **options)


@pytest.mark.parametrize("io, state, layout", list(itertools.product([f32, bf16, fp16], [f32, bf16], ["vk", "kv"])))
@pytest.mark.parametrize("dim_k, dim_v", [(64, 64), (128, 128), (256, 256), (128, 64), (64, 320)])
def test_every_kernel(io, state, layout, dim_k, dim_v):
    run(make([37, 0, 16, 3], HV=4, io=io, gate_dtype=io, beta_dtype=io, seed=40, device="cpu", dim_k=dim_k, dim_v=dim_v), layout, state)


@pytest.mark.parametrize("threads", [2, 3, 8])
def test_the_bits_do_not_depend_on_the_threads(threads):
    p = make(**exact(lens=[333, 1, 0, 64], H=2, HV=4, seed=60, device="cpu"))
    out, final = run(p, num_threads=1)
    again, final_again = run(p, num_threads=threads)
    assert torch.equal(out, again) and torch.equal(final, final_again)


# ------------------------------------------------------------------------------------------------------------- states


@pytest.mark.parametrize("layout, dtype", [("vk", torch.int32), ("kv", torch.int64)])
def test_in_place_in_a_padded_pool(layout, dtype):
    """Shuffled slots of a pool with gaps; every other slot and the gaps keep their bits."""
    p = make(**exact(lens=[65, 0, 130, 1], seed=42, device="cpu"))
    size = 2 * 128 * 128
    page = torch.full((9, size + 512), 7.0)
    pool = page[:, :size].view(9, 2, 128, 128)
    order = torch.tensor([5, 2, 8, 0])
    pool[order] = laid_out(p.h0, layout)
    index = order.to(dtype)
    a = arguments(p, state=pool, state_out=pool, read_index=index, write_index=index, state_layout=layout)
    prefill(**a)
    check(p, a["out"], laid_out(pool[order], layout), FLOAT32)
    others = [i for i in range(9) if i not in order.tolist()]
    assert (page[:, size:] == 7).all() and (page[others] == 7).all()


def test_void_indexes():
    """Negative, out of range, null: read zero, store nothing; outputs are computed in any case."""
    p = make(**exact(lens=[40, 70, 33, 64, 20, 0], H=1, HV=2, seed=43, device="cpu"))
    pool = torch.randn(6, 2, 128, 128)
    before = pool.clone()
    read, write = [2, -1, 0, 5, 99, -7], [1, 3, 0, -1, 4, 6]
    zero = torch.zeros(2, 128, 128)
    p.h0 = torch.stack([before[r] if 0 < r < 6 else zero for r in read])
    a = arguments(p, state=pool, state_out=pool, read_index=torch.tensor(read, dtype=torch.int32), write_index=torch.tensor(write), null_slot=0)
    prefill(**a)
    check(p, a["out"], None, FLOAT32)
    _, want = pf.reference(p)
    for slot in range(6):
        if slot in (1, 3, 4):
            assert pf.error(pool[slot], want[write.index(slot)]) <= 2 * FLOAT32
        else:
            assert torch.equal(pool[slot], before[slot])


@pytest.mark.parametrize("given", ["neither", "initial", "final"])
def test_pools_that_are_not_there(given):
    p = make(**exact(lens=[100, 1, 0, 64], seed=44, device="cpu"))
    initial, final = p.h0.clone(), torch.full_like(p.h0, NAN)
    a = arguments(p, **{"neither": {}, "initial": dict(state=initial), "final": dict(state_out=final)}[given])
    prefill(**a)
    if given != "initial":
        p.h0.zero_()
    check(p, a["out"], final if given == "final" else None, FLOAT32)
    assert torch.equal(initial, p.h0) or given != "initial", "an initial state was written"


@pytest.mark.parametrize("layout", ["vk", "kv"])
@pytest.mark.parametrize("fixed", [False, True])
def test_checkpoints_are_the_states_on_the_way(layout, fixed):
    pf.check_checkpoints(make(**exact(lens=[200, 200] if fixed else [200, 63, 128, 0], fixed=fixed, seed=45, device="cpu")), layout, FLOAT32)


@pytest.mark.parametrize("packed", [False, True])
def test_without_tokens_states_are_copied(packed):
    p = make(**exact(lens=[0] * 3, HV=4, fixed=not packed, seed=45, device="cpu"))
    final = torch.full_like(p.h0, NAN)
    prefill(**arguments(p, state=p.h0, state_out=final))
    assert torch.equal(final, p.h0)


@pytest.mark.parametrize("layout", ["vk", "kv"])
def test_decode_goes_on_from_the_final_state(layout):
    """Prefill of 100 tokens and decode of three are prefill of 103."""
    whole, part = (make(**exact(lens=[103], seed=47, device="cpu")) for _ in range(2))
    for name in ("q", "k", "v", "gate", "beta"):
        setattr(part, name, getattr(part, name)[:, :100].contiguous())
    part.lens = [100]
    state = laid_out(part.h0, layout)
    a = arguments(part, state=state, state_out=state, state_layout=layout)
    prefill(**a)
    outs = [a["out"][0]]
    for t in range(100, 103):
        row = {name: getattr(whole, name)[0, t : t + 1].contiguous() for name in ("q", "k", "v", "gate", "beta")}
        outs.append(cula.kda.kda_decode(**row, state=state, state_layout=layout, **whole.raw, **whole.options))
    check(whole, torch.cat(outs)[None], laid_out(state, layout), FLOAT32)


# ------------------------------------------------------------------------------------------------------------ operands


@pytest.mark.parametrize("how", ["padded", "heads first"])
@pytest.mark.parametrize("fixed", [False, True])
def test_strides(how, fixed):
    """No alignment is asked for: odd token strides."""
    p = make(**exact(lens=[97, 97], HV=4, fixed=fixed, seed=48, device="cpu"))

    def strided(x):
        if how == "heads first":
            return x.transpose(1, 2).contiguous().transpose(1, 2)
        wide = torch.nn.functional.pad(x.flatten(2), (1, 2))[:, :, 1:-2]
        return wide.unflatten(2, x.shape[2:])

    for name in ("q", "k", "v", "gate", "beta"):
        x = strided(getattr(p, name))
        assert x.stride() != getattr(p, name).stride() and torch.equal(x.nan_to_num(), getattr(p, name).nan_to_num())
        setattr(p, name, x)
    out = strided(torch.full(p.v.shape, NAN))
    final = torch.full_like(p.h0, NAN)
    prefill(**arguments(p, out=out, state=p.h0, state_out=final))
    check(p, out, final, FLOAT32)


@pytest.mark.parametrize("bounds", [[0, 1 << 40], [-5, 40], [50, 10], [1 << 31, (1 << 31) + 4]])
def test_cu_seqlens_of_other_memory_are_not_followed(bounds):
    """Values come from another part of a program: none may make the kernel leave its tensors."""
    p = make(**exact(lens=[40], H=1, HV=2, seed=61, device="cpu"))
    final = torch.full_like(p.h0, NAN)
    a = arguments(p, cu_seqlens=torch.tensor(bounds), state=p.h0, state_out=final)
    guard = torch.full((3, 40, 2, 128), NAN)
    a["out"] = guard[1:2]
    prefill(**a)
    assert guard[[0, 2]].isnan().all() and final.isfinite().all()


def test_segments_of_a_gpu_are_refused():
    p = make(**exact(lens=[40], seed=62, device="cpu"))
    with pytest.raises(cula.InvalidArgumentError, match="segments is 2; must be 0 or 1 for CPU tensors"):
        prefill(**arguments(p, segments=2))
    prefill(**arguments(p, segments=1))
