"""Many threads in the library at once on the cpu arch: the bits of a serial run, and every thread its own error text."""

from __future__ import annotations

import threading

import pytest
import torch

import cula
from tests.cases.tools import GATE, OPS, pool, rows, same_bits
from tests.numerics.call import INVALID, decode

TOKENS = 12


def run_tokens(op, seed):
    x, state = rows(op, 9, 2, 4, 128, 64, io=torch.bfloat16, seed=seed), pool(9, 4, 128, 64, seed=seed)
    for _ in range(TOKENS):
        decode(op, **x, gate_kind=GATE[op], state=state, num_threads=seed % 3)
        assert cula.last_kernels()[0].startswith(f"{op}_decode.cpu.")
    return x["out"], state


def refused_text(wrong):
    with pytest.raises(INVALID) as caught:
        decode("kda", **rows("kda", 2), gate_kind="log_channel", state=torch.zeros(2, 2, 64, wrong))
    return str(caught.value)


def test_calls_and_errors_of_many_threads_do_not_mix():
    jobs = [(op, seed) for seed in range(3) for op in OPS]
    want = {job: run_tokens(*job) for job in jobs}
    results, failures = {}, []
    start = threading.Barrier(2 * len(jobs))

    def work(job):
        try:
            start.wait()
            results[job] = run_tokens(*job)
        except BaseException as error:
            failures.append(error)

    def err(wrong):
        try:
            start.wait()
            for _ in range(50):
                assert f"[2,2,64,{wrong}]" in refused_text(wrong)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(job,)) for job in jobs]
    threads += [threading.Thread(target=err, args=(65 + i,)) for i in range(len(jobs))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures
    for job in jobs:
        assert same_bits(results[job][0], want[job][0]) and same_bits(results[job][1], want[job][1])
