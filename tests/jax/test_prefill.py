"""cula.jax.kda_prefill against the float64 token recurrence, its memory, and the workspace of its custom call.

LIMIT: that of tests/frontends/test_prefill.py, for float32 tokens.
"""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import cula
from cula.jax import kda_prefill
from tests.frontends.test_prefill import LIMIT
from tests.gpu import prefill as problems

bf16, f32 = torch.bfloat16, torch.float32


def to_jax(x):
    return jnp.asarray(x.float().numpy()).astype({bf16: jnp.bfloat16, f32: jnp.float32}[x.dtype])


def to_torch(x):
    return torch.from_numpy(np.array(x.astype(jnp.float32))).to({"bfloat16": bf16, "float32": f32}[x.dtype.name])


def problem(lens=(5, 0, 70, 33), io=f32, heads=(2, 4), **kw):
    p = problems.make(list(lens), *heads, device="cpu", io=io, gate_dtype=f32, beta_dtype=f32, seed=2, **kw)
    return p, [to_jax(x) for x in (p.q, p.k, p.v, p.gate, p.beta)], {key: to_jax(x) for key, x in p.raw.items()} | p.options


def cu(p):
    return None if p.fixed else jnp.asarray(p.starts, jnp.int32)


def check(p, out, states, limit):
    want, final = problems.reference(p)
    got = to_torch(out)
    assert problems.error(torch.cat([p.of_sequence(got, i).flatten() for i in range(len(p.lens))]), torch.cat([x.flatten() for x in want])) <= limit
    assert problems.error(to_torch(states), final) <= limit


@pytest.mark.parametrize("how", ["plain", "donate", "jit", "jit donate"])
@pytest.mark.parametrize("fixed", [False, True])
def test_prefill(platform, how, fixed):
    """bf16 on a GPU, whose kernels take no float32."""
    p, operands, options = problem((40, 40, 40) if fixed else (5, 0, 70, 33), io=f32 if platform == "cpu" else bf16, fixed=fixed)
    pool = jnp.asarray(p.h0.numpy())
    kept = np.asarray(pool).copy()
    call = lambda *x, **kw: kda_prefill(*x, cu_seqlens=cu(p), **options, **kw)  # noqa: E731
    if "jit" in how:
        out, states = jax.jit(call, donate_argnums=(5,) if "donate" in how else ())(*operands, pool)
    else:
        out, states = call(*operands, pool, donate=how == "donate")
    check(p, out, states, LIMIT if platform == "cpu" else problems.LIMIT)
    assert pool.is_deleted() == ("donate" in how)
    if "donate" not in how:
        assert np.array_equal(pool, kept)


def test_pools_slots_and_checkpoints():
    p, operands, options = problem((64, 40))
    start = np.full((6, 4, 128, 128), 7.0, np.float32)
    start[[3, 0]] = p.h0.numpy()
    read, write = jnp.array([3, 0]), jnp.array([1, -1])
    marks = jnp.zeros((3, 4, 128, 128))
    other = jnp.full((2, 4, 128, 128), 5.0)
    out, states, marked = kda_prefill(*operands, jnp.asarray(start), cu_seqlens=cu(p), read_index=read, write_index=write, checkpoints=marks,
                                      checkpoint_index=jnp.array([[2, -1], [0, -1]]), checkpoint_interval=32, **options)
    check(p, out, jnp.stack([states[1], problems.reference(p)[1][1].float().numpy()]), LIMIT)
    assert np.array_equal(np.delete(states, 1, 0), np.delete(start, 1, 0)) and not marks.any() and not marked[1].any() and marked[0].any() and marked[2].any()
    again, apart = kda_prefill(*operands, jnp.asarray(start), state_out=other, cu_seqlens=cu(p), read_index=read, write_index=write, **options)
    assert np.array_equal(again, out) and np.array_equal(apart[1], states[1]) and (apart[0] == 5).all()
    alone, nothing = kda_prefill(*operands, cu_seqlens=cu(p), **options)
    assert nothing is None and not np.array_equal(alone, out)


def test_a_donated_pool_is_not_copied():
    p, operands, options = problem()
    pool = jnp.asarray(p.h0.numpy())
    call = lambda *x: kda_prefill(*x, cu_seqlens=cu(p), **options)  # noqa: E731
    copies = lambda **kw: re.findall(r"= f32\[4,4,128,128\]\S* copy", jax.jit(call, **kw).lower(*operands, pool).compile().as_text())  # noqa: E731
    assert not copies(donate_argnums=5) and copies()


@pytest.mark.parametrize("lens, heads", [((5, 0, 70, 33), (2, 4)), ((4436,), (1, 1))])
def test_the_gpu_program_has_the_workspace_of_every_gpu(lens, heads):
    """A program may run on a GPU with any number of multiprocessors, and how many segments a head of 4,436 tokens has depends on it."""
    p, operands, options = problem(lens, bf16, heads)
    pool = jnp.asarray(p.h0.numpy())
    call = jax.jit(lambda *x: kda_prefill(*x, cu_seqlens=cu(p), **options))
    if not {"sm90"} & set(cula.info()["artifacts"]["kernels"]):
        pytest.skip("no GPU kernels of prefill here")
    spec = lambda x, dtype: cula.Spec(x.shape, dtype)  # noqa: E731
    sizes = {n: cula.query(cula.kda.kda_prefill, *(spec(x, t) for x, t in zip((*operands, pool), ("bf16", "bf16", "bf16", "fp32", "fp32", "fp32"))),
                        out=spec(operands[2], "bf16"), cu_seqlens=cula.Spec((len(lens) + 1,), "int32"), state_out=spec(pool, "fp32"), arch="sm90", sm_count=n,
                        **{key: spec(x, "fp32") if hasattr(x, "shape") else x for key, x in options.items()}).workspace_bytes
             for n in range(1, 193)}
    most = max(sizes.values())
    assert most > 0 and (len(lens) > 1 or sizes[8] < sizes[132])
    texts = {platform: jax.export.export(call, platforms=[platform], disabled_checks=[jax.export.DisabledSafetyCheck.custom_call("cula_kda_prefill")])(
        *operands, pool).mlir_module() for platform in ("cpu", "cuda")}
    assert f"tensor<{most}xui8>" in texts["cuda"] and f"{most}xui8" not in texts["cpu"]
    assert texts["cpu"].count("@cula_kda_prefill") == 1


REFUSED = {
    "gate": (lambda x: x.update(gate=x["gate"][0]), "kda_prefill: gate has shape"),
    "cu": (lambda x: x.update(cu_seqlens=jnp.zeros((2, 2), jnp.int32)), "kda_prefill: cu_seqlens has shape"),
    "v": (lambda x: x.update(v=None), "kda_prefill: v is missing"),
    "gate_kind": (lambda x: x.update(gate_kind="none"), "kda_prefill: gate_kind='none': allowed: 'log', 'raw'"),
    "checkpoints": (lambda x: x.update(checkpoints=x["state"], checkpoint_interval=32), "checkpoints is the array of state or state_out"),
    "write_index": (lambda x: x.update(read_index=jnp.arange(4)), "kda_prefill: write_index is missing"),
    "donate": (lambda x: x.update(state=None, donate=True), "donate=True gives up a pool"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_while_traced(name):
    p, operands, options = problem()
    x = dict(zip(("q", "k", "v", "gate", "beta"), operands), state=jnp.asarray(p.h0.numpy()), cu_seqlens=cu(p), **options)
    change, message = REFUSED[name]
    change(x)
    with pytest.raises(cula.InvalidArgumentError, match=re.escape(message)):
        kda_prefill(**x)


def test_symbolic_sizes_are_refused_by_name():
    scope = jax.export.SymbolicScope()
    spec = lambda shape: jax.ShapeDtypeStruct(jax.export.symbolic_shape(shape, scope=scope), jnp.float32)  # noqa: E731
    call = jax.jit(lambda *x: kda_prefill(*x, gate_kind="log")[0])
    with pytest.raises(cula.UnsupportedError, match=r"kda_prefill: \w+ has shape \[1, t, .*\]: symbolic sizes"):
        jax.export.export(call)(*map(spec, ("1,t,2,128", "1,t,2,128", "1,t,4,128", "1,t,4,128", "1,t,4")))


def test_vmap_and_gradients_are_refused():
    p, operands, options = problem((9, 9), fixed=True)
    call = lambda q: kda_prefill(q, *operands[1:], **options)[0]  # noqa: E731
    with pytest.raises(cula.UnsupportedError, match="kda_prefill: vmap is not supported"):
        jax.vmap(call)(jnp.stack([operands[0]] * 2))
    with pytest.raises(cula.UnsupportedError, match="kda_prefill: cula's kernels are forward only"):
        jax.grad(lambda q: call(q).sum())(operands[0])
