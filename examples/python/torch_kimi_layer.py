"""A Kimi Delta Attention layer in the manner of Kimi Linear (arXiv 2510.26692): prompt, then one token a step, on the GPU where there is one, else on the CPU.

A layer that was written for flash-linear-attention runs on cula with one line changed: the import of the two ops below.
"""

import torch
import torch.nn.functional as F
from torch import nn

from cula.torch import chunk_kda, fused_recurrent_kda  # was: from fla.ops.kda import chunk_kda, fused_recurrent_kda

LOWER_BOUND = -5.0


class KimiLayer(nn.Module):
    """x [B,T,hidden] -> (y [B,T,hidden], cache). The cache is (last inputs of the convolution, state): what the next tokens need."""

    def __init__(self, hidden=256, heads=2, dim=128, conv=4):
        super().__init__()
        self.heads, self.dim, width = heads, dim, heads * dim
        self.qkv = nn.Linear(hidden, 3 * width, bias=False)
        self.conv = nn.Conv1d(3 * width, 3 * width, conv, groups=3 * width, bias=False)  # causal: forward pads on the left
        self.gate = nn.Sequential(nn.Linear(hidden, dim, bias=False), nn.Linear(dim, width, bias=False))
        self.beta = nn.Linear(hidden, heads, bias=False)
        self.out_gate = nn.Sequential(nn.Linear(hidden, dim, bias=False), nn.Linear(dim, width))
        self.norm = nn.RMSNorm(dim, eps=1e-5)
        self.out = nn.Linear(width, hidden, bias=False)
        self.A_log, self.dt_bias = nn.Parameter(torch.rand(heads) * 2), nn.Parameter(torch.randn(width) - 4)

    def forward(self, x, cache=None, prefill=chunk_kda, step=fused_recurrent_kda):
        B, T, _ = x.shape
        rows = self.qkv(x).transpose(1, 2)
        past = self.conv.kernel_size[0] - 1
        before, state = cache if cache is not None else (rows.new_zeros(B, rows.shape[1], past), None)
        rows = torch.cat([before, rows], -1)
        q, k, v = F.silu(self.conv(rows)).transpose(1, 2).reshape(B, T, 3, self.heads, self.dim).unbind(2)
        o, state = (step if T == 1 else prefill)(
            q, k, v, self.gate(x).view(B, T, self.heads, self.dim), self.beta(x), A_log=self.A_log, dt_bias=self.dt_bias, initial_state=state,
            output_final_state=True, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, lower_bound=LOWER_BOUND,
            state_v_first=True, **(dict(safe_gate=True) if T > 1 else {}))
        o = self.norm(o) * torch.sigmoid(self.out_gate(x)).view_as(o)
        return self.out(o.reshape(B, T, -1)), (rows[..., -past:], state)


def recurrence(q, k, v, g, beta, *, A_log, dt_bias, initial_state, lower_bound, **_):
    """What the layer's call of either op means, token by token in float64."""
    q, k, v, g, beta, A_log, dt_bias = (x.double() for x in (q, k, v, g, beta, A_log, dt_bias))
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    g = lower_bound * torch.sigmoid(A_log.exp()[:, None] * (g + dt_bias.view(g.shape[2:])))
    S = torch.zeros_like(v[:, 0, :, :, None] * k[:, 0, :, None]) if initial_state is None else initial_state.double()  # [B,H,V,K]
    o = []
    for t in range(q.shape[1]):
        S = S * g[:, t].exp()[:, :, None]
        u = beta[:, t].sigmoid()[..., None] * (v[:, t] - (S @ k[:, t, :, :, None])[..., 0])
        S = S + u[..., None] * k[:, t, :, None]
        o.append((S @ q[:, t, :, :, None])[..., 0] * q.shape[-1] ** -0.5)
    return torch.stack(o, 1), S


def generate(layer, x, prompt, **ops):
    """The prompt in one call, the rest token by token: outputs of all tokens, final state."""
    y, cache = layer(x[:, :prompt], **ops)
    outputs = [y]
    for t in range(prompt, x.shape[1]):
        y, cache = layer(x[:, t : t + 1], cache, **ops)
        outputs.append(y)
    return torch.cat(outputs, 1), cache[1]


# float32: sums of 256 products are off by sqrt(256) 2^-24 / sqrt(3) = 5.5e-7; five of them follow one another (projection, convolution, gate, op, projection).
# bf16: every tensor between two ops is rounded, 1.66e-3 RMS; some twenty of these count, the raw gate's and beta's among them.
LIMITS = {torch.float32: 2e-6, torch.bfloat16: 20**0.5 * 1.66e-3}


@torch.inference_mode()
def main():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for dtype in (torch.bfloat16,) if device == "cuda" else LIMITS:  # GPU kernels of prefill take 16-bit rows
        torch.manual_seed(0)
        layer = KimiLayer().to(device, dtype)
        x = torch.randn(2, 75, 256, device=device, dtype=dtype)
        y, state = generate(layer, x, prompt=70)
        want, final = generate(layer.double(), x.double(), prompt=70, prefill=recurrence, step=recurrence)
        errors = [float((a.double() - b).norm() / b.norm()) for a, b in ((y, want), (state, final))]
        print(f"device {device}, {dtype}: out {errors[0]:.1e}, state {errors[1]:.1e}, limit {LIMITS[dtype]:.1e}")
        assert all(e < LIMITS[dtype] for e in errors), errors  # a NaN is not below
    print("OK")


if __name__ == "__main__":
    main()
