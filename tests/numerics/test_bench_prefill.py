"""The prefill benchmark: recorded peers parse, the floor by hand, the calls it makes, tables, on the CPU."""

from __future__ import annotations

import itertools

import torch

from benchmarks import peers, prefill, report


def test_recorded_peers_name_the_shapes_that_are_timed():
    rows = peers.recorded_prefill()
    assert len({(r.lib, r.gates, r.heads, r.shape) for r in rows}) == len(rows) == 77
    timed = {(c.heads, c.shape, c.gates) for c in prefill.cases(quick=False)}
    assert {(r.heads, r.shape, r.gates) for r in rows} == timed and len(timed) == 30
    found = {(r.lib, r.gates, r.heads, r.shape): r.ms for r in rows}
    assert found["cudnn", "slow", 8, "32768"] == 9.205 and found["fla", "random", 64, "2 x 8192"] == 3.458


def test_floor_counts_each_tensor_once():
    case = prefill.Case(2, "3", (3, 4), False, "slow")
    a = prefill.arguments(case, device="cpu")
    assert prefill.least_bytes(a) == 7 * 2 * 128 * 2 * 5 + 7 * 2 * 2 + 2 * (2 * 2 * 128 * 128 * 4)
    assert bool((a["A_log"] == 0).all()) and bool((a["dt_bias"] == -8).all()) and a["lower_bound"] == -5.0
    assert a["cu_seqlens"].tolist() == [0, 3, 7]


def test_segments_of_the_plan():
    assert prefill.chosen_segments(lambda s: 100 + 7 * s, 135) == 5 and prefill.chosen_segments(lambda s: 100 + 7 * s, 136) is None
    assert [(f["variant"], f["segments"]) for f in prefill.forced(1)] == [("overlap", 1), ("serial", 1), ("chain", 0), ("overlap", 2)]
    assert {f["segments"] for f in prefill.forced(5)} == {0, 1, 4, 5, 6, 10} and max(f["segments"] for f in prefill.forced(64)) == 64


def test_accuracy_of_the_peers_case():
    """The cpu arch is float32 inside, so the error of out is that of its bf16 store (1.66e-3; an eighth and a tenth for the sample)."""
    figures = prefill.accuracy(device="cpu")
    assert figures["out"] <= 2.0e-3 and figures["state"] <= 5.4e-7


def test_a_run_with_a_fake_timer(monkeypatch, tmp_path):
    """Every case of a quick run, with the tensors on the CPU and the times counted up: what is asked for, and what is shown."""
    clock, real = itertools.count(100), prefill.arguments
    calls = []
    monkeypatch.setattr(prefill, "cases", lambda quick: [prefill.Case(2, "8192", (8,), True, g) for g in ("random", "slow")])
    monkeypatch.setattr(prefill, "arguments", lambda case: real(case, device="cpu"))
    monkeypatch.setattr(prefill, "accuracy", lambda: {"out": 4e-3, "state": 3e-3})
    monkeypatch.setattr(prefill.timing, "graph_us", lambda c: calls.extend(c) or {"us": float(next(clock)), "us_min": 1.0})
    monkeypatch.setattr(prefill.timing, "host_us", lambda c, n: 9.0)
    monkeypatch.setattr(prefill, "workspace", lambda a, **o: 1000 + o.get("segments", 3))
    monkeypatch.setattr(prefill.peers, "fla_prefill", lambda a: (_ for _ in ()).throw(ImportError("no fla")))
    result = prefill.run(True, copy=100.0)  # floor: 8 tokens, 20,512 bytes, and two states of 131,072
    asked = [{k: v for k, v in c.keywords.items() if k in ("variant", "segments")} for c in calls]
    assert asked == 2 * [{}, *prefill.forced(3)]
    calls[0]()  # the call that is timed is one that runs
    assert bool(torch.isfinite(calls[0].keywords["out"]).all())
    text = prefill.markdown(result)
    assert "| 2 | 8192 | random | 0.100 | 0.003 | 3 | overlap 3: 0.101 | -1.0% |" in text and "4.00e-03" in text
    floor, rows = (2 * 131072 + 20512) / 100.0 / 1e3, result["rows"]
    panels = report.prefill_panels(result)
    assert list(panels) == ["kda_prefill, random gates", "kda_prefill, slow gates"]
    for row, lines in zip(rows, panels.values()):
        assert lines["cula"] == [("H=2, 8192", floor / row["us"])] and row["us"] >= 100
        assert lines["best variant"] == [("H=2, 8192", floor / (row["us"] + 1))]  # the first that was asked for is next on the clock
    missing = report.plot({"prefill": result}, tmp_path / "bench.png")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        assert missing == "matplotlib is not installed"
    else:
        assert missing is None and (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_table_shows_failures():
    case = vars(prefill.cases(True)[0])
    bad = case | {"error": "ValueError: no", "floor_us": 1.0, "variants": [], "peers": [{"lib": "fla", "source": "measured", "error": "OutOfMemory"}]}
    text = prefill.markdown({"copy_GBs": 4284.0, "rows": [bad], "accuracy": {"out": float("nan"), "state": 0.0}})
    assert "failed | ValueError: no" in text and "| fla | OutOfMemory |" in text and "out nan" in text
    assert report.prefill_panels({"rows": [bad]}) == {} and report.plot({"prefill": {"rows": [bad]}}, None) == "no GPU rows to plot"


def test_the_plot_leaves_out_what_has_no_time_and_keeps_peers_beside_a_failure():
    case = vars(prefill.cases(True)[0]) | {"floor_us": 40.0, "variants": [{"variant": "overlap", "error": "no"}, {"variant": "serial", "us": 160.0}]}
    failed = case | {"shape": "512", "error": "no", "variants": [], "peers": [{"lib": "fla", "source": "PEERS.md", "us": 400.0}]}
    timed = case | {"shape": "8192", "us": 200.0, "peers": [{"lib": "cudnn", "us": 80.0}, {"lib": "fla", "error": "no"}]}
    (lines,) = report.prefill_panels({"rows": [failed, timed]}).values()
    assert lines == {"fla": [("H=64, 512", 0.1)], "cula": [("H=64, 8192", 0.2)], "best variant": [("H=64, 8192", 0.25)], "cudnn": [("H=64, 8192", 0.5)]}
