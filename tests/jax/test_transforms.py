"""What cula.jax promises as JAX functions: memory, tracing, errors, transformations, sharding."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import cula
from cula.jax import gdn_decode, gdn_gate, gla_decode, kda_decode, kda_gate, l2norm, lightning_decode

ROOT = Path(__file__).resolve().parents[2]
N, H, D = 3, 4, 64
OPTIONS = dict(gate_kind="log", l2norm=True)


def rows(dtype=jnp.bfloat16, seed=0):
    """q, k, v, gate, beta, state"""
    keys = jax.random.split(jax.random.PRNGKey(seed), 6)
    q, k, v = (jax.random.normal(key, (N, H, D), dtype) for key in keys[:3])
    return [q, k, v, -jax.random.uniform(keys[3], (N, H, D)), jax.random.uniform(keys[4], (N, H)), jax.random.normal(keys[5], (N, H, D, D))]


def step(*operands):
    return kda_decode(*operands, **OPTIONS)


def same(a, b) -> bool:
    return all(np.array_equal(np.asarray(x).view(np.uint8), np.asarray(y).view(np.uint8)) for x, y in zip(a, b, strict=True))


# ----------------------------------------------------------------------------------------------------------------- memory


def pool_copies(compiled) -> list[str]:
    """Lines of an optimised program that copy something of the pool's shape."""
    return [line for line in compiled.as_text().splitlines() if re.search(rf"= f32\[{N},{H},{D},{D}\]\S* copy", line)]


def test_donated_pool_is_the_result(platform):
    x = rows()
    want = step(*x)
    jitted = jax.jit(step, donate_argnums=5)
    assert not pool_copies(jitted.lower(*x).compile())
    for call in (lambda *a: kda_decode(*a, donate=True, **OPTIONS), jitted):
        pool = jnp.array(x[5])
        place = jax.block_until_ready(pool).unsafe_buffer_pointer()
        out, states = call(*x[:5], pool)
        assert states.unsafe_buffer_pointer() == place and pool.is_deleted()
        assert same((out, states), want)
        with pytest.raises(RuntimeError, match="deleted"):
            np.asarray(pool)


def test_kept_pool_is_copied_and_stays(platform):
    x = rows()
    before = np.asarray(x[5]).copy()
    jitted = jax.jit(step)
    assert pool_copies(jitted.lower(*x).compile())  # and this shows that the test above can fail
    for call in (step, jitted):
        _, states = call(*x)
        assert np.array_equal(x[5], before) and not np.array_equal(states, before)
        assert states.unsafe_buffer_pointer() != x[5].unsafe_buffer_pointer()


def test_pool_in_a_loop_is_not_copied(platform):
    x = rows()

    def steps(pool):
        def body(pool, _):
            out, pool = step(*x[:5], pool)
            return pool, out

        return jax.lax.scan(body, pool, None, length=5)

    assert not pool_copies(jax.jit(steps, donate_argnums=0).lower(x[5]).compile())


def test_pool_that_is_used_afterwards_keeps_its_old_value(platform):
    x = rows()

    @jax.jit
    def both(*x):
        _, states = step(*x)
        return x[5] + 1, states

    old, states = both(*x)
    assert np.array_equal(old, x[5] + 1) and np.array_equal(states, step(*x)[1])


def test_donate_needs_a_pool():
    x = rows()
    with pytest.raises(cula.InvalidArgumentError, match="donate=True gives up a pool"):
        step_without = kda_decode(*x[:5], donate=True, **OPTIONS)
        del step_without
    with pytest.raises(cula.InvalidArgumentError, match="donate='yes'"):
        kda_decode(*x, donate="yes", **OPTIONS)


# ---------------------------------------------------------------------------------------------------------- trace-time errors

s = jax.ShapeDtypeStruct
BF16 = s((N, H, D), jnp.bfloat16)
GATE, BETA, POOL = s((N, H, D), jnp.float32), s((N, H), jnp.float32), s((5, H, D, D), jnp.float32)


def shaped(**changes):
    return {**dict(q=BF16, k=BF16, v=BF16, gate=GATE, beta=BETA, state=POOL), **changes}


REFUSED = {
    "q": (shaped(q=s((N + 1, H, D), jnp.bfloat16)), {}, cula.InvalidArgumentError, r"kda_decode: q has shape \[4,4,64\]; expected \[N,H,K\] with N = 3"),
    "gate": (shaped(gate=s((N, H), jnp.float32)), {}, cula.InvalidArgumentError, r"kda_decode: gate has shape \[3,4\]"),
    "no beta": (shaped(beta=None), {}, cula.InvalidArgumentError, "kda_decode: beta"),
    "no v": (shaped(v=None), {}, cula.InvalidArgumentError, "kda_decode: v is missing"),
    "packed rows alone": (dict(mixed_qkv=s((N, 3 * H * D), jnp.bfloat16), beta=BETA, gate=GATE), {}, cula.InvalidArgumentError, "mixed_qkv alone does not tell HV and V"),
    "head dim": (shaped(**{name: s((N, H, 96), jnp.bfloat16) for name in ("q", "k")}, gate=s((N, H, 96), jnp.float32), state=s((5, H, D, 96), jnp.float32)), {},
                 cula.UnsupportedError, "head_dim_k 96 is not built.*64, 128, 256"),
    "slots": (shaped(state=s((2, H, D, D), jnp.float32)), {}, cula.InvalidArgumentError, "kda_decode: state"),
    "state dtype": (shaped(state=s((5, H, D, D), jnp.float16)), {}, cula.InvalidArgumentError, "kda_decode: state has dtype float16"),
    "dtypes": (shaped(k=s((N, H, D), jnp.float16)), {}, cula.InvalidArgumentError, "kda_decode: k is fp16, q is bf16"),
    "int8": (shaped(gate=s((N, H, D), jnp.int8)), {}, cula.InvalidArgumentError, "kda_decode: gate: dtype int8 is none that cula reads"),
    "index": (shaped(read_index=s((N, 1), jnp.int32)), {}, cula.InvalidArgumentError, "kda_decode: read_index"),
    "index dtype": (shaped(read_index=s((N,), jnp.float32)), {}, cula.InvalidArgumentError, "kda_decode: read_index has dtype float32"),
    "gate_kind": (shaped(), dict(gate_kind="raw", lower_bound=0.0), cula.InvalidArgumentError, r"kda_decode: lower_bound=0.0: allowed: a number in \[-5, 0\)"),
    "scale": (shaped(), dict(scale=float("nan")), cula.InvalidArgumentError, "kda_decode: scale"),
    "unhashable": (shaped(), dict(scale=[1.0]), cula.InvalidArgumentError, r"kda_decode: scale=\[1.0\]: allowed: a real number or None"),
    "flag": (shaped(), dict(l2norm="yes"), cula.InvalidArgumentError, "kda_decode: l2norm='yes': allowed: True, False"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_while_traced(name):
    operands, options, kind, message = REFUSED[name]
    with pytest.raises(kind, match=message):
        jax.eval_shape(lambda x: kda_decode(**x, **{**OPTIONS, **options}), operands)


def test_other_refusals():
    x = rows()
    for call, message in ((lambda: kda_gate(None), "kda_gate: x is missing"), (lambda: l2norm(None), "l2norm: x is missing"), (lambda: l2norm([1.0]), "l2norm: x: builtins.list is no"),
                          (lambda: kda_gate(x[3], dtype="float32"), "kda_gate: dtype='float32': allowed"), (lambda: l2norm(x[0], dtype="fp8"), "l2norm: dtype='fp8'"),
                          (lambda: l2norm(x[0], eps=0.0), "l2norm: eps=0.0"), (lambda: gdn_gate(x[4], beta=x[4], beta_kind="value"), "gdn_gate: beta_kind='value'"),
                          (lambda: lightning_decode(*x[:3], x[5], decay=x[4][0], gate_kind="log"), "decay and gate exclude each other"),
                          (lambda: lightning_decode(*x[:3], x[5], gate=x[4][0], gate_kind="decay"), "pass the constant as decay=")):
        with pytest.raises(cula.InvalidArgumentError, match=re.escape(message)):
            call()
    with pytest.raises(TypeError, match="out"):
        kda_decode(*x, out=x[2], **OPTIONS)


def test_traced_option_is_refused():
    x = rows()
    with pytest.raises(cula.InvalidArgumentError, match="scale=.*allowed: a real number or None"):
        jax.jit(lambda scale: kda_decode(*x, scale=scale, **OPTIONS))(0.5)


def test_the_loaders_own_functions_refuse_tracers():
    with pytest.raises(cula.UnsupportedError, match="cula.jax"):
        jax.jit(lambda x: cula.norm.l2norm(x))(rows()[0])


# ------------------------------------------------------------------------------------------------------------ run-time errors


def test_an_error_of_the_library_is_jaxs_error(platform):
    """What only the machine knows comes when the program runs: made here by a call that no function of cula.jax makes."""
    x = jnp.ones((2, 4))
    cula.jax.register()
    call = jax.ffi.ffi_call("cula_l2norm", s(x.shape, x.dtype))
    with pytest.raises(Exception, match=r"NOT_FOUND.*there is no op 99"):
        jax.block_until_ready(call(x, op=np.int32(99), args=np.zeros(8, np.uint8), fields=np.array([0, 1], np.int32)))


@pytest.mark.gpu
def test_threads_are_refused_on_a_gpu(platform):
    if platform == "cpu":
        pytest.skip("of a GPU")
    with pytest.raises(Exception, match="kda_decode: num_threads"):
        jax.block_until_ready(kda_decode(*rows(), num_threads=2, **OPTIONS))


# ------------------------------------------------------------------------------------------------------------ transformations


def test_vmap_is_refused():
    x = rows()
    for call in (jax.vmap(l2norm), jax.jit(jax.vmap(l2norm)), jax.vmap(lambda q: kda_decode(q, *x[1:], **OPTIONS)[0])):
        with pytest.raises(cula.UnsupportedError, match="vmap is not supported"):
            call(jnp.stack([x[0]] * 2))
    mapped = jax.lax.map(lambda q: kda_decode(q, *x[1:], **OPTIONS)[0], jnp.stack([x[0]] * 2))
    assert same(mapped, [step(*x)[0]] * 2)


def test_differentiation_is_refused():
    x = rows(jnp.float32)

    def loss(q, state):
        return kda_decode(q, *x[1:5], state, **OPTIONS)[0].sum()

    for call in (lambda: jax.grad(loss)(x[0], x[5]), lambda: jax.jit(jax.grad(loss, argnums=1))(x[0], x[5]), lambda: jax.vjp(loss, x[0], x[5]),
                 lambda: jax.jvp(loss, (x[0], x[5]), (x[0], x[5])), lambda: jax.grad(lambda q: l2norm(q).sum())(x[0])):
        with pytest.raises(cula.UnsupportedError, match="forward only"):
            call()


def test_differentiation_around_a_call():
    x = rows(jnp.float32)

    def loss(w):
        out, _ = step(*map(jax.lax.stop_gradient, [x[0] * w, *x[1:]]))
        return (out * w).sum()

    assert np.allclose(jax.grad(loss)(1.0), step(*x)[0].sum(), rtol=1e-5)


def test_inside_cond_and_checkpoint(platform):
    x = rows()
    want = step(*x)
    assert same(jax.jit(lambda flag, *x: jax.lax.cond(flag, step, lambda *x: (x[2], x[5]), *x))(True, *x), want)
    assert same(jax.jit(jax.checkpoint(step))(*x), want)
    with jax.disable_jit():
        assert same(step(*x), want)


def test_x64(platform):
    """Off, JAX makes int32 of int64 indices before cula sees them; on, they arrive as they are."""
    x, index = rows(), np.array([2, -1, 0], np.int64)
    want = kda_decode(*x, read_index=index.astype(np.int32), **OPTIONS)
    call = jax.jit(lambda index, *x: kda_decode(*x, read_index=index, **OPTIONS))
    assert same(call(index, *x), want) and "xi64>" not in call.lower(index, *x).as_text()
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
        assert same(call(index, *x), want) and "tensor<3xi64>" in call.lower(index, *x).as_text()
        with pytest.raises(cula.InvalidArgumentError, match="kda_decode: gate has dtype float64"):
            kda_decode(*x[:3], np.asarray(x[3], np.float64), *x[4:], **OPTIONS)


def test_numpy_operands():
    x = [np.asarray(a) for a in rows(jnp.float32)]
    out, states = step(*x)
    assert isinstance(out, jax.Array) and same((out, states), step(*map(jnp.asarray, x)))


def test_threads(platform):
    """Programs of several threads at once, each with its own pool."""
    x, results = rows(), {}

    def work(i):
        pool = jnp.array(x[5]) * (i + 1)
        for _ in range(20):
            out, pool = kda_decode(*x[:5], pool, donate=True, **OPTIONS)
        results[i] = np.asarray(pool)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    [t.start() for t in threads], [t.join() for t in threads]
    for i in range(4):
        pool = jnp.array(x[5]) * (i + 1)
        for _ in range(20):
            _, pool = step(*x[:5], pool)
        assert np.array_equal(results[i], pool)


def test_number_of_threads_changes_nothing():
    x = rows()
    assert same(kda_decode(*x, num_threads=1, **OPTIONS), step(*x))


def test_exported_program():
    """One program for both platforms; JAX asks for the names of custom calls that it has no promise for."""
    x = rows()
    allowed = [jax.export.DisabledSafetyCheck.custom_call("cula_kda_decode")]
    exported = jax.export.export(jax.jit(step), disabled_checks=allowed, platforms=["cpu", "cuda"])(*x)
    assert exported.platforms == ("cpu", "cuda") and same(exported.call(*x), step(*x))


@pytest.mark.parametrize("op", ["gdn_decode", "gla_decode", "lightning_decode", "kda_gate", "gdn_gate", "l2norm"])
def test_every_op_has_its_own_name_in_a_program(op):
    x = rows()
    calls = {"gdn_decode": lambda: gdn_decode(*x[:3], x[4], x[4], x[5], gate_kind="log"), "gla_decode": lambda: gla_decode(*x[:4], x[5], gate_kind="log"),
             "lightning_decode": lambda: lightning_decode(*x[:3], x[5]), "kda_gate": lambda: kda_gate(x[3]), "gdn_gate": lambda: gdn_gate(x[4]), "l2norm": lambda: l2norm(x[0])}
    assert f"@cula_{op}(" in jax.jit(calls[op]).lower().as_text()


# ------------------------------------------------------------------------------------------------------------ other processes

SHARDED = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tests.jax.test_transforms import rows, same, step

assert len(jax.devices()) == 2
x = rows()
heads = PartitionSpec(None, "heads")
mesh = Mesh(np.array(jax.devices()), ("heads",))
program = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(heads,) * 6, out_specs=(heads, heads)), donate_argnums=5)
parts = [jax.device_put(np.asarray(a), NamedSharding(mesh, heads)) for a in x]
assert "all-gather" not in program.lower(*parts).compile().as_text()
got = program(*parts)
assert same(got, step(*x)) and parts[5].is_deleted() and len(got[1].sharding.device_set) == 2
print("done")
"""

IMPORT = """
import sys
import cula.jax
from jax._src import xla_bridge
assert sys.modules["cula_loader.library"]._library is None and not xla_bridge._backends
assert "torch" not in sys.modules and "cuda.bindings" not in sys.modules
print("done")
"""

NO_ARTIFACTS = """
import jax.numpy as jnp, cula.jax
try:
    cula.jax.l2norm(jnp.ones((2, 4)))
except cula.ArtifactError as error:
    assert "make artifacts" in str(error), error
    print("done")
"""


@pytest.mark.parametrize("code, settings", [
    (SHARDED, {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}), (IMPORT, {}), (NO_ARTIFACTS, {"CULA_ARTIFACTS": "/nonexistent"}),
], ids=["shard_map", "import", "no artifacts"])
def test_process(code, settings):
    env = dict(os.environ, JAX_PLATFORMS="cpu", PYTHONPATH=os.pathsep.join(map(str, (ROOT, ROOT / "loader", ROOT / "python"))), **settings)
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.returncode == 0 and done.stdout.endswith("done\n"), done.stdout + done.stderr
