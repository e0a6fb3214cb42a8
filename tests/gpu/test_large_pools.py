"""Field cases 1 and 2 on the GPU at full size: pools of 4.3 GB (bf16) and 8.6 GB (float32), more rows than a grid has."""

from __future__ import annotations

import pytest
import torch

import cula
from tests.cases.tools import index, pool, rows, run, same_bits
from tests.numerics.call import decode

pytestmark = pytest.mark.gpu
DEVICE = "cuda"


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", ["vk", "kv"])
def test_case_02_dense_pool_beyond_2_31(layout, state_dtype):
    """A real pool of more than 2^31 elements, live at both ends and in the middle."""
    hv, k, v = 32, 128, 128
    slots = 2**31 // (hv * k * v) + 3
    state = torch.empty(slots, hv, *((v, k) if layout == "vk" else (k, v)), dtype=state_dtype, device=DEVICE)
    state[-3:] = pool(3, hv, k, v, layout=layout, dtype=state_dtype, device=DEVICE, seed=1)
    state[:2] = pool(2, hv, k, v, layout=layout, dtype=state_dtype, device=DEVICE, seed=2)
    small = torch.cat([state[:2], state[-3:]])
    x = rows("kda", 5, 8, hv, k, v, io=torch.bfloat16, device=DEVICE)
    y = {name: t.clone() for name, t in x.items()}
    decode("kda", **x, gate_kind="log_channel", state=state, layout=layout,
           read_index=index([0, 1, slots - 3, slots - 2, slots - 1], device=DEVICE))
    run("kda", y, state=small, layout=layout)  # the same rows on a small pool, checked against float64
    assert same_bits(x["out"], y["out"])
    assert same_bits(torch.cat([state[:2], state[-3:]]), small)


@pytest.mark.parametrize("layout", ["vk", "kv"])
@pytest.mark.parametrize("form", ["plain", "read_index", "write_index", "null_slot"])
def test_case_01_more_rows_than_a_grid_has(form, layout):
    """70000 rows are two launches: the bits of two calls on half of the rows each."""
    n, half = 70_000, 35_000
    x = rows("gdn", n, 1, 1, io=torch.bfloat16, device=DEVICE)
    source = torch.randn(n, 1, 64, 64, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(0))
    order = torch.randperm(n, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    order[::7] = -1
    kw = {"plain": {}, "read_index": {"read_index": order}, "write_index": {"read_index": order, "write_index": order.clone()},
          "null_slot": {"null_slot": 66_001}}[form]
    whole = source.clone()
    decode("gdn", **x, gate_kind="log_head", state=whole, layout=layout, **kw)
    assert len(cula.last_kernels()) == 2
    parts, outs = source.clone(), []
    for first in (0, half):
        part = slice(first, first + half)
        y = {name: t[part].clone() for name, t in x.items()}
        y["out"].fill_(float("nan"))
        piece = {name: t[part] if isinstance(t, torch.Tensor) else t - first for name, t in kw.items()}
        decode("gdn", **y, gate_kind="log_head", state=parts if "read_index" in kw else parts[part], layout=layout, **piece)
        outs.append(y["out"])
    assert torch.isfinite(x["out"].float()).all()
    assert same_bits(x["out"], torch.cat(outs)) and same_bits(whole, parts)
    assert not same_bits(whole, source)
