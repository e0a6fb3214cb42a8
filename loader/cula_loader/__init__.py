"""Run time of cula for Python: finds the artifacts, reads operands of any framework, launches. Knows no framework and imports none.

    artifacts.py   where the artifacts are, the strict manifest reader        abi.py        cula.h in ctypes
    library.py     libcula.so, errors as exceptions                           ops.py        operands and options of each op
    dlpack.py      operands into DLTensors                                    producers.py  what is known of each framework
    stream.py      stream arguments                                           cuda.py       cubins on GPUs, through cuda-python
    dispatch.py    one call, fast path and slow path                          devices.py    which GPUs there are
    errors.py      what is raised
"""

from .dispatch import Query, Requirements, call, empty, last_kernels, prepare
from .dlpack import Spec
from .errors import (
    ArtifactError,
    CudaError,
    CulaError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    OutOfMemoryError,
    UnsupportedError,
    VersionError,
    WorkspaceError,
)
from .library import library

__all__ = ["ArtifactError", "CudaError", "CulaError", "InternalError", "InvalidArgumentError", "NotFoundError", "OutOfMemoryError", "Query",
           "Requirements", "Spec", "UnsupportedError", "VersionError", "WorkspaceError", "call", "empty", "last_kernels", "library", "prepare"]
