"""The gate benchmark's rows: bytes, references and tables, on the CPU."""

import pytest
import torch

from benchmarks import gates

ROWS = [r for r in gates.rows(quick=False) if r.tokens == 64]


@pytest.mark.parametrize("row", ROWS, ids=lambda r: f"{r.op}-{r.form}-{r.heads}-{r.io}-{r.result}")
def test_row_computes_what_it_says(row):
    """The call that is timed gives the reference's values in the row's dtypes."""
    inputs = gates.Inputs(row, 0, device="cpu")
    assert inputs.x.dtype == gates.DTYPE[row.io] and inputs.out.dtype == gates.DTYPE[row.result]
    assert gates.accuracy(row, device="cpu") < {torch.float32: 2e-7, torch.bfloat16: 1.8e-3}[inputs.out.dtype]


def test_bytes_are_the_least_traffic():
    kda = gates.Inputs(gates.Row("kda_gate", "bound", 3, 2, "bf16", "fp32"), 0, device="cpu")
    assert kda.bytes == 3 * 2 * 128 * (2 + 4)
    gdn = gates.Inputs(gates.Row("gdn_gate", "softplus+beta", 3, 16, "bf16", "fp32"), 0, device="cpu")
    assert gdn.bytes == 2 * 3 * 16 * (2 + 4)
    norm = gates.Inputs(gates.Row("l2norm", "in place", 3, 2, "bf16", "bf16"), 0, device="cpu")
    assert norm.bytes == 3 * 2 * 128 * (2 + 2)


def test_table_shows_failures():
    row = vars(ROWS[0])
    good = row | dict(us=10.0, GBs=4000.0, bytes=1, floor_us=9.0, share=0.9, error_rms=1e-8, host_us=5.0, fla={"error": "OutOfMemory"})
    text = gates.markdown({"copy_GBs": 4284.0, "rows": [good, row | dict(error="ValueError: no", fla=None)]})
    assert "| 10.00 | 9.00 | 90.0% | 1.0e-08 | 5.0 | failed: OutOfMemory |" in text and "ValueError: no" in text
