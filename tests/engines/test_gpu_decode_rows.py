"""The index work of a step and the decode of its rows in one captured graph, replayed with other contents."""

from __future__ import annotations

import pytest
import torch

import cula
from cula.engines import decode_rows, slots_of_step
from tests.numerics.compare import assert_close
from tests.reference import recurrence

pytestmark = pytest.mark.gpu
N, H, HV, D = 6, 2, 4, 128
SIZE = HV * D * D


def test_a_step_in_a_graph():
    cula.prepare(0)
    gen = torch.Generator("cuda").manual_seed(4)
    normal = lambda *shape: torch.randn(*shape, device="cuda", generator=gen)  # noqa: E731
    mixed, a, b = normal(N, 2 * H * D + HV * D).bfloat16(), normal(N, HV).bfloat16(), normal(N, HV).bfloat16()
    A_log, dt_bias = normal(HV) * 0.3, normal(HV)
    memory = normal(9, SIZE + 4096)
    state = memory[:, :SIZE].unflatten(1, (HV, D, D))
    out = torch.empty(N, 1, HV, D, dtype=torch.bfloat16, device="cuda")
    slots = torch.zeros(N, dtype=torch.int32, device="cuda")
    start = torch.arange(N + 1, dtype=torch.int32, device="cuda")
    mask = torch.ones(N, dtype=torch.bool, device="cuda")

    def step():
        read, write = slots_of_step(slots, N, query_start_loc=start, has_initial_state=mask)
        decode_rows("gdn", state=state, read_index=read, write_index=write, null_slot=0, mixed_qkv=mixed, a=a, b=b, A_log=A_log, dt_bias=dt_bias,
                    l2norm=True, out=out)

    before = memory.clone()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()  # all rows are padding: slot 0 is the null slot
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for lengths, slot, has in (([1] * 6, [3, 1, 8, 2, 5, 7], [1, 0, 1, 1, 1, 1]), ([1, 0, 1, 1, 0, 0], [6, 4, 2, 1, 0, 0], [1, 1, 0, 1, 1, 1])):
        memory.copy_(before)
        mixed.copy_(normal(*mixed.shape))
        out.fill_(float("nan"))
        start[1:].copy_(torch.tensor(lengths).cumsum(0))
        slots.copy_(torch.tensor(slot))
        mask.copy_(torch.tensor(has).bool())
        graph.replay()
        torch.cuda.synchronize()
        live = [n for n in range(N) if lengths[n]] + [None] * (N - sum(lengths))
        read = [-1 if n is None or not has[n] else slot[n] for n in live]
        write = [-1 if n is None else slot[n] for n in live]
        f64 = lambda x: x.double().cpu().numpy()  # noqa: E731
        q, k, v = (x.unflatten(1, (-1, D)) for x in mixed.split([H * D, H * D, HV * D], 1))
        want = recurrence.decode("gdn", f64(q), f64(k), f64(v), gate=f64(a), gate_kind="raw", A_log=f64(A_log), dt_bias=f64(dt_bias),
                                 beta=f64(b), beta_kind="logit", l2norm=True, state=f64(before[:, :SIZE].unflatten(1, (HV, D, D))),
                                 read_index=read, write_index=write)
        assert_close("out", out[:, 0], torch.from_numpy(want.out))
        assert_close("state", state[want.written], torch.from_numpy(want.state[want.written]))
        expected = before.clone()
        expected[want.written, :SIZE] = memory[want.written, :SIZE]
        assert torch.equal(memory.view(torch.int32), expected.view(torch.int32)), "memory changed that no row writes"
        assert cula.last_kernels() == ("gdn_decode.%s.bf16.sfp32.k128.vk" % cula.info()["devices"][0]["arch"],)
