"""The cpu part of the benchmark on problems that take no time: what is called, that states do not stay in a cache, what is shown."""

from __future__ import annotations

import pytest
import torch

from benchmarks import decode_cpu, prefill_cpu, timing_cpu


def test_states_take_turns_beyond_the_caches(monkeypatch):
    monkeypatch.setitem(decode_cpu.HEADS, "gdn", ((1, 2),))
    inputs = decode_cpu.turns("gdn", 3, "bf16", cached=1 << 20)
    size = 3 * 2 * 128 * 128 * 2
    assert all(x.state.numel() * x.state.element_size() == size for x in inputs)
    assert len(inputs) * size >= 4 << 20 > (len(inputs) - 1) * size and len({x.state.data_ptr() for x in inputs}) == len(inputs)


def test_every_buffer_is_used_in_turn(monkeypatch):
    called, layouts = [], []
    monkeypatch.setattr(decode_cpu, "HEADS", {"kda": ((1, 2),)})
    monkeypatch.setattr(decode_cpu, "BATCHES", (2,))
    monkeypatch.setattr(decode_cpu, "cache_bytes", lambda: 1 << 20)
    monkeypatch.setattr(decode_cpu, "accuracy", lambda op, state, device: {})
    monkeypatch.setattr(decode_cpu, "cula_call", lambda x, layout: layouts.append(layout) or (lambda: called.append(x.state.data_ptr())))
    monkeypatch.setattr(timing_cpu.MemoryRate, "__init__", lambda self: setattr(self, "best", 10.0))
    monkeypatch.setattr(timing_cpu.MemoryRate, "measure", lambda self: None)
    result = decode_cpu.run(quick=False)
    assert [(r["state"], r["layout"]) for r in result["rows"]] == [(s, x) for s in ("fp32", "bf16") for x in ("vk", "kv")]
    sets = 16  # of 2 * 2 * 128 * 128 float32 in four times 1 MB
    assert layouts[:sets] == ["vk"] * sets and len(set(called[:sets])) == sets and called[0] == called[sets]
    assert all(r["share"] == r["GBs"] / 10 for r in result["rows"])


def test_prefill(monkeypatch):
    monkeypatch.setattr(prefill_cpu, "SHAPES", ((2, (20,)), (1, (3, 0, 17))))
    monkeypatch.setattr(prefill_cpu.prefill, "accuracy", lambda device: {"out": 1e-3, "state": 1e-7})
    seen, real = [], prefill_cpu.cula.kda.kda_prefill
    monkeypatch.setattr(prefill_cpu.cula.kda, "kda_prefill", lambda **a: seen.append(a) or real(**a))
    result = prefill_cpu.run(quick=False)
    assert {a.get("num_threads") for a in seen} == {None, 1} and all(bool(torch.isfinite(a["out"]).all()) for a in seen)
    assert [r["tokens"] for r in result["rows"]] == [20, 20] and [r["sequences"] for r in result["rows"]] == [1, 3]
    assert result["rows"][0]["rate"] == pytest.approx(40 / result["rows"][0]["us"] * 1e6)
    text = prefill_cpu.markdown(result)
    assert "| 1 | 20 | 3 |" in text and "out 1.00e-03, state 1.00e-07" in text
