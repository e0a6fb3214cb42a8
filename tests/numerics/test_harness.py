"""The test machinery itself: the selection covers what it says, and every kind of fault is caught.

A stand-in that stores the expectation plays the library; each fault then spoils one thing.
"""

from __future__ import annotations

import pytest
import torch

from tests.numerics import cases, compare, problem
from tests.numerics.covering import combinations


@pytest.mark.parametrize("op", cases.GATES)
def test_selection_covers(op):
    covered = {frozenset((a, getattr(c, a)) for a in group) for c in cases.cases_of(op) for group in cases.groups_of(op)}
    wanted = combinations(cases.axes_of(op), cases.groups_of(op), cases.feasible)
    assert not wanted - covered
    kernels = {c.kernel_id("cpu") for c in cases.cases_of(op)}
    assert len(kernels) == 3 * 2 * 3 * 2  # io, state, K, layout


def test_case_ids_are_unique():
    assert len({c.id for c in cases.CASES}) == len(cases.CASES)


def example(**different) -> cases.Case:
    plain = dict(op="kda", io="bf16", state="fp32", k=64, v=64, layout="vk", gate="none", gate_dtype="fp32", param_dtype="fp32",
                 beta="value", beta_dtype="fp32", l2norm=False, scale=1.0, heads=(1, 4), rows="nhk", pool="compact", index="none",
                 n=7, offset=0)
    return cases.Case(**{**plain, **different})


def store_expectation(p: problem.Problem) -> None:
    a = p.op_args
    a["out"].dev.copy_(torch.from_numpy(p.want.out).reshape(a["out"].shape))
    for pool in ("state_out", "state"):
        if pool in a:
            a[pool].dev[torch.from_numpy(p.want.written)] = torch.from_numpy(p.want.state[p.want.written]).to(
                a[pool].dev.dtype)
            return


RW = example(gate="log_channel", index="rw_i32_pad", pool="head_gap")
STRIDED = example(op="gdn", rows="gap_odd", offset=3)
SAME_SLOTS = example(op="gla", io="fp16", state="bf16")


def spoil_output(p):
    p.op_args["out"].dev[-1, -1, -1] *= 1.02


def leave_output_unwritten(p):
    p.op_args["out"].dev[0, 0, 3] = float("nan")


def spoil_state(p):
    p.op_args["state"].dev[int(p.want.written[-1]), 0, 1, 2] += 0.01


def miss_a_store(p):
    slot = int(p.want.written[0])
    p.op_args["state"].dev[slot] = p.op_args["state"].cpu[slot]


def touch_read_slot(p):
    p.op_args["state"].dev[p.op_args["read_index"].cpu[0], 0, 0, 0] += 1


def write_row_gap(p):
    p.op_args["out"].memory.dev[-1] = 0


def write_slot_gap(p):
    x = p.op_args["state"]
    x.memory.dev[x.strides[0] - 1] = 0


def write_input(p):
    p.op_args["v"].dev[0, 0, 0] += 1


def round_state_to_bf16(p):
    x = p.op_args["state"].dev
    w = torch.from_numpy(p.want.written)
    x[w] = x[w].bfloat16().float()


@pytest.mark.parametrize("fault, case, message", [
    (None, RW, None), (None, STRIDED, None), (None, SAME_SLOTS, None),
    (spoil_output, STRIDED, "out: relative RMSE"),
    (leave_output_unwritten, STRIDED, "out: 1 of .* not finite"),
    (spoil_state, SAME_SLOTS, "state: relative RMSE"),
    (miss_a_store, RW, "state: "),
    (touch_read_slot, RW, "state: 1 elements changed"),
    (write_row_gap, STRIDED, "out: 1 elements changed"),
    (write_slot_gap, RW, "state: 1 elements changed"),
    (write_input, STRIDED, "v: 1 elements changed"),
    (round_state_to_bf16, example(), "state: relative RMSE"),
], ids=lambda x: getattr(x, "__name__", None))
def test_faults_are_caught(fault, case, message):
    p = problem.build(case, "cpu")
    store_expectation(p)
    if fault is None:
        problem.check(p)
        return
    fault(p)
    with pytest.raises(AssertionError, match=message):
        problem.check(p)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_one_rounding_is_allowed_and_two_are_not(dtype):
    want = torch.randn(64, 1024, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    compare.assert_close("x", want.to(dtype), want)
    # Storing through the next narrower float first rounds twice: ties fall the wrong way now and then.
    narrower = want.to(dtype)
    one_off = (problem.bits(narrower).clone() + 1).view(dtype)
    with pytest.raises(AssertionError, match="beyond the rounding"):
        compare.assert_close("x", one_off, want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_ulp_is_the_distance_between_neighbours(dtype):
    x = torch.randn(4096, generator=torch.Generator().manual_seed(1)).to(dtype)
    x = torch.cat([x, (x * 2.0**-20).to(dtype)])
    neighbour = (problem.bits(x) + 1).view(dtype)
    assert torch.equal(compare.half_ulp(x.double(), dtype) * 2, (neighbour.double() - x.double()).abs())


def test_addends_matter_only_where_a_sum_cancels():
    """As a whole the norm of the addends is that of the outputs, so that it loosens nothing; a cancelling row is far below it."""
    p = problem.build(example(n=33, rows="nhk", pool="compact"), "cpu")
    ratio = torch.from_numpy(p.want.addends).norm() / torch.from_numpy(p.want.out).norm()
    assert 0.8 < ratio < 1.25
    cancelled = torch.full((1, 64), 1e-3, dtype=torch.float64)
    got = (cancelled + 3e-7 * 1e-2).float()
    with pytest.raises(AssertionError):
        compare.assert_close("x", got, cancelled)
    compare.assert_close("x", got, cancelled, addends=torch.full((1, 64), 1e-1, dtype=torch.float64))
    with pytest.raises(AssertionError):
        compare.assert_close("x", got + 1e-6, cancelled, addends=torch.full((1, 64), 1e-1, dtype=torch.float64))
