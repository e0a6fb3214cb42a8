"""Stream arguments, and the stream of a call whose caller gave none."""

from __future__ import annotations

from .errors import InvalidArgumentError


def handle_of(stream) -> int:
    """The CUstream handle of a stream argument: an int, an object with `__cuda_stream__`, or a torch, CuPy or cuda-python stream."""
    if isinstance(stream, int) and not isinstance(stream, bool):
        handle = stream
    elif hasattr(stream, "__cuda_stream__"):
        protocol = stream.__cuda_stream__
        version, handle = protocol() if callable(protocol) else protocol
        if version != 0:
            raise InvalidArgumentError(f"stream: {stream!r} speaks __cuda_stream__ version {version}, cula reads version 0")
    elif hasattr(stream, "cuda_stream"):
        handle = stream.cuda_stream
    elif hasattr(stream, "ptr"):
        handle = stream.ptr
    elif type(stream).__name__ == "CUstream":
        handle = int(stream)
    else:
        raise InvalidArgumentError(f"stream={stream!r}: allowed: None (the producer's current stream), an int (CUstream handle), an object "
                                   "with __cuda_stream__, or a torch, CuPy or cuda-python stream")
    if type(handle) is not int or not 0 <= handle < 2**63:
        raise InvalidArgumentError(f"stream={stream!r}: its handle {handle!r} is no CUstream")
    return handle


def as_dlpack(handle: int) -> int:
    """DLPack forbids 0 as ambiguous; 1 is the legacy default stream there as in the driver."""
    return handle or 1


def agreed(candidates: list[tuple[str, str, int]], op: str) -> int:
    """The one stream that the operands' frameworks work on. candidates: (operand, framework, handle) of those that have one."""
    if not candidates:
        raise InvalidArgumentError(f"{op}: stream: none of the operands' frameworks has a current stream that can be asked for; pass stream=")
    streams = {1 if handle == 0 else handle for _, _, handle in candidates}
    if len(streams) > 1:
        listed = ", ".join(f"{name} ({framework}) {handle:#x}" for name, framework, handle in candidates)
        raise InvalidArgumentError(f"{op}: stream: the operands' current streams differ: {listed}; order them and pass stream=")
    return candidates[0][2]
