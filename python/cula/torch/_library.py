"""The torch custom ops, for torch.compile and everything else that traces: schemas, kernels, shapes, no gradients.

Each decode op has two, both with the operands and options of its function in cula.kda, cula.gdn, cula.gla, cula.lightning:
    cula::<op>_out   writes out and the state pool (state, or state_out where given); returns nothing
    cula::<op>       functional: returns out and the final states, and writes nothing that it was given
and cula::kda_gate, cula::gdn_gate, cula::l2norm are functional. The prefill ops are in _prefill.

They are registered with torch.library directly: its custom_op decorator costs 10 us a call more on the same kernels. An op that
would be recorded for a gradient raises when it is called, not in backward, where the call that is to blame is no longer on the stack.
"""

from __future__ import annotations

import functools

import torch

from cula_loader import UnsupportedError, call
from cula_loader.ops import BY_NAME

from . import _fake

DECODE = ("kda_decode", "gdn_decode", "gla_decode", "lightning_decode")
_ROWS = ("q", "k", "v", "mixed_qkv", "gate", "A_log", "dt_bias", "beta")
_OPTIONS = ("str gate_kind", "str beta_kind", "bool l2norm", "float? scale", "str state_layout", "float? lower_bound", "int? null_slot",
            "int num_threads")
_TENSORS = ", ".join(f"Tensor? {name}" for name in _ROWS)
_SCHEMAS = {
    "{}_out": f"({_TENSORS}, Tensor? read_index, Tensor? write_index, Tensor(a!)? state, Tensor(b!)? state_out, Tensor(c!) out, "
              f"{', '.join(_OPTIONS)}) -> ()",
    "{}": f"({_TENSORS}, Tensor? initial_state, {', '.join(o for o in _OPTIONS if 'null_slot' not in o)}) -> (Tensor, Tensor)",
}
_GATE = "(Tensor x, Tensor? A_log, Tensor? dt_bias, Tensor? beta, float? lower_bound, str beta_kind, ScalarType dtype, int num_threads) -> {}"
_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}

library = torch.library.Library("cula", "DEF")


def _rows_shape(v, mixed_qkv, state, state_layout):
    """Shape of out, for rows v or packed rows, whose value heads only the state tells."""
    if v is not None:
        return v.shape
    slots = state.shape
    return (*mixed_qkv.shape[:-1], slots[1], slots[3] if state_layout == "kv" else slots[2])


def _make_decode(name: str):
    op = BY_NAME[name]

    def run(q, k, v, mixed_qkv, gate, A_log, dt_bias, beta, read_index, write_index, state, state_out, out, gate_kind, beta_kind, l2norm,
            scale, state_layout, lower_bound, null_slot, num_threads):
        call(op, (q, k, v, mixed_qkv, out, gate, A_log, dt_bias, beta, state, state_out, read_index, write_index),
             (gate_kind, beta_kind, l2norm, scale, state_layout, lower_bound, null_slot, num_threads))

    def shapes(q, k, v, mixed_qkv, gate, A_log, dt_bias, beta, initial_state, gate_kind, beta_kind, l2norm, scale, state_layout, *_):
        rows = v if v is not None else mixed_qkv
        if initial_state is not None:
            final = torch.empty_like(initial_state, memory_format=torch.contiguous_format)
        elif v is None:
            raise UnsupportedError(f"{name}: mixed_qkv without initial_state does not tell HV and V: pass q, k and v")
        else:
            n = v.shape[1] if v.dim() == 4 and v.shape[0] == 1 else v.shape[0]
            dims = (q.shape[-1], v.shape[-1]) if state_layout == "kv" else (v.shape[-1], q.shape[-1])
            final = v.new_empty((n, v.shape[-2], *dims), dtype=torch.float32)
        return rows.new_empty(_rows_shape(v, mixed_qkv, initial_state, state_layout)), final

    def functional(q, k, v, mixed_qkv, gate, A_log, dt_bias, beta, initial_state, gate_kind, beta_kind, l2norm, scale, state_layout,
                   lower_bound, num_threads):
        out, final = shapes(q, k, v, mixed_qkv, gate, A_log, dt_bias, beta, initial_state, gate_kind, beta_kind, l2norm, scale, state_layout)
        run(q, k, v, mixed_qkv, gate, A_log, dt_bias, beta, None, None, initial_state, final, out, gate_kind, beta_kind, l2norm, scale,
            state_layout, lower_bound, None, num_threads)
        return out, final

    def check(q, k, v, mixed_qkv, gate, A_log, dt_bias, beta, read_index, write_index, state, state_out, out, *options):
        _fake.check(op, (q, k, v, mixed_qkv, out, gate, A_log, dt_bias, beta, state, state_out, read_index, write_index), options)

    def fake(q, k, v, mixed_qkv, gate, A_log, dt_bias, beta, initial_state, gate_kind, beta_kind, l2norm, scale, state_layout, lower_bound, num_threads):
        out, final = shapes(q, k, v, mixed_qkv, gate, A_log, dt_bias, beta, initial_state, gate_kind, beta_kind, l2norm, scale, state_layout)
        check(q, k, v, mixed_qkv, gate, A_log, dt_bias, beta, None, None, initial_state, final, out, gate_kind, beta_kind, l2norm, scale, state_layout,
              lower_bound, None, num_threads)
        return out, final

    register(f"{name}_out", _SCHEMAS["{}_out"], run, check)
    register(name, _SCHEMAS["{}"], functional, fake)


def _make_gate(name: str, with_beta: bool):
    op = BY_NAME[name]

    def shapes(x, A_log, dt_bias, beta, lower_bound, beta_kind, dtype, num_threads):
        g = torch.empty(x.shape, dtype=dtype, device=x.device)
        return (g, torch.empty(beta.shape, dtype=dtype, device=x.device)) if with_beta else g

    def run(x, A_log, dt_bias, beta, lower_bound, beta_kind, dtype, num_threads):
        results = shapes(x, A_log, dt_bias, beta, lower_bound, beta_kind, dtype, num_threads)
        g, beta_out = results if with_beta else (results, None)
        call(op, (x, g, A_log, dt_bias, beta, beta_out), (beta_kind, lower_bound, num_threads))
        return results

    def fake(x, A_log, dt_bias, beta, lower_bound, beta_kind, dtype, num_threads):
        results = shapes(x, A_log, dt_bias, beta, lower_bound, beta_kind, dtype, num_threads)
        g, beta_out = results if with_beta else (results, None)
        _fake.check(op, (x, g, A_log, dt_bias, beta, beta_out), (beta_kind, lower_bound, num_threads))
        return results

    register(f"{name}_beta" if with_beta else name, _GATE.format("(Tensor, Tensor)" if with_beta else "Tensor"), run, fake)


def _make_l2norm():
    op = BY_NAME["l2norm"]

    def shapes(x, eps, dtype, num_threads):
        return torch.empty(x.shape, dtype=dtype, device=x.device)

    def run(x, eps, dtype, num_threads):
        y = shapes(x, eps, dtype, num_threads)
        call(op, (x, y, None), (eps, num_threads))
        return y

    def fake(x, eps, dtype, num_threads):
        y = shapes(x, eps, dtype, num_threads)
        _fake.check(op, (x, y, None), (eps, num_threads))
        return y

    register("l2norm", "(Tensor x, float eps, ScalarType dtype, int num_threads) -> Tensor", run, fake)


def register(name: str, schema: str, kernel, fake) -> None:
    library.define(name + schema)
    for key in ("CPU", "CUDA"):
        library.impl(name, kernel, key)
    overload = getattr(torch.ops.cula, name).default

    def forward_only(*args):
        if torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in args):
            raise UnsupportedError(f"{name}: an operand requires grad, and cula's kernels are forward only: call under torch.no_grad() or "
                                   "torch.inference_mode(), or pass x.detach()")
        with torch._C._AutoDispatchBelowAutograd():
            return overload(*args)

    library.impl(name, forward_only, "Autograd")
    torch.library.register_fake(f"cula::{name}", fake, lib=library)
    if name.startswith(DECODE + ("kda_prefill",)):
        torch.library.register_vmap(f"cula::{name}", functools.partial(_refuse_vmap, name), lib=library)


def _refuse_vmap(name, *_):
    raise UnsupportedError(f"{name}: vmap is not supported: the operands have a dimension for the batch already (rows N, tokens T); reshape into it")


for _name in DECODE:
    _make_decode(_name)
for _name in ("kda_gate", "gdn_gate"):
    for _with_beta in (False, True):
        _make_gate(_name, _with_beta)
_make_l2norm()
