"""Kimi Delta Attention (arXiv 2510.26692): delta rule with a decay a key channel."""

from __future__ import annotations

from cula_loader import call, empty
from cula_loader.ops import KDA_DECODE, KDA_GATE, KDA_PREFILL

from ._gate import run_gate
from ._outputs import new_out, refuse_no_integers, shape_of


def kda_decode(q=None, k=None, v=None, gate=None, beta=None, state=None, *, mixed_qkv=None, A_log=None, dt_bias=None, lower_bound=None,
               gate_kind="none", beta_kind="value", l2norm=False, scale=None, state_layout="vk", state_out=None, read_index=None,
               write_index=None, null_slot=None, out=None, num_threads=0, stream=None, donate=False):
    """One token for each of N rows; returns out and updates the states.

    With S [K,V] the float32 state of a row and value head, and the row's q, k of head hv // (HV/H):

        S <- diag(exp g) S;   u = beta (v - S^T k);   S <- S + k u^T;   out = scale * S^T q

    Operands (N rows, H query heads, HV value heads, HV a multiple of H; K and V are head dims, K of 64, 128, 256, V a multiple of 64)
        q, k        [N,H,K]       bf16, fp16 or float32, one dtype for q, k, v, out. [N,1,...] and [1,N,...] are taken too
        v           [N,HV,V]
        mixed_qkv   [N, 2*H*K + HV*V], instead of q, k and v: one projection row; its row stride is free
        gate        by gate_kind; float32, bf16 or fp16
                    "none"  no gate, decay 1
                    "log"   g [N,HV,K], the natural log of the decay, g <= 0
                    "raw"   x [N,HV,K]: g = -exp(A_log[hv]) * softplus(x + dt_bias[hv,k]), or with lower_bound in [-5,0)
                            g = lower_bound * sigmoid(exp(A_log[hv]) * (x + dt_bias[hv,k]))
        A_log       HV elements of any shape, "raw" only; None: exp(A_log) = 1
        dt_bias     HV*K elements of any shape, "raw" only; None: 0
        beta        [N,HV], required. beta_kind "value": as it is; "logit": sigmoid(beta); "logit_twice": 2 * sigmoid(beta)
        state       pool of slots, float32 or bf16: [slots,HV,V,K] with state_layout "vk", [slots,HV,K,V] with "kv"; slot and head strides
                    are free. None: every row starts from zero
        state_out   pool that is written; None: state. It may be the same memory
        read_index, write_index   [N] int32 or int64, on the device of the rows: the slot that row n starts from, and the one it stores to.
                    None: slot n, and the slot that was read. Negative, out of range, or equal to null_slot: start from zero, store
                    nothing. A row with neither is padding: its output is zero. No slot may be written by two rows, or written by one
                    and read by another (not checked)
        out         [N,HV,V]; None: a new array of v's (or mixed_qkv's) framework. It may not overlap an input
    Options
        l2norm      q and k <- x / sqrt(sum x^2 + 1e-6), before the scale
        scale       None: K^-0.5; else any finite number, 0 included
        num_threads CPU only: threads, 0 for all that the process may run on
        stream, donate   see the package's documentation

    Raises InvalidArgumentError for operands and options that break a rule, UnsupportedError for dtypes and dims that are not built.
    N = 0 does nothing.
    """
    if type(num_threads) is not int or (null_slot is not None and type(null_slot) is not int):
        refuse_no_integers("kda_decode", num_threads, null_slot)
    fresh = ()
    if out is None:
        out, fresh = new_out("kda_decode", v, mixed_qkv, state, state_layout), ("out",)
    call(KDA_DECODE, (q, k, v, mixed_qkv, out, gate, A_log, dt_bias, beta, state, state_out, read_index, write_index),
         (gate_kind, beta_kind, l2norm, scale, state_layout, lower_bound, null_slot, num_threads), stream, donate, fresh)
    return out


def kda_prefill(q, k, v, gate, beta, state=None, *, gate_kind, cu_seqlens=None, A_log=None, dt_bias=None, lower_bound=None, beta_kind="value",
                l2norm=False, scale=None, state_layout="vk", state_out=None, read_index=None, write_index=None, checkpoints=None,
                checkpoint_index=None, checkpoint_interval=0, null_slot=None, out=None, variant="auto", segments=0, exact=False, num_threads=0, stream=None,
                donate=False):
    """All tokens of N sequences; returns out, and stores final states in state_out.

    With S [K,V] the float32 state of a sequence and value head, for its tokens t in turn, with head hv // (HV/H):

        S <- diag(exp g_t) S;   u = beta_t (v_t - S^T k_t);   S <- S + k_t u^T;   out_t = scale * S^T q_t

    computed in chunks (Kimi Linear, arXiv 2510.26692, section 3), the state in float32 from the first token to the last. On a GPU the products of
    a chunk have bf16 operands, for fp16 tokens too; on the CPU all arithmetic is float32.

    Operands (B rows of T tokens, or with cu_seqlens N sequences in one row; H query heads, HV value heads, a multiple of H; K = V = 128 on a GPU)
        q, k        [B,T,H,K]     bf16 or fp16, on the CPU also float32; one dtype for q, k, v, out. Token and head strides are free: views into
                    a fused row are fine. On a GPU rows of v and out start at multiples of 16 bytes, rows of q, k and gate at multiples of 4
                    elements, and so a float32 dt_bias
        v           [B,T,HV,V]
        gate        [B,T,HV,K]    float32, bf16 or fp16. gate_kind (required) "log": g, the natural log of the decay, g <= 0; "raw": before its
                    activation, as in kda_decode, with A_log, dt_bias and lower_bound
        beta        [B,T,HV]      beta_kind "value": as it is; "logit": sigmoid(beta); "logit_twice": 2 * sigmoid(beta)
        cu_seqlens  [N+1] int32 or int64, on the device of the tokens: sequence n has the tokens cu_seqlens[n] to cu_seqlens[n+1]. B is 1 then, or
                    q, k, v, gate, beta and out have no B. Never read on the host: a captured graph may be replayed with other lengths, and nobody
                    checks that its numbers never fall and stay from 0 to T. Sequences may be empty; tokens of no sequence are not read, and their rows of out not written. None: sequence n is row n
        state       initial states, a pool of slots as in kda_decode; it is only read. None: every sequence starts from zero
        state_out   pool that final states are stored in; it may be the memory of state. None: they are not stored
        read_index, write_index   [N] int32 or int64: slots of state and of state_out. None: slot n; with read_index and state_out, write_index must
                    be given. Negative, out of range, or equal to null_slot: start from zero, store nothing
        checkpoints, checkpoint_index   a pool (which may be the memory of the others) and [N,C] slots in it: the state of sequence n after
                    (j + 1) * checkpoint_interval of its tokens is stored in slot checkpoint_index[n,j]; checkpoint_interval is a multiple
                    of 32
        out         as v; None: a new array of v's framework, whose rows of no sequence hold anything. It may not overlap anything
    Options
        l2norm, scale, state_layout, num_threads, stream, donate   as in kda_decode
        variant     "auto"; "serial", "overlap", "chain": how the kernels follow one another, for tests and measurements
        segments    parts that each sequence is cut into and that run at the same time; 0: chosen by the plan, 1: none, at most 64
        exact       True: every segment starts from the state that the tokens before it leave. False: or up to 64 tokens earlier from zero, where
                    the device finds that those forget what was before them (||dS_after / dS_before|| below 2^-32); a NaN before them then
                    does not reach the segment

    A call on a GPU uses device memory beside its operands (cula.query says how much): of torch's allocator for torch tensors on torch's current
    stream, else of the driver's, in the order of the stream.

    Raises InvalidArgumentError for operands and options that break a rule, UnsupportedError for dtypes, dims and alignments that no kernel
    takes, CudaError where memory cannot be had. N = 0 does nothing.
    """
    if (type(num_threads) is not int or type(segments) is not int or type(checkpoint_interval) is not int
            or (null_slot is not None and type(null_slot) is not int)):
        refuse_no_integers("kda_prefill", num_threads, null_slot, segments=segments, checkpoint_interval=checkpoint_interval)
    fresh = ()
    if out is None:
        out, fresh = empty(v, "out", shape_of("kda_prefill", "v", v)), ("out",)
    call(KDA_PREFILL, (q, k, v, out, gate, A_log, dt_bias, beta, cu_seqlens, state, state_out, read_index, write_index, checkpoints, checkpoint_index),
         (gate_kind, beta_kind, l2norm, scale, state_layout, lower_bound, null_slot, checkpoint_interval, variant, segments, exact, num_threads), stream,
         donate, fresh)
    return out


def kda_gate(x, A_log=None, dt_bias=None, *, lower_bound=None, beta=None, beta_kind=None, out=None, beta_out=None, dtype=None,
             num_threads=0, stream=None, donate=False):
    """The log decay g of a raw gate, elementwise; with beta also its activation. Returns g, or (g, beta_out) where beta is given.

        g = -exp(A_log[hv]) * softplus(x + dt_bias[hv,k]), or with lower_bound in [-5,0)
        g = lower_bound * sigmoid(exp(A_log[hv]) * (x + dt_bias[hv,k]))

    x           [T,HV,K] or [B,T,HV,K]; float32, bf16 or fp16; token and head strides are free
    A_log       HV elements of any shape; None: exp(A_log) = 1.   dt_bias  HV*K elements of any shape; None: 0
    beta        [T,HV] or [B,T,HV] logits; beta_kind "logit", or None: sigmoid(beta), "logit_twice": 2 * sigmoid(beta)
    out         shape of x; float32, bf16 or fp16; it may be x itself. None: a new array of x's framework, of dtype "fp32" (or None), "bf16", "fp16"
    beta_out    shape of beta, likewise

    (flash-linear-attention: fused_kda_gate.) Raises as kda_decode does.
    """
    return run_gate(KDA_GATE, x, A_log, dt_bias, lower_bound, beta, beta_kind, out, beta_out, dtype, num_threads, stream, donate)
