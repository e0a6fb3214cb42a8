"""Calls on the cpu arch from numpy, torch and JAX, alone and mixed, against the float64 recurrence; and how calls share nothing."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

import cula
from cula_loader import abi, dispatch, dlpack
from tests.reference import recurrence

N, H, HV, K, V = 5, 2, 4, 64, 128
LIMIT = {"float32": 2e-6, "float16": 4e-4, "bfloat16": 2.5e-3}  # relative RMS: rounding of out


def problem(dtype: str, seed=0) -> dict:
    """Operands of a KDA decode in numpy, with permuted slots, a row from zero, one that stores nothing and one of padding."""
    random = np.random.default_rng(seed)
    normal = lambda *shape: random.standard_normal(shape).astype("float32")  # noqa: E731
    io = getattr(ml_dtypes, dtype, dtype)
    return dict(q=normal(N, H, K).astype(io), k=normal(N, H, K).astype(io), v=normal(N, HV, V).astype(io), gate=normal(N, HV, K).astype(io),
                beta=normal(N, HV), state=normal(N + 2, HV, V, K), A_log=normal(HV), dt_bias=normal(HV, K),
                read_index=np.array([6, -1, 2, -1, 0], "int32"), write_index=np.array([6, 1, -1, -1, 3], "int32"))


OPTIONS = dict(gate_kind="raw", beta_kind="logit", l2norm=True, lower_bound=-5.0)


def expected(rows: dict, **options) -> recurrence.Decoded:
    o = OPTIONS | options
    return recurrence.decode("kda", **{n: x.astype("float64") if x.dtype.kind not in "i" else x for n, x in rows.items()}, **o)


def to_numpy(x):
    if isinstance(x, torch.Tensor):
        return x.double().numpy()
    return np.asarray(x).astype("float64")


FRAMEWORKS = {
    "numpy": lambda x: x.copy(),
    "torch": lambda x: torch.from_numpy(x.view("int16").copy()).view(torch.bfloat16) if x.dtype == ml_dtypes.bfloat16 else torch.from_numpy(x.copy()),
    "jax": jnp.array,
}


def check(out, state, want: recurrence.Decoded, dtype: str, before) -> None:
    out, state = to_numpy(out), to_numpy(state)
    assert np.linalg.norm(out - want.out) <= LIMIT[dtype] * np.linalg.norm(want.out)
    assert np.linalg.norm(state - want.state) <= 2e-7 * np.linalg.norm(want.state)
    untouched = np.setdiff1d(np.arange(len(state)), want.written)
    assert np.array_equal(state[untouched], before[untouched].astype("float64"))


@pytest.mark.parametrize("dtype", LIMIT)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_every_framework_and_dtype(framework, dtype):
    """Among them numpy's bfloat16 of ml_dtypes, which DLPack does not carry."""
    rows = problem(dtype)
    given = {name: FRAMEWORKS[framework](x) for name, x in rows.items()}
    out = cula.kda.kda_decode(**given, **OPTIONS, donate=framework == "jax")
    assert type(out) is type(given["v"]) and str(out.dtype).endswith(dtype) and tuple(out.shape) == (N, HV, V)
    check(out, given["state"], expected(rows), dtype, rows["state"])
    assert cula.last_kernels() == (f"kda_decode.cpu.{ {'float32': 'fp32', 'float16': 'fp16', 'bfloat16': 'bf16'}[dtype]}.sfp32.k64.vk",)


@pytest.mark.parametrize("lead", FRAMEWORKS)
def test_frameworks_may_be_mixed(lead):
    """Weights in numpy, rows in torch, indices in JAX: every operand is read as its own framework gives it."""
    rows = problem("float32")
    kinds = ["torch", "numpy", "jax"]
    given = {name: FRAMEWORKS[kinds[i % 3]](x) for i, (name, x) in enumerate(rows.items())}
    given["state"], given["v"] = torch.from_numpy(rows["state"].copy()), FRAMEWORKS[lead](rows["v"])
    out = cula.kda.kda_decode(**given, **OPTIONS)
    assert type(out) is type(given["v"])
    check(out, given["state"], expected(rows), "float32", rows["state"])


def test_the_fast_and_the_slow_reader_agree_bitwise(monkeypatch):
    rows = problem("bfloat16")
    results = []
    for slow in (False, True):
        given = {name: FRAMEWORKS["torch"](x) for name, x in rows.items()}
        if slow:
            monkeypatch.setattr(dispatch, "_bind_objects", lambda *a: 1)
        out = cula.kda.kda_decode(**given, **OPTIONS)
        results.append((out, given["state"]))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])


def test_the_fast_reader_is_used_for_torch(monkeypatch):
    """Or the host-time target would be lost without a test noticing."""
    monkeypatch.setattr(dispatch, "_bind_slow", lambda *a: pytest.fail("the slow reader was used"))
    given = {name: FRAMEWORKS["torch"](x) for name, x in problem("float32").items()}
    cula.kda.kda_decode(**given, **OPTIONS)
    given["A_log"] = torch.nn.Parameter(given["A_log"], requires_grad=False)
    cula.kda.kda_decode(**given, **OPTIONS)


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_views_are_read_in_place(framework):
    """Slices of one projection row, a padded slot stride, a reversed order of heads as far as the rules allow."""
    rows = problem("float32")
    wide = np.full((N, 2 * H * K + HV * V + 40), np.nan, "float32")
    wide[:, : H * K], wide[:, H * K: 2 * H * K] = rows["q"].reshape(N, -1), rows["k"].reshape(N, -1)
    wide[:, 2 * H * K: 2 * H * K + HV * V] = rows["v"].reshape(N, -1)
    pool = np.full((N + 2, HV * V * K + 512), np.nan, "float32")
    pool[:, : HV * V * K] = rows["state"].reshape(N + 2, -1)
    wide, pool = FRAMEWORKS[framework](wide), FRAMEWORKS[framework](pool)
    given = {name: FRAMEWORKS[framework](x) for name, x in rows.items() if name not in ("q", "k", "v", "state")}
    q, k = wide[:, : H * K].reshape(N, H, K), wide[:, H * K: 2 * H * K].reshape(N, H, K)
    v = wide[:, 2 * H * K: 2 * H * K + HV * V].reshape(N, HV, V)
    state = pool[:, : HV * V * K].reshape(N + 2, HV, V, K)
    if framework == "numpy":  # numpy's reshape may copy; these views do not
        assert np.shares_memory(q, wide) and np.shares_memory(state, pool)
    out = cula.kda.kda_decode(q, k, v, state=state, **given, **OPTIONS)
    check(out, state, expected(rows), "float32", rows["state"])
    assert np.isnan(to_numpy(pool)[:, HV * V * K:]).all(), "the gap between slots is not written"


# ------------------------------------------------------------------------------------------------------------ refusals


def test_an_operand_that_is_no_array_is_named():
    given = {name: FRAMEWORKS["torch"](x) for name, x in problem("float32").items()}
    for wrong in ([1.0], 3, "x", object()):
        with pytest.raises(cula.InvalidArgumentError, match=r"kda_decode: beta: \w+ offers neither DLPack nor __cuda_array_interface__"):
            cula.kda.kda_decode(**{**given, "beta": wrong}, **OPTIONS)


@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize(("name", "change", "text"), [
    ("q", lambda x: x[:, :, :-1], "kda_decode: .*q has shape|kda_decode: .*shape"), ("beta", lambda x: x[:-1], "kda_decode: .*beta"),
    ("state", lambda x: x[:, :, 0], "kda_decode: .*state"), ("read_index", lambda x: x[:2], "kda_decode: .*read_index")])
def test_the_librarys_message_names_the_operand(framework, name, change, text):
    given = {n: FRAMEWORKS[framework](x) for n, x in problem("float32").items()}
    with pytest.raises(ValueError, match=text):
        cula.kda.kda_decode(**{**given, name: change(given[name])}, **OPTIONS)


def test_a_read_only_array_is_no_output():
    given = {name: FRAMEWORKS["numpy"](x) for name, x in problem("float32").items()}
    out, state = np.zeros((N, HV, V), "float32"), given["state"]
    out.flags.writeable = False
    with pytest.raises(cula.InvalidArgumentError, match="kda_decode: out: is written, and this array is read-only"):
        cula.kda.kda_decode(**given, out=out, **OPTIONS)
    state.flags.writeable = False
    with pytest.raises(cula.InvalidArgumentError, match="kda_decode: state: is written"):
        cula.kda.kda_decode(**given, **OPTIONS)
    for name in ("q", "A_log", "read_index"):
        given[name].flags.writeable = False
    other = np.zeros_like(state)
    cula.kda.kda_decode(**given, state_out=other, **OPTIONS)  # then state is only read
    assert np.linalg.norm(other) > 0


def test_jax_arrays_are_written_only_when_donated():
    rows = problem("float32")
    given = {name: jnp.array(x) for name, x in rows.items()}
    with pytest.raises(cula.InvalidArgumentError, match="kda_decode: state: is written, and jax arrays are immutable: pass donate=True"):
        cula.kda.kda_decode(**given, **OPTIONS)
    assert np.array_equal(given["state"], rows["state"])
    without = {**given, "state": None, "read_index": None, "write_index": None}
    out = cula.kda.kda_decode(**without, **OPTIONS)  # a new out needs no donation
    want = expected({n: x for n, x in rows.items() if n not in ("state", "read_index", "write_index")})
    assert np.linalg.norm(np.asarray(out) - want.out) <= 2e-6 * np.linalg.norm(want.out)


def test_a_gradient_is_refused_with_the_name():
    given = {name: FRAMEWORKS["torch"](x) for name, x in problem("float32").items()}
    given["dt_bias"].requires_grad_()
    with pytest.raises(cula.UnsupportedError, match="kda_decode: dt_bias: requires grad"):
        cula.kda.kda_decode(**given, **OPTIONS)
    with torch.no_grad():
        cula.kda.kda_decode(**given, **OPTIONS)


def test_meta_and_fake_tensors_are_refused():
    from torch._subclasses.fake_tensor import FakeTensorMode

    given = {name: FRAMEWORKS["torch"](x) for name, x in problem("float32").items()}
    for name in ("q", "state"):
        with pytest.raises(cula.InvalidArgumentError, match=f"kda_decode: {name}: .*meta"):
            cula.kda.kda_decode(**{**given, name: given[name].to("meta")}, **OPTIONS)
        with FakeTensorMode():
            fake = torch.zeros(given[name].shape)
        with pytest.raises(cula.CulaError, match=f"kda_decode: {name}.*FakeTensor"):
            cula.kda.kda_decode(**{**given, name: fake}, **OPTIONS)
    with FakeTensorMode(), pytest.raises(cula.CulaError):
        cula.kda.kda_decode(**{n: torch.zeros(x.shape, dtype=x.dtype) for n, x in given.items()}, **OPTIONS)


class Elsewhere:
    """An array of a device that cula knows nothing of, or of pinned host memory."""

    def __init__(self, x, device_type):
        self.x, self.device_type = x, device_type

    def __dlpack_device__(self):
        return self.device_type, 0

    def __dlpack__(self, **kwargs):
        kwargs.pop("stream", None)
        capsule = self.x.__dlpack__(**kwargs)
        abi.Tensor.from_address(dlpack.from_capsule(capsule).address).device_type = self.device_type
        return capsule


@pytest.mark.parametrize(("device_type", "text"), [(14, "device type 14|oneapi"), (3, "cuda_host|kDLCUDAHost|cudahost")])
@pytest.mark.parametrize("names", [("q",), ("state",), ("q", "k", "v", "gate", "beta", "state", "out")])
def test_other_devices_are_refused(names, device_type, text):
    rows = problem("float32")
    given = {n: x.copy() for n, x in rows.items() if n not in ("A_log", "dt_bias", "read_index", "write_index")} | {"out": np.zeros_like(rows["v"])}
    with pytest.raises(cula.InvalidArgumentError, match=f"(?i)kda_decode: .*({text})"):
        cula.kda.kda_decode(**{n: Elsewhere(x, device_type) if n in names else x for n, x in given.items()}, **OPTIONS)


def test_a_stream_for_cpu_tensors_is_refused():
    given = {name: FRAMEWORKS["torch"](x) for name, x in problem("float32").items()}
    with pytest.raises(cula.InvalidArgumentError, match="stream"):
        cula.kda.kda_decode(**given, stream=77, **OPTIONS)
    cula.kda.kda_decode(**given, stream=0, **OPTIONS)


def test_a_failed_call_leaves_nothing_behind():
    given = {name: FRAMEWORKS["torch"](x) for name, x in problem("float32").items()}
    cula.kda.kda_decode(**given, **OPTIONS)
    assert len(cula.last_kernels()) == 1
    with pytest.raises(ValueError, match="beta"):
        cula.kda.kda_decode(**{**given, "beta": given["beta"][:1]}, **OPTIONS)
    assert cula.last_kernels() == ()
    cula.kda.kda_decode(**given, **OPTIONS)
    assert len(cula.last_kernels()) == 1


# --------------------------------------------------------------------------------------------------- lifetime, threads


@pytest.mark.parametrize("framework", ["numpy", "torch", "jax"])
def test_no_operand_is_kept(framework):
    given = {name: FRAMEWORKS[framework](x) for name, x in problem("float32").items()}
    out = cula.kda.kda_decode(**given, **OPTIONS, donate=framework == "jax")
    gone = [weakref.ref(x) for x in given.values()] + [weakref.ref(out)]
    del given, out
    gc.collect()
    assert not [ref for ref in gone if ref() is not None]


def test_threads_do_not_mix_their_calls():
    """Each thread its own problem and options, at the same time, again and again: bitwise what it is alone."""
    def run(seed):
        rows = problem("float32", seed)
        given = {name: FRAMEWORKS["torch" if seed % 2 else "numpy"](x) for name, x in rows.items()}
        return to_numpy(cula.kda.kda_decode(**given, **OPTIONS, scale=1 / (seed + 1), num_threads=1)), cula.last_kernels()

    alone, failures = [run(seed) for seed in range(6)], []

    def work(seed):
        try:
            for _ in range(20):
                out, kernels = run(seed)
                assert np.array_equal(out, alone[seed][0]) and kernels == alone[seed][1]
        except BaseException as error:  # noqa: BLE001
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    [t.start() for t in threads], [t.join() for t in threads]
    assert not failures


def test_a_call_inside_a_call(monkeypatch):
    """Between reading and running, something else calls: the outer call's operands stay its own."""
    rows, other = problem("float32"), problem("float32", 1)
    given = {name: FRAMEWORKS["torch"](x) for name, x in rows.items()}
    cula.kda.kda_decode(**{n: x.clone() for n, x in given.items()}, **OPTIONS)
    real = dispatch._run

    def interrupted(*args):
        monkeypatch.setattr(dispatch, "_run", real)
        cula.kda.kda_decode(**{name: FRAMEWORKS["torch"](x) for name, x in other.items()}, **OPTIONS)
        return real(*args)

    monkeypatch.setattr(dispatch, "_run", interrupted)
    out = cula.kda.kda_decode(**given, **OPTIONS)
    check(out, given["state"], expected(rows), "float32", rows["state"])


FORKED = """
import os, numpy, cula
def decode():
    x = numpy.random.default_rng(0).standard_normal((64, 8, 64)).astype("float32")
    return cula.gla.gla_decode(x, x, x, state=numpy.zeros((64, 8, 64, 64), "float32"))
expected = decode()
for _ in range(3):
    child = os.fork()
    if child == 0:
        os._exit(0 if numpy.array_equal(decode(), expected) and len(cula.last_kernels()) == 1 else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert numpy.array_equal(decode(), expected)
"""


def test_a_forked_child_computes():
    """The parent's threads do not exist in the child; both go on computing. (In a process of its own: JAX's threads do not like forks.)"""
    root = Path(__file__).parents[2]
    env = dict(os.environ, PYTHONPATH=os.pathsep.join(map(str, (root / "loader", root / "python"))))
    done = subprocess.run([sys.executable, "-c", FORKED], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_kept_option_sets_are_bounded():
    given = {name: FRAMEWORKS["torch"](x) for name, x in problem("float32").items()}
    for i in range(3 * dispatch._PREPARED_LIMIT):
        cula.kda.kda_decode(**{n: x.clone() for n, x in given.items()}, **OPTIONS, scale=1 + i / 1000)
    assert all(len(known) <= dispatch._PREPARED_LIMIT for known in dispatch._local.pool[-1].prepared.values())
    with pytest.raises(ValueError, match="scale"):
        cula.kda.kda_decode(**given, **OPTIONS, scale=float("nan"))
