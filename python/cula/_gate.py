"""What kda_gate and gdn_gate share."""

from __future__ import annotations

from cula_loader import InvalidArgumentError, call, empty

from ._outputs import shape_of


def run_gate(op, x, A_log, dt_bias, lower_bound, beta, beta_kind, out, beta_out, dtype, num_threads, stream, donate):
    if dtype not in ("fp32", "bf16", "fp16"):
        raise InvalidArgumentError(f"{op.name}: dtype={dtype!r}: allowed: 'fp32', 'bf16', 'fp16'")
    if beta is None:
        if beta_out is not None:
            raise InvalidArgumentError(f"{op.name}: beta_out is given without beta")
        beta_kind = "value"  # nothing to activate
    elif beta_kind == "value":
        raise InvalidArgumentError(f"{op.name}: beta_kind='value': allowed: 'logit', 'logit_twice'; a beta that is a value needs no activation")
    fresh = ()
    if out is None:
        out, fresh = empty(x, "out", shape_of(op.name, "x", x), dtype), ("g",)
    if beta is not None and beta_out is None:
        beta_out, fresh = empty(beta, "beta_out", shape_of(op.name, "beta", beta), dtype), (*fresh, "beta_out")
    call(op, (x, out, A_log, dt_bias, beta, beta_out), (beta_kind, lower_bound, num_threads), stream, donate, fresh)
    return out if beta is None else (out, beta_out)
