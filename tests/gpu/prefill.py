"""KDA prefill problems for the GPU tests: random inputs, the float64 token recurrence, a call on poisoned memory, the comparison.

How far a right result may be from the recurrence. The state and all sums are float32, but the products of a chunk have bf16 operands,
and rounding a normally distributed value to bf16 is an error of RMS e = 1.66e-3 (tests/numerics/compare.py). Roundings are independent:
    U = T R, R = V - S^T Kd      operands T, R and S, Kd: sqrt(4) e
    S <- decay S + Kr^T U        U with its error, rounded, and Kr: sqrt(4 + 2) e = 4.1e-3 of what a chunk adds
    o = S^T Qd + P U, stored     S with its error, rounded, Qd, and o itself: sqrt(6 + 3) e = 5.0e-3
LIMIT is the larger with a tenth for the sample. Where keys repeat and beta is 1, U is a difference of nearly equal terms, and the error of S
comes in through U once more: CORRELATED = sqrt(2) 5.0e-3 and a tenth.
"""

from __future__ import annotations

import ctypes
import dataclasses
from dataclasses import dataclass, field
from pathlib import Path

import torch

import cula
from tests.capi import abi
from tests.numerics.device import arch_of

D = 128
LIMIT, CORRELATED = 5.5e-3, 7.8e-3
NAN = float("nan")
bf16, fp16, f32 = torch.bfloat16, torch.float16, torch.float32
NAMES = {bf16: "bf16", fp16: "fp16", f32: "fp32"}


@dataclass
class Problem:
    """lens: tokens of each sequence. fixed: a batch of rows, all of lens[0] tokens; else packed, with `before` and `after` tokens of no
    sequence around them. options: of kda_prefill. h0 [N,HV,V,K] float32."""

    lens: list[int]
    fixed: bool
    before: int
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    gate: torch.Tensor
    beta: torch.Tensor
    h0: torch.Tensor
    options: dict
    raw: dict = field(default_factory=dict)  # A_log, dt_bias

    @property
    def starts(self) -> list[int]:
        return [0 if self.fixed else self.before + sum(self.lens[:i]) for i in range(len(self.lens) + (not self.fixed))]

    def of_sequence(self, x: torch.Tensor, i: int) -> torch.Tensor:
        """The tokens of sequence i of a tensor [B,T,...]."""
        return x[i] if self.fixed else x[0, self.starts[i] : self.starts[i] + self.lens[i]]


def make(lens, H=2, HV=None, *, io=bf16, gate="safe", gate_dtype=bf16, beta="logit", beta_dtype=bf16, keys="random", fixed=False, seed=0, params=f32,
         before=0, after=0, device="cuda", dim_k=D, dim_v=D, **options) -> Problem:
    HV = HV or H
    gen = torch.Generator(device).manual_seed(seed)
    normal = lambda *shape: torch.randn(*shape, device=device, generator=gen)
    uniform = lambda *shape: torch.rand(*shape, device=device, generator=gen)
    B, T = (len(lens), lens[0]) if fixed else (1, before + sum(lens) + after)
    q, k, v, g, b = normal(B, T, H, dim_k), normal(B, T, H, dim_k), normal(B, T, HV, dim_v), normal(B, T, HV, dim_k), normal(B, T, HV)
    A_log, dt_bias = uniform(HV), uniform(HV, dim_k)
    if keys == "identical":
        k = normal(1, 1, H, dim_k).expand_as(k).clone()
    elif keys == "correlated":
        k = 0.9**0.5 * normal(1, 1, H, dim_k) + 0.1**0.5 * k
    elif keys == "short":
        k = k * 0.05
    if gate == "slow":
        A_log.zero_(), dt_bias.fill_(-8)
    elif gate == "bound":
        g = torch.where(uniform(*g.shape) < 0.8, 30.0, g)
    elif gate == "softplus A 16":
        A_log.fill_(2.7725887)
    elif gate.startswith("log -"):  # most channels forget everything in a token, others nearly nothing
        g = torch.where(uniform(*g.shape) < 0.3, -0.1, float(gate[4:]))
    elif gate == "log 0":
        g.zero_()
    elif gate == "log spans":  # 100 tokens that forget at once or that keep nearly everything, by turns and by head
        fast = (torch.arange(T, device=device)[:, None] // 100 + torch.arange(HV, device=device)) % 3 < 2
        g = torch.where(fast[None, :, :, None], -1.5 * uniform(*g.shape), -1e-3)
    elif gate == "log mix":
        g = -torch.exp(2 * g - 4)
    if beta in ("0", "1", "2"):
        b.fill_(float(beta))
    raw = not gate.startswith("log")
    kinds = {"logit": "logit", "twice": "logit_twice"}
    options = dict(gate_kind="raw" if raw else "log", beta_kind=kinds.get(beta, "value"), l2norm=True, **options)
    if gate in ("safe", "slow", "bound"):
        options["lower_bound"] = -5.0
    x = dict(q=q.to(io), k=k.to(io), v=v.to(io), gate=g.to(gate_dtype), beta=b.to(beta_dtype))
    if not fixed:  # a token of no sequence that was read would show
        for t in x.values():
            t[:, :before] = NAN
            t[:, T - after :] = NAN
    return Problem(list(lens), fixed, before, **x, h0=0.5 * normal(len(lens), HV, dim_v, dim_k), options=options,
                   raw=dict(A_log=A_log.to(params), dt_bias=dt_bias.to(params)) if raw else {})


def reference(p: Problem, l2norm=True, scale=None) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The recurrence in float64, token by token, all sequences side by side: outputs of each sequence, final states [N,HV,V,K]."""
    n, hv = len(p.lens), p.v.shape[2]
    longest = max(p.lens, default=0)

    def rows(x):
        padded = torch.zeros(n, max(longest, 1), *x.shape[2:], dtype=torch.float64, device=x.device)
        for i in range(n):
            padded[i, : p.lens[i]] = p.of_sequence(x, i).double()
        return padded

    q, k, v, g, b = (rows(x) for x in (p.q, p.k, p.v, p.gate, p.beta))
    if l2norm:
        q, k = (x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q = (q * (q.shape[-1] ** -0.5 if scale is None else scale)).repeat_interleave(hv // q.shape[2], 2)
    k = k.repeat_interleave(hv // k.shape[2], 2)
    if p.raw:
        rate, x = p.raw["A_log"].double().exp()[:, None], g + p.raw["dt_bias"].double()
        bound = p.options.get("lower_bound")
        g = bound * torch.sigmoid(rate * x) if bound else -rate * torch.nn.functional.softplus(x)
    b = {"value": lambda b: b, "logit": torch.sigmoid, "logit_twice": lambda b: 2 * torch.sigmoid(b)}[p.options["beta_kind"]](b)
    S = p.h0.double().transpose(-1, -2).clone()
    o = torch.zeros_like(v)
    lens = torch.tensor(p.lens, device=v.device)
    for t in range(longest):
        X = S * torch.exp(g[:, t])[..., None]
        u = b[:, t][..., None] * (v[:, t] - torch.einsum("nhkv,nhk->nhv", X, k[:, t]))
        X = X + k[:, t][..., None] * u[:, :, None, :]
        o[:, t] = torch.einsum("nhkv,nhk->nhv", X, q[:, t])
        S = torch.where((lens > t)[:, None, None, None], X, S)
    return [o[i, :length] for i, length in enumerate(p.lens)], S.transpose(-1, -2)


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative RMSE; infinite if anything is not finite, so that no comparison with it can pass."""
    got, want = got.double(), want.double()
    assert got.shape == want.shape
    if got.numel() == 0:
        return 0.0
    if not bool(torch.isfinite(got).all()):
        return float("inf")
    return float((got - want).norm() / want.norm()) if bool(want.any()) else float(got.abs().max())


def laid_out(states: torch.Tensor, layout: str, dtype=f32) -> torch.Tensor:
    """[N,HV,V,K] as a pool of the layout, or back."""
    return (states if layout == "vk" else states.transpose(-1, -2)).to(dtype).contiguous()


def cu_seqlens(p: Problem, dtype=torch.int32) -> torch.Tensor | None:
    return None if p.fixed else torch.tensor(p.starts, dtype=dtype, device=p.q.device)


def arguments(p: Problem, **kw) -> dict:
    """Of kda_prefill, with a poisoned out."""
    out = torch.full(p.v.shape, NAN, dtype=p.v.dtype, device=p.v.device)
    return dict(q=p.q, k=p.k, v=p.v, gate=p.gate, beta=p.beta, out=out, cu_seqlens=cu_seqlens(p), **p.raw, **p.options) | kw


def kernels_of(p: Problem, state="fp32", layout="vk", segments=1, checkpoints=False, variant="auto") -> tuple[str, ...]:
    """Ids of the kernels that a call with these options must launch."""
    io = NAMES[p.q.dtype]
    op = f"kda_prefill.{arch_of(p.q.device.type)}"
    if p.q.device.type == "cpu":
        return (f"{op}.{io}.s{state}.k{p.q.shape[-1]}.{layout}",)
    prep = f"{op}.{io}.k128.v128.prep{'_gf32' if p.gate.dtype == f32 else ''}"
    pools = f"{op}.{io}.s{state}.k128.v128.{layout}"
    between = (f"{pools}.scan", f"{op}.fp32.k128.v128.carry") if segments > 1 and variant != "chain" else ()
    return (prep, *between, f"{pools}.state{'_checkpoints' if checkpoints else ''}")


def check(p: Problem, out: torch.Tensor, states: torch.Tensor | None, limit=LIMIT, l2norm=True, scale=None) -> None:
    """Every output and state [N,HV,V,K] against the recurrence, and what belongs to no sequence against the poison."""
    want_out, want_states = reference(p, l2norm, scale)
    got_out = [p.of_sequence(out, i) for i in range(len(p.lens))]
    figure = error(torch.cat([x.flatten() for x in got_out]), torch.cat([x.flatten() for x in want_out]))
    assert figure <= limit, f"out: relative RMSE {figure:.3g} > {limit:.3g}"
    for i, (got, want) in enumerate(zip(got_out, want_out)):
        # of one token and head there are 128 values, whose error is that of few roundings
        assert error(got, want) <= 4 * limit, f"out of sequence {i} with {p.lens[i]} tokens: relative RMSE {error(got, want):.3g}"
    if states is not None:
        assert error(states, want_states) <= limit, f"states: relative RMSE {error(states, want_states):.3g} > {limit:.3g}"
        for i in range(len(p.lens)):
            assert error(states[i], want_states[i]) <= 2 * limit, f"state of sequence {i}: relative RMSE {error(states[i], want_states[i]):.3g}"
    if not p.fixed:
        covered = p.starts[-1]
        assert out[0, : p.before].isnan().all() and out[0, covered:].isnan().all(), "a row of no sequence was written"


def check_checkpoints(p: Problem, layout: str, limit: float, **kw) -> None:
    """States after every 64 tokens go to the slots that are named; a void index and an interval that is not full store nothing.
    p: 200 tokens in the first sequence; then, in a fixed batch, 200, else 63, 128 and 0."""
    device, hv = p.v.device, p.v.shape[2]
    n, pool = len(p.lens), torch.full((12, hv, D, D), NAN, device=device)
    index = torch.full((n, 3), -1, dtype=torch.int32)
    index[0] = torch.tensor([3, 7, 1])
    last = 1 if p.fixed else 2
    index[last, :2] = torch.tensor([5, 0])
    if not p.fixed:
        index[1, 0] = 9  # 63 tokens: no interval is full
    a = arguments(p, state=laid_out(p.h0, layout), checkpoints=pool, checkpoint_index=index.to(device), checkpoint_interval=64, state_layout=layout, **kw)
    cula.kda.kda_prefill(**a)
    if device.type == "cuda":
        assert cula.last_kernels() == kernels_of(p, layout=layout, segments=kw.get("segments", 1), checkpoints=True)
    check(p, a["out"], None, limit)
    stored = set()
    for i, j in ((0, 0), (0, 1), (0, 2), (last, 0), (last, 1)):
        part = dataclasses.replace(p, lens=[64 * (j + 1)], fixed=True, h0=p.h0[i : i + 1],
                                   **{name: p.of_sequence(getattr(p, name), i)[None, : 64 * (j + 1)] for name in ("q", "k", "v", "gate", "beta")})
        slot = int(index[i, j])
        stored.add(slot)
        assert error(laid_out(pool[slot][None], layout), reference(part)[1]) <= 2 * limit, (i, j)
    assert all(pool[s].isnan().all() for s in range(12) if s not in stored)


_CODES = {f32: "fp32", bf16: "bf16", fp16: "fp16", torch.int32: "i32", torch.int64: "i64"}


class CCall:
    """The same call through the C interface: cula_run on the current stream, with a workspace that is made once, before any capture."""

    def __init__(self, **kw):
        self.lib = abi.load(Path(cula.info()["artifacts"]["path"]) / "lib/libcula.so")
        assert self.lib.cula_prepare(0) == abi.OK, abi.last_error(self.lib)
        self.keep = tensors = {name: x for name, x in kw.items() if isinstance(x, torch.Tensor)}
        fields = dict(gate_kind={"log": 2, "raw": 3}[kw["gate_kind"]], beta_kind={"value": 0, "logit": 1, "logit_twice": 2}[kw["beta_kind"]],
                      state_layout={"vk": 0, "kv": 1}[kw.get("state_layout", "vk")], l2norm=int(kw["l2norm"]), lower_bound=kw.get("lower_bound") or 0.0,
                      segments=kw.get("segments", 0), exact=int(kw.get("exact", False)), variant={"auto": 0, "serial": 1, "overlap": 2, "chain": 3}[kw.get("variant", "auto")])
        described = {name: abi.tensor(x.shape, _CODES[x.dtype], list(x.stride()), x.data_ptr(), (abi.GPU, x.device.index)) for name, x in tensors.items()}
        self.call = abi.Call("kda_prefill", described, **fields)
        status, needs = self.call.query(self.lib, "device")
        assert status == abi.OK, abi.last_error(self.lib)
        self.workspace = torch.full((max(needs.workspace_bytes, 1),), 0xFF, dtype=torch.uint8, device="cuda")
        self.kernels = tuple(abi.kernel_id(self.lib, needs.kernels[i]) for i in range(needs.launch_count))

    def __call__(self) -> None:
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        status = self.call.run(self.lib, stream, self.workspace.data_ptr(), self.workspace.numel())
        assert status == abi.OK, abi.last_error(self.lib)
