"""A few launches for ncu: profile.py CUBIN_FOLDER H T [overlap]"""
import sys

import torch

from device import DIM, Prefill
from gpu_check import inputs

H, T = int(sys.argv[2]), int(sys.argv[3])
op = Prefill(sys.argv[1])
d = inputs([T], H, H, gate="safe", seed=3)
out = torch.empty(1, T, H, DIM, dtype=torch.bfloat16, device="cuda")
p = op.plan(d["q"], d["k"], d["v"], d["gate"], d["beta"], out, a_log=d["a_log"], dt_bias=d["dt_bias"], lower_bound=d["lower_bound"], state_in=d["h0"],
            state_out=torch.empty_like(d["h0"]), overlap="overlap" in sys.argv)  # fmt: skip
for _ in range(3):
    p["run"]()
torch.cuda.synchronize()
