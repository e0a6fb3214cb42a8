"""`python -m cula selftest`: every op once against a float64 recurrence in numpy, on the CPU and on every GPU that can run.

Needs numpy, and cuda-bindings for GPUs; no framework. Prints a line a call with the relative root-mean-square errors of output and
state and the kernel that ran. An error above its limit, or another kernel than that of the device's arch, is a failure.
"""

from __future__ import annotations

import sys

from cula_loader import CulaError, last_kernels

from . import gdn, gla, info, kda, lightning, norm

N, H, HV, K, V = 5, 2, 4, 128, 128
# Rounding of the stored result: half a unit in the last place, uniformly distributed, is 0.29 of it; float32 sums of K products.
OUT_LIMIT = {"float32": 2e-6, "float16": 4e-4, "bfloat16": 2.5e-3}
STATE_LIMIT = 5e-7
PREFILL_STATE_LIMIT = 1.1e-6  # of many tokens in float32; tests/frontends/test_prefill.py derives half of it for all states together
PREFILL_GPU_LIMIT = 5.5e-3  # products of a chunk have bf16 operands there; tests/gpu/prefill.py derives it


def selftest(which: str = "all") -> int:
    """Exit code: 0 if everything that can run here is right. which: "all", "cpu", "cuda" (then a missing GPU is a failure)."""
    facts = info()
    if facts["artifacts"]["error"]:
        print(f"selftest: {facts['artifacts']['error']}", file=sys.stderr)
        return 1
    try:
        import numpy  # noqa: F401
    except ImportError:
        print("selftest: needs numpy: pip install numpy", file=sys.stderr)
        return 1
    machines = [] if which == "cuda" else [_Cpu()]
    for device in facts["devices"] if which != "cpu" else []:
        if device["problem"]:
            print(f"selftest: cuda:{device['ordinal']} is skipped: {device['problem']}")
        else:
            machines.append(_Cuda(device["ordinal"], device["arch"]))
    if not machines:
        print("selftest: no GPU here can run", file=sys.stderr)
        return 1
    dtypes = _dtypes()
    failures = 0
    for machine in machines:
        for name, dtype, check in _checks(dtypes):
            if name == "kda_prefill" and machine.arch != "cpu":
                if name not in facts["artifacts"]["kernels"][machine.arch]:
                    print(f"selftest: {name} is left out on {machine.name}: no {machine.arch} kernels of it here")
                    continue
                if dtype == "float32":  # bf16 and fp16 alone on a GPU
                    continue
            out_limit, state_limit = _limits(name, dtype, machine.arch)
            try:
                out_error, state_error = check(machine, dtype)
                kernels = last_kernels()
            except CulaError as error:
                print(f"FAIL {machine.name} {name} {dtype}: {type(error).__name__}: {error}")
                failures += 1
                continue
            right = out_error <= out_limit and state_error <= state_limit  # False for NaN
            right = right and bool(kernels) and all(kernel.startswith(f"{name}.{machine.arch}.") for kernel in kernels)
            failures += not right
            print(f"{'ok  ' if right else 'FAIL'} {machine.name} {name} {dtype}: out {out_error:.1e} (limit {out_limit:.1e}), state "
                  f"{state_error:.1e} (limit {state_limit:.1e}), kernel {', '.join(kernels) or 'none'}")
    print(f"selftest: {failures} failures" if failures else f"selftest: all right on {', '.join(m.name for m in machines)}")
    return 1 if failures else 0


def _limits(name: str, dtype: str, arch: str) -> tuple[float, float]:
    """Of the relative errors of output and state."""
    if name != "kda_prefill":
        return OUT_LIMIT[dtype], STATE_LIMIT
    return (OUT_LIMIT[dtype], PREFILL_STATE_LIMIT) if arch == "cpu" else (PREFILL_GPU_LIMIT, PREFILL_GPU_LIMIT)


# ------------------------------------------------------------------------------------------------------------ machines


class _Cpu:
    name = arch = "cpu"

    def put(self, x):
        return x

    get = put
    stream = None


class _Cuda:
    """Device buffers through cuda-python, so that no framework is needed."""

    def __init__(self, ordinal: int, arch: str):
        from cula_loader import cuda

        self.name, self.arch, self.cuda, self.gpu = f"cuda:{ordinal}", arch, cuda, cuda.gpu(ordinal)
        self.stream = 0

    def put(self, x):
        import numpy as np

        x = np.ascontiguousarray(x)
        driver, check = self.cuda.driver, self.cuda.check
        with self.cuda.context_of(self.gpu):
            pointer = check(driver.cuMemAlloc(x.nbytes), "cuMemAlloc")
            check(driver.cuMemcpyHtoD(pointer, x.ctypes.data, x.nbytes), "cuMemcpyHtoD")
        return _Buffer(int(pointer), x.shape, x.dtype)

    def get(self, buffer):
        """The content; frees the buffer."""
        import numpy as np

        x = np.empty(buffer.shape, buffer.dtype)
        driver, check = self.cuda.driver, self.cuda.check
        with self.cuda.context_of(self.gpu):
            check(driver.cuMemcpyDtoH(x.ctypes.data, buffer.pointer, x.nbytes), "cuMemcpyDtoH")
            check(driver.cuMemFree(buffer.pointer), "cuMemFree")
        return x


class _Buffer:
    def __init__(self, pointer: int, shape: tuple[int, ...], dtype):
        self.pointer, self.shape, self.dtype = pointer, shape, dtype
        self.__cuda_array_interface__ = {"version": 3, "shape": shape, "typestr": dtype.str, "data": (pointer, False), "strides": None}


# -------------------------------------------------------------------------------------------------------------- checks


def _dtypes() -> tuple[str, ...]:
    try:
        import ml_dtypes  # noqa: F401  registers bfloat16 with numpy
    except ImportError:
        print("selftest: bfloat16 is left out, numpy has none without ml_dtypes")
        return "float32", "float16"
    return "float32", "float16", "bfloat16"


def _checks(dtypes: tuple[str, ...]):
    for name, function, with_beta in (("kda_decode", _kda, True), ("gdn_decode", _gdn, True), ("gla_decode", _gla, False),
                                      ("lightning_decode", _lightning, False)):
        for dtype in dtypes:
            yield name, dtype, lambda machine, dtype, f=function, b=with_beta: _decode(machine, dtype, f, b)
    for dtype in dtypes:
        yield "kda_prefill", dtype, _prefill
    yield "kda_gate", "float32", _kda_gate
    yield "gdn_gate", "float32", _gdn_gate
    yield "l2norm", "float32", _l2norm


def _random(dtype: str):
    import numpy as np

    generator = np.random.default_rng(7)
    return lambda *shape: generator.standard_normal(shape).astype(dtype)


def _decode(machine, dtype, function, with_beta):
    """Runs `function` and the recurrence; slots are permuted, row 1 starts from zero, row 2 stores nothing, row 3 is padding."""
    import numpy as np

    random = _random(dtype)
    q, k, v, out = random(N, H, K), random(N, H, K), random(N, HV, V), np.full((N, HV, V), np.nan, dtype)
    beta = random(N, HV).astype("float32") if with_beta else None
    state = _random("float32")(N + 2, HV, V, K)
    read, write = np.array([6, -1, 2, -1, 0], "int32"), np.array([6, 1, -1, -1, 3], "int32")
    rows = {"q": q, "k": k, "v": v, "out": out, "state": state, "read_index": read, "write_index": write}
    if with_beta:
        rows["beta"] = beta
    given = {name: machine.put(x.copy()) for name, x in rows.items()}
    log_decay, delta = function(machine, given, random)
    got_out, got_state = (machine.get(given[name]).astype("float64") for name in ("out", "state"))

    def normal(x):
        x = x.astype("float64")
        return np.repeat(x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6), HV // H, 1)

    qn, kn, v64 = normal(q) * K**-0.5, normal(k), v.astype("float64")
    before = np.where((read >= 0)[:, None, None, None], state[read].astype("float64"), 0) * np.exp(log_decay)[:, :, None, :]
    u = v64
    if delta:
        u = _sigmoid(beta.astype("float64"))[..., None] * (v64 - np.einsum("nhvk,nhk->nhv", before, kn))
    after = before + u[..., None] * kn[:, :, None, :]
    want_out = np.einsum("nhvk,nhk->nhv", after, qn)
    want_out[3] = 0
    stored = write >= 0
    untouched = np.setdiff1d(np.arange(len(state)), write[stored])
    if not np.array_equal(got_state[untouched], state[untouched]):
        return _error(got_out, want_out), float("inf")
    return _error(got_out, want_out), _error(got_state[write[stored]], after[stored])


def _prefill(machine, dtype):
    """Sequences of 70, 0 and 37 tokens in one row; the first starts from zero, each stores to another slot than it reads."""
    import numpy as np

    random, ends = _random(dtype), np.array([0, 70, 70, 107], "int32")
    T = int(ends[-1])
    read, write = np.array([-1, 2, 4], "int32"), np.array([1, 3, 5], "int32")
    q, k, v, raw, beta = random(T, H, K), random(T, H, K), random(T, HV, V), random(T, HV, K), random(T, HV)
    A_log, dt_bias = random(HV).astype("float32"), random(HV, K).astype("float32")
    state = _random("float32")(6, HV, V, K)
    rows = {"q": q, "k": k, "v": v, "gate": raw, "beta": beta, "A_log": A_log, "dt_bias": dt_bias, "cu_seqlens": ends, "read_index": read,
            "write_index": write, "out": np.full((T, HV, V), np.nan, dtype), "state": state}
    given = {name: machine.put(x.copy()) for name, x in rows.items()}
    kda.kda_prefill(gate_kind="raw", lower_bound=-5.0, beta_kind="logit", l2norm=True, state_out=given["state"], stream=machine.stream, **given)
    got_out, got_state = (machine.get(given[name]).astype("float64") for name in ("out", "state"))

    def normal(x):
        x = x.astype("float64")
        return np.repeat(x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6), HV // H, 1)

    qn, kn, v64, decay, b = normal(q) * K**-0.5, normal(k), v.astype("float64"), np.exp(_safe_gate(raw, A_log, dt_bias)), _sigmoid(beta.astype("float64"))
    want_out, want_state = np.empty(v.shape), state.astype("float64")
    for n in range(len(read)):
        S = want_state[read[n]] if read[n] >= 0 else np.zeros((HV, V, K))
        for t in range(ends[n], ends[n + 1]):
            S = S * decay[t][:, None, :]
            u = b[t][:, None] * (v64[t] - np.einsum("hvk,hk->hv", S, kn[t]))
            S = S + u[..., None] * kn[t][:, None, :]
            want_out[t] = np.einsum("hvk,hk->hv", S, qn[t])
        want_state[write[n]] = S
    others = np.setdiff1d(np.arange(len(state)), write)
    if not np.array_equal(got_state[others], state[others]):
        return _error(got_out, want_out), float("inf")
    return _error(got_out, want_out), max(_error(got_state[slot], want_state[slot]) for slot in write)


def _kda(machine, given, random):
    raw, A_log, dt_bias = random(N, HV, K), random(HV).astype("float32"), random(HV, K).astype("float32")
    kda.kda_decode(gate=machine.put(raw), A_log=machine.put(A_log), dt_bias=machine.put(dt_bias), gate_kind="raw", lower_bound=-5.0,
                   beta_kind="logit", l2norm=True, stream=machine.stream, **given)
    return _safe_gate(raw, A_log, dt_bias), True


def _gdn(machine, given, random):
    raw, A_log, dt_bias = random(N, HV), random(HV).astype("float32"), random(HV).astype("float32")
    gdn.gdn_decode(gate=machine.put(raw), A_log=machine.put(A_log), dt_bias=machine.put(dt_bias), gate_kind="raw", beta_kind="logit",
                   l2norm=True, stream=machine.stream, **given)
    return _softplus_gate(raw, A_log, dt_bias)[..., None], True


def _gla(machine, given, random):
    log_decay = -abs(random(N, HV, K)).astype("float32")
    gla.gla_decode(gate=machine.put(log_decay), gate_kind="log", l2norm=True, stream=machine.stream, **given)
    return log_decay.astype("float64"), False


def _lightning(machine, given, random):
    import numpy as np

    decay = np.linspace(0.5, 1, HV, dtype="float32")
    lightning.lightning_decode(decay=machine.put(decay), l2norm=True, stream=machine.stream, **given)
    return np.broadcast_to(np.log(decay.astype("float64"))[None, :, None], (N, HV, 1)), False


def _kda_gate(machine, dtype):
    random = _random(dtype)
    x, A_log, dt_bias = random(N, HV, K), random(HV), random(HV, K)
    g = machine.put(x * 0)
    kda.kda_gate(machine.put(x), machine.put(A_log), machine.put(dt_bias), lower_bound=-5.0, out=g, stream=machine.stream)
    return _error(machine.get(g), _safe_gate(x, A_log, dt_bias)), 0.0


def _gdn_gate(machine, dtype):
    random = _random(dtype)
    x, A_log, dt_bias = random(N, HV), random(HV), random(HV)
    g = machine.put(x * 0)
    gdn.gdn_gate(machine.put(x), machine.put(A_log), machine.put(dt_bias), out=g, stream=machine.stream)
    return _error(machine.get(g), _softplus_gate(x, A_log, dt_bias)), 0.0


def _l2norm(machine, dtype):
    import numpy as np

    x = _random(dtype)(N, H, K)
    y = machine.put(x * 0)
    norm.l2norm(machine.put(x), out=y, stream=machine.stream)
    x64 = x.astype("float64")
    return _error(machine.get(y), x64 / np.sqrt((x64 * x64).sum(-1, keepdims=True) + 1e-6)), 0.0


def _sigmoid(x):
    import numpy as np

    return 1 / (1 + np.exp(-x))


def _safe_gate(raw, A_log, dt_bias):
    import numpy as np

    raw, A_log, dt_bias = (x.astype("float64") for x in (raw, A_log, dt_bias))
    return -5.0 * _sigmoid(np.exp(A_log)[None, :, None] * (raw + dt_bias))


def _softplus_gate(raw, A_log, dt_bias):
    import numpy as np

    raw, A_log, dt_bias = (x.astype("float64") for x in (raw, A_log, dt_bias))
    return -np.exp(A_log) * np.logaddexp(0, raw + dt_bias)


def _error(got, want) -> float:
    """||got - want|| / ||want||."""
    import numpy as np

    return float(np.linalg.norm(got.astype("float64") - want) / np.linalg.norm(want))
