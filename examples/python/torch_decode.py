"""KDA decode on torch tensors, on the GPU where there is one (captured in a CUDA graph there), else on the CPU.

Rows come as one bf16 projection [N, 2*H*K + HV*V + HV*K + HV], as in an engine; q|k|v, gate and beta are views into it.
"""

import torch

import cula

N, H, HV, K, V, SLOTS, STEPS, LOWER_BOUND = 4, 2, 4, 128, 128, 16, 6, -5.0


def reference_step(S, mixed, gate, beta, A_log, dt_bias):
    """The recurrence in float64. S [N,HV,K,V]."""
    q, k, v = mixed.double().split([H * K, H * K, HV * V], dim=-1)
    q, k = (x.reshape(N, H, K).repeat_interleave(HV // H, 1) for x in (q, k))
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    g = LOWER_BOUND * torch.sigmoid(A_log.double().exp()[:, None] * (gate.double() + dt_bias.double()))
    S = S * g.exp()[..., None]
    u = beta.double().sigmoid()[..., None] * (v.reshape(N, HV, V) - torch.einsum("nhkv,nhk->nhv", S, k))
    S = S + torch.einsum("nhk,nhv->nhkv", k, u)
    return S, torch.einsum("nhkv,nhk->nhv", S, q * K**-0.5)


@torch.inference_mode()
def main():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    widths = [2 * H * K + HV * V, HV * K, HV]
    rows = torch.empty(N, sum(widths), dtype=torch.bfloat16, device=device)
    mixed, gate, beta = rows.split(widths, dim=-1)
    gate = gate.view(N, HV, K)
    A_log, dt_bias = torch.randn(HV, device=device) * 0.5, torch.randn(HV, K, device=device) - 4
    pool = torch.full((SLOTS, HV, V, K), float("nan"), device=device)
    slots = torch.tensor([9, 2, 0, 5], dtype=torch.int32, device=device)
    read = torch.full_like(slots, -1)  # first step: start from zero
    out = torch.empty(N, HV, V, dtype=torch.bfloat16, device=device)

    def step():
        cula.kda.kda_decode(mixed_qkv=mixed, gate=gate, beta=beta, state=pool, A_log=A_log, dt_bias=dt_bias, lower_bound=LOWER_BOUND,
                            gate_kind="raw", beta_kind="logit", l2norm=True, read_index=read, write_index=slots, out=out)

    if device == "cuda":
        cula.prepare(torch.cuda.current_device())  # loads the kernels: nothing may be loaded during capture
        rows.zero_()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
    S = torch.zeros(N, HV, K, V, dtype=torch.float64, device=device)
    for t in range(STEPS):
        rows.copy_(torch.randn(rows.shape, device=device))
        if t == 1:
            read.copy_(slots)  # the captured step sees new contents in the same buffers
        graph.replay() if device == "cuda" else step()
        S, want = reference_step(S, mixed, gate, beta, A_log, dt_bias)
        error = (out.double() - want).norm() / want.norm()
        assert error < 2.5e-3, error  # one rounding to bf16
    state_error = (pool[slots.long()].double().transpose(2, 3) - S).norm() / S.norm()
    assert state_error < 1e-6, state_error
    print(f"device {device}, out {error:.1e}, state {state_error:.1e}")
    print("OK")


if __name__ == "__main__":
    main()
