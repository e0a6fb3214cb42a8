"""Field cases 30 to 39, 42 and 44: padding slots, separate write slots, padded pools, views into fused rows, alignment."""

from __future__ import annotations

import pytest
import torch

from tests.cases.tools import DELTA, GATE, OPS, index, pool, rows, run, same_bits
from tests.numerics.call import decode
from tests.numerics.device import DEVICES

pytestmark = pytest.mark.parametrize("device", DEVICES)
LAYOUTS = pytest.mark.parametrize("layout", ["vk", "kv"])
STATES = pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])


@STATES
@LAYOUTS
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("op", OPS)
def test_case_30_31_32_minus_one_names_no_slot(device, op, dtype, layout, state_dtype):
    """Slot 0 and the last slot are live; -1 is neither of them, for every state dtype and index dtype."""
    x = rows(op, 5, device=device)
    state = pool(4, dtype=state_dtype, layout=layout, device=device)
    result = run(op, x, state=state, read_index=index([-1, 2, -1, 1, -1], dtype, device), layout=layout)
    assert same_bits(state[[0, 3]], result.before[[0, 3]])
    assert not x["out"][[0, 2, 4]].any()


@LAYOUTS
def test_case_31_null_slot_zero(device, layout):
    """Engines whose padding slot is 0: only with null_slot, and then slot 0 is neither read nor written."""
    x = rows("kda", 3, device=device)
    result = run("kda", x, state=pool(3, layout=layout, device=device), read_index=index([0, 1, 0], device=device), null_slot=0,
                 layout=layout)
    assert not x["out"][[0, 2]].any() and result.want.written.tolist() == [1]
    x = rows("kda", 3, device=device)  # without null_slot, 0 is a slot like any other; here read only
    result = run("kda", x, state=pool(3, layout=layout, device=device), read_index=index([0, 1, 0], device=device),
                 write_index=index([-1, 1, -1], device=device), layout=layout)
    assert x["out"].any(dim=-1).all()


@LAYOUTS
@STATES
def test_case_33_separate_write_slot(device, state_dtype, layout):
    x = rows("gdn", 2, device=device)
    state = pool(5, dtype=state_dtype, layout=layout, device=device)
    result = run("gdn", x, state=state, read_index=index([1, 3], device=device), write_index=index([4, 0], device=device),
                 layout=layout)
    assert same_bits(state[[1, 2, 3]], result.before[[1, 2, 3]])


@pytest.mark.parametrize("gap_holds", ["behind", "before"])
@LAYOUTS
def test_case_34_page_that_holds_more_than_the_state(device, gap_holds, layout):
    """The page of an engine: slots of 524288 elements 540672 apart, the rest of the page belongs to a convolution."""
    hv, k, v, slot = 32, 128, 128, 540672
    start = 0 if gap_holds == "behind" else slot - hv * k * v
    flat = torch.full((4 * slot,), 7.0, device=device)
    state = flat[start:].as_strided((4, hv, v, k), (slot, k * v, k, 1))
    state.copy_(pool(4, hv, k, v, device=device))
    x = rows("gdn", 3, 8, hv, k, v, io=torch.bfloat16, device=device)
    run("gdn", x, state=state, read_index=index([3, 0, 2], device=device), layout=layout)
    state.fill_(7.0)
    assert (flat == 7.0).all(), "the rest of a page was written"


def test_case_34_all_layers_in_one_slot(device):
    """A pool [slots, layers, HV, V, K]: the view of one layer is updated, the others keep their bits."""
    whole = torch.randn(3, 4, 2, 64, 64, generator=torch.Generator().manual_seed(0)).to(device)
    before = whole.clone()
    run("gla", rows("gla", 3, device=device), state=whole[:, 2])
    others = [0, 1, 3]
    assert same_bits(whole[:, others], before[:, others]) and not same_bits(whole[:, 2], before[:, 2])


@LAYOUTS
def test_case_36_mostly_padding(device, layout):
    """A captured capacity of 257 rows with 9 running."""
    idx = torch.full((257,), -1, dtype=torch.int32)
    running = torch.randperm(257, generator=torch.Generator().manual_seed(0))[:9]
    idx[running] = torch.arange(9, dtype=torch.int32)
    x = rows("kda", 257, device=device)
    run("kda", x, state=pool(9, layout=layout, device=device), read_index=idx.to(device), layout=layout)
    assert int(x["out"].any(dim=-1).any(dim=-1).sum()) == 9


@pytest.mark.parametrize("bad", [-1, -2, -2**31, 4, 5, 2**31 - 1, -2**63, 2**40, 2**63 - 1])
@LAYOUTS
def test_case_37_no_index_reaches_memory_outside_the_pool(device, bad, layout):
    """Negative or past the end, for the read and for the write, is 'no slot'; guards around the pool keep their bits."""
    dtype = torch.int32 if -2**31 <= bad < 2**31 else torch.int64
    for read, write in (([bad, 1], [0, 1]), ([0, 1], [bad, 1]), ([bad, 1], [bad, 1])):
        guarded = pool(6, layout=layout, device=device)
        before = guarded.clone()
        run("kda", rows("kda", 2, device=device), state=guarded[1:5], read_index=index(read, dtype, device),
            write_index=index(write, dtype, device), layout=layout)
        assert same_bits(guarded[[0, 5]], before[[0, 5]])


@STATES
@LAYOUTS
@pytest.mark.parametrize("op", OPS)
def test_case_39_in_place_equals_out_of_place(device, op, layout, state_dtype):
    """One buffer for both, the same buffer passed twice, another buffer: equal bits."""
    source = pool(5, 4, 128, 64, layout=layout, dtype=state_dtype, device=device)
    idx = index([4, 2, 0], device=device)
    results = []
    for form in ("in place", "passed twice", "another"):
        x = rows(op, 3, 2, 4, 128, 64, io=torch.bfloat16, device=device)
        state = source.clone()
        target = {"in place": None, "passed twice": state, "another": source.clone()}[form]
        decode(op, **x, gate_kind=GATE[op], state=state, state_out=target, read_index=idx, layout=layout)
        results.append((x["out"], state if target is None else target))
        if form == "another":
            assert same_bits(state, source)
    for out, state in results[1:]:
        assert same_bits(out, results[0][0]) and same_bits(state, results[0][1])


@pytest.mark.parametrize("op", OPS)
@LAYOUTS
def test_case_42_views_into_one_row(device, op, layout):
    """q, k, v as separate tensors, as views into one projected row, and as mixed_qkv: equal bits."""
    n, h, hv, k, v = 5, 2, 4, 64, 128
    x = rows(op, n, h, hv, k, v, io=torch.bfloat16, device=device)
    fused = torch.cat([x[name].reshape(n, -1) for name in "qkv"] + [torch.zeros(n, 8, device=device).bfloat16()], dim=1)
    width = 2 * h * k + hv * v
    views = dict(q=fused[:, : h * k].view(n, h, k), k=fused[:, h * k : 2 * h * k].view(n, h, k),
                 v=fused[:, 2 * h * k : width].view(n, hv, v))
    rest = {name: t for name, t in x.items() if name not in "qkv"}
    results = []
    for form in ({name: x[name] for name in "qkv"}, views, {"mixed_qkv": fused[:, :width]}):
        out, state = torch.full_like(x["out"], float("nan")), pool(n, hv, k, v, layout=layout, device=device)
        decode(op, **{**rest, "out": out}, **form, gate_kind=GATE[op], state=state, layout=layout)
        results.append((out, state))
    assert torch.isfinite(results[0][0].float()).all()
    for out, state in results[1:]:
        assert same_bits(out, results[0][0]) and same_bits(state, results[0][1])


@pytest.mark.parametrize("offset", range(1, 8))
@pytest.mark.parametrize("io", [torch.bfloat16, torch.float16, torch.float32])
@LAYOUTS
def test_case_44_rows_at_any_element_offset(device, io, offset, layout):
    """Every row operand starts `offset` elements into its storage: the same bits as the aligned call."""
    aligned = rows("kda", 3, 2, 4, 64, 64, io=io, device=device)
    aligned["gate"] = aligned["gate"].to(io)
    state = pool(3, 4, layout=layout, device=device)
    shifted, shifted_state = {}, state.clone()
    for name, t in aligned.items():
        flat = torch.full((t.numel() + offset,), float("nan"), dtype=t.dtype, device=device)
        shifted[name] = flat[offset:].view(t.shape).copy_(t)
    run("kda", aligned, state=state, layout=layout)
    decode("kda", **shifted, gate_kind="log_channel", state=shifted_state, layout=layout)
    assert same_bits(aligned["out"], shifted["out"]) and same_bits(state, shifted_state)


@pytest.mark.parametrize("op", DELTA)
def test_head_strides_of_gate_and_beta(device, op):
    """Gate and beta as columns of one wide projection."""
    n, hv = 4, 6
    wide = torch.rand(n, hv, 3, generator=torch.Generator().manual_seed(0)).to(device)
    x = rows(op, n, 2, hv, device=device)
    x["beta"] = wide[:, :, 1]
    if op == "gdn":
        x["gate"] = (-wide)[:, :, 2]
    run(op, x, state=pool(n, hv, device=device))
