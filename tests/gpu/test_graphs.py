"""CUDA graphs: capture once, replay with new contents in the same buffers. Field case 52."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import cula
from tests.cases.tools import GATE, OPS, expectation, index, pool, rows, same_bits
from tests.numerics import cabi
from tests.numerics.call import decode
from tests.numerics.compare import FLOAT32, assert_close
from tests.reference import recurrence

pytestmark = pytest.mark.gpu
LAYOUTS = pytest.mark.parametrize("layout", ["vk", "kv"])
ROOT = Path(__file__).parents[2]


def python_call(op, x, **kw):
    return lambda: decode(op, **x, **kw)


def c_call(op, x, **kw):
    """cula_run on the current stream, through the C ABI; cula_prepare before anything is captured."""
    tensors = {**x, **{name: kw.pop(name) for name in tuple(kw) if name in cabi.TENSORS}}
    call = cabi.Call(op, tensors, **kw)
    cabi.raise_for(cabi.library().cula_prepare(0))
    return lambda: call.run(torch.cuda.current_stream().cuda_stream)


@pytest.fixture(scope="module", autouse=True)
def prepared():
    """Loading is not legal inside a capture; prepare does all of it."""
    cula.prepare(0)


EXECUTORS = pytest.mark.parametrize("make_call", [python_call, c_call], ids=["python", "c"])


def capture(call) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


@EXECUTORS
@LAYOUTS
@pytest.mark.parametrize("op", OPS)
def test_case_52_replay_with_new_contents(op, layout, make_call):
    """Rows, gates, slots and states change between replays; padding comes and goes."""
    n, hv, slots = 7, 4, 9
    x = rows(op, n, 2, hv, 128, 128, io=torch.bfloat16, device="cuda")
    state = pool(slots, hv, 128, 128, layout=layout, device="cuda")
    read, write = (torch.full((n,), -1, dtype=torch.int32, device="cuda") for _ in range(2))
    graph = capture(make_call(op, x, gate_kind=GATE[op], state=state, read_index=read, write_index=write, layout=layout))
    for replay, (reads, writes) in enumerate([([0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 3, 4, 5, 6]),
                                              ([-1, 7, -1, 99, 4, 0, 8], [3, 5, -1, 99, -1, 1, 2]),
                                              ([-1] * 7, [-1] * 7)]):
        for name, t in rows(op, n, 2, hv, 128, 128, io=torch.bfloat16, device="cuda", seed=10 + replay).items():
            x[name].copy_(t)
        state.copy_(pool(slots, hv, 128, 128, layout=layout, device="cuda", seed=20 + replay))
        read.copy_(index(reads))
        write.copy_(index(writes))
        before = state.clone()
        want = expectation(op, x, state=state, read_index=read, write_index=write, layout=layout)
        graph.replay()
        torch.cuda.synchronize()
        assert_close("out", x["out"], torch.from_numpy(want.out))
        for slot in range(slots):
            if slot in want.written:
                assert_close(f"slot {slot}", state[slot], torch.from_numpy(want.state[slot]))
            else:
                assert same_bits(state[slot], before[slot])


@EXECUTORS
@LAYOUTS
@pytest.mark.parametrize("op", OPS)
def test_many_dependent_tokens_in_one_graph(op, layout, make_call):
    """16 tokens, each kernel starting while the one before drains: the state must be complete before it is read."""
    tokens, n, hv = 16, 33, 8
    state = pool(n, hv, 128, 128, layout=layout, device="cuda")
    exact = state.double().cpu().numpy()
    inputs = [rows(op, n, 2, hv, 128, 128, io=torch.bfloat16, device="cuda", seed=t) for t in range(tokens)]
    calls = [make_call(op, x, gate_kind=GATE[op], state=state, layout=layout) for x in inputs]
    graph = capture(lambda: [call() for call in calls])
    for x in inputs:
        x["out"].fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    for x in inputs:
        f64 = {name: t.double().cpu().numpy() for name, t in x.items() if name != "out"}
        want = recurrence.decode(op, **f64, gate_kind=GATE[op], state=exact, layout=layout)
        exact = want.state
        assert_close("out", x["out"], torch.from_numpy(want.out), float32=tokens * FLOAT32)
    assert_close("state", state, torch.from_numpy(exact), float32=4 * FLOAT32)


@EXECUTORS
def test_no_rows_inside_a_capture(make_call):
    """N = 0 adds nothing to the graph, and the calls around it still run."""
    empty, x = rows("kda", 0, device="cuda"), rows("kda", 3, device="cuda")
    state = pool(3, device="cuda")
    want = expectation("kda", x, state=state)
    calls = [make_call("kda", r, gate_kind="log_channel", state=state) for r in (empty, x, empty)]
    graph = capture(lambda: [call() for call in calls])
    graph.replay()
    torch.cuda.synchronize()
    assert_close("out", x["out"], torch.from_numpy(want.out))
    assert_close("state", state, torch.from_numpy(want.state))


FIRST_CALL = """
import torch
from cula import prepare
from tests.cases.tools import expectation, pool, rows
from tests.numerics.call import decode
from tests.numerics.compare import assert_close
x, state = rows("kda", 3, device="cuda"), pool(3, device="cuda")
want = expectation("kda", x, state=state)
prepare()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    decode("kda", **x, gate_kind="log_channel", state=state)
graph.replay()
torch.cuda.synchronize()
assert_close("out", x["out"], torch.from_numpy(want.out))
assert_close("state", state, torch.from_numpy(want.state))
"""


def test_case_52_first_call_inside_a_capture():
    """A fresh process whose first launch is captured: all loading was done by prepare."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "loader"), str(ROOT / "python")])
    done = subprocess.run([sys.executable, "-c", FIRST_CALL], env=dict(os.environ, PYTHONPATH=path), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
