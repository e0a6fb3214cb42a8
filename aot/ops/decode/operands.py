"""What the two decode kernels share: the compiled-in configuration, slots, and the operands of a row and head."""

from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from aot.ops.decode import ptx

GATE_NONE, GATE_LOG_HEAD, GATE_LOG_CHANNEL, GATE_RAW, GATE_CONST_HEAD = range(5)  # cula_gate_kind
BETA_VALUE, BETA_LOGIT, BETA_LOGIT_TWICE = range(3)  # cula_beta_kind


class Config:
    """What is compiled in. Everything else is a mode at run time, uniform over the grid: a decode call reads its state once
    and a few hundred bytes of operands, so specialising on the form of the operands would multiply kernels for nothing."""

    def __init__(self, op, io, state, k, layout):
        self.op, self.io, self.state, self.k, self.layout = op, io, state, k, layout
        self.prefetch = True
        self.min_blocks = 0
        self.loads = {"fp32": 8, "bf16": 4}[state]
        self.load_hint = ".L1::no_allocate"
        self.store_hint = ""
        self.io_code = ptx.DTYPE_CODE[io]
        self.io_bytes = ptx.DTYPE_BYTES[io]
        self.state_code = ptx.DTYPE_CODE[state]
        self.state_bytes = ptx.DTYPE_BYTES[state]
        self.delta = op in ("kda_decode", "gdn_decode")
        self.per_channel = op in ("kda_decode", "gla_decode")  # the gate tensor has an element for each key channel
        self.raw_gate = op in ("kda_decode", "gdn_decode")
        self.const_gate = op == "lightning_decode"


def slots(p, row):
    """(read, write, reads, writes) of a row: the slot numbers and whether they count."""
    read = ptx.load_index(p.read_index, row * p.read_stride, p.read_dtype, row)
    write = ptx.load_index(p.write_index, row * p.write_stride, p.write_dtype, read)
    reads = (read >= 0) & (read != p.null_slot) & (read < p.in_slots) & (p.no_state == 0)
    writes = (write >= 0) & (write != p.null_slot) & (write < p.out_slots)
    return read, write, reads, writes


@cute.jit
def load_row(config: cutlass.Constexpr, count: cutlass.Constexpr, wide: Int32, address: Int64):
    """`count` (4 or 8) consecutive io elements as packed words: 16-byte accesses where the plan saw that they are legal,
    else one element at a time (any slice of a fused projection row is legal)."""
    words = count * config.io_bytes // 4
    packed = cute.make_rmem_tensor((words,), Uint32)
    if wide != 0:
        step = min(words, 4)
        for i in cutlass.range_constexpr(words // step):
            part = ptx.load_words(address + i * step * 4, step)
            for j in cutlass.range_constexpr(step):
                packed[i * step + j] = part[j]
    else:
        for i in cutlass.range_constexpr(words):
            if cutlass.const_expr(config.io_bytes == 4):
                packed[i] = ptx.load_words(address + i * 4, 1)[0]
            else:
                packed[i] = ptx.load_half(address + i * 4) | (ptx.load_half(address + i * 4 + 2) << 16)
    return packed


@cute.jit
def load_gate_channels(count: cutlass.Constexpr, wide: Int32, base: Int64, index: Int64, code: Int32):
    """`count` gate elements from `index`, as ptx.load_channels lays them out."""
    words = cute.make_rmem_tensor((count,), Uint32)
    if wide != 0:
        loaded = ptx.load_channels(base, index, code, count)
        for i in cutlass.range_constexpr(count):
            words[i] = loaded[i]
    else:
        for i in cutlass.range_constexpr(count):
            words[i] = ptx.load_scalar(base, index + i, code)
        if code != ptx.F32:
            for i in cutlass.range_constexpr(count // 2):
                words[i] = words[2 * i] | (words[2 * i + 1] << 16)
    return words


@cute.jit
def decay_of(config: cutlass.Constexpr, x: Float32, exp_a: Float32, bias: Float32, kind: Int32, lower_bound: Float32):
    """exp(g) of one gate element; x is what the gate tensor holds, 0 if there is none."""
    g = x
    if cutlass.const_expr(config.raw_gate):
        if kind == GATE_RAW:
            y = x + bias
            if lower_bound != Float32(0.0):
                g = lower_bound * ptx.sigmoid(exp_a * y)
            else:
                g = -exp_a * ptx.softplus(y)
    a = cute.math.exp(g)
    if cutlass.const_expr(config.const_gate):
        if kind == GATE_CONST_HEAD:
            a = x
    return a


@cute.jit
def beta_of(x: Float32, kind: Int32):
    b = x
    if kind != BETA_VALUE:
        b = ptx.sigmoid(x)
        if kind == BETA_LOGIT_TWICE:
            b = b + b
    return b


def load_operands(config, p, row, head, channels, count):
    """Issues the loads of everything but state and v. channels: first channel of each run of `count` that the thread holds."""
    io = config.io_bytes
    qk_head = Int64(Int32(head) // p.group)
    q_base = p.q + (row * p.q_n + qk_head * p.q_h) * io
    k_base = p.k + (row * p.k_n + qk_head * p.k_h) * io
    raw = SimpleNamespace()
    raw.q = [load_row(config, count, p.wide, q_base + c * io) for c in channels]
    raw.k = [load_row(config, count, p.wide, k_base + c * io) for c in channels]
    gate_at = row * p.gate_n + head * p.gate_h
    if config.per_channel:
        raw.gate = [load_gate_channels(count, p.wide, p.gate, gate_at + c, p.gate_dtype) for c in channels]
    else:
        raw.gate = ptx.load_scalar(p.gate, gate_at, p.gate_dtype)
    if config.raw_gate:
        raw.a_log = ptx.load_scalar(p.a_log, head, p.a_log_dtype)
        at = [head * config.k + c + j for c in channels for j in range(count)] if config.per_channel else [head]
        raw.bias = [ptx.load_scalar(p.dt_bias, i, p.dt_bias_dtype) for i in at]
    if config.delta:
        raw.beta = ptx.load_scalar(p.beta, row * p.beta_n + head * p.beta_h, p.beta_dtype)
    return raw


@cute.jit
def norm_scale(wide_sum: cutlass.Constexpr, on: Int32, square: Float32):
    scale = Float32(1.0)
    if on != 0:
        scale = ptx.rsqrt(wide_sum(square) + Float32(1e-6))
    return scale


def finish_operands(config, p, raw, count, wide_sum):
    """Converts what load_operands loaded: q (normed, scaled), k (normed), decay, by channel; kq = k . q; beta.
    wide_sum: sums a value over all threads that hold channels of this head."""
    words = count * config.io_bytes // 4
    q, k = [], []
    for q_run, k_run in zip(raw.q, raw.k):
        q += ptx.unpack([q_run[i] for i in range(words)], config.io_code)
        k += ptx.unpack([k_run[i] for i in range(words)], config.io_code)
    qq, kk, qk = Float32(0.0), Float32(0.0), Float32(0.0)
    for a, b in zip(q, k):
        qq, kk, qk = ptx.fma(a, a, qq), ptx.fma(b, b, kk), ptx.fma(a, b, qk)
    qk = wide_sum(qk)
    q_scale = p.scale * norm_scale(wide_sum, p.l2norm, qq)
    k_scale = norm_scale(wide_sum, p.l2norm, kk)

    exp_a, bias = Float32(1.0), [Float32(0.0)] * len(q)
    if config.raw_gate:
        exp_a = cute.math.exp(ptx.to_float(raw.a_log, p.a_log_dtype))
        bias = [ptx.to_float(word, p.dt_bias_dtype) for word in raw.bias]
    if config.per_channel:
        gate = [g for run in raw.gate for g in ptx.unpack_channels([run[i] for i in range(count)], p.gate_dtype, count)]
        decay = [decay_of(config, g, exp_a, b, p.gate_kind, p.lower_bound) for g, b in zip(gate, bias)]
    else:
        gate = ptx.to_float(raw.gate, p.gate_dtype)
        decay = [decay_of(config, gate, exp_a, bias[0], p.gate_kind, p.lower_bound)] * len(q)
    beta = beta_of(ptx.to_float(raw.beta, p.beta_dtype), p.beta_kind) if config.delta else None
    return SimpleNamespace(
        q=[value * q_scale for value in q], k=[value * k_scale for value in k], kq=qk * q_scale * k_scale, decay=decay, beta=beta
    )
