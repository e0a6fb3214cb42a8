"""kda_gate, gdn_gate and l2norm through the Python API against float64 numpy: one list of cases for every device.

Every tensor is a view into a larger allocation full of NaN: an element that is not written, or one outside of the view that is,
shows. The cases cover every pair of values of the axes below.
"""

from __future__ import annotations

import dataclasses
import zlib

import numpy as np
import torch

import cula
from tests.numerics.compare import FLOAT32, half_ulp
from tests.numerics.covering import covering, pairs

IO = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PARAMETER = (None, "fp32", "bf16", "fp16")
OFFSETS = tuple(range(8))  # elements past a 64-byte boundary; only 0 allows 16-byte accesses
STRIDES = ("compact", "padded tokens", "heads outside", "sliced batch")

GATE_AXES = dict(
    op=("kda", "gdn"), io=tuple(IO), result=tuple(IO), a_log=PARAMETER, dt_bias=PARAMETER, beta=PARAMETER, beta_result=tuple(IO),
    twice=(False, True), bound=(None, -5.0, -0.37), rank=(3, 4), tokens=(1, 2, 7, 64, 259), heads=(1, 3, 8, 32), dim=(1, 7, 8, 64, 128, 200),
    strides=STRIDES, offset=OFFSETS, in_place=(False, True), regime=("typical", "slow", "strong", "wide"),
)  # fmt: skip
NORM_AXES = dict(
    io=tuple(IO), result=tuple(IO), rank=(2, 3, 4), dim=(1, 2, 31, 32, 64, 72, 96, 128, 129, 256, 512, 1000, 1024), rows=(1, 2, 5, 37, 300),
    heads=(1, 3, 16), strides=STRIDES, offset=OFFSETS, in_place=(False, True), rstd=(False, True), eps=(1e-6, 1e-3),
    magnitude=(1e-3, 1.0, 1e3),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Gate:
    op: str
    io: str
    result: str
    a_log: str | None
    dt_bias: str | None
    beta: str | None
    beta_result: str
    twice: bool
    bound: float | None
    rank: int  # of kda's x; gdn has one less
    tokens: int
    heads: int
    dim: int
    strides: str
    offset: int
    in_place: bool
    regime: str

    @property
    def id(self) -> str:
        return "-".join(str(value).replace(" ", "_") for value in dataclasses.astuple(self))


@dataclasses.dataclass(frozen=True)
class Norm:
    io: str
    result: str
    rank: int
    dim: int
    rows: int
    heads: int
    strides: str
    offset: int
    in_place: bool
    rstd: bool
    eps: float
    magnitude: float

    id = Gate.id


def _converts_in_place(row: dict) -> bool:
    return row.get("in_place", False) and "io" in row and "result" in row and row["io"] != row["result"]


def _gate_feasible(row: dict) -> bool:
    gdn = row.get("op") == "gdn"
    if gdn and (row.get("bound") is not None or row.get("dim", 1) != 1):
        return False
    if _converts_in_place(row):
        return False
    return not (row.get("strides") == "sliced batch" and row.get("rank") == 3)


def _norm_feasible(row: dict) -> bool:
    if _converts_in_place(row):
        return False
    rank = row.get("rank", 4)
    return not (row.get("strides") == "sliced batch" and rank < 4 or row.get("strides") == "heads outside" and rank < 3)


# What 16-byte accesses need: they have their own code, and few of the cases above meet it.
WIDE_GATE = GATE_AXES | dict(offset=(0,), dim=(1, 8, 64, 128, 200), heads=(8, 16, 40))
WIDE_NORM = NORM_AXES | dict(offset=(0,), dim=(8, 32, 64, 72, 128, 256, 264, 512, 1000, 1024))


def gate_cases() -> list[Gate]:
    rows = covering(GATE_AXES, pairs(GATE_AXES), _gate_feasible, seed=1) + covering(WIDE_GATE, pairs(WIDE_GATE), _gate_feasible, seed=3)
    return [Gate(**row) for row in rows]


def norm_cases() -> list[Norm]:
    rows = covering(NORM_AXES, pairs(NORM_AXES), _norm_feasible, seed=2) + covering(WIDE_NORM, pairs(WIDE_NORM), _norm_feasible, seed=4)
    return [Norm(**row) for row in rows]


# ---------------------------------------------------------------------------------------------------------------- tensors


class Guarded:
    """`view`: a tensor inside an allocation of NaN."""

    def __init__(self, shape, dtype: str, device, *, strides="compact", offset=0, values: np.ndarray | None = None):
        torch_dtype = IO[dtype]
        steps, span = _strides(shape, strides)
        pad = 64 // torch_dtype.itemsize
        self.base = torch.full((span + offset + 2 * pad,), float("nan"), dtype=torch_dtype, device=device)
        self.view = self.base.as_strided(shape, steps, pad + offset)
        if values is not None:
            self.view.copy_(torch.from_numpy(values))
        inside = torch.zeros(self.base.shape, dtype=torch.bool, device=device)
        inside.as_strided(shape, steps, pad + offset).fill_(True)
        self._outside = ~inside

    @property
    def f64(self) -> np.ndarray:
        return self.view.double().cpu().numpy()

    def assert_guard(self, name: str) -> None:
        assert self.base[self._outside].isnan().all(), f"{name}: written outside of the tensor"


def _strides(shape, kind: str) -> tuple[list[int], int]:
    """Element strides, the last 1, and the span. Pads are multiples of 8, so that an offset of 0 keeps every row aligned."""
    order = list(range(len(shape)))[::-1]  # innermost first
    if kind == "heads outside" and len(shape) >= 3:
        order = [len(shape) - 1, len(shape) - 3, len(shape) - 2, *order[3:]]
    steps, step = [0] * len(shape), 1
    for axis in order:
        steps[axis] = step
        step *= shape[axis]
        if kind == "padded tokens" and axis == order[-2 if len(order) > 1 else -1]:
            step = -(-step // 8) * 8 + 24
        if kind == "sliced batch" and axis == 1:
            step += step // max(shape[1], 1) * 5
    return steps, sum((n - 1) * s for n, s in zip(shape, steps)) + 1


def assert_close(name: str, got: torch.Tensor, want: torch.Tensor, float32: float = FLOAT32) -> None:
    """Relative RMSE beyond half an ulp of the stored dtype, as compare.py derives it. Its second bound, on the rounding error as a
    whole, is for normally distributed values; gates crowd at lower_bound and at 0."""
    got, dtype = got.detach().double().cpu(), got.dtype
    assert got.shape == want.shape
    bad = ~got.isfinite()
    assert not bad.any(), f"{name}: {int(bad.sum())} of {bad.numel()} values are not finite, first at {tuple(bad.nonzero()[0].tolist())}"
    excess = ((got - want).abs() - half_ulp(want, dtype)).clamp(min=0)
    figure = (excess.norm() / want.norm()).item() if want.norm() else float(got.abs().max())
    at = np.unravel_index(int(excess.argmax()), want.shape)
    assert figure <= float32, f"{name}: relative RMSE beyond rounding {figure:.3g} > {float32:.3g}; at {at}: {got[at]:.9g}, expected {want[at]:.9g}"


# ------------------------------------------------------------------------------------------------------------------ gates


def _softplus(y):
    return np.maximum(y, 0) + np.log1p(np.exp(-np.abs(y)))


def _sigmoid(y):
    t = np.exp(-np.abs(y))
    return np.where(y < 0, t, 1.0) / (1.0 + t)


# (mean, deviation) of x and of dt_bias. Slow gates are where x + dt_bias is far below zero: there an error in the sum is a relative
# error of the result. Strong ones overflow a softplus that is not written for it.
REGIME = {"typical": ((0, 1), (0, 1)), "slow": ((0, 1), (-8, 0.5)), "strong": ((30, 10), (5, 2)), "wide": ((0, 12), (0, 4))}


def run_gate(c: Gate, device) -> None:
    rng = np.random.default_rng(zlib.crc32(c.id.encode()))
    lead = (3, c.tokens) if c.rank == 4 else (c.tokens,)
    shape = (*lead, c.heads, c.dim) if c.op == "kda" else (*lead, c.heads)
    (mean, deviation), (bias_mean, bias_deviation) = REGIME[c.regime]
    kind = c.strides if c.op == "kda" or c.strides == "padded tokens" else "compact"
    x = Guarded(shape, c.io, device, strides=kind, offset=c.offset, values=rng.normal(mean, deviation, shape))
    out = x if c.in_place else Guarded(shape, c.result, device, strides=kind, offset=c.offset)
    source = x.f64

    def parameter(dtype, *values_shape, low, high):
        return dtype and Guarded(values_shape, dtype, device, offset=3, values=rng.uniform(low, high, values_shape))

    a_log = parameter(c.a_log, c.heads, low=-2, high=1.5)
    width = bias_deviation * 1.7
    dt_bias = parameter(c.dt_bias, c.heads * (c.dim if c.op == "kda" else 1), low=bias_mean - width, high=bias_mean + width)
    beta = beta_out = logits = None
    if c.beta:
        beta = Guarded(shape[: len(lead) + 1], c.beta, device, strides="padded tokens", offset=1, values=rng.normal(0, 6, shape[: len(lead) + 1]))
        beta_out = Guarded(shape[: len(lead) + 1], c.beta_result, device, offset=5)
        logits = beta.f64

    keywords = dict(beta=beta and beta.view, beta_out=beta_out and beta_out.view, out=out.view)
    if c.beta:
        keywords["beta_kind"] = "logit_twice" if c.twice else "logit"
    if c.op == "kda":
        keywords["lower_bound"] = c.bound
    call = cula.kda.kda_gate if c.op == "kda" else cula.gdn.gdn_gate
    result = call(x.view, a_log and a_log.view, dt_bias and dt_bias.view, **keywords)
    assert (result[0] is out.view and result[1] is beta_out.view) if c.beta else result is out.view

    a = np.exp(a_log.f64) if a_log else np.ones(c.heads)
    bias = dt_bias.f64 if dt_bias else np.zeros(c.heads * (c.dim if c.op == "kda" else 1))
    if c.op == "kda":
        a, bias = a[:, None], bias.reshape(c.heads, c.dim)
    y = source + bias
    want = -a * _softplus(y) if c.bound is None else c.bound * _sigmoid(a * y)
    assert_close("g", out.view, torch.from_numpy(want))
    out.assert_guard("g")
    if c.beta:
        assert_close("beta_out", beta_out.view, torch.from_numpy((2 if c.twice else 1) * _sigmoid(logits)))
        beta_out.assert_guard("beta_out")


def run_norm(c: Norm, device) -> None:
    rng = np.random.default_rng(zlib.crc32(c.id.encode()))
    shape = {2: (c.rows * c.heads, c.dim), 3: (c.rows, c.heads, c.dim), 4: (3, c.rows, c.heads, c.dim)}[c.rank]
    magnitude = min(c.magnitude, 1e2) if c.io == "fp16" else c.magnitude  # fp16 ends at 65504
    x = Guarded(shape, c.io, device, strides=c.strides, offset=c.offset, values=rng.normal(0, magnitude, shape))
    out = x if c.in_place else Guarded(shape, c.result, device, strides=c.strides, offset=c.offset)
    rstd = Guarded(shape[:-1], "fp32", device, offset=1) if c.rstd else None
    source = x.f64
    assert cula.norm.l2norm(x.view, eps=c.eps, out=out.view, rstd=rstd and rstd.view) is out.view
    factor = 1 / np.sqrt((source**2).sum(-1) + float(np.float32(c.eps)))
    assert_close("y", out.view, torch.from_numpy(source * factor[..., None]))
    out.assert_guard("y")
    if rstd:
        assert_close("rstd", rstd.view, torch.from_numpy(factor))
        rstd.assert_guard("rstd")


def run_special(device, dtype: str) -> None:
    """NaN and infinity pass through, in their own element or row; nothing else becomes one."""
    nan, inf = float("nan"), float("inf")
    values = torch.tensor([nan, inf, -inf, 0.0, 1e30, -1e30, 1.0, -1.0])
    x = values.to(IO[dtype]).to(device)
    for result in ("fp32", "bf16"):
        for g in (
            cula.kda.kda_gate(x.view(1, 1, 8), dt_bias=torch.full((8,), 0.5, device=device), dtype=result),
            cula.gdn.gdn_gate(x.view(1, 8), dt_bias=torch.full((8,), 0.5, device=device), dtype=result),
        ):
            g = g.flatten().double().cpu()
            assert g[0].isnan() and g[1] == -inf and g[2] == 0 and g[5] == 0, g
            np.testing.assert_allclose(g[[3, 4, 6, 7]], -_softplus(np.array([0.5, 1e30, 1.5, -0.5])), rtol=2.0**-8)
        g = cula.kda.kda_gate(x.view(1, 1, 8), lower_bound=-5.0, dtype=result).flatten().double().cpu()
        assert g[0].isnan() and g[1] == -5 and abs(g[2]) < 1e-30 and g[4] == -5 and abs(g[5]) < 1e-30, g
        rows = torch.ones(4, 64)
        rows[0], rows[1, 5], rows[2, 7] = 0.0, nan, inf
        y = cula.norm.l2norm(rows.to(IO[dtype]).to(device), dtype=result).double().cpu()
        assert (y[0] == 0).all() and y[1].isnan().all() and y[2, 7].isnan() and (y[2, :7] == 0).all() and (y[2, 8:] == 0).all()
        np.testing.assert_allclose(y[3], 0.125, rtol=2.0**-8)


def run_extremes(device) -> None:
    """Every float32 element on its own, from the subnormal end of exp to the linear part: 8 ulp, not only a norm."""
    x = torch.linspace(-87, 100, 200_000, dtype=torch.float64).float()
    for bias in (0.0, -0.30000001192092896):
        y = x.double().numpy() + bias
        g = cula.kda.kda_gate(x.view(-1, 1, 8).to(device), dt_bias=torch.full((8,), bias, device=device)).flatten().double().cpu().numpy()
        want = -_softplus(y)
        normal = np.abs(want) > 2.0**-125
        worst = (np.abs(g - want)[normal] / np.abs(want)[normal]).max()
        assert worst <= 8 * 2.0**-23, worst * 2.0**23
        s = cula.kda.kda_gate(x.view(-1, 1, 8).to(device), dt_bias=torch.full((8,), bias, device=device), lower_bound=-1.0)
        s, want = s.flatten().double().cpu().numpy(), -_sigmoid(y)
        normal = np.abs(want) > 2.0**-125
        worst = (np.abs(s - want)[normal] / np.abs(want)[normal]).max()
        assert worst <= 8 * 2.0**-23, worst * 2.0**23


def run_empty(device, shape) -> None:
    assert cula.kda.kda_gate(torch.empty(shape, device=device)).shape == shape
    assert cula.gdn.gdn_gate(torch.empty(shape[:-1], device=device)).shape == shape[:-1]
    assert cula.norm.l2norm(torch.empty(shape, device=device)).shape == shape
