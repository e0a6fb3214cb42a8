"""Whether a call has to go through the dispatcher, or may read its tensors' memory at once."""

from __future__ import annotations

import torch

from cula_loader import InvalidArgumentError

_modes = torch._C._len_torch_dispatch_stack
_transforms = torch._C._functorch.peek_interpreter_stack
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def traced(x) -> bool:
    """True under torch.compile, torch.export, make_fx, FakeTensorMode, functorch transforms, and for tensor subclasses: there the custom
    ops of _library are called, elsewhere the loader, which is 10 us faster."""
    if type(x) not in _PLAIN:
        refuse_no_tensor(x)
        return x is not None  # what is missing is said by the function itself
    return torch.compiler.is_compiling() or _modes() > 0 or _transforms() is not None


def refuse_no_tensor(x, name: str = "") -> None:
    if x is not None and not isinstance(x, torch.Tensor):
        raise InvalidArgumentError(f"{name}{': ' if name else ''}{type(x).__module__}.{type(x).__qualname__} is no torch tensor: cula.torch is for torch alone; "
                                   "cula.kda, cula.gdn, cula.gla, cula.lightning and cula.norm take arrays of any framework")


def refuse_stream(stream) -> None:
    if stream is not None:
        raise InvalidArgumentError("stream= has no meaning in a traced graph: it runs on the stream that is current then")


def keep_for(stream, tensors) -> None:
    """Tells torch's caching allocator that `stream`, not the current one, uses these tensors, so that none is given out again early."""
    if stream is None or torch.compiler.is_compiling():
        return
    for x in tensors:
        if isinstance(x, torch.Tensor) and x.is_cuda:
            foreign = stream if isinstance(stream, torch.cuda.Stream) else torch.cuda.ExternalStream(_handle(stream), device=x.device)
            x.record_stream(foreign)


def _handle(stream) -> int:
    from cula_loader.stream import handle_of

    return stream if isinstance(stream, int) else handle_of(stream)
