"""Compiles the decode kernels: the compile function of aot/ops/decode/matrix.py.

kernel_vk and kernel_kv hold the two kernels, operands what they share, ptx the device helpers. The parameters are those of
params.def, in its order; `modes` is unpacked here.
"""

import re
from pathlib import Path
from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
from cuda.bindings import driver
from cutlass import Float32, Int32, Int64
from cutlass.cute.runtime import make_fake_stream

from aot.archs import ARCHS
from aot.ops.decode import kernel_kv, kernel_vk, operands

_TEXT = Path(__file__).with_name("params.def").read_text()
PARAMS = [(name, kind) for kind, name in re.findall(r"^CULA_PARAM\((\w+), (\w+)\)", _TEXT, re.M)]
MODES = {name: (int(shift), int(bits)) for name, shift, bits in re.findall(r"^CULA_MODE\((\w+), (\d+), (\d+)\)", _TEXT, re.M)}
OCCUPANCY_SMEM = 110 * 1024  # the most that the launch rule of params.def asks for
TYPES = {"ptr": Int64, "i64": Int64, "i32": Int32, "f32": Float32}


@cute.kernel
def decode(
    q: Int64, k: Int64, v: Int64, out: Int64, gate: Int64, a_log: Int64, dt_bias: Int64, beta: Int64,
    state_in: Int64, state_out: Int64, read_index: Int64, write_index: Int64,
    q_n: Int64, q_h: Int64, k_n: Int64, k_h: Int64, v_n: Int64, v_h: Int64, out_n: Int64, out_h: Int64,
    gate_n: Int64, gate_h: Int64, beta_n: Int64, beta_h: Int64,
    in_slot: Int64, in_h: Int64, out_slot: Int64, out_state_h: Int64, read_stride: Int64, write_stride: Int64,
    in_slots: Int64, out_slots: Int64, null_slot: Int64, group_inverse: Int64,
    n: Int32, hv: Int32, group: Int32, head_dim_k: Int32, head_dim_v: Int32, steps: Int32, modes: Int32,
    scale: Float32, lower_bound: Float32,
    config: cutlass.Constexpr,
):  # fmt: skip
    p = SimpleNamespace(
        q=q, k=k, v=v, out=out, gate=gate, a_log=a_log, dt_bias=dt_bias, beta=beta, state_in=state_in, state_out=state_out,
        read_index=read_index, write_index=write_index, q_n=q_n, q_h=q_h, k_n=k_n, k_h=k_h, v_n=v_n, v_h=v_h, out_n=out_n,
        out_h=out_h, gate_n=gate_n, gate_h=gate_h, beta_n=beta_n, beta_h=beta_h, in_slot=in_slot, in_h=in_h,
        out_slot=out_slot, out_state_h=out_state_h, read_stride=read_stride, write_stride=write_stride, in_slots=in_slots,
        out_slots=out_slots, null_slot=null_slot, group_inverse=group_inverse, head_dim_v=head_dim_v, steps=steps, scale=scale,
        lower_bound=lower_bound, **{name: (modes >> shift) & ((1 << bits) - 1) for name, (shift, bits) in MODES.items()},
    )  # fmt: skip
    thread, _, _ = cute.arch.thread_idx()
    cute.arch.griddepcontrol_wait()  # nothing that an earlier kernel of the stream wrote is read before this
    tile, head, row = cute.arch.block_idx()
    size = operands.Shared(config).size
    if cutlass.const_expr(config.layout == "kv"):
        shape = kernel_kv.Shape(config)
        size += config.threads // 32 * shape.columns * (2 if config.delta else 1)
    shared = cute.make_tensor(cute.arch.alloc_smem(Float32, size, 16), cute.make_layout(size))
    body = kernel_vk.row_head if config.layout == "vk" else kernel_kv.row_head
    body(config, p, shared, Int64(row), Int64(head), tile, thread)


def compile_decode(spec, out_dir):
    """One kernel: its cubin, entry symbol, block, and dynamic shared memory (none). spec: aot.matrix.KernelSpec."""
    config = operands.Config(spec.op, spec.io, spec.state, spec.k, spec.layout)

    # Elsewhere than on sm_90 ptxas stops at 72 or 80 registers for its own idea of occupancy, and spills a value or two for it.
    # With a bound it does not. The carveout keeps the DSL from asking the machine's GPU for one.
    bounds = {} if spec.arch == "sm90" else dict(min_blocks_per_mp=1, preferred_smem_carveout=0)

    @cute.jit
    def host(value: Int64, stream: driver.CUstream):
        # Values do not matter: only the cubin is kept. They are run-time values so that nothing of them is compiled in.
        arguments = [TYPES[kind](value) for _, kind in PARAMS]
        decode(*arguments, config).launch(
            grid=(1, 1, 1), block=(config.threads, 1, 1), stream=stream, use_pdl=True, **bounds,
        )  # fmt: skip

    options = f"--gpu-arch {ARCHS[spec.arch].target} --keep-cubin --keep-ptx"
    compiled = cute.compile(host, Int64(0), make_fake_stream(), options=options)
    (entry,) = re.findall(r"\.entry\s+(\w+)", compiled.__ptx__)
    smem = OCCUPANCY_SMEM if spec.arch == "sm90" and spec.layout == "vk" else 0
    return dict(cubin=compiled.__cubin__, entry=entry, block=(config.threads, 1, 1), max_dynamic_smem=smem)
