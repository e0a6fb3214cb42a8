"""KDA prefill in CUDA graphs, on streams and in threads: the workspace belongs to the call, lengths are read on the device."""

from __future__ import annotations

import threading

import pytest
import torch

import cula
from tests.gpu import prefill as pf
from tests.gpu.prefill import NAN, CCall, D, arguments, bf16, check, make

pytestmark = pytest.mark.gpu
prefill = cula.kda.kda_prefill


@pytest.fixture(scope="module", autouse=True)
def prepared():
    """Loading is not legal inside a capture; prepare does all of it."""
    cula.prepare(0)


def python_call(**kw):
    return lambda: prefill(**kw)


EXECUTORS = pytest.mark.parametrize("make_call", [python_call, CCall], ids=["python", "c"])


def capture(call) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


# Of 600 tokens and at most six sequences; padding repeats the last value, as engines do.
LENGTHS = [[100, 0, 1, 333, 64, 31], [600, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 7], [32, 64, 96, 128, 160, 120], [0] * 6]


@EXECUTORS
@pytest.mark.parametrize("segments, variant", [(1, "auto"), (1, "serial"), (3, "auto")])
def test_replay_with_other_lengths(make_call, segments, variant):
    """One capture; tokens, lengths, states and slots change between replays."""
    base = make([600], HV=4, seed=60)
    held = arguments(base, segments=segments, variant=variant)
    state = torch.zeros(8, 4, D, D, device="cuda")
    read, write = (torch.full((6,), -1, dtype=torch.int32, device="cuda") for _ in range(2))
    held["cu_seqlens"] = torch.zeros(7, dtype=torch.int32, device="cuda")
    graph = capture(make_call(**held, state=state, state_out=state, read_index=read, write_index=write))
    for replay, lens in enumerate(LENGTHS):
        after = 600 - sum(lens)
        p = make(lens, HV=4, seed=61 + replay, after=after)
        for name in ("q", "k", "v", "gate", "beta"):
            held[name].copy_(getattr(p, name))
        for name, x in p.raw.items():
            held[name].copy_(x)
        held["cu_seqlens"].copy_(pf.cu_seqlens(p))
        held["out"].fill_(NAN)
        order = torch.randperm(8, device="cuda")[:6].to(torch.int32)
        state.normal_()
        before = state.clone()
        p.h0 = state[order.long()].clone()
        read.copy_(order), write.copy_(order)
        graph.replay()
        torch.cuda.synchronize()
        check(p, held["out"], state[order.long()])
        others = [i for i in range(8) if i not in order.tolist()]
        assert torch.equal(state[others], before[others])


@EXECUTORS
def test_layers_in_one_graph(make_call):
    """Calls one after another, the output of each the values of the next: no kernel may start before what it reads is complete."""
    p = make([300, 77], seed=70)
    values = [p.v, *(torch.full_like(p.v, NAN) for _ in range(6))]
    states = [torch.full_like(p.h0, NAN) for _ in range(6)]
    calls = [make_call(**arguments(p, v=values[i], out=values[i + 1], state=p.h0, state_out=states[i], segments=1 + i % 3)) for i in range(6)]
    graph = capture(lambda: [call() for call in calls])
    for _ in range(3):
        for x in (*values[1:], *states):
            x.fill_(NAN)
        graph.replay()
    torch.cuda.synchronize()
    for i in range(6):
        p.v = values[i]  # as it was stored, so that no error is counted twice
        check(p, values[i + 1], states[i])


def test_a_graph_on_a_stream_that_torch_does_not_work_on():
    """The workspace is then a node of the graph, from the driver."""
    p = make([500], seed=71)
    a = arguments(p, state=p.h0, state_out=torch.full_like(p.h0, NAN))
    side = torch.cuda.Stream()
    prefill(**a, stream=side)  # the pool exists
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        main = torch.cuda.current_stream()
        assert main == side
        other = torch.cuda.Stream()
        other.wait_stream(side)
        prefill(**a, stream=other)
        side.wait_stream(other)
    for _ in range(3):
        a["out"].fill_(NAN), a["state_out"].fill_(NAN)
        graph.replay()
        torch.cuda.synchronize()
        check(p, a["out"], a["state_out"])


def test_two_streams_at_once():
    """Interleaved on two streams: each call gets the bits of a run alone."""
    problems = [make([900, 100], H=8, seed=80 + i) for i in range(2)]
    want = []
    for p in problems:
        a = arguments(p, state=p.h0, state_out=torch.full_like(p.h0, NAN))
        prefill(**a)
        want.append((a["out"], a["state_out"]))
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(2)]
    got = [[], []]
    for i in range(20):
        with torch.cuda.stream(streams[i % 2]):
            a = arguments(problems[i % 2], state=problems[i % 2].h0, state_out=torch.full_like(problems[i % 2].h0, NAN))
            prefill(**a)
            got[i % 2].append((a["out"], a["state_out"]))
    torch.cuda.synchronize()
    for which in range(2):
        for out, state in got[which]:
            assert torch.equal(out, want[which][0]) and torch.equal(state, want[which][1])


@pytest.mark.parametrize("kind", ["torch stream", "handle", "legacy"])
def test_a_stream_of_the_caller(kind):
    """Inputs are made late on that stream, behind a spin: only a launch in its order sees them."""
    p = make([200], seed=90)
    late = {name: getattr(p, name).clone() for name in ("q", "k", "v", "gate", "beta")}
    a = arguments(p, state=p.h0, state_out=torch.full_like(p.h0, NAN))
    for name in late:
        a[name] = torch.full_like(late[name], NAN)
    side = torch.cuda.Stream() if kind != "legacy" else torch.cuda.default_stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        for name, x in late.items():
            a[name].copy_(x)
    current = torch.cuda.Stream()  # what torch works on meanwhile
    with torch.cuda.stream(current):
        prefill(**a, stream=side if kind == "torch stream" else side.cuda_stream)
    torch.cuda.synchronize()
    check(p, a["out"], a["state_out"])


def test_threads():
    problems = [make([64 * i + 5], seed=100 + i) for i in range(4)]
    failures = []

    def work(i):
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(5):
                    a = arguments(problems[i], state=problems[i].h0, state_out=torch.full_like(problems[i].h0, NAN))
                    prefill(**a)
                torch.cuda.current_stream().synchronize()
                check(problems[i], a["out"], a["state_out"])
        except BaseException as error:  # noqa: BLE001
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    torch.cuda.synchronize()
    [t.start() for t in threads], [t.join() for t in threads]
    assert not failures, failures


def test_c_and_python_give_the_same_bits():
    p = make([700, 33], H=4, seed=110)
    a, b = (arguments(p, state=p.h0, state_out=torch.full_like(p.h0, NAN)) for _ in range(2))
    prefill(**a)
    ran = cula.last_kernels()
    call = CCall(**b)
    call()
    torch.cuda.synchronize()
    assert call.kernels == ran and torch.equal(a["out"], b["out"]) and torch.equal(a["state_out"], b["state_out"])
    check(p, a["out"], a["state_out"])
    assert a["out"].dtype == bf16
