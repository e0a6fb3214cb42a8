"""What kda_gate and gdn_gate share."""

from __future__ import annotations

from cula_loader import InvalidArgumentError, call, empty

from ._outputs import refuse_no_integers, shape_of


def gate_options(name: str, beta, beta_kind, dtype, allocates: bool = True):
    """(beta_kind for the args struct, dtype). None stands for the defaults, so that one that was given and has no use is refused."""
    if beta is None:
        if beta_kind is not None:
            raise InvalidArgumentError(f"{name}: beta_kind={beta_kind!r} is given without beta")
        beta_kind = "value"  # nothing to activate
    elif beta_kind == "value":
        raise InvalidArgumentError(f"{name}: beta_kind='value': allowed: 'logit', 'logit_twice'; a beta that is a value needs no activation")
    elif beta_kind is None:
        beta_kind = "logit"
    if dtype not in (None, "fp32", "bf16", "fp16"):
        raise InvalidArgumentError(f"{name}: dtype={dtype!r}: allowed: 'fp32', 'bf16', 'fp16'")
    if dtype is not None and not allocates:
        raise InvalidArgumentError(f"{name}: dtype={dtype!r} is for results that the call allocates, and all of them are given: their dtypes are what they are")
    return beta_kind, dtype or "fp32"


def run_gate(op, x, A_log, dt_bias, lower_bound, beta, beta_kind, out, beta_out, dtype, num_threads, stream, donate):
    if type(num_threads) is not int:
        refuse_no_integers(op.name, num_threads)
    if beta is None and beta_out is not None:
        raise InvalidArgumentError(f"{op.name}: beta_out is given without beta")
    beta_kind, dtype = gate_options(op.name, beta, beta_kind, dtype, out is None or (beta is not None and beta_out is None))
    fresh = ()
    if out is None:
        out, fresh = empty(x, "out", shape_of(op.name, "x", x), dtype), ("g",)
    if beta is not None and beta_out is None:
        beta_out, fresh = empty(beta, "beta_out", shape_of(op.name, "beta", beta), dtype), (*fresh, "beta_out")
    call(op, (x, out, A_log, dt_bias, beta, beta_out), (beta_kind, lower_bound, num_threads), stream, donate, fresh)
    return out if beta is None else (out, beta_out)
