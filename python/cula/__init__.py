"""cula: linear-attention kernels compiled ahead of time, called on tensors of any framework that speaks DLPack.

    cula.kda        kda_prefill, kda_decode, kda_gate   Kimi Delta Attention
    cula.gdn        gdn_decode, gdn_gate          gated delta rule
    cula.gla        gla_decode                    gated linear attention
    cula.lightning  lightning_decode              Lightning attention and simple GLA
    cula.norm       l2norm
    cula.torch, cula.jax    all of them inside torch.compile and jax.jit (not imported by this package)

    import torch, cula
    out = cula.kda.kda_decode(q, k, v, gate, beta, state, gate_kind="raw", A_log=A_log, dt_bias=dt_bias, l2norm=True)

What holds for every function
  - Operands: torch, JAX, CuPy, NumPy arrays, anything with DLPack or __cuda_array_interface__, all on one device. They are read in
    place; strides are free except the last, which is 1.
  - Stream: GPU work goes to the current stream of the operands' framework, or to stream=: an int (CUstream), an object with
    __cuda_stream__, a torch or CuPy stream. Frameworks without a current stream (JAX, bare buffers) need stream=, and the caller orders
    later use of the results after that stream. Calls return before the GPU is done. CPU calls are done when they return.
  - Memory: a call allocates nothing but outputs that were not given, in the operands' framework, and for prefill on a GPU what the kernels
    pass to one another, in the order of the stream; it synchronises nothing and may be captured in a CUDA graph. Operands must stay alive until the stream has passed the call.
  - Arrays that are immutable by contract (JAX) are written only with donate=True.
  - Forward only: a torch operand that requires grad, with grad enabled, is refused.
  - Errors: InvalidArgumentError (a ValueError), UnsupportedError (a NotImplementedError), ArtifactError, CudaError; all CulaError.

Importing cula initialises no CUDA, imports no framework and reads no artifacts.
"""

from cula_loader import (
    ArtifactError,
    CudaError,
    CulaError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    OutOfMemoryError,
    Requirements,
    Spec,
    UnsupportedError,
    VersionError,
    WorkspaceError,
    last_kernels,
    prepare,
)

from . import gdn, gla, kda, lightning, norm
from ._query import info, query

__version__ = "0.1.0"
__all__ = ["ArtifactError", "CudaError", "CulaError", "InternalError", "InvalidArgumentError", "NotFoundError", "OutOfMemoryError",
           "Requirements", "Spec", "UnsupportedError", "VersionError", "WorkspaceError", "gdn", "gla", "info", "kda", "last_kernels",
           "lightning", "norm", "prepare", "query"]
