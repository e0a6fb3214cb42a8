"""kda_gate, gdn_gate and l2norm: every rule with its message, and plans whose addresses are compared element by element."""

import ctypes
import itertools
import math
import random

import pytest

from tests.capi import abi, standin
from tests.capi.abi import CPU, GPU, INVALID, OK, UNSUPPORTED, tensor
from tests.capi.calls import gate, l2norm
from tests.capi.test_decode_plan import CODE, address, name_of, strides_of
from tests.capi.test_decode_rules import with_

gdn = lambda shape=(5, 64), **kw: gate("gdn_gate", shape, **kw)


def on(call, name, of, **kw):
    t = tensor(**kw)
    t.data = call.tensors[of].data
    return with_(call, **{name: t})


RULES = [
    *((f"kda_gate: {name} is missing (NULL)", lambda name=name: with_(gate(), **{name: None})) for name in ("x", "g")),
    ("kda_gate: beta_out is missing (NULL)", lambda: with_(gate(beta=True), beta_out=None)),
    ("kda_gate: beta_out is given, but there is no beta", lambda: with_(gate(), beta_out=tensor([5, 4]))),
    ("kda_gate: beta_kind is 0; must be LOGIT (1) or LOGIT_TWICE (2) with beta, 0 without", lambda: gate(beta=True, beta_kind=0)),
    ("kda_gate: beta_kind is 3; must be LOGIT (1) or LOGIT_TWICE (2) with beta, 0 without", lambda: gate(beta=True, beta_kind=3)),
    ("kda_gate: beta_kind is 1 and there is no beta; must be LOGIT (1) or LOGIT_TWICE (2) with beta, 0 without", lambda: gate(beta_kind=1)),
    ("gdn_gate: lower_bound is -5, but it belongs to kda_gate", lambda: gdn(lower_bound=-5.0)),
    ("kda_gate: lower_bound is -5.5; must be 0 (softplus form) or in [-5,0)", lambda: gate(lower_bound=-5.5)),
    ("kda_gate: lower_bound is nan; must be 0 (softplus form) or in [-5,0)", lambda: gate(lower_bound=math.nan)),
    ("kda_gate: lower_bound is 2; must be 0 (softplus form) or in [-5,0)", lambda: gate(lower_bound=2.0)),
    ("kda_gate: reserved0 is 4; must be 0", lambda: gate(reserved0=4)),
    ("kda_gate: num_threads is -3; must be 0 (all) or more", lambda: gate(num_threads=-3)),
    ("kda_gate: num_threads is 2; must be 0 for tensors on a GPU", lambda: gate(num_threads=2)),
    ("kda_gate: x has dtype float64; must be bf16, fp16 or float32", lambda: gate(io="fp64")),
    ("kda_gate: g has dtype int32; must be bf16, fp16 or float32", lambda: gate(g="i32")),
    ("kda_gate: x has shape [5,64]; expected [T,HV,K] or [B,T,HV,K]", lambda: with_(gate(), x=tensor([5, 64], "bf16"))),
    ("gdn_gate: x has shape [2,2,5,64]; expected [T,HV] or [B,T,HV]", lambda: with_(gdn(), x=tensor([2, 2, 5, 64], "bf16"))),
    ("kda_gate: x has shape [5,0,128]; HV and K must be at least 1", lambda: gate(shape=(5, 0, 128), params=False)),
    ("gdn_gate: x has shape [5,0]; HV must be at least 1", lambda: gdn((5, 0), params=False)),
    ("kda_gate: g has shape [5,4,64]; expected [5,4,128], from x", lambda: with_(gate(), g=tensor([5, 4, 64]))),
    ("kda_gate: the last stride of x is 2; must be 1", lambda: with_(gate(), x=tensor([5, 4, 128], "bf16", [1024, 256, 2]))),
    ("gdn_gate: the last stride of g is 5; must be 1", lambda: with_(gdn(), g=tensor([5, 64], "fp32", [1, 5]))),
    ("kda_gate: g has shape [5,4,128] and stride 0 in dimension 0: two of its elements share memory, but it is written",
     lambda: with_(gate(), g=tensor([5, 4, 128], "fp32", [0, 128, 1]))),
    ("kda_gate: A_log has shape [5]; expected HV = 4 elements", lambda: with_(gate(), A_log=tensor([5]))),
    ("kda_gate: dt_bias has shape [4]; expected HV*K = 512 elements", lambda: with_(gate(), dt_bias=tensor([4]))),
    ("gdn_gate: dt_bias has shape [4]; expected HV = 64 elements", lambda: with_(gdn(), dt_bias=tensor([4]))),
    ("kda_gate: beta has shape [4,4]; expected [5,4], from x", lambda: with_(gate(beta=True), beta=tensor([4, 4]))),
    ("kda_gate: beta_out has shape [5,3]; expected [5,4], from x", lambda: with_(gate(beta=True), beta_out=tensor([5, 3]))),
    ("kda_gate: beta_out has shape [5,4] and stride 0 in dimension 1: two of its elements share memory, but it is written",
     lambda: with_(gate(beta=True), beta_out=tensor([5, 4], "fp32", [1, 0]))),
    ("kda_gate: g overlaps x in memory, but with another start, dtype or strides; it must be the same memory or other memory",
     lambda: on(gate(), "g", "x", shape=[5, 4, 128], dtype="fp32")),
    ("kda_gate: beta_out overlaps beta in memory, but with another start, dtype or strides; it must be the same memory or other memory",
     lambda: on(gate(beta=True), "beta_out", "beta", shape=[5, 4], dtype="bf16", strides=[1, 5])),
    ("kda_gate: g overlaps A_log in memory", lambda: on(gate(), "A_log", "g", shape=[4])),
    ("kda_gate: g overlaps beta in memory", lambda: on(gate(beta=True), "beta", "g", shape=[5, 4])),
    ("kda_gate: g overlaps beta_out in memory", lambda: on(gate(beta=True), "beta_out", "g", shape=[5, 4])),
    ("kda_gate: beta_out overlaps x in memory", lambda: on(gate(beta=True), "beta_out", "x", shape=[5, 4])),
    ("kda_gate: beta_out overlaps dt_bias in memory", lambda: on(gate(beta=True), "beta_out", "dt_bias", shape=[5, 4])),
    *((f"l2norm: {name} is missing (NULL)", lambda name=name: with_(l2norm(), **{name: None})) for name in ("x", "y")),
    ("l2norm: x has shape [128]; expected [...,D] of rank 2 to 4", lambda: l2norm((128,))),
    ("l2norm: x has shape [1,2,3,4,128]; expected [...,D] of rank 2 to 4", lambda: l2norm((1, 2, 3, 4, 128))),
    ("l2norm: x has shape [5,0]; D must be at least 1", lambda: l2norm((5, 0))),
    ("l2norm: x has shape [5,1025]; D must be from 1 to 1024", lambda: l2norm((5, 1025))),
    ("l2norm: y has shape [5,4,64]; expected [5,4,128], from x", lambda: with_(l2norm(), y=tensor([5, 4, 64]))),
    ("l2norm: the last stride of x is 3; must be 1", lambda: with_(l2norm(), x=tensor([5, 4, 128], "bf16", [1536, 384, 3]))),
    ("l2norm: y has shape [5,4,128] and stride 64 in dimension 1: two of its elements share memory, but it is written",
     lambda: with_(l2norm(), y=tensor([5, 4, 128], "bf16", [512, 64, 1]))),
    ("l2norm: rstd has dtype bfloat16; must be float32", lambda: with_(l2norm(), rstd=tensor([5, 4], "bf16"))),
    ("l2norm: rstd has shape [5]; expected [5,4], from x", lambda: with_(l2norm(), rstd=tensor([5]))),
    ("l2norm: rstd has stride 8 in dimension 0; it must be compact, stride 4 there", lambda: with_(l2norm(), rstd=tensor([5, 4], "fp32", [8, 1]))),
    ("l2norm: rstd overlaps y in memory", lambda: on(l2norm(), "rstd", "y", shape=[5, 4])),
    ("l2norm: rstd overlaps x in memory", lambda: on(l2norm(), "rstd", "x", shape=[5, 4])),
    ("l2norm: y overlaps x in memory, but with another start, dtype or strides; it must be the same memory or other memory",
     lambda: on(l2norm(), "y", "x", shape=[5, 4, 128], dtype="fp16")),
    ("l2norm: eps is -1; must be 0 (1e-6) or positive and finite", lambda: l2norm(eps=-1.0)),
    ("l2norm: eps is nan; must be 0 (1e-6) or positive and finite", lambda: l2norm(eps=math.nan)),
    ("l2norm: eps is inf; must be 0 (1e-6) or positive and finite", lambda: l2norm(eps=math.inf)),
    ("l2norm: num_threads is 1; must be 0 for tensors on a GPU", lambda: l2norm(num_threads=1)),
    ("l2norm: num_threads is -1; must be 0 (all) or more", lambda: l2norm(num_threads=-1)),
]


@pytest.mark.parametrize("message, make", RULES, ids=[message for message, _ in RULES])
def test_rule(lib, message, make):
    status, _ = make().query(lib)
    assert abi.last_error(lib) == message
    assert status == (UNSUPPORTED if "from 1 to 1024" in message else INVALID)


@pytest.mark.parametrize("make", [gate, gdn, l2norm])
def test_arch_that_is_not_built(lib, make):
    call = make()
    assert (call.query(lib, "sm103")[0], abi.last_error(lib)) == (UNSUPPORTED, f"{call.op}: no sm103 kernels in this library; built archs: cpu, sm90, sm120")


@pytest.mark.parametrize("make", [
    lambda: gate(shape=(0, 4, 128)), lambda: gate(shape=(2, 0, 4, 128), beta=True), lambda: gate(shape=(0, 7, 4, 128)), lambda: gdn((0, 64)),
    lambda: l2norm((0, 128), rstd=True), lambda: l2norm((3, 0, 5, 128), rstd=True),
])  # fmt: skip
def test_no_tokens(lib, make):
    call = make()
    for t in call.tensors.values():
        if 0 in t.shape[: t.ndim]:
            t.data = None
    for arch in ("sm90", "sm100"):
        status, r = call.query(lib, arch)
        assert status == OK and r.launch_count == 0
    assert call.run(lib) == OK


def test_in_place(lib):
    """Results may be their source, element on element."""
    for call, name, of in ((gate(g="bf16"), "g", "x"), (gdn(g="bf16"), "g", "x"), (l2norm(), "y", "x")):
        assert with_(call, **{name: call.tensors[of]}).query(lib)[0] == OK
    call = gate(beta=True)
    assert with_(call, beta_out=call.tensors["beta"]).query(lib)[0] == OK


def random_strides(rng, shape, last_free=False):
    """Distinct memory, dimensions in random memory order but the last, gaps between them."""
    strides, step = [0] * len(shape), 1
    inner = len(shape) - 1
    order = [inner, *rng.sample(range(inner), inner)]
    if last_free:
        rng.shuffle(order)
    compact = rng.random() < 0.4
    order = [*reversed(range(len(shape)))] if compact else order
    for d in order:
        strides[d] = step
        step = step * max(shape[d], 1) + (0 if compact else rng.choice([0, 0, 8, 3]))
    return [s if n > 1 else rng.choice([s, 12345]) for s, n in zip(strides, shape)]


def check_wide(p, x, y, row):
    want = row % 8 == 0 and all(address(t) % 16 == 0 and all(s * abi.ITEMSIZE[name_of(t)] % 16 == 0 for s in strides_of(t)[:-1]) for t in (x, y))
    assert p["mode.wide"] == int(want)
    return want


@pytest.mark.parametrize("op", ["kda_gate", "gdn_gate"])
def test_gate_plans(lib, op):
    rng = random.Random(op)
    seen = set()
    for _ in range(1200):
        batch, tokens, hv = rng.choice([None, 1, 2, 5]), rng.choice([1, 2, 33, 257]), rng.choice([1, 3, 8, 64])
        k = rng.choice([1, 5, 64, 128, 136]) if op == "kda_gate" else 1
        lead = [tokens] if batch is None else [batch, tokens]
        io, g, sms = rng.choice(list(CODE)[:3]), rng.choice(list(CODE)[:3]), rng.choice([0, 1, 50])
        tail = [hv, k] if op == "kda_gate" else [hv]
        call = gate(op, [*lead, *tail], io=io, g=g, beta=rng.random() < 0.5, params=rng.random() < 0.7)
        for name in ("x", "g", "beta", "beta_out"):
            if name in call.tensors and rng.random() < 0.8:
                t = call.tensors[name]
                shape, dtype = t.shape[: t.ndim], name_of(t)
                with_(call, **{name: tensor(shape, dtype, random_strides(rng, shape, name.startswith("beta")), byte_offset=abi.ITEMSIZE[dtype] * rng.choice([0, 0, 8, 1]))})
        arch = rng.choice(["sm90", "sm120"])
        status, b = call.bind(lib, arch, sms)
        assert status == OK, abi.last_error(lib)
        launch = b.launch[0]
        assert b.count == 1 and abi.kernel_id(lib, launch.kernel) == f"{op}.{arch}.{io}"
        p = abi.launch_params(op, launch)
        x = call.tensors
        has_beta = "beta" in x
        assert p["batch"] * p["tokens"] == (batch or 1) * tokens and (p["hv"], p["head_dim"]) == (hv, k)
        # the address of every element that is visited, in order
        for name in ("x", "g", "beta", "beta_out"):
            if name not in x:
                assert (p[name], p[f"{name}_b"], p[f"{name}_t"], p[f"{name}_h"]) == (0, 0, 0, 0)
                continue
            t = x[name]
            assert p[name] == address(t)
            shape, strides = [*(t.shape[: t.ndim])], strides_of(t)
            if name in ("x", "g") and op == "kda_gate":
                shape, strides = shape[:-1], strides[:-1]
            want = [sum(i * s for i, s in zip(at, strides)) for at in itertools.product(*(sorted({0, n // 2, n - 1}) for n in shape))]
            got = []
            for at in itertools.product(*(sorted({0, n // 2, n - 1}) for n in shape)):
                token = at[0] if batch is None else at[0] * tokens + at[1]
                bb, tt = divmod(token, p["tokens"])
                got.append(bb * p[f"{name}_b"] + tt * p[f"{name}_t"] + at[-1] * p[f"{name}_h"])
            assert got == want
            seen.add((name, p["batch"] > 1))
        if op == "gdn_gate":
            assert p["x_h"] == p["g_h"] == 1
        assert (p["a_log"], p["dt_bias"]) == (address(x.get("A_log")), address(x.get("dt_bias")))
        for mode, name in (("g_dtype", "g"), ("a_log_dtype", "A_log"), ("dt_bias_dtype", "dt_bias"), ("beta_dtype", "beta"), ("beta_out_dtype", "beta_out")):
            assert p[f"mode.{mode}"] == CODE[name_of(x.get(name))]
        assert p["mode.beta_kind"] == (1 if has_beta else 0) and p["lower_bound"] == 0
        wide = check_wide(p, x["x"], x["g"], k if op == "kda_gate" else hv)
        elements = (batch or 1) * tokens * hv * k
        work = elements // (16 // abi.ITEMSIZE[io] if wide else 1) + ((batch or 1) * tokens * hv if has_beta else 0)
        sms = sms or {"sm90": 132, "sm120": 188}[arch]
        assert list(launch.config.grid) == [min(-(-work // 256), 4 * sms), 1, 1] and list(launch.config.block) == [256, 1, 1]
        assert launch.config.dynamic_smem == 0 and launch.config.attribute_count == 1
    assert seen == {(name, many) for name in ("x", "g", "beta", "beta_out") for many in (False, True)}


def test_gate_batch_is_folded_where_it_can_be(lib):
    status, b = gate(shape=(3, 5, 4, 128), beta=True).bind(lib)
    p = abi.launch_params("kda_gate", b.launch[0])
    assert (p["batch"], p["tokens"], p["x_t"], p["beta_t"]) == (1, 15, 512, 4)
    call = with_(gate(shape=(3, 5, 4, 128), beta=True), beta=tensor([3, 5, 4], "bf16", [40, 4, 1]))
    p = abi.launch_params("kda_gate", call.bind(lib)[1].launch[0])
    assert (p["batch"], p["tokens"], p["x_b"], p["x_t"], p["beta_b"], p["beta_t"]) == (3, 5, 2560, 512, 40, 4)


def test_lower_bound_and_beta_kind_arrive(lib):
    p = abi.launch_params("kda_gate", gate(lower_bound=-2.5, beta=True, beta_kind=2).bind(lib)[1].launch[0])
    assert (p["lower_bound"], p["mode.beta_kind"]) == (-2.5, 2)


def test_norm_plans(lib):
    rng = random.Random(3)
    ranks = set()
    for _ in range(1500):
        rank, dim = rng.choice([2, 3, 4]), rng.choice([1, 7, 64, 128, 256, 1024])
        shape = [*(rng.choice([1, 2, 5, 33]) for _ in range(rank - 1)), dim]
        io, y, sms, arch = rng.choice(list(CODE)[:3]), rng.choice(list(CODE)[:3]), rng.choice([0, 1, 50]), rng.choice(["sm90", "sm120"])
        call = l2norm(shape, io, y, rstd=rng.random() < 0.5, eps=rng.choice([0.0, 1e-5]))
        for name in ("x", "y"):
            if rng.random() < 0.7:
                with_(call, **{name: tensor(shape, name_of(call.tensors[name]), random_strides(rng, shape), byte_offset=16 * rng.choice([0, 1]))})
        status, b = call.bind(lib, arch, sms)
        assert status == OK, abi.last_error(lib)
        launch, x = b.launch[0], call.tensors
        assert b.count == 1 and abi.kernel_id(lib, launch.kernel) == f"l2norm.{arch}.{io}"
        p = abi.launch_params("l2norm", launch)
        rows = math.prod(shape[:-1])
        assert p["n_0"] * p["n_1"] * p["n_2"] == rows and p["head_dim"] == dim and (p["x"], p["y"]) == (address(x["x"]), address(x["y"]))
        assert p["rstd"] == address(x.get("rstd")) and p["eps"] == ctypes.c_float(call.args.eps or 1e-6).value
        for row in {0, 1 % rows, rows // 3, rows // 2, rows - 1}:
            at, rest = [], row
            for n in reversed(shape[:-1]):
                at.insert(0, rest % n)
                rest //= n
            i, rest = divmod(row, p["n_1"] * p["n_2"])
            j, l = divmod(rest, p["n_2"])
            for name in ("x", "y"):
                assert i * p[f"{name}_0"] + j * p[f"{name}_1"] + l * p[f"{name}_2"] == sum(a * s for a, s in zip(at, strides_of(x[name])))
        ranks.add(sum(p[f"n_{d}"] > 1 for d in range(3)))
        assert p["mode.y_dtype"] == CODE[y]
        check_wide(p, x["x"], x["y"], dim)
        sms = sms or {"sm90": 132, "sm120": 188}[arch]
        assert list(launch.config.grid) == [min(-(-rows // 8), 8 * sms), 1, 1] and list(launch.config.block) == [256, 1, 1]
    assert ranks == {0, 1, 2, 3}


def test_norm_of_a_compact_tensor_is_one_loop(lib):
    p = abi.launch_params("l2norm", l2norm((3, 5, 7, 128)).bind(lib)[1].launch[0])
    assert [p[name] for name in ("n_0", "n_1", "n_2", "x_0", "x_1", "x_2")] == [1, 1, 105, 0, 0, 128]


def test_every_kernel_of_the_matrix_is_found(lib):
    for (op, make), io, arch in itertools.product((("kda_gate", gate), ("gdn_gate", gdn), ("l2norm", l2norm)), standin.IO, standin.ARCHS):
        status, r = make(io=io, device=(CPU if arch == "cpu" else GPU, 0)).query(lib, arch)
        assert status == OK and abi.kernel_id(lib, r.kernels[0]) == f"{op}.{arch}.{io}"
