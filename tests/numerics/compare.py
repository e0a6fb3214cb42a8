"""How a result is compared with the float64 reference, and where the tolerances come from.

The kernels compute in float32 and round once, to nearest, when they store. So for a stored value y, its float64 reference
r and the float32 error e of the computation,  |y - r| <= half_ulp(r) + |e|.  The test takes half_ulp(r) of the stored dtype
off every element's error and bounds the relative RMSE of what is left by FLOAT32: one bound for all dtypes, at float32 level.
For float32 results nothing is taken off.

An output is a sum over K, and the rounding error of a sum scales with its addends: with e_i = +-2^-24 of the i-th, |e| is about
2^-24 sqrt(sum a_i^2). That root is the size of the sum itself where the addends have random signs, as a whole; one row may cancel
by chance (N = 1 from a zero state: out = v (k . q), one dot product for all elements). So outputs are relative to whichever norm is
larger, theirs or that of their addends.

FLOAT32 = 2e-7 is what the project promises for the state: 1.2e-7 = one float32 ulp, and half as much again for the sum over K.
A bf16 result as a whole is then within 1.7e-3 relative RMSE (uniform error in +-2^-8 over normally distributed values:
1.66e-3), an fp16 one within 2.1e-4; both are asserted from 32768 elements on, where the sampling error is 0.6 percent.
"""

from __future__ import annotations

import torch

FLOAT32 = 2e-7
ROUNDED = {torch.bfloat16: 1.7e-3, torch.float16: 2.13e-4}
ENOUGH = 32768

# significand bits (with the hidden one) and exponent of the smallest normal number
_FORMAT = {torch.bfloat16: (8, -126), torch.float16: (11, -14)}


def half_ulp(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Half the distance between neighbours of `dtype` at each float64 value of x; 0 for float32 (see above)."""
    if dtype == torch.float32:
        return torch.zeros_like(x)
    bits, emin = _FORMAT[dtype]
    _, exponent = torch.frexp(x)  # |x| = m * 2^exponent, m in [0.5, 1)
    exponent = torch.where(x == 0, emin, exponent - 1).clamp(min=emin)  # frexp gives 0 the exponent of 0.5
    return torch.ldexp(torch.ones_like(x), exponent - bits)


def assert_close(name: str, got: torch.Tensor, want: torch.Tensor, float32: float = FLOAT32, addends=None) -> float:
    """got: any device, the stored dtype; want and addends: float64, CPU. Returns the relative RMSE."""
    dtype, got = got.dtype, got.detach().double().cpu()
    want = torch.as_tensor(want, dtype=torch.float64)
    assert got.shape == want.shape, f"{name}: shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    if got.numel() == 0:
        return 0.0
    bad = ~torch.isfinite(got)
    assert not bad.any(), f"{name}: {int(bad.sum())} of {bad.numel()} values are not finite, first at {_where(bad)}"
    error, norm = (got - want).abs(), want.norm().item()
    if norm == 0:
        assert not error.any(), f"{name}: must be zero, largest {error.max().item():.3g} at {_where(error == error.max())}"
        return 0.0
    excess = (error - half_ulp(want, dtype)).clamp(min=0)
    worst = _where(excess == excess.max())
    figure = excess.norm().item() / max(norm, 0.0 if addends is None else torch.as_tensor(addends).norm().item())
    assert figure <= float32, (f"{name}: relative RMSE beyond the rounding of {dtype} is {figure:.3g} > {float32:.3g}; worst at "
                               f"{worst}: {got[worst].item():.9g}, expected {want[worst].item():.9g}")
    rmse = error.norm().item() / norm
    if got.numel() >= ENOUGH and dtype in ROUNDED:
        assert rmse <= ROUNDED[dtype], f"{name}: relative RMSE {rmse:.3g} > {ROUNDED[dtype]:.3g}"
    return rmse


def _where(mask: torch.Tensor) -> tuple[int, ...]:
    return tuple(mask.nonzero()[0].tolist())
