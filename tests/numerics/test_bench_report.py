"""The benchmark's tables: recorded peers parse, targets judge the right way round, failures show."""

from __future__ import annotations

import pytest

from benchmarks import decode_inputs, peers, report


def row(op="kda", n=128, heads=(64, 64), state="fp32", us=300.0, share=0.96, **kw):
    return {"op": op, "state": state, "layout": "vk", "heads": heads, "n": n, "us": us, "us_min": us, "GBs": 4000.0, "bytes": 10**9,
            "share": share, "host_us": 7.0, "peers": [{"lib": r.lib, "us": r.us, "host_us": r.host_us, "source": "PEERS.md"}
                                                      for r in peers.recorded()
                                                      if (r.op, r.n, r.heads, r.state) == (op, n, heads, state)], **kw}


def test_recorded_peers():
    rows = peers.recorded()
    assert len({(r.op, r.lib, r.state, r.heads, r.n) for r in rows}) == len(rows) == 90
    for op, heads in (("kda", (64, 64)), ("gdn", (16, 64)), ("gdn", (8, 32)), ("gdn", (4, 16)), ("lightning", (64, 64))):
        assert {r.n for r in rows if (r.op, r.heads) == (op, heads)} == set(decode_inputs.BATCHES)
    for (op, state), libs in peers.LIVE.items():  # a live peer replaces the recorded row of the same name
        if op != "gla":
            assert libs.keys() <= {r.lib for r in rows if (r.op, r.state) == (op, state)}


@pytest.mark.parametrize("given, met", [
    (row(), True), (row(share=0.94), False),
    (row(state="bf16", share=0.91), True), (row(state="bf16", share=0.89), False),
    (row(n=1, us=4.4), True), (row(n=1, us=4.6), False),
    (row(n=8, us=25.0), True), (row(n=8, us=26.0), False),  # recorded best: 25.88
    (row("gdn", 32, (4, 16), us=19.0), True), (row("gdn", 32, (4, 16), us=19.4), False),  # 19.31
])
def test_targets(given, met):
    assert report.target_of(given)[1] is met


def test_tables_show_misses_and_failures():
    accuracy = [{"op": "kda", "state": s, "layout": "vk", "out": 1.6e-3, "state_error": 1e-7} for s in ("fp32", "bf16")]
    result = {"machine": {"gpu": "none"}, "import": {"ms": 130.0}, "cold": {"beyond_cuda_s": 0.3},
              "decode": {"copy_GBs": 4284.0, "accuracy": accuracy, "host": {"python_us": 7.0, "cpp_us": 5.5},
                         "rows": [row(), row(share=0.5), {**row(), "error": "ValueError: no"}]},
              "cpu": {"memory_GBs": 20.0, "cores": 2, "accuracy": accuracy,
                      "rows": [{"op": "kda", "state": "fp32", "layout": "vk", "heads": (64, 64), "n": 128, "us": 1e5,
                                "us_min": 9e4, "GBs": 9.0,
                                "share": 0.45}]}}
    del result["decode"]["rows"][2]["us"]
    text, short = report.markdown(result), report.short(result)
    assert "ValueError: no" in text and "FAILED ValueError: no" in short
    assert "MISSED" in short and short.count("NO") == 2  # import and C++ host time
    assert "| kda | fp32 | 64/64 | 128 | fla_inplace | PEERS.md | 380.64 | 106 |" in text


def test_input_bytes_are_the_least_traffic():
    x = decode_inputs.make("gdn", 2, (1, 2), "fp32", 0, device="cpu")
    rows = 2 * (128 + 128 + 2 * 128 + 2 * 128) * 2 + 2 * 2 * 2 * 2  # q, k, v, out; beta and gate
    assert x.bytes == 2 * 2 * 2 * 128 * 128 * 4 + rows
