"""Random one-token rows for the front-end tests, [B,1,...] as a decoding layer has them."""

from types import SimpleNamespace

import torch

OPS = {"kda": "kda_decode", "gdn": "gdn_decode", "gla": "gla_decode", "lightning": "lightning_decode"}


def rows(batch=3, heads=2, value_heads=4, k=64, v=128, dtype=torch.float32, seed=0, device="cpu"):
    g = torch.Generator().manual_seed(seed)
    r = lambda *shape: torch.randn(*shape, generator=g)  # noqa: E731
    x = SimpleNamespace(
        q=r(batch, 1, heads, k).to(dtype), k=r(batch, 1, heads, k).to(dtype), v=r(batch, 1, value_heads, v).to(dtype),
        g=-torch.rand(batch, 1, value_heads, k, generator=g), g_head=-torch.rand(batch, 1, value_heads, generator=g),
        raw=r(batch, 1, value_heads, k), raw_head=r(batch, 1, value_heads), beta=torch.rand(batch, 1, value_heads, generator=g),
        A_log=torch.rand(value_heads, generator=g), dt_bias=r(value_heads, k), dt_bias_head=r(value_heads),
        h0=r(batch, value_heads, k, v))
    return SimpleNamespace(**{name: t.to(device) for name, t in vars(x).items()})


def error(out, ref):
    """Relative RMSE; infinite where out is not finite."""
    out, ref = out.double(), ref.double()
    return float((out - ref).norm() / ref.norm()) if torch.isfinite(out).all() else float("inf")
