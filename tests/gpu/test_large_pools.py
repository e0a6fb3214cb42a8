"""Field case 2 on the GPU with memory behind every address: 4.3 GB (bf16) and 8.6 GB (float32) pools."""

from __future__ import annotations

import pytest
import torch

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
