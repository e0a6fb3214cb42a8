"""Field cases 1 to 3 and 14: sizes, 64-bit addresses, buffers sized by the wrong dimension, padding."""

from __future__ import annotations

import mmap

import pytest
import torch

from tests.cases.tools import GATE, NAN, OPS, index, pool, rows, run, same_bits
from tests.numerics.call import decode
from tests.numerics.device import DEVICES

pytestmark = pytest.mark.parametrize("device", DEVICES)
LAYOUTS = pytest.mark.parametrize("layout", ["vk", "kv"])


@LAYOUTS
def test_case_01_more_than_65535_rows_times_heads(device, layout):
    """A grid's y and z extents end at 65535; N * HV is 70400 here. Rows share four slots and store nothing."""
    n, hv = 1100, 64
    x = rows("gdn", n, 1, hv, io=torch.bfloat16, device=device)
    state = pool(4, hv, layout=layout, device=device)
    reads = index([i % 4 for i in range(n)], device=device)
    run("gdn", x, state=state, read_index=reads, write_index=torch.full_like(reads, -1), layout=layout)


@LAYOUTS
@pytest.mark.parametrize("op", ["kda", "lightning"])
def test_case_02_slot_stride_beyond_2_31(device, op, layout):
    """Three slots, 2^31 + 64 elements apart: every offset in the second and third needs 64 bits."""
    hv, stride = 2, 2**31 + 64
    elements = 2 * stride + hv * 64 * 64
    if device == "cpu":  # untouched pages of an anonymous mapping cost nothing
        memory = mmap.mmap(-1, elements * 2, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0))
        flat = torch.frombuffer(memory, dtype=torch.bfloat16)
    else:
        flat = torch.empty(elements, dtype=torch.bfloat16, device=device)
    state = flat.as_strided((3, hv, 64, 64), (stride, 64 * 64, 64, 1))
    state.copy_(pool(3, hv, dtype=torch.bfloat16, device=device))
    x = rows(op, 3, 1, hv, device=device)
    run(op, x, state=state, read_index=index([2, 0, 1], device=device), layout=layout)


@LAYOUTS
def test_case_03_pool_smaller_than_the_batch(device, layout):
    """The bound of an index is the number of slots, not the number of rows: 12 rows, 3 slots, most rows padding."""
    x = rows("kda", 12, device=device)
    read = index([-1, 2, -1, 3, 11, 0, -1, -1, 5, 4, -9, 3], device=device)
    write = index([-1, 2, -1, 3, 11, 0, -1, 1, 5, -1, -1, -1], device=device)
    run("kda", x, state=pool(3, layout=layout, device=device), read_index=read, write_index=write, layout=layout)


@LAYOUTS
def test_case_03_each_pool_bounds_its_own_index(device, layout):
    """state has 5 slots, state_out 3: slot 4 can be read and not stored; and the other way round."""
    for slots_in, slots_out in ((5, 3), (3, 5)):
        x = rows("gla", 4, device=device)
        run("gla", x, state=pool(slots_in, layout=layout, device=device), layout=layout,
            state_out=pool(slots_out, layout=layout, device=device, seed=3), read_index=index([4, 1, 2, 0], device=device),
            write_index=index([1, 4, 3, 2], device=device))


@LAYOUTS
@pytest.mark.parametrize("op", OPS)
def test_case_14_padding_is_never_read(device, op, layout):
    """NaN in every operand of the padded rows and in every slot that is not read: zeros come out, nothing else changes."""
    x = rows(op, 6, device=device)
    for name in ("q", "k", "v", "gate", "beta"):
        if name in x:
            x[name][[1, 4]] = NAN
    state = pool(6, layout=layout, device=device)
    state[[0, 4]] = NAN
    idx = index([1, -1, 2, 3, -1, 5], device=device)
    clean = {name: t.clone() for name, t in x.items()}
    for name in clean:
        clean[name][[1, 4]] = 0  # the expectation must not see the garbage either
    expected = {name: t.clone() for name, t in clean.items()}
    result = run(op, expected, state=state.clone(), read_index=idx, layout=layout)
    decode(op, **x, gate_kind=GATE[op], state=state, read_index=idx, layout=layout)
    assert not x["out"][[1, 4]].any()
    assert same_bits(x["out"], result.out) and same_bits(state, result.state)


@pytest.mark.parametrize("op", OPS)
def test_case_09_no_rows(device, op):
    """N = 0 is no error and touches nothing; the tensors have no data."""
    state = pool(3, device=device)
    before = state.clone()
    x = rows(op, 0, device=device)
    decode(op, **x, gate_kind=GATE[op], state=state)
    decode(op, **x, gate_kind=GATE[op], state=state, read_index=index([], device=device))
    assert same_bits(state, before)
