"""Streams and threads: work goes where the caller's stream is, nothing is shared between calls, the context stays."""

from __future__ import annotations

import threading

import pytest
import torch

from tests.cases.tools import GATE, OPS, pool, rows, same_bits
from tests.numerics.call import INVALID, decode

pytestmark = pytest.mark.gpu
LAYOUTS = pytest.mark.parametrize("layout", ["vk", "kv"])


def problem(op, seed, n=65, layout="vk"):
    return (rows(op, n, 2, 8, 128, 128, io=torch.bfloat16, device="cuda", seed=seed),
            pool(n, 8, 128, 128, layout=layout, device="cuda", seed=seed + 100))


def serial(op, seeds, tokens, layout):
    results = []
    for seed in seeds:
        x, state = problem(op, seed, layout=layout)
        for _ in range(tokens):
            decode(op, **x, gate_kind=GATE[op], state=state, layout=layout)
        results.append((x["out"].clone(), state))
    torch.cuda.synchronize()
    return results


@LAYOUTS
@pytest.mark.parametrize("op", OPS)
def test_two_streams_at_once(op, layout):
    """Interleaved on two streams: each pool gets the bits of a run alone."""
    want = serial(op, (1, 2), 12, layout)
    streams = [torch.cuda.Stream() for _ in range(2)]
    problems = [problem(op, seed, layout=layout) for seed in (1, 2)]
    torch.cuda.synchronize()
    for _ in range(12):
        for stream, (x, state) in zip(streams, problems):
            with torch.cuda.stream(stream):
                decode(op, **x, gate_kind=GATE[op], state=state, layout=layout)
    torch.cuda.synchronize()
    for (x, state), (out, expected) in zip(problems, want):
        assert same_bits(x["out"], out) and same_bits(state, expected)


def test_the_current_stream_of_the_producer_is_used():
    """The rows are written late, behind a long spin on the side stream: only a launch on that stream sees them."""
    x, state = problem("kda", 3)
    (want_out, want_state), = serial("kda", (3,), 1, "vk")
    late = {name: t.clone() for name, t in x.items()}
    for name in ("q", "k", "v"):
        x[name].zero_()
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        for name in ("q", "k", "v"):
            x[name].copy_(late[name])
        decode("kda", **x, gate_kind="log_channel", state=state)
    side.synchronize()
    assert same_bits(x["out"], want_out) and same_bits(state, want_state)


def test_a_call_does_not_wait_for_the_gpu():
    """With a spin of a tenth of a second in front, calls return at once."""
    x, state = problem("gdn", 4)
    decode("gdn", **x, gate_kind="log_head", state=state)
    torch.cuda.synchronize()
    done = torch.cuda.Event()
    torch.cuda._sleep(400_000_000)
    for _ in range(10):
        decode("gdn", **x, gate_kind="log_head", state=state)
    done.record()
    assert not done.query()
    torch.cuda.synchronize()


def test_threads():
    """Eight threads, each with its stream and its pools: the bits of a serial run, and no error is lost."""
    seeds, tokens = range(8), 20
    want = serial("kda", seeds, tokens, "vk")
    problems = [problem("kda", seed) for seed in seeds]
    torch.cuda.synchronize()
    start, errors = threading.Barrier(len(problems)), []

    def work(x, state):
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                start.wait()
                for _ in range(tokens):
                    decode("kda", **x, gate_kind="log_channel", state=state)
                torch.cuda.current_stream().synchronize()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=p) for p in problems]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors
    for (x, state), (out, expected) in zip(problems, want):
        assert same_bits(x["out"], out) and same_bits(state, expected)


def test_the_context_is_the_same_after_a_call():
    from cuda.bindings import driver

    x, state = problem("gla", 5)
    before = driver.cuCtxGetCurrent()
    decode("gla", **x, gate_kind="log_channel", state=state)
    with pytest.raises(INVALID):
        decode("gla", **x, gate_kind="raw", state=state)
    assert [int(v) for v in driver.cuCtxGetCurrent()] == [int(v) for v in before]


def test_devices_that_differ():
    """A row operand or an index on the CPU beside CUDA tensors is refused by name."""
    x, state = problem("kda", 6)
    for name in ("q", "beta"):
        with pytest.raises(INVALID, match=name):
            decode("kda", **{**x, name: x[name].cpu()}, gate_kind="log_channel", state=state)
    with pytest.raises(INVALID, match="read_index"):
        decode("kda", **x, gate_kind="log_channel", state=state, read_index=torch.arange(65, dtype=torch.int32))
