"""Compiles the state kernel for the build: the compile function of matrix.py around state.py."""

from aot.archs import ARCHS
from aot.build import toolchain
from aot.ops.chunk import state


def compile_state(spec, out_dir):
    """One kernel: its cubin, entry symbol, block and dynamic shared memory. spec: aot.matrix.KernelSpec, variant "state" or "scan"."""
    made = state.compile_state(spec.io, spec.state, spec.layout, toolchain.ptxas(), spec.variant == "scan", ARCHS[spec.arch].target)
    return {name: made[name] for name in ("cubin", "entry", "block", "max_dynamic_smem")}
