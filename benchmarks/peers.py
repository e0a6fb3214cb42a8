"""The peers: measured in the same run where they are installed, else their recorded figure from PEERS.md.

Each entry of LIVE turns Inputs into a call without arguments, or raises ImportError. A peer that is installed but fails on a
shape is reported as failed, never replaced by the recorded figure.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.decode_inputs import LOWER_BOUND, Inputs

# FLA's own optional backends would replace the kernels that are to be measured.
for _name in ("FLA_TILELANG", "FLA_FLASH_QLA", "FLA_FLASH_KDA"):
    os.environ.setdefault(_name, "0")


@dataclass(frozen=True)
class Recorded:
    op: str
    lib: str
    state: str
    heads: tuple[int, int]
    n: int
    us: float
    host_us: float


def _table_rows(columns: int) -> list[list[str]]:
    """The cells of every line of PEERS.md that has so many, headers among them."""
    lines = (Path(__file__).parent / "PEERS.md").read_text().splitlines()
    rows = ([c.strip() for c in line.strip().strip("|").split("|")] for line in lines)
    return [cells for cells in rows if len(cells) == columns]


def recorded() -> list[Recorded]:
    return [Recorded(c[0], c[1], c[2], tuple(int(x) for x in c[3].split("/")), int(c[4]), float(c[5]), float(c[6]))
            for c in _table_rows(7) if c[4].isdigit()]


@dataclass(frozen=True)
class RecordedPrefill:
    lib: str
    gates: str
    heads: int
    shape: str
    ms: float


def recorded_prefill() -> list[RecordedPrefill]:
    """Rows of the prefill table: lib, random or slow gates, heads, shape as PEERS.md names it, ms."""
    return [RecordedPrefill(c[0], c[1], int(c[2]), c[3], float(c[4])) for c in _table_rows(5) if c[1] in ("random", "slow")]


def fla_prefill(a: dict):
    """a: the arguments of kda_prefill that cula is given. FLA's states are K first, of the same size."""
    from fla.ops.kda import chunk_kda
    cu = None if a["cu_seqlens"] is None else a["cu_seqlens"].long()
    return lambda: chunk_kda(
        a["q"], a["k"], a["v"], a["gate"], a["beta"], A_log=a["A_log"], dt_bias=a["dt_bias"].view(-1), initial_state=a["state"],
        output_final_state=True, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, safe_gate=True,
        lower_bound=LOWER_BOUND, cu_seqlens=cu)


def fla_kda(x: Inputs):
    from fla.ops.kda import fused_recurrent_kda
    return lambda: fused_recurrent_kda(
        x.q, x.k, x.v, x.gate, x.beta, A_log=x.A_log, dt_bias=x.dt_bias.view(-1), scale=x.scale, initial_state=x.state,
        output_final_state=True, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True,
        lower_bound=LOWER_BOUND)


def fla_kda_inplace(x: Inputs):
    import torch
    from fla.ops.kda.fused_recurrent import fused_recurrent_kda_fwd
    index = torch.arange(x.n, device=x.q.device, dtype=torch.int32)
    return lambda: fused_recurrent_kda_fwd(
        x.q, x.k, x.v, x.gate, x.beta, A_log=x.A_log, dt_bias=x.dt_bias.view(-1), scale=x.scale, initial_state=x.state,
        inplace_final_state=True, state_v_first=True, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True, lower_bound=LOWER_BOUND, out=x.out, ssm_state_indices=index)


def fla_gdn(x: Inputs):
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule
    return lambda: fused_recurrent_gated_delta_rule(
        x.q, x.k, x.v, g=x.gate, beta=x.beta, scale=x.scale, initial_state=x.state, output_final_state=True,
        use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, A_log=x.A_log, dt_bias=x.dt_bias,
        use_beta_sigmoid_in_kernel=True)


def fla_gla(x: Inputs):
    from fla.ops.gla import fused_recurrent_gla
    return lambda: fused_recurrent_gla(x.q, x.k, x.v, gk=x.gate, scale=x.scale, initial_state=x.state,
                                       output_final_state=True)


def fla_lightning(x: Inputs):
    from fla.ops.simple_gla import fused_recurrent_simple_gla
    log_decay = x.gate.log()
    return lambda: fused_recurrent_simple_gla(x.q, x.k, x.v, g_gamma=log_decay, scale=x.scale, initial_state=x.state,
                                              output_final_state=True)


def flashinfer_kda(x: Inputs):
    from flashinfer.kda import recurrent_kda
    return lambda: recurrent_kda(
        x.q, x.k, x.v, x.gate, x.beta, A_log=x.A_log, dt_bias=x.dt_bias.view(-1), scale=x.scale, initial_state=x.state,
        output_final_state=True, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, lower_bound=LOWER_BOUND,
        beta_is_logit=True, output=x.out)


def flashinfer_gdn(x: Inputs):
    from flashinfer.gdn_decode import gated_delta_rule_decode_pretranspose
    return lambda: gated_delta_rule_decode_pretranspose(x.q, x.k, x.v, x.state, x.A_log, x.gate, x.dt_bias, x.beta,
                                                        scale=x.scale, output=x.out, use_qk_l2norm=True)


def flashinfer_gdn_kv(x: Inputs):
    from flashinfer.gdn_decode import gated_delta_rule_decode
    return lambda: gated_delta_rule_decode(x.q, x.k, x.v, x.state, x.A_log, x.gate, x.dt_bias, x.beta, scale=x.scale,
                                           output=x.out, use_qk_l2norm=True)


# (op, state) -> recorded name -> how to call it
LIVE: dict[tuple[str, str], dict[str, Callable]] = {
    ("kda", "fp32"): {"fla": fla_kda, "fla_inplace": fla_kda_inplace},
    ("kda", "bf16"): {"fi_bf16": flashinfer_kda},
    ("gdn", "fp32"): {"fla": fla_gdn, "fi": flashinfer_gdn, "fi_nontr": flashinfer_gdn_kv},
    ("gdn", "bf16"): {"fi_bf16": flashinfer_gdn},
    ("gla", "fp32"): {"fla": fla_gla},
    ("lightning", "fp32"): {"fla": fla_lightning},
}
