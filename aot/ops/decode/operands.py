"""What the two decode kernels share: the compiled-in configuration, slots, and the operands of a row and head.

The block makes q, k and decay of its row and head together, one thread a channel, and leaves them in shared memory. (Made by
every warp for itself, 4 channels a lane, the gate arithmetic of KDA with a bf16 state took as long as the state.) With one
element a thread every access is coalesced at any alignment, so slices of a fused projection row need no second path.
"""

from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from aot.common.dsl import load_index
from aot.ops.decode import ptx

GATE_NONE, GATE_LOG_HEAD, GATE_LOG_CHANNEL, GATE_RAW, GATE_CONST_HEAD = range(5)  # cula_gate_kind
BETA_VALUE, BETA_LOGIT, BETA_LOGIT_TWICE = range(3)  # cula_beta_kind


class Config:
    """What is compiled in. Everything else is a mode at run time, uniform over the grid: a decode call reads its state once
    and a few hundred bytes of operands, so specialising on the form of the operands would multiply kernels for nothing."""

    def __init__(self, op, io, state, k, layout):
        self.op, self.io, self.state, self.k, self.layout = op, io, state, k, layout
        self.io_code = ptx.DTYPE_CODE[io]
        self.io_bytes = ptx.DTYPE_BYTES[io]
        self.state_code = ptx.DTYPE_CODE[state]
        self.state_bytes = ptx.DTYPE_BYTES[state]
        self.delta = op in ("kda_decode", "gdn_decode")
        self.per_channel = op in ("kda_decode", "gla_decode")  # the gate tensor has an element for each key channel
        self.raw_gate = op in ("kda_decode", "gdn_decode")
        self.const_gate = op == "lightning_decode"
        # 16-byte state loads that a thread issues before it needs the first: 8 of float32, of bf16 half as many, since a
        # loaded word becomes two registers.
        self.loads = 8 if state == "fp32" else 4
        self.threads = 256 if layout == "kv" and k == 256 else 128


def slots(p, row):
    """(read, write, reads, writes, live) of a row: the slot numbers, whether they count, and whether the row is not padding.
    Without any pool no row is padding, and the outputs are those of a zero state."""
    read = load_index(p.read_index, row * p.read_stride, p.read_dtype, row)
    write = load_index(p.write_index, row * p.write_stride, p.write_dtype, read)
    reads = (read >= 0) & (read != p.null_slot) & (read < p.in_slots) & (p.no_state == 0)
    writes = (write >= 0) & (write != p.null_slot) & (write < p.out_slots)
    return read, write, reads, writes, reads | writes | (p.state_out == 0)


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


class Shared:
    """Shared memory of a block: q, k and, per channel, decay; then the warps' partial sums. In floats."""

    SUMS = 4  # |q|^2, |k|^2, q.k, padded to a 16-byte access

    def __init__(self, config):
        self.q, self.k, self.decay = 0, config.k, 2 * config.k
        self.sums = (3 if config.per_channel else 2) * config.k
        self.warps = config.threads // 32
        self.size = self.sums + self.warps * self.SUMS


def load_operands(config, p, row, head, thread):
    """Issues the thread's loads of all operands but state and v; nothing is waited for."""
    io = config.io_bytes
    qk_head = head * p.group_inverse >> 32
    q_base = p.q + (row * p.q_n + qk_head * p.q_h) * io
    k_base = p.k + (row * p.k_n + qk_head * p.k_h) * io
    gate_at = row * p.gate_n + head * p.gate_h
    raw = SimpleNamespace(q=[], k=[], gate=[], bias=[])
    per_thread = max(1, config.k // config.threads)
    raw.channels = [Int64(thread % config.k + i * config.threads) for i in range(per_thread)]
    for channel in raw.channels:
        raw.q.append(ptx.load_scalar(q_base, channel, config.io_code))
        raw.k.append(ptx.load_scalar(k_base, channel, config.io_code))
        if config.per_channel:
            raw.gate.append(ptx.load_scalar(p.gate, gate_at + channel, p.gate_dtype))
            if config.raw_gate:
                raw.bias.append(ptx.load_scalar(p.dt_bias, head * config.k + channel, p.dt_bias_dtype))
    if not config.per_channel:
        raw.gate = [ptx.load_scalar(p.gate, gate_at, p.gate_dtype)]
        if config.raw_gate:
            raw.bias = [ptx.load_scalar(p.dt_bias, head, p.dt_bias_dtype)]
    if config.raw_gate:
        raw.a_log = ptx.load_scalar(p.a_log, head, p.a_log_dtype)
    if config.delta:
        raw.beta = ptx.load_scalar(p.beta, row * p.beta_n + head * p.beta_h, p.beta_dtype)
    return raw


def loads_issued():
    """Lets the next kernel of the stream be set up, now that this one's loads are on their way. At the start of the kernel it
    cost 0.4 us at N = 1 and 1.5 % of bandwidth at any N: waiting blocks take the slots of this grid, and ptxas orders no load
    around the instruction, so that here it also keeps arithmetic from being scheduled between the loads."""
    cute.arch.griddepcontrol_launch_dependents()


@cute.jit
def write_shared(config: cutlass.Constexpr, shared: cute.Tensor, at: cutlass.Constexpr, raw: cutlass.Constexpr, values: cutlass.Constexpr, thread: Int32):
    if thread < config.k:
        for i in cutlass.range_constexpr(len(values)):
            shared[at + Int32(raw.channels[i])] = values[i]


@cute.jit
def write_sums(config: cutlass.Constexpr, shared: cute.Tensor, layout: cutlass.Constexpr, sums: cutlass.Constexpr, thread: Int32):
    if thread % 32 == 0:
        for i in cutlass.range_constexpr(len(sums)):
            shared[layout.sums + thread // 32 * layout.SUMS + i] = sums[i]


@cute.jit
def norm_scale(on: Int32, square: Float32):
    scale = Float32(1.0)
    if on != 0:
        scale = ptx.rsqrt(square + Float32(1e-6))
    return scale


def share_operands(config, p, raw, shared, thread):
    """Puts q, k (as given) and decay into shared memory; ends with a block barrier. Returns what all threads know: the
    factors of q (with the scale) and k, kq = k . q after both, the decay of a per-head gate, and beta."""
    layout = Shared(config)
    q = [ptx.to_float(word, config.io_code) for word in raw.q]
    k = [ptx.to_float(word, config.io_code) for word in raw.k]
    write_shared(config, shared, layout.q, raw, q, thread)
    write_shared(config, shared, layout.k, raw, k, thread)
    qq, kk, qk = Float32(0.0), Float32(0.0), Float32(0.0)
    for a, b in zip(q, k):
        qq, kk, qk = ptx.fma(a, a, qq), ptx.fma(b, b, kk), ptx.fma(a, b, qk)
    write_sums(config, shared, layout, [ptx.sum_lanes(x, 32) for x in (qq, kk, qk)], thread)

    exp_a, bias = Float32(1.0), [Float32(0.0)] * len(raw.gate)
    if config.raw_gate:
        exp_a = cute.math.exp(ptx.to_float(raw.a_log, p.a_log_dtype))
        bias = [ptx.to_float(word, p.dt_bias_dtype) for word in raw.bias]
    gate = [ptx.to_float(word, p.gate_dtype) for word in raw.gate]
    decay = [decay_of(config, g, exp_a, b, p.gate_kind, p.lower_bound) for g, b in zip(gate, bias)]
    if config.per_channel:
        write_shared(config, shared, layout.decay, raw, decay, thread)
    beta = beta_of(ptx.to_float(raw.beta, p.beta_dtype), p.beta_kind) if config.delta else None
    cute.arch.sync_threads()

    totals = [Float32(0.0)] * 3
    for warp in range(min(layout.warps, config.k // 32)):  # warps past K hold copies of others' channels
        part = read_shared(shared, layout.sums + warp * layout.SUMS, layout.SUMS)
        totals = [t + part[i] for i, t in enumerate(totals)]
    q_scale = p.scale * norm_scale(p.l2norm, totals[0])
    k_scale = norm_scale(p.l2norm, totals[1])
    return SimpleNamespace(q_scale=q_scale, k_scale=k_scale, kq=totals[2] * q_scale * k_scale, decay=decay[0], beta=beta)


def read_shared(shared, at, count):
    """`count` floats (a multiple of 4) from index `at`, itself a multiple of 4."""
    values = []
    for i in range(0, count, 4):
        quad = cute.make_rmem_tensor((4,), Float32)
        cute.autovec_copy(cute.make_tensor((shared.iterator + at + i).align(16), cute.make_layout(4)), quad)
        values += [quad[j] for j in range(4)]
    return values


def read_channels(config, shared, x, first, count):
    """(k, q, decay) of `count` channels from `first` on, both multiples of 4, with their factors."""
    layout = Shared(config)
    q = [value * x.q_scale for value in read_shared(shared, layout.q + first, count)]
    k = [value * x.k_scale for value in read_shared(shared, layout.k + first, count)]
    decay = read_shared(shared, layout.decay + first, count) if config.per_channel else [x.decay] * count
    return k, q, decay
