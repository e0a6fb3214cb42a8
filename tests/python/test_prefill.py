"""cula.kda.kda_prefill on NumPy arrays: random calls against the float64 recurrence, what may and may not share memory, strides, NaN that must
stay where it is, threads and forks, and every refusal, which leaves the outputs alone.

LIMIT is derived in tests/frontends/test_prefill.py: everything here is float32. The numerics of all kernels are in tests/cpu.
"""

from __future__ import annotations

import os
import re
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cula
from tests.reference import recurrence

LIMIT = 5.4e-7
H, HV, K, V = 1, 2, 64, 64
prefill = cula.kda.kda_prefill
ROWS = ("q", "k", "v", "gate", "beta")


def problem(lens, seed=0, before=0, after=0, gate_kind="log"):
    """(operands and options, cu_seqlens, initial states [N,HV,V,K]) of packed sequences between tokens of none."""
    rng = np.random.default_rng(seed)
    normal = lambda *shape: rng.standard_normal(shape).astype("f")  # noqa: E731
    T = before + sum(lens) + after
    x = dict(q=normal(1, T, H, K), k=normal(1, T, H, K), v=normal(1, T, HV, V), gate=normal(1, T, HV, K), beta=normal(1, T, HV))
    if gate_kind == "log":
        x["gate"] = -np.abs(x["gate"])
    return x | dict(gate_kind=gate_kind, beta_kind="logit", l2norm=True), np.cumsum([before, *lens], dtype="i4"), normal(len(lens), HV, V, K)


def expected(x, cu, initial, **gate):
    """out, with NaN where no sequence is, and the final states [N,HV,V,K]. gate: A_log, dt_bias, lower_bound of the raw gate."""
    q, k = (recurrence.l2_normalise(x[name][0].astype("f8")) for name in "qk")
    kind = {"log": "log_channel", "raw": "raw"}[x["gate_kind"]]
    g = recurrence.log_decay(kind, x["gate"][0], HV, K, **gate)
    beta = recurrence.activate_beta(x["beta_kind"], x["beta"][0])
    out, final = np.full(x["v"].shape, np.nan), []
    for n, (a, b) in enumerate(zip(cu, cu[1:])):
        S = initial[n].swapaxes(-1, -2).astype("f8")
        if b > a:
            out[0, a:b], S = recurrence.sequence("kda", q[a:b], k[a:b], x["v"][0, a:b], g[a:b], beta[a:b], x.get("scale"), S)
        final.append(S.swapaxes(-1, -2))
    return out, np.stack(final)


def error(got, want):
    """Relative RMSE over what is not NaN in `want`; infinite if it is not finite in `got`."""
    there = ~np.isnan(want)
    got, want = got[there].astype("f8"), want[there]
    if not want.size:
        return 0.0
    return np.linalg.norm(got - want) / (np.linalg.norm(want) or 1.0) if np.isfinite(got).all() else np.inf


def poison(x):
    return np.full(x["v"].shape, np.nan, "f")


LENGTHS = st.lists(st.one_of(st.sampled_from([0, 1, 15, 16, 17, 31, 32, 33]), st.integers(0, 70)), min_size=1, max_size=5)


@settings(max_examples=60, deadline=None)
@given(lens=LENGTHS, seed=st.integers(0, 2**31), before=st.integers(0, 2), after=st.integers(0, 2), raw=st.booleans(), bound=st.sampled_from([None, -5, -0.5]),
       parameters=st.booleans(), scale=st.sampled_from([None, 0.0, 1.5, -0.25]), slots=st.integers(0, 3), data=st.data())
def test_any_call_is_the_recurrence(lens, seed, before, after, raw, bound, parameters, scale, slots, data):
    x, cu, _ = problem(lens, seed, before, after, "raw" if raw else "log")
    rng = np.random.default_rng(seed)
    if scale is not None:
        x["scale"] = scale
    given_gate, gate = {}, {}
    if raw:
        gate["lower_bound"] = bound or 0.0
        given_gate["lower_bound"] = bound
        if parameters:
            gate |= dict(A_log=rng.standard_normal(HV).astype("f"), dt_bias=rng.standard_normal((HV, K)).astype("f"))
            given_gate |= gate | dict(lower_bound=bound)
    n, size = len(lens), len(lens) + slots
    before_call = rng.standard_normal((size, HV, V, K)).astype("f")
    pool = before_call.copy()
    write = rng.permutation(size)[:n].astype(data.draw(st.sampled_from(["i4", "i8"])))
    read = write.copy()
    for i in range(n):
        read[i] = data.draw(st.sampled_from([read[i], -1, size, size + 2**20, -(2**31)]))
        write[i] = data.draw(st.sampled_from([write[i], write[i], -1, size]))
    initial = np.stack([before_call[r] if 0 <= r < size else np.zeros_like(before_call[0]) for r in read])
    want, final = expected(x, cu, initial, **gate)
    out = poison(x)
    assert prefill(**x, **given_gate, cu_seqlens=cu, state=pool, state_out=pool, read_index=read, write_index=write, out=out) is out
    assert np.array_equal(np.isnan(out), np.isnan(want)) and error(out, want) <= LIMIT
    stored = {int(w): i for i, w in enumerate(write) if 0 <= w < size}
    for slot in range(size):
        if slot in stored:
            assert error(pool[slot], final[stored[slot]]) <= 2 * LIMIT
        else:
            assert np.array_equal(pool[slot], before_call[slot])


# --------------------------------------------------------------------------------------------------------- memory


def views(x):
    """Other strides of the same values."""
    wide = np.full((*x.shape[:-1], x.shape[-1] + 3), np.nan, "f")
    wide[..., : x.shape[-1]] = x
    return {"padded": wide[..., : x.shape[-1]], "tokens backwards": x[:, ::-1].copy()[:, ::-1], "heads backwards": x[:, :, ::-1].copy()[:, :, ::-1],
            "heads first": x.swapaxes(1, 2).copy().swapaxes(1, 2)}


@pytest.mark.parametrize("how", ["padded", "tokens backwards", "heads backwards", "heads first"])
def test_strides_change_no_bit(how):
    x, cu, _ = problem([33, 7])
    out = poison(x)
    prefill(**x, cu_seqlens=cu, out=out)
    assert error(out, expected(x, cu, np.zeros((2, HV, V, K)))[0]) <= LIMIT
    changed = {name: views(x[name])[how] for name in ROWS}
    assert all(np.array_equal(changed[name], x[name]) for name in ROWS) and changed["v"].strides != x["v"].strides
    again = views(poison(x))[how]
    prefill(**(x | changed), cu_seqlens=cu, out=again)
    assert np.array_equal(out, again)


def test_operands_that_are_only_read_may_be_broadcast_and_one_array():
    x, cu, _ = problem([33, 7])
    x["beta"] = np.broadcast_to(x["beta"][:, :1, :1], x["beta"].shape)
    x["gate"] = np.broadcast_to(x["gate"][:, :1], x["gate"].shape)
    x["k"] = x["q"]
    assert 0 in x["beta"].strides and 0 in x["gate"].strides
    index, pool = np.array([1, 0]), np.zeros((2, HV, V, K), "f")
    out = prefill(**x, cu_seqlens=cu, state=pool, state_out=pool, read_index=index, write_index=index, out=poison(x))
    assert error(out, expected(x, cu, np.zeros((2, HV, V, K)))[0]) <= LIMIT


def read_only(x):
    x.flags.writeable = False
    return x


def flat(x, *shape):
    return x.reshape(-1)[: np.prod(shape)].reshape(shape)


big = np.zeros((4, HV, V, K), "f")
MEMORY = {
    **{f"out is {name}": (lambda x, name=name: dict(out=flat(x[name], *x["v"].shape)), f"kda_prefill: out overlaps {name} in memory") for name in ("v", "gate")},
    "out in the pool": (lambda x: dict(out=flat(big, *x["v"].shape), state=big), "kda_prefill: out overlaps state in memory"),
    "out broadcast": (lambda x: dict(out=np.lib.stride_tricks.as_strided(np.zeros(V, "f"), x["v"].shape, (0, 0, 0, 4))), "two of its elements share memory"),
    "out read-only": (lambda x: dict(out=read_only(np.zeros(x["v"].shape, "f"))), "kda_prefill: out: is written, and this array is read-only"),
    "state_out read-only": (lambda x: dict(state_out=read_only(np.zeros((2, HV, V, K), "f"))), "kda_prefill: state_out: is written, and this array is read-only"),
    "shifted pools": (lambda x: dict(state=big[:2], state_out=big[1:3]), "state_out overlaps state in memory, but starts elsewhere"),
    "values backwards": (lambda x: dict(v=x["v"][..., ::-1]), "kda_prefill: the last stride of v is -1; must be 1"),
    "pool off by 4 bytes": (lambda x: dict(state=flat(big.reshape(-1)[1:], 2, HV, V, K)), "address and both strides must be multiples of 16 bytes"),
    "cu_seqlens every other": (lambda x: dict(cu_seqlens=np.array([0, 9, 33, 9, 40], "i4")[::2]), "kda_prefill: cu_seqlens has stride 2"),
    "cu_seqlens float": (lambda x: dict(cu_seqlens=np.array([0, 40.0], "f")), "kda_prefill: cu_seqlens has dtype float32; must be int32 or int64"),
    "cu_seqlens int16": (lambda x: dict(cu_seqlens=np.array([0, 40], "i2")), "kda_prefill: cu_seqlens: dtype int16 is none that cula reads"),
    "cu_seqlens empty": (lambda x: dict(cu_seqlens=np.array([], "i4")), "kda_prefill: cu_seqlens has shape [0]; expected [N+1]"),
    "cu_seqlens list": (lambda x: dict(cu_seqlens=[0, 40]), "kda_prefill: cu_seqlens: list offers neither DLPack"),
    "float64 q": (lambda x: dict(q=x["q"].astype("f8")), "kda_prefill: q has dtype float64; must be bf16, fp16 or float32"),
    "fp16 k": (lambda x: dict(k=x["k"].astype("f2")), "kda_prefill: k is fp16, q is float32; q, k, v and out have one dtype"),
    "heads": (lambda x: dict(q=np.zeros((1, 40, 3, K), "f"), k=np.zeros((1, 40, 3, K), "f")), "HV must be a multiple of H"),
    "no v": (lambda x: dict(v=None), "kda_prefill: v is missing"),
    "no beta": (lambda x: dict(beta=None), "kda_prefill: beta is missing"),
    "float64 pool": (lambda x: dict(state=np.zeros((2, HV, V, K), "f8")), "kda_prefill: state has dtype float64; must be bf16 or float32"),
    "one slot": (lambda x: dict(state=big[:1]), "kda_prefill: state has 1 slots for 2 sequences"),
}
OPTIONS = {
    "lower_bound 0": (dict(gate_kind="raw", lower_bound=0.0), "lower_bound=0.0: allowed: a number in [-5, 0)"),
    "lower_bound that float32 has as 0": (dict(gate_kind="raw", lower_bound=-1e-50), "lower_bound=-1e-50: allowed: a number in [-5, 0)"),
    "lower_bound of a log gate": (dict(lower_bound=-5), "lower_bound is -5, but it belongs to the 'raw' gate"),
    "A_log of a log gate": (dict(A_log=np.zeros(HV, "f")), "A_log is given, but gate_kind is not 'raw'"),
    "scale beyond float32": (dict(scale=1e300), "scale=1e+300: allowed: a number that float32 can hold"),
    "scale beyond float64": (dict(scale=10**400), "allowed: a number that float32 can hold"),
    "scale nan": (dict(scale=float("nan")), "scale is nan; must be finite"),
    "variant": (dict(variant="serial"), "variant is 'serial'; must be 'auto' for CPU tensors"),
    "variant typo": (dict(variant="parallel"), "variant='parallel': allowed: 'auto', 'serial', 'overlap'"),
    "stream": (dict(stream=1), "stream is 0x1; CPU tensors take no stream"),
    "donate": (dict(donate="yes"), "donate='yes': allowed: True, False"),
    "segments": (dict(segments=2), "segments is 2; must be 0 or 1 for CPU tensors"),
    "checkpoint_interval": (dict(checkpoint_interval=32), "checkpoint_interval is 32, but there are no checkpoints"),
    "interval of no chunks": (dict(checkpoints=big, checkpoint_index=np.zeros((2, 2), "i4"), checkpoint_interval=48), "must be a positive multiple of 32"),
    "null_slot": (dict(null_slot=0, state_out=None), "null_slot is given, but there is neither state"),
}


@pytest.mark.parametrize("name", [*MEMORY, *OPTIONS])
def test_refused_by_name_and_nothing_written(name):
    x, cu, initial = problem([33, 7])
    change, text = MEMORY[name] if name in MEMORY else (lambda x: OPTIONS[name][0], OPTIONS[name][1])
    kept = dict(out=np.full(x["v"].shape, 7, "f"), state_out=np.full((2, HV, V, K), 7, "f"))
    call = x | kept | dict(cu_seqlens=cu)
    call |= change(x)
    with pytest.raises(ValueError, match=re.escape(text)) as caught:
        prefill(**call)
    assert isinstance(caught.value, cula.CulaError) and str(caught.value).startswith("kda_prefill: ")
    assert all((array == 7).all() for array in kept.values()) and cula.last_kernels() == ()


@pytest.mark.parametrize("name", ["segments", "checkpoint_interval"])
@pytest.mark.parametrize("value", [True, 0.0, "1", None])
def test_integers_are_integers(name, value):
    x, cu, _ = problem([3])
    prefill(**x, cu_seqlens=cu)
    with pytest.raises(cula.InvalidArgumentError, match=f"kda_prefill: {name}={value!r}: allowed: an integer"):
        prefill(**x, cu_seqlens=cu, **{name: value})
    assert prefill(**x, cu_seqlens=cu, **{name: np.int64(0)}).shape == x["v"].shape


# ------------------------------------------------------------------------------------------------------------ NaN


@pytest.mark.parametrize("name", [*ROWS, "state"])
def test_nan_stays_in_its_sequence(name):
    x, cu, initial = problem([17, 0, 33, 20])
    clean, clean_states = poison(x), np.full_like(initial, np.nan)
    prefill(**x, cu_seqlens=cu, state=initial, state_out=clean_states, out=clean)
    dirty = x | {key: x[key].copy() for key in ROWS}
    states = initial.copy()
    (states[2] if name == "state" else dirty[name][0, cu[2] : cu[3]])[...] = np.nan
    out, final = poison(x), np.full_like(initial, np.nan)
    prefill(**dirty, cu_seqlens=cu, state=states, state_out=final, out=out)
    others = [t for t in range(sum([17, 33, 20])) if not cu[2] <= t < cu[3]]
    assert np.isfinite(clean).all() and np.array_equal(out[0, others], clean[0, others])
    assert np.array_equal(final[[0, 1, 3]], clean_states[[0, 1, 3]])
    assert np.isnan(out[0, cu[2] : cu[3]]).any()


@pytest.mark.parametrize("name, heads", [("q", [0, 1]), ("v", [0]), ("gate", [0]), ("beta", [0])])
def test_nan_of_a_token_reaches_no_earlier_token_and_no_other_head(name, heads):
    x, cu, _ = problem([40])
    clean = prefill(**x, cu_seqlens=cu, out=poison(x))
    x[name] = x[name].copy()
    x[name][0, 20, 0] = np.nan
    dirty = prefill(**x, cu_seqlens=cu, out=poison(x))
    reached = np.zeros(clean.shape[1:3], bool)
    reached[20 : 21 if name == "q" else None, heads] = True
    assert np.isnan(dirty[0][reached]).any(-1).all() and np.array_equal(dirty[0][~reached], clean[0][~reached])


# ------------------------------------------------------------------------------------------------- threads, processes


def test_eight_threads_at_once_have_the_bits_of_one():
    problems = [problem([40 + 3 * i, 0, 5], seed=i) for i in range(4)]
    wanted = []
    for x, cu, initial in problems:
        pool = initial.copy()
        wanted.append((prefill(**x, cu_seqlens=cu, state=pool, state_out=pool, num_threads=1), pool))
    assert error(wanted[0][0], expected(*problems[0])[0]) <= LIMIT
    wrong, start = [], threading.Barrier(8)

    def work(i):
        start.wait()
        for turn in range(25):
            x, cu, initial = problems[(i + turn) % 4]
            pool = initial.copy()
            out = prefill(**x, cu_seqlens=cu, state=pool, state_out=pool, num_threads=(0, 1, 2, 5)[turn % 4])
            want = wanted[(i + turn) % 4]
            if not (np.array_equal(out, want[0]) and np.array_equal(pool, want[1])):
                wrong.append((i, turn))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_a_forked_child_has_the_same_bits():
    """After the parent's threads have run: a child has none of them."""
    x, cu, _ = problem([100, 5])
    want = prefill(**x, cu_seqlens=cu, num_threads=2)
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(0 if np.array_equal(prefill(**x, cu_seqlens=cu, num_threads=2), want) else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
