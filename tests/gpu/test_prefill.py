"""KDA prefill on a GPU against the float64 recurrence: outputs and workspaces poisoned, the kernels that ran asserted."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

import cula
from cula_loader import producers
from tests.gpu import prefill as pf
from tests.gpu.prefill import CORRELATED, LIMIT, NAN, D, arguments, bf16, check, f32, fp16, kernels_of, laid_out, make
from tests.reference import recurrence

gpu = pytest.mark.gpu
prefill = cula.kda.kda_prefill
TAILS = [*range(131), 0, 0]  # every length up to four chunks and a bit


@pytest.fixture(autouse=True)
def poisoned_workspace(monkeypatch):
    """Every workspace comes full of NaN and of flags that say "ready": a record that is read before it is written shows."""

    def workspace(self, like, size):
        memory = torch.full((size,), 0xFF, dtype=torch.uint8, device=like.device)
        return memory, memory.data_ptr()

    monkeypatch.setattr(producers.Torch, "workspace", workspace)


def run(p, layout="vk", state=f32, segments=1, variant="auto", cu=torch.int32, limit=LIMIT, l2norm=True, scale=None, **kw):
    """Calls twice, from an initial state into a poisoned pool, and checks both; the bits must be the same."""
    first = None
    for _ in range(2):
        initial = laid_out(p.h0, layout, state)
        final = torch.full_like(initial, NAN)
        a = arguments(p, state=initial, state_out=final, state_layout=layout, segments=segments, variant=variant, cu_seqlens=pf.cu_seqlens(p, cu), scale=scale, **kw)
        a["l2norm"] = l2norm
        assert prefill(**a) is a["out"]
        if segments > 0:
            assert cula.last_kernels() == kernels_of(p, pf.NAMES[state], layout, segments, variant=variant)
        got = a["out"], laid_out(final, layout, final.dtype)
        if first is None:
            first = got
            check(p, *got, limit, l2norm, scale)
        else:
            assert all(torch.equal(x.nan_to_num(9e9), y.nan_to_num(9e9)) for x, y in zip(got, first)), "two runs differ"


# name: (problem, options of run)
CASES = {
    "every length": (dict(lens=TAILS, H=1, HV=2), {}),
    "every length, serial, int64": (dict(lens=TAILS, H=1, HV=2, seed=1), dict(variant="serial", cu=torch.int64)),
    "every length, fp16, kv": (dict(lens=TAILS, H=1, HV=2, io=fp16, seed=2), dict(layout="kv")),
    "bf16 state, kv": (dict(lens=[100, 0, 1, 77], HV=4, seed=3), dict(layout="kv", state=bf16)),
    "bf16 state, fp16 io, float32 gate": (dict(lens=[100, 0, 1, 77], HV=4, seed=3, io=fp16, gate_dtype=f32), dict(state=bf16)),
    "fixed batch": (dict(lens=[100] * 3, fixed=True, seed=4), {}),
    "fixed batch of whole chunks, serial": (dict(lens=[64] * 5, H=4, fixed=True, seed=5), dict(variant="serial")),
    "four value heads a head": (dict(lens=[65, 130], HV=8, seed=6), {}),
    "tokens of no sequence around": (dict(lens=[65, 30, 0], before=37, after=100, seed=8), {}),
    "float32 gate and beta": (dict(lens=[200], gate_dtype=f32, beta_dtype=f32, seed=9), {}),
    "fp16 gate, beta, A_log, dt_bias": (dict(lens=[200], io=fp16, gate_dtype=fp16, beta_dtype=fp16, params=fp16, seed=10), {}),
    "bf16 A_log, dt_bias": (dict(lens=[200], params=bf16, seed=10), {}),
    "slow decay, float32 gate": (dict(lens=[2048], gate="slow", gate_dtype=f32, seed=11), {}),
    "softplus": (dict(lens=[300], gate="softplus", seed=12), {}),
    "softplus A 16": (dict(lens=[300], gate="softplus A 16", seed=13), {}),
    "log gate": (dict(lens=[300], gate="log mix", gate_dtype=f32, seed=14), {}),
    "log gate -20": (dict(lens=[300], gate="log -20", seed=15), {}),
    "log gate -50": (dict(lens=[300], gate="log -50", seed=16), {}),
    "no decay": (dict(lens=[300], gate="log 0", seed=17), {}),
    "identical keys, no decay, beta 1": (dict(lens=[300], gate="log 0", keys="identical", beta="1", seed=18), dict(limit=CORRELATED)),
    "correlated keys, beta 1": (dict(lens=[300], gate="slow", keys="correlated", beta="1", seed=19), dict(limit=CORRELATED)),
    "beta 0": (dict(lens=[300], beta="0", seed=20), {}),
    "beta 2": (dict(lens=[300], beta="2", seed=21), {}),
    "beta twice": (dict(lens=[300], beta="twice", seed=22), {}),
    "not normalised, scale 1": (dict(lens=[300], keys="short", gate="log mix", seed=23), dict(l2norm=False, scale=1.0)),
    "scale 0": (dict(lens=[64], seed=24), dict(scale=0.0)),
    "70 heads, two groups": (dict(lens=[40, 70], H=70, seed=25), {}),
    "gates at their bound": (dict(lens=[300], gate="bound", seed=26), {}),
    "2 segments, ragged": (dict(lens=[100, 0, 1, 333, 64, 31], gate="slow", seed=30), dict(segments=2)),
    "3 segments, slow decay": (dict(lens=[1000], gate="slow", seed=27), dict(segments=3)),
    "5 segments, ragged, serial": (dict(lens=[100, 0, 1, 333, 64, 31], gate="log mix", seed=31), dict(segments=5, variant="serial")),
    "8 segments, bf16 state": (dict(lens=[1000], HV=4, seed=28), dict(segments=8, state=bf16)),
    "8 segments, slow decay, kv, fp16": (dict(lens=[2047], io=fp16, gate="slow", gate_dtype=f32, seed=29), dict(segments=8, layout="kv")),
    "64 segments of a short sequence": (dict(lens=[333], seed=32), dict(segments=64)),
    "5 segments, no decay": (dict(lens=[300, 500], gate="log 0", seed=33), dict(segments=5)),
    "8 segments, exact": (dict(lens=[1000], HV=4, seed=28), dict(segments=8, exact=True)),
    "some segments from warm-up chunks": (dict(lens=[4000], HV=4, gate="log spans", gate_dtype=f32, seed=36), dict(segments=9)),
    "some segments from warm-up chunks, ragged, serial": (dict(lens=[1000, 0, 31, 2000, 65, 700], HV=4, gate="log spans", gate_dtype=f32, seed=37),
                                                          dict(segments=6, variant="serial", cu=torch.int64)),
    "some segments from warm-up chunks, fixed batch, kv": (dict(lens=[1100] * 3, HV=4, fixed=True, gate="log spans", gate_dtype=f32, seed=38),
                                                           dict(segments=6, layout="kv")),
    "chained, slow decay": (dict(lens=[1000, 0, 40], HV=4, gate="slow", gate_dtype=f32, seed=39), dict(segments=5, variant="chain")),
    "chained, some segments from warm-up chunks, kv, bf16 state": (dict(lens=[1000, 0, 31, 2000, 65, 700], HV=4, gate="log spans", gate_dtype=f32, seed=37),
                                                                  dict(segments=6, variant="chain", layout="kv", state=bf16)),
    "chained, exact, 100 heads": (dict(lens=[600], H=100, seed=41), dict(segments=8, variant="chain", exact=True)),
    "4,096 tokens, slow decay": (dict(lens=[4096], gate="slow", seed=34), {}),
    "4,096 tokens, slow decay, 6 segments": (dict(lens=[4096], gate="slow", seed=34), dict(segments=6)),
}


@gpu
@pytest.mark.parametrize("name", CASES)
def test_against_the_recurrence(name):
    problem, options = CASES[name]
    run(make(**problem), **options)


@gpu
@pytest.mark.parametrize("io, state, layout, gate", list(itertools.product([bf16, fp16], [f32, bf16], ["vk", "kv"], [bf16, f32])))
def test_every_kernel(io, state, layout, gate):
    """The whole matrix: with segments all five kernels run, without them the two of the plain form."""
    p = make([70, 0, 133], HV=4, io=io, gate_dtype=gate, seed=40)
    for segments in (1, 3):
        run(p, layout, state, segments)


@gpu
def test_the_plan_takes_segments_for_few_heads():
    p = make([4000], H=2, seed=41)
    run(p, segments=0)
    assert cula.last_kernels() == kernels_of(p, segments=2)
    run(make([40], H=2, seed=41), segments=0)
    assert cula.last_kernels() == kernels_of(p)


@gpu
@pytest.mark.parametrize("gate, exact, warm", [("safe", False, True), ("safe", True, False), ("slow", False, False)])
def test_which_segments_start_from_warm_up_chunks(gate, exact, warm):
    """A NaN among the first tokens tells: it reaches whatever starts from the state after them."""
    p = make([2000], gate=gate, seed=48)
    (want,), _ = pf.reference(p)
    p.v[0, 3] = NAN
    a = arguments(p, segments=4, exact=exact, state=p.h0, state_out=(final := torch.full_like(p.h0, NAN)))
    prefill(**a)
    second = 16 * 32  # of 63 chunks a segment has 16
    assert pf.error(a["out"][0, :3], want[:3]) <= LIMIT and a["out"][0, 3:second].isnan().all()
    if warm:
        assert pf.error(a["out"][0, second:], want[second:]) <= LIMIT and final.isfinite().all()
    else:
        assert a["out"][0, second:].isnan().all() and final.isnan().all()


# ------------------------------------------------------------------------------------------------------------- states


@gpu
@pytest.mark.parametrize("layout, dtype", [("vk", torch.int32), ("kv", torch.int64)])
@pytest.mark.parametrize("segments, variant", [(1, "auto"), (4, "auto"), (4, "chain")])
def test_in_place_in_a_padded_pool(layout, dtype, segments, variant):
    """Shuffled slots of a pool with gaps; every other slot and the gaps keep their bits."""
    p = make([65, 0, 130, 1], seed=42)
    n, slots, size = 4, 9, 2 * D * D
    page = torch.full((slots, size + 512), 7.0, device="cuda")
    pool = page[:, :size].view(slots, 2, D, D)
    order = torch.tensor([5, 2, 8, 0], device="cuda")
    pool[order] = laid_out(p.h0, layout)
    index = order.to(dtype)
    a = arguments(p, state=pool, state_out=pool, read_index=index, write_index=index, state_layout=layout, segments=segments, variant=variant)
    prefill(**a)
    check(p, a["out"], laid_out(pool[order], layout))
    others = [i for i in range(slots) if i not in order.tolist()]
    assert (page[:, size:] == 7).all() and (page[others] == 7).all() and len(others) == slots - n


@gpu
@pytest.mark.parametrize("segments", [1, 3])
def test_void_indexes(segments):
    """Negative, out of range, null: read zero, store nothing; outputs are computed in any case."""
    p = make([40, 70, 33, 64, 20, 0], H=1, HV=2, seed=43)
    pool = torch.randn(6, 2, D, D, device="cuda")
    before = pool.clone()
    read, write = [2, -1, 0, 5, 99, -7], [1, 3, 0, -1, 4, 6]
    zero = torch.zeros(2, D, D, device="cuda")
    p.h0 = torch.stack([before[r] if 0 < r < 6 else zero for r in read])
    index = lambda x, dtype: torch.tensor(x, dtype=dtype, device="cuda")
    a = arguments(p, state=pool, state_out=pool, read_index=index(read, torch.int32), write_index=index(write, torch.int64), null_slot=0, segments=segments)
    prefill(**a)
    check(p, a["out"], None)
    _, want = pf.reference(p)
    for slot in range(6):
        if slot in (1, 3, 4):
            assert pf.error(pool[slot], want[write.index(slot)]) <= 2 * LIMIT
        else:
            assert torch.equal(pool[slot], before[slot])


@gpu
@pytest.mark.parametrize("layout, fixed, segments, exact", [("vk", False, 1, False), ("kv", True, 1, False), ("kv", False, 3, False), ("vk", True, 3, True)])
def test_checkpoints_are_the_states_on_the_way(layout, fixed, segments, exact):
    pf.check_checkpoints(make([200, 200] if fixed else [200, 63, 128, 0], fixed=fixed, seed=49), layout, LIMIT, segments=segments, exact=exact)


@gpu
@pytest.mark.parametrize("given", ["neither", "initial", "final"])
def test_pools_that_are_not_there(given):
    p = make([100, 1, 0, 64], seed=44)
    initial, final = p.h0.clone(), torch.full_like(p.h0, NAN)
    a = arguments(p, **{"neither": {}, "initial": dict(state=initial), "final": dict(state_out=final)}[given])
    prefill(**a)
    if given != "initial":
        p.h0.zero_()
    check(p, a["out"], final if given == "final" else None)
    assert torch.equal(initial, p.h0) or given != "initial", "an initial state was written"


@gpu
@pytest.mark.parametrize("cu", [False, True])
def test_without_tokens_states_are_copied(cu):
    p = make([0] * 3, HV=4, fixed=not cu, seed=45)
    final = torch.full_like(p.h0, NAN)
    a = arguments(p, state=p.h0, state_out=final)
    prefill(**a)
    assert torch.equal(final, p.h0) and cula.last_kernels() == kernels_of(p)[1:]
    prefill(**arguments(p, state=p.h0))
    assert cula.last_kernels() == ()


@gpu
def test_nothing_for_no_sequence():
    p = make([0], H=1, seed=46)
    a = arguments(p, cu_seqlens=torch.zeros(1, dtype=torch.int32, device="cuda"))
    prefill(**a)
    assert cula.last_kernels() == ()


@gpu
@pytest.mark.parametrize("layout", ["vk", "kv"])
def test_decode_goes_on_from_the_final_state(layout):
    """Prefill of 100 tokens and decode of three are prefill of 103."""
    whole = make([103], seed=47)
    part = make([103], seed=47)
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
    check(whole, torch.cat(outs)[None], laid_out(state, layout))


# ------------------------------------------------------------------------------------------------------------ operands


def strided(x, how):
    """The same values in other memory: padded, inside a wider row, or heads outside of tokens."""
    if how == "padded":
        return torch.nn.functional.pad(x, (0, 8, 0, 1))[:, :, :-1, :-8] if x.ndim == 4 else torch.nn.functional.pad(x, (0, 3))[..., :-3]
    return x.transpose(1, 2).contiguous().transpose(1, 2)  # heads first


@gpu
@pytest.mark.parametrize("how", ["padded", "heads first"])
@pytest.mark.parametrize("fixed", [False, True])
def test_strides(how, fixed):
    p = make([97, 97], HV=4, fixed=fixed, seed=48)
    for name in ("q", "k", "v", "gate", "beta"):
        x = strided(getattr(p, name), how)
        assert x.stride() != getattr(p, name).stride() and torch.equal(x, getattr(p, name))
        setattr(p, name, x)
    out = strided(torch.full(p.v.shape, NAN, dtype=bf16, device="cuda"), how)
    final = torch.full_like(p.h0, NAN)
    prefill(**arguments(p, out=out, state=p.h0, state_out=final))
    check(p, out, final)


@gpu
def test_columns_of_one_projection_row():
    p = make([65, 130], HV=8, seed=49)
    row = torch.cat([p.q.flatten(2), p.k.flatten(2), p.v.flatten(2)], -1).contiguous()
    p.q, p.k, p.v = (x.unflatten(-1, (-1, D)) for x in row.split([2 * D, 2 * D, 8 * D], -1))
    run(p)


@gpu
def test_packed_without_a_batch_dimension():
    p = make([65, 0, 31], HV=4, seed=50)
    a = arguments(p, state=p.h0, state_out=torch.full_like(p.h0, NAN))
    for name in ("q", "k", "v", "gate", "beta", "out"):
        a[name] = a[name][0]
    prefill(**a)
    check(p, a["out"][None], a["state_out"])


@gpu
def test_a_beta_and_a_gate_of_one_value():
    """Zero strides: what is only read may be broadcast."""
    p = make([100], gate="log mix", beta="1", keys="short", seed=51)
    p.beta = torch.tensor([0.5], dtype=bf16, device="cuda").expand(1, 100, 2)
    p.gate = p.gate[:, :1].expand(1, 100, 2, D)
    run(p)


@gpu
def test_raw_gate_without_parameters():
    p = make([100], seed=52)
    p.raw = dict(A_log=torch.zeros(2, device="cuda"), dt_bias=torch.zeros(2, D, device="cuda"))
    a = arguments(p, A_log=None, dt_bias=None)
    prefill(**a)
    p.h0.zero_()
    check(p, a["out"], None)


@gpu
def test_what_is_not_aligned_is_refused():
    p = make([100], seed=53)
    wide = torch.zeros(100 * 2 * D + 4, dtype=bf16, device="cuda")
    v = wide[4:].view(1, 100, 2, D)
    with pytest.raises(cula.UnsupportedError, match=r"kda_prefill: v is at 0x\w+8 with strides 0, 256 and 128 .* must be multiples of 16 bytes"):
        prefill(**arguments(p, v=v))
    with pytest.raises(cula.UnsupportedError, match="kda_prefill: q is at .* must be multiples of 8 bytes"):
        prefill(**arguments(p, q=wide[2:-2].view(1, 100, 2, D)))
    assert cula.last_kernels() == ()


@gpu
def test_out_is_allocated_where_v_is():
    p = make([100], seed=54)
    a = arguments(p)
    del a["out"]
    out = prefill(**a)
    p.h0.zero_()
    check(p, out, None)
    assert out.shape == p.v.shape and out.dtype == bf16 and out.device == p.v.device


# ------------------------------------------------------------------------------------------------------ the reference


def test_the_reference_is_the_recurrence():
    """On a CPU: sequences packed and with states, against the recurrence that the other ops are tested with."""
    p = make([5, 0, 3], H=1, HV=2, gate="log mix", beta="1", device="cpu", before=2, after=1, io=f32, gate_dtype=f32, beta_dtype=f32)
    outs, states = pf.reference(p, l2norm=False, scale=0.3)
    for i, length in enumerate(p.lens):
        if length == 0:
            assert torch.equal(states[i], p.h0[i].double())
            continue
        q, k, v, g, b = (p.of_sequence(x, i).double().numpy() for x in (p.q, p.k, p.v, p.gate, p.beta))
        o, S = recurrence.sequence("kda", q, k, v, g, b, 0.3, p.h0[i].double().transpose(-1, -2).numpy())
        assert np.allclose(outs[i].numpy(), o, rtol=1e-12, atol=1e-12) and np.allclose(states[i].transpose(-1, -2).numpy(), S, rtol=1e-12, atol=1e-12)


def test_nan_is_no_small_error():
    x = torch.ones(4)
    assert pf.error(torch.tensor([1, 1, 1, NAN]), x) == float("inf") and pf.error(x * 1.01, x) == pytest.approx(0.01, rel=1e-4)
    assert pf.error(torch.ones(3), torch.zeros(3)) == 1
