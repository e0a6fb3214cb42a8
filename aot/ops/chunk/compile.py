"""Compiles the state kernel for the build: the compile function of matrix.py around state.py."""

from typing import NamedTuple

from aot.archs import ARCHS
from aot.build import toolchain
from aot.ops.chunk import state


class Form(NamedTuple):
    loop: str  # of state.LOOPS: only sm_90a has wgmma
    depth: int  # stages of records: 3 need 105 KB of shared memory, 2 need 72


FORMS = {"sm90": Form("wgmma", 3), "sm100": Form("mma", 3), "sm103": Form("mma", 3), "sm120": Form("mma", 2)}


def compile_state(spec, out_dir):
    """One kernel: its cubin, entry symbol, block and dynamic shared memory. spec: aot.matrix.KernelSpec, variant "state", "state_checkpoints" or "scan"."""
    form = FORMS[spec.arch]
    made = state.compile_state(
        spec.io, spec.state, spec.layout, toolchain.ptxas(), spec.variant == "scan", ARCHS[spec.arch].target, form.loop, form.depth,
        spec.variant == "state_checkpoints",
    )
    return {name: made[name] for name in ("cubin", "entry", "block", "max_dynamic_smem")}
