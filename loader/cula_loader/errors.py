"""What cula raises. Every class also derives from the built-in exception that fits, so callers need not know cula's."""

from __future__ import annotations


class CulaError(Exception):
    """Base of all errors. `status` is the name in cula.h."""

    status = "CULA_ERR_INTERNAL"


class InvalidArgumentError(CulaError, ValueError):
    """The caller's mistake: a shape, dtype, stride, device, option or operand that breaks a rule. The message names it."""

    status = "CULA_ERR_INVALID_ARGUMENT"


class UnsupportedError(CulaError, NotImplementedError):
    """A valid request that no kernel in these artifacts serves; the message lists what is built."""

    status = "CULA_ERR_UNSUPPORTED"


class NotFoundError(CulaError, LookupError):
    status = "CULA_ERR_NOT_FOUND"


class ArtifactError(CulaError, RuntimeError):
    """Artifacts are missing, damaged or do not fit together; the message says what to build or install."""

    status = "CULA_ERR_ARTIFACT"


class VersionError(ArtifactError):
    """The library and this loader are of different versions."""

    status = "CULA_ERR_VERSION"


class WorkspaceError(CulaError, ValueError):
    status = "CULA_ERR_WORKSPACE"


class CudaError(CulaError, RuntimeError):
    """The driver refused, is missing, or cannot be used in this process (a forked child)."""

    status = "CULA_ERR_CUDA"


class OutOfMemoryError(CulaError, MemoryError):
    status = "CULA_ERR_OUT_OF_MEMORY"


class InternalError(CulaError, RuntimeError):
    """A defect in cula."""


BY_STATUS = {1: InvalidArgumentError, 2: UnsupportedError, 3: NotFoundError, 4: ArtifactError, 5: VersionError, 6: WorkspaceError,
             7: CudaError, 8: OutOfMemoryError, 9: InternalError}
