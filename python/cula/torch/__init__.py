"""cula for torch: the ops as custom ops that torch.compile can trace, and functions of flash-linear-attention.

    kda_decode, gdn_decode, gla_decode, lightning_decode      one token a row, states updated in place or from one pool to another
    kda_prefill                                               all tokens of N sequences
    kda_gate, gdn_gate, l2norm                                elementwise
    chunk_kda, fused_recurrent_kda                            FLA 0.6's signatures, any T, cu_seqlens
    fused_recurrent_gated_delta_rule, fused_recurrent_gla, fused_recurrent_simple_gla,
    fused_recurrent_lightning_attn                            FLA 0.6's signatures, at T = 1

Forward only: an operand that requires grad, with grad enabled, raises at once. Autocast changes nothing.
The custom ops themselves are torch.ops.cula.<op> (functional: out and final states) and torch.ops.cula.<op>_out (writes out and a pool).
"""

from ._fla import (
                   fused_recurrent_gated_delta_rule,
                   fused_recurrent_gla,
                   fused_recurrent_lightning_attn,
                   fused_recurrent_simple_gla,
)
from ._fla_kda import chunk_kda, fused_recurrent_kda
from ._native import gdn_decode, gdn_gate, gla_decode, kda_decode, kda_gate, l2norm, lightning_decode
from ._prefill import kda_prefill

__all__ = ["chunk_kda", "fused_recurrent_gated_delta_rule", "fused_recurrent_gla", "fused_recurrent_kda", "fused_recurrent_lightning_attn",
           "fused_recurrent_simple_gla", "gdn_decode", "gdn_gate", "gla_decode", "kda_decode", "kda_gate", "kda_prefill", "l2norm", "lightning_decode"]
