"""What cula.engines refuses by name: host values and tensors of a kind that torch itself would take in another sense."""

import pytest
import torch

import cula
from cula import engines


@pytest.mark.parametrize("call, text", [
    (lambda t: engines.slots_of_blocks(t, True), "block_index=True"),
    (lambda t: engines.slots_of_blocks(t, -1), "block_index=-1"),
    (lambda t: engines.slots_of_blocks(t, torch.tensor([0.0, 1.7, 2, 2])), "int32 or int64"),
    (lambda t: engines.slots_of_blocks([[0]], 0), "block_table is a list"),
    (lambda t: engines.slots_of_step(t[:, 0], -1), "rows=-1"),
    (lambda t: engines.slots_of_step(t[:, 0], 2.0), "rows=2.0"),
    (lambda t: engines.slots_of_step([1, 2], 2), "slots is a list"),
    (lambda t: engines.slots_of_step(t[:, 0], 2, query_start_loc=torch.tensor([0.0, 1, 2, 3, 4])), "query_start_loc is torch.float32"),
    (lambda t: engines.slots_of_step(t[:, 0], 2, has_initial_state=[True] * 4), "has_initial_state is a list"),
    (lambda t: engines.decode_rows("kda", state=torch.zeros(2, 1, 64, 64), read_index=None), "read_index is a NoneType"),
    (lambda t: engines.decode_rows("kda", state=[1], read_index=t[:, 0]), "state is a list"),
    (lambda t: engines.decode_rows(["kda"], state=torch.zeros(2, 1, 64, 64), read_index=t[:, 0]), "family="),
])
def test_what_is_no_tensor_or_no_index_is_refused_by_name(call, text):
    table = torch.arange(12, dtype=torch.int32).view(4, 3)
    with pytest.raises(cula.InvalidArgumentError, match=text):
        call(table)


def test_a_numpy_integer_is_a_column():
    import numpy as np

    table = torch.arange(12, dtype=torch.int32).view(4, 3)
    assert torch.equal(engines.slots_of_blocks(table, np.int64(1)), table[:, 1])
