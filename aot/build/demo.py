"""The call that ends a build: KDA decode through the public Python API, on the CPU and on the GPU if there is one, with its result
checked against the recurrence in float64. A process of its own, as a user's would be; it imports nothing of aot.

    python aot/build/demo.py        (CULA_ARTIFACTS names the artifact folder)
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

LIMIT = 1e-6  # relative RMSE: float32 inputs, outputs and states, a few roundings each


def run(artifacts: Path) -> int:
    """Runs the demo on an artifact folder; returns its exit code."""
    root = Path(__file__).resolve().parents[2]
    paths = [str(root / "loader"), str(root / "python")]
    environment = os.environ | {"CULA_ARTIFACTS": str(artifacts), "PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.run([sys.executable, __file__], env=environment).returncode


def recurrence(np, q, k, v, x, beta, A_log, dt_bias, state, read, scale):
    """KDA decode in float64: raw gate, beta logits, L2 norm of q and k; state [slots,HV,V,K]. Returns out and the new states."""
    q, k, v, x, beta, A_log, dt_bias, state = (np.asarray(a, np.float64) for a in (q, k, v, x, beta, A_log, dt_bias, state))
    q, k = (a / np.sqrt((a * a).sum(-1, keepdims=True) + 1e-6) for a in (q, k))
    group = v.shape[1] // q.shape[1]
    out, new = np.zeros(v.shape), state.copy()
    for row, slot in enumerate(read):
        if slot < 0:
            continue  # padding: zero output, no state touched
        for head in range(v.shape[1]):
            key, query = k[row, head // group], scale * q[row, head // group]
            decay = np.exp(-np.exp(A_log[head]) * np.logaddexp(0, x[row, head] + dt_bias[head]))
            s = state[slot, head] * decay
            u = (v[row, head] - s @ key) / (1 + np.exp(-beta[row, head]))
            new[slot, head] = s + np.outer(u, key)
            out[row, head] = new[slot, head] @ query
    return out, new


class _DeviceArray:
    """A NumPy array's copy on the current CUDA device, shared by __cuda_array_interface__."""

    def __init__(self, driver, array):
        self.driver, self.like = driver, array
        self.pointer = check(driver.cuMemAlloc(array.nbytes))
        check(driver.cuMemcpyHtoD(self.pointer, array.ctypes.data, array.nbytes))

    @property
    def __cuda_array_interface__(self):
        return {"version": 3, "shape": self.like.shape, "typestr": self.like.dtype.str, "data": (int(self.pointer), False), "strides": None}

    def numpy(self):
        copy = self.like.copy()
        check(self.driver.cuMemcpyDtoH(copy.ctypes.data, self.pointer, copy.nbytes))
        return copy


def check(result):
    status, *values = result
    if int(status):
        raise RuntimeError(f"CUDA error {status}")
    return values[0] if values else None


def main() -> int:
    import cula
    import numpy as np

    rng = np.random.default_rng(0)
    rows, heads, value_heads, dim, slots = 5, 2, 4, 128, 7
    normal = lambda *shape: rng.standard_normal(shape, dtype=np.float32)  # noqa: E731
    q, k, v = normal(rows, heads, dim), normal(rows, heads, dim), normal(rows, value_heads, dim)
    x, beta = normal(rows, value_heads, dim), normal(rows, value_heads)
    A_log, dt_bias, state = normal(value_heads), normal(value_heads, dim), normal(slots, value_heads, dim, dim)
    slot = np.array([4, 0, -1, 6, 2], np.int32)
    want, want_state = recurrence(np, q, k, v, x, beta, A_log, dt_bias, state, slot, dim**-0.5)

    def verdict(device: str, out, new_state, seconds: float) -> bool:
        errors = [np.sqrt(((have - ref) ** 2).sum() / (ref**2).sum()) for have, ref in ((out, want), (new_state, want_state))]
        good = all(error <= LIMIT for error in errors)  # false for NaN too
        print(
            f"kda_decode on {device}: {'ok' if good else 'WRONG'}, relative error of out {errors[0]:.1e}, of the states {errors[1]:.1e} against "
            f"float64 (limit {LIMIT:.0e}); {seconds * 1e3:.1f} ms; {', '.join(cula.last_kernels())}",
            flush=True,
        )
        return good

    operands = dict(q=q, k=k, v=v, gate=x, beta=beta, state=state, A_log=A_log, dt_bias=dt_bias, read_index=slot, out=np.empty_like(v))
    options = dict(gate_kind="raw", beta_kind="logit", l2norm=True)
    good = True

    on_cpu = {name: array.copy() for name, array in operands.items()}
    start = time.perf_counter()
    cula.kda.kda_decode(**on_cpu, **options)
    good &= verdict("cpu", on_cpu["out"], on_cpu["state"], time.perf_counter() - start)

    report = cula.info()
    usable = [device for device in report["devices"] if not device["problem"]]
    for device in report["devices"]:
        if device["problem"]:
            print(f"not called on GPU {device['ordinal']} ({device['name']}): {device['problem']}")
    if not report["devices"]:
        print(f"not called on a GPU: {report['driver']['problem']}")
    if usable:
        from cuda.bindings import driver

        check(driver.cuInit(0))
        gpu = check(driver.cuDeviceGet(usable[0]["ordinal"]))
        check(driver.cuCtxSetCurrent(check(driver.cuDevicePrimaryCtxRetain(gpu))))
        stream = check(driver.cuStreamCreate(0))
        on_gpu = {name: _DeviceArray(driver, array) for name, array in operands.items()}
        cula.prepare(usable[0]["ordinal"])
        start = time.perf_counter()
        cula.kda.kda_decode(**on_gpu, **options, stream=int(stream))
        check(driver.cuStreamSynchronize(stream))
        seconds = time.perf_counter() - start
        good &= verdict(usable[0]["name"], on_gpu["out"].numpy(), on_gpu["state"].numpy(), seconds)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
