"""The front-end functions: every option does what its docstring says, against the float64 recurrences; unknown ones are refused by name.

The numerics of the kernels over all shapes and dtypes are in tests/numerics; here it is the way from a Python call to the kernel.
"""

from __future__ import annotations

import inspect
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

import cula
from tests.reference import recurrence

N, H, HV, K, V = 4, 2, 4, 64, 64
OPS = {"kda": cula.kda.kda_decode, "gdn": cula.gdn.gdn_decode, "gla": cula.gla.gla_decode, "lightning": cula.lightning.lightning_decode}
GATES = {"kda": {"none": "none", "log": "log_channel", "raw": "raw"}, "gdn": {"none": "none", "log": "log_head", "raw": "raw"},
         "gla": {"none": "none", "log": "log_channel"}, "lightning": {"none": "none", "log": "log_head"}}
BETA = ("kda", "gdn")
random = np.random.default_rng(3)


def normal(*shape):
    return random.standard_normal(shape).astype("float32")


def rows(op: str, gate_kind: str = "none", layout: str = "vk") -> dict:
    x = dict(q=normal(N, H, K), k=normal(N, H, K), v=normal(N, HV, V), state=normal(N, HV, *((V, K) if layout == "vk" else (K, V))))
    if op in BETA:
        x["beta"] = normal(N, HV)
    if gate_kind != "none":
        x["gate"] = normal(N, HV, K) if op in ("kda", "gla") else normal(N, HV)
        if gate_kind == "log":
            x["gate"] = -abs(x["gate"])
    return x


def close(got, want, limit=2e-6):
    got, want = np.asarray(got, "float64"), np.asarray(want, "float64")
    assert got.shape == want.shape and np.isfinite(got).all()
    assert np.linalg.norm(got - want) <= limit * np.linalg.norm(want)


def run(op: str, given: dict, reference_options: dict | None = None, **options):
    """Calls the function and the recurrence (whose gate kinds have the names of cula.h), compares out and state."""
    other = dict(options) if reference_options is None else reference_options
    want = recurrence.decode(op, **{**given, **other})
    mine = {name: x.copy() if isinstance(x, np.ndarray) else x for name, x in given.items()}
    out = OPS[op](**mine, **options)
    close(out, want.out)
    state = mine.get("state_out") if mine.get("state_out") is not None else mine.get("state")
    if state is not None:
        close(state, want.state, 3e-7)
    return out


@pytest.mark.parametrize(("op", "gate_kind"), [(op, kind) for op in OPS for kind in GATES[op]])
def test_gate_kinds(op, gate_kind):
    run(op, rows(op, gate_kind), dict(gate_kind=GATES[op][gate_kind]), **({"gate_kind": gate_kind} if gate_kind != "none" else {}))


@pytest.mark.parametrize("op", ["kda", "gdn"])
@pytest.mark.parametrize("with_weights", [False, True])
def test_raw_weights(op, with_weights):
    given = rows(op, "raw")
    if with_weights:
        given |= dict(A_log=normal(HV), dt_bias=normal(HV, K) if op == "kda" else normal(HV))
    run(op, given, gate_kind="raw")


@pytest.mark.parametrize("bound", [-5.0, -0.5, -1])
def test_lower_bound(bound):
    run("kda", rows("kda", "raw") | dict(A_log=normal(HV), dt_bias=normal(HV, K)), gate_kind="raw", lower_bound=bound)


@pytest.mark.parametrize("op", BETA)
@pytest.mark.parametrize("beta_kind", ["value", "logit", "logit_twice"])
def test_beta_kinds(op, beta_kind):
    run(op, rows(op), beta_kind=beta_kind)


def test_lightning_decay():
    decay = np.linspace(0.1, 1, HV, dtype="float32")
    given = rows("lightning")
    want = recurrence.decode("lightning", **given, gate=decay, gate_kind="const_head")
    close(cula.lightning.lightning_decode(**given, decay=decay), want.out)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("scale", [None, 0.0, 1.0, -0.5, 1, np.float32(0.25)])
def test_scale(op, scale):
    """0 is a scale, not the default."""
    given = rows(op)
    want = recurrence.decode(op, **given, scale=scale)
    out = OPS[op](**{n: x.copy() for n, x in given.items()}, scale=scale)
    close(out, want.out)
    assert (scale == 0.0) == (np.linalg.norm(out) == 0)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("layout", ["vk", "kv"])
@pytest.mark.parametrize("l2norm", [False, True])
def test_layout_and_norm(op, layout, l2norm):
    given = rows(op, layout=layout)
    run(op, given, dict(layout=layout, l2norm=l2norm), state_layout=layout, l2norm=l2norm)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("layout", ["vk", "kv"])
def test_packed_rows(op, layout):
    given = rows(op, layout=layout)
    packed = np.concatenate([given[n].reshape(N, -1) for n in "qkv"], axis=1)
    want = recurrence.decode(op, **given, layout=layout)
    rest = {n: x.copy() for n, x in given.items() if n not in "qkv"}
    out = OPS[op](mixed_qkv=packed, state_layout=layout, **rest)
    assert out.shape == (N, HV, V)
    close(out, want.out)


@pytest.mark.parametrize("op", OPS)
def test_slots(op):
    given = rows(op)
    given["state"] = normal(9, HV, V, K)
    read, write = np.array([8, -1, 0, 0], "int64"), np.array([3, 4, 0, 0], "int64")
    out = run(op, given | dict(read_index=read, write_index=write), null_slot=0)
    assert not out[2:].any(), "rows of the null slot are padding"
    given["state_out"] = normal(9, HV, V, K)
    run(op, given | dict(read_index=read[:4], write_index=np.array([1, 2, -1, 5], "int32")))


@pytest.mark.parametrize("op", OPS)
def test_without_a_state(op):
    given = rows(op)
    del given["state"]
    run(op, given)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("shape", ["[N,1]", "[1,N]"])
def test_rows_with_a_time_dimension(op, shape):
    given = rows(op, "log")
    want = recurrence.decode(op, **given, gate_kind=GATES[op]["log"])
    at = 1 if shape == "[N,1]" else 0
    mine = {n: x.copy() if n == "state" else np.expand_dims(x, at) for n, x in given.items()}
    out = OPS[op](**mine, gate_kind="log")
    close(out, np.expand_dims(want.out, at))


def test_out_is_written_and_returned():
    given, out = rows("kda"), np.full((N, HV, V), np.nan, "float32")
    assert cula.kda.kda_decode(**given, out=out) is out and np.isfinite(out).all()


# ------------------------------------------------------------------------------------------------------ gates and norm


@pytest.mark.parametrize("lower_bound", [None, -5.0])
@pytest.mark.parametrize("shape", [(6,), (2, 3)])
def test_kda_gate(lower_bound, shape):
    x, A_log, dt_bias = normal(*shape, HV, K), normal(1, 1, HV, 1), normal(HV * K)
    want = recurrence.log_decay("raw", x.reshape(6, HV, K), HV, K, A_log, dt_bias, lower_bound or 0.0)
    close(cula.kda.kda_gate(x, A_log, dt_bias, lower_bound=lower_bound).reshape(6, HV, K), want)


@pytest.mark.parametrize("beta_kind", ["logit", "logit_twice"])
def test_gates_with_beta(beta_kind):
    x, beta, A_log, dt_bias = normal(6, HV), normal(6, HV), normal(HV), normal(HV)
    g, activated = cula.gdn.gdn_gate(x, A_log, dt_bias, beta=beta, beta_kind=beta_kind)
    close(g[..., None], recurrence.log_decay("raw", x, HV, 1, A_log, dt_bias))
    close(activated, recurrence.activate_beta(beta_kind, beta))
    buffers = np.empty((6, HV), "float32"), np.empty((6, HV), "float32")
    again = cula.gdn.gdn_gate(x, A_log, dt_bias, beta=beta, beta_kind=beta_kind, out=buffers[0], beta_out=buffers[1])
    assert again[0] is buffers[0] and again[1] is buffers[1]
    assert np.array_equal(buffers[0], g) and np.array_equal(buffers[1], activated)


def test_a_gate_in_place():
    x = normal(6, HV, K)
    want = cula.kda.kda_gate(x)
    assert cula.kda.kda_gate(x, out=x) is x and np.array_equal(x, want)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_dtypes_of_new_outputs(dtype):
    expected = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    x = torch.from_numpy(normal(6, HV, K)).bfloat16()
    g, beta = cula.kda.kda_gate(x, beta=x[..., 0], dtype=dtype)
    assert g.dtype == beta.dtype == expected
    assert cula.norm.l2norm(x, dtype=dtype).dtype == expected and cula.norm.l2norm(x).dtype == torch.bfloat16
    assert cula.kda.kda_gate(x).dtype == torch.float32


@pytest.mark.parametrize("shape", [(7, 33), (3, 2, 64), (2, 3, 4, 128)])
@pytest.mark.parametrize("eps", [1e-6, 0.1])
def test_l2norm(shape, eps):
    x = normal(*shape)
    norm = np.sqrt((x.astype("float64") ** 2).sum(-1, keepdims=True) + eps)
    rstd = np.empty(shape[:-1], "float32")
    close(cula.norm.l2norm(x, eps=eps, rstd=rstd), x / norm)
    close(rstd, 1 / norm[..., 0])
    assert cula.last_kernels() == ("l2norm.cpu.fp32",)


# ------------------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(("op", "options", "text"), [
    ("kda", dict(gate_kind="Raw"), r"kda_decode: gate_kind='Raw': allowed: 'none', 'log', 'raw'"),
    ("gla", dict(gate_kind="raw"), r"gla_decode: gate_kind='raw': allowed: 'none', 'log'"),
    ("gdn", dict(gate_kind=3), r"gdn_decode: gate_kind=3: allowed: 'none', 'log', 'raw'"),
    ("lightning", dict(gate_kind="decay"), r"pass the constant as decay="),
    ("kda", dict(beta_kind="sigmoid"), r"kda_decode: beta_kind='sigmoid': allowed: 'value', 'logit', 'logit_twice'"),
    ("kda", dict(beta_kind=None), r"beta_kind=None: allowed"),
    ("kda", dict(state_layout="v_first"), r"kda_decode: state_layout='v_first': allowed: 'vk', 'kv'"),
    ("kda", dict(state_layout=["vk"]), r"kda_decode: state_layout=\['vk'\]: allowed: 'vk', 'kv'"),
    ("kda", dict(l2norm=2), r"l2norm=2: allowed: True, False"),
    ("kda", dict(l2norm="no"), r"l2norm='no': allowed: True, False"),
    ("kda", dict(scale="1"), r"scale='1': allowed: a real number or None"),
    ("kda", dict(scale=torch.ones(())), r"scale=.*: allowed: a real number or None"),
    ("kda", dict(scale=float("inf")), r"kda_decode: .*scale"),
    ("kda", dict(lower_bound=0.0, gate_kind="raw"), r"lower_bound=0.0: allowed: a number in \[-5, 0\)"),
    ("kda", dict(lower_bound=-5.1), r"lower_bound=-5.1"),
    ("kda", dict(lower_bound=float("nan")), r"lower_bound=nan"),
    ("kda", dict(null_slot=1.5), r"null_slot=1.5: allowed: an integer"),
    ("kda", dict(null_slot=2**63), r"null_slot=9223372036854775808: allowed: an integer"),
    ("kda", dict(num_threads=-1), r"num_threads=-1: allowed: an integer from 0"),
    ("kda", dict(num_threads=0.5), r"num_threads=0.5"),
    ("kda", dict(stream="current"), r"stream='current': allowed: None"),
])
def test_options_are_refused_by_name(op, options, text):
    with pytest.raises(ValueError, match=text) as caught:
        OPS[op](**rows(op), **options)
    assert isinstance(caught.value, cula.CulaError)


def test_what_equals_an_allowed_value_is_allowed():
    """Whatever came before: option sets are kept, and 1, True and 1.0 are one key."""
    given = rows("kda")
    want = cula.kda.kda_decode(**{n: x.copy() for n, x in given.items()}, l2norm=True, num_threads=1, scale=1.0)
    for options in (dict(l2norm=1, num_threads=np.int32(1), scale=1), dict(l2norm=np.bool_(True) + 0, num_threads=1, scale=True)):
        assert np.array_equal(cula.kda.kda_decode(**{n: x.copy() for n, x in given.items()}, **options), want)


@pytest.mark.parametrize("value", [True, 1.0, "1"])
def test_integers_are_integers(value):
    """True and 1.0 equal 1, also right after a call with 1, whose option set is the same key."""
    x, given = normal(2, 4), rows("kda")
    for name, call in (("num_threads", lambda n: cula.norm.l2norm(x, num_threads=n)), ("num_threads", lambda n: cula.kda.kda_gate(rows("kda", "log")["gate"], num_threads=n)),
                       ("num_threads", lambda n: cula.kda.kda_decode(**given, num_threads=n)), ("null_slot", lambda n: cula.kda.kda_decode(**given, null_slot=n)),
                       ("null_slot", lambda n: cula.kda.kda_prefill(*(given[key][None] for key in "qkv"), rows("kda", "log")["gate"][None], given["beta"][None],
                                                                    given["state"][:1], gate_kind="log", null_slot=n))):
        call(1)
        with pytest.raises(cula.InvalidArgumentError, match=f"{name}={value!r}: allowed: an integer"):
            call(value)
    for op in ("gdn", "gla", "lightning"):
        with pytest.raises(cula.InvalidArgumentError, match="null_slot="):
            OPS[op](**rows(op), null_slot=value)


def test_options_without_a_use_are_refused():
    x, beta = normal(3, H, K), normal(3, H)
    for call, message in ((lambda: cula.kda.kda_gate(x, beta_kind="logit"), "beta_kind='logit' is given without beta"),
                          (lambda: cula.gdn.gdn_gate(beta, beta_kind="logit_twice"), "beta_kind='logit_twice' is given without beta"),
                          (lambda: cula.kda.kda_gate(x, out=x.copy(), dtype="fp32"), "dtype='fp32' is for results that the call allocates"),
                          (lambda: cula.kda.kda_gate(x, beta=beta, out=x.copy(), beta_out=beta.copy(), dtype="fp16"), "dtype='fp16' is for results")):
        with pytest.raises(cula.InvalidArgumentError, match=message):
            call()
    assert cula.kda.kda_gate(x, beta=beta, out=x.copy(), dtype="fp16")[1].dtype == np.float16  # of beta's result


def test_messages_have_the_names_of_python():
    x = rows("gla")
    state = x.pop("state")
    with pytest.raises(cula.InvalidArgumentError, match="gla_decode: null_slot is given, but there is neither"):
        cula.gla.gla_decode(**x, null_slot=0)
    with pytest.raises(cula.InvalidArgumentError, match="gla_decode: gate is missing$"):
        cula.gla.gla_decode(**x, state=state, gate_kind="log")
    with pytest.raises(cula.InvalidArgumentError, match="gla_decode: gate is given, but gate_kind is 'none'$"):
        cula.gla.gla_decode(**x, state=state, gate=normal(N, HV, K))
    with pytest.raises(cula.InvalidArgumentError, match="kda_decode: A_log is given, but gate_kind is not 'raw'$"):
        cula.kda.kda_decode(**rows("kda", "log"), gate_kind="log", A_log=normal(HV))


def test_big_endian_arrays_are_refused_with_what_to_do():
    x = normal(2, 4)
    with pytest.raises(cula.InvalidArgumentError, match=r"l2norm: x: dtype >f4 is big-endian.*newbyteorder\('<'\)"):
        cula.norm.l2norm(x.astype(">f4"))
    swapped = x.astype(">f4")
    assert np.array_equal(cula.norm.l2norm(swapped.astype(swapped.dtype.newbyteorder("<"))), cula.norm.l2norm(x))


@pytest.mark.parametrize("text, warned", [("2", False), (" +2", False), ("", True), ("two", True), ("0", True), ("-1", True), ("4097", True), ("3x", True)])
def test_a_wrong_number_of_threads_in_the_environment_is_said(text, warned):
    """Once a process, by name: the library takes it for not set."""
    code = "import numpy, cula; [cula.norm.l2norm(numpy.ones((2, 4), 'f')) for _ in range(2)]"
    done = subprocess.run([sys.executable, "-W", "always", "-c", code], env=dict(os.environ, CULA_NUM_THREADS=text), capture_output=True, text=True, check=True)
    assert done.stderr.count(f"CULA_NUM_THREADS={text!r} is no number from 1 to 4096: it counts as not set") == warned


@pytest.mark.parametrize("scale", [np.ones(2), torch.ones(2), [1.0], {}])
def test_an_array_among_the_options_is_refused_by_name(scale):
    """Also right after a call that differs in nothing else, when the two option sets are compared."""
    for _ in range(2):
        cula.kda.kda_decode(**rows("kda"), scale=1.0)
        with pytest.raises(cula.InvalidArgumentError, match="kda_decode: scale=.*allowed: a real number or None"):
            cula.kda.kda_decode(**rows("kda"), scale=scale)


def test_a_gate_without_its_kind_is_refused():
    """What a gate holds is never guessed."""
    for op in OPS:
        with pytest.raises(ValueError, match="gate"):
            OPS[op](**rows(op, "log"))
        with pytest.raises(ValueError, match="gate"):
            OPS[op](**rows(op), gate_kind="log")


def test_rows_are_given_once():
    given = rows("kda")
    packed = np.concatenate([given[n].reshape(N, -1) for n in "qkv"], axis=1)
    with pytest.raises(ValueError, match="mixed_qkv"):
        cula.kda.kda_decode(**given, mixed_qkv=packed)
    with pytest.raises(ValueError, match="v is missing"):
        cula.kda.kda_decode(given["q"], given["k"], beta=given["beta"])
    with pytest.raises(ValueError, match="pass out= or state"):
        cula.kda.kda_decode(mixed_qkv=packed, beta=given["beta"])
    with pytest.raises(ValueError, match="expected .*slots"):
        cula.kda.kda_decode(mixed_qkv=packed, beta=given["beta"], state=given["state"][0])


def test_other_refusals():
    x, beta = normal(6, HV), normal(6, HV)
    given = rows("lightning", "log")
    for function, text in (
            (lambda: cula.lightning.lightning_decode(**given, decay=normal(HV)), "decay and gate exclude each other"),
            (lambda: cula.gdn.gdn_gate(x, beta_out=beta), "beta_out is given without beta"),
            (lambda: cula.gdn.gdn_gate(x, beta=beta, beta_kind="value"), "allowed: 'logit', 'logit_twice'"),
            (lambda: cula.gdn.gdn_gate(x, dtype="float32"), "dtype='float32': allowed: 'fp32', 'bf16', 'fp16'"),
            (lambda: cula.norm.l2norm(x, dtype="fp8"), "dtype='fp8': allowed"),
            (lambda: cula.norm.l2norm(x, out=x, dtype="fp32"), "dtype is that of out"),
            (lambda: cula.norm.l2norm(x, eps=0), "eps=0: allowed: a number above 0"),
            (lambda: cula.norm.l2norm([1.0]), "l2norm: x: list is no array")):
        with pytest.raises(ValueError, match=text):
            function()
    with pytest.raises(cula.UnsupportedError, match="head_dim|K|96"):
        cula.gla.gla_decode(normal(N, H, 96), normal(N, H, 96), normal(N, H, 64))


@pytest.mark.parametrize("function", [*OPS.values(), cula.kda.kda_gate, cula.gdn.gdn_gate, cula.norm.l2norm], ids=lambda f: f.__name__)
def test_every_keyword_is_documented_or_said_to_be_as_elsewhere(function):
    text = (function.__doc__ or "") + cula.kda.kda_decode.__doc__ + cula.kda.kda_gate.__doc__
    missing = [name for name in inspect.signature(function).parameters if name not in text]
    assert not missing
