"""What cula knows of the framework that an operand's type belongs to: how it is read, its current stream, how it allocates.

One `Producer` a type, made at its first operand and cached. No framework is imported here: a framework whose object arrives is in
sys.modules already.
"""

from __future__ import annotations

import sys

from . import abi
from .dlpack import Exchange, Reading, Spec, from_array_interface, from_dlpack
from .errors import InvalidArgumentError, UnsupportedError

CPU_DEVICE = (abi.CPU, 0)


class Producer:
    """A type that speaks DLPack and of which nothing else is known."""

    name = "dlpack"
    has_memory = True
    immutable = False  # operands that are written need donate=True
    grad_enabled = None  # callable: does the framework record gradients now
    any_requires_grad = None  # callable of operands: would it record one of them
    checks_types = False  # its exchange API refuses foreign objects itself
    allocates_in_stream_order = False  # memory that is dropped may still be used by what is on its current stream

    def __init__(self, kind: type):
        self.kind = kind
        self.exchange = Exchange.of(kind)
        self.fast = self.exchange is not None and self.exchange.can_read

    def device(self, x) -> tuple[int, int]:
        kind, index = x.__dlpack_device__()
        return int(kind), int(index)

    def read(self, x, stream: int) -> Reading:
        """stream: DLPack's argument, -1 for no hand-over."""
        return self.exchange.read(x) if self.fast else from_dlpack(x, self.device(x), stream)

    def current_stream(self, x, device: tuple[int, int]) -> int | None:
        """The stream that this framework works on now, or None if it has none that can be asked for."""
        return self.exchange.current_stream(*device) if self.exchange else None

    def empty(self, like, shape: tuple[int, ...], dtype: str | None = None):
        """A new compact array on the device of `like`. dtype: "fp32", "bf16" or "fp16"; None for that of `like`."""
        if self.exchange is None:
            raise InvalidArgumentError(f"{type_name(self.kind)} offers no allocator that cula knows")
        reading = self.exchange.read(like) if self.fast else from_dlpack(like, self.device(like), -1)
        return self.exchange.empty(abi.Tensor.from_address(reading.address), shape, abi.DTYPES[dtype] if dtype else None)


class Torch(Producer):
    name = "torch"
    checks_types = True
    allocates_in_stream_order = True

    def __init__(self, kind: type):
        super().__init__(kind)
        self.torch = sys.modules["torch"]
        # Subclasses that dispatch in Python (FakeTensor, DTensor, quantised wrappers) have no memory of their own to hand out.
        if kind.__torch_dispatch__ is not self.torch.Tensor.__torch_dispatch__:
            raise UnsupportedError(f"{type_name(kind)} has no memory of its own (a torch.Tensor subclass with __torch_dispatch__); pass plain "
                                   "tensors, under torch.compile through a registered custom op")
        self.grad_enabled = self.torch.is_grad_enabled
        # One call for all operands costs half of reading the attribute of each, 0.5 us for a decode call.
        self.any_requires_grad = getattr(self.torch._C, "_any_requires_grad", _one_requires_grad)

    def device(self, x):
        if x.device.type == "meta":
            raise InvalidArgumentError("a meta tensor has no memory")
        return (abi.CUDA, x.device.index or 0) if x.is_cuda else super().device(x)

    def read(self, x, stream):
        if x.requires_grad and self.grad_enabled():
            raise UnsupportedError("requires grad, and cula's kernels are forward only: call under torch.no_grad() or "
                                   "torch.inference_mode(), or pass x.detach()")
        if x.is_neg():  # not asked on the fast path, where it would be a tenth of a decode call
            raise InvalidArgumentError("torch negates this view lazily, and DLPack hands out its memory without the sign: pass x.resolve_neg()")
        return super().read(x, stream)

    def current_stream(self, x, device):
        if self.exchange:
            return self.exchange.current_stream(*device)
        return self.torch.cuda.current_stream(device[1]).cuda_stream  # torch before 2.10

    def empty(self, like, shape, dtype=None):
        return like.new_empty(shape) if dtype is None else like.new_empty(shape, dtype=getattr(self.torch, _LONG[dtype]))

    def workspace(self, like, size: int):
        """Memory for one call on the current stream: what to keep, and its address."""
        memory = self.torch.empty(size, dtype=self.torch.uint8, device=like.device)
        return memory, memory.data_ptr()


def _one_requires_grad(*objects) -> bool:
    return any(getattr(x, "requires_grad", False) for x in objects)


class Numpy(Producer):
    """Read through __array_interface__: numpy exports neither bfloat16 nor, before 2.1, versions over DLPack."""

    name = "numpy"

    def __init__(self, kind: type):
        super().__init__(kind)
        if issubclass(kind, sys.modules["numpy"].ma.MaskedArray):
            raise UnsupportedError("a numpy masked array: its mask would be ignored; pass a plain array")

    def device(self, x):
        return CPU_DEVICE

    def read(self, x, stream):
        return from_array_interface(x.__array_interface__, CPU_DEVICE, x)

    def current_stream(self, x, device):
        return None

    def empty(self, like, shape, dtype=None):
        return sys.modules["numpy"].empty(shape, _numpy_dtype(like, dtype))


class Jax(Producer):
    """Eager JAX arrays. They are immutable by contract, so what is written must be donated; under jit they are tracers without memory."""

    name = "jax"
    immutable = True

    def __init__(self, kind: type):
        super().__init__(kind)
        if issubclass(kind, sys.modules["jax"].core.Tracer):
            raise UnsupportedError("a JAX tracer has no memory: inside jit call the function of the same name in cula.jax")
        self.fast = False  # every operand is looked at: what is written must be donated

    def empty(self, like, shape, dtype=None):
        # Ready before it is handed out, so that JAX's own fill cannot come after the kernel's stores.
        jax = sys.modules["jax"]
        return jax.block_until_ready(jax.numpy.empty(shape, _numpy_dtype(like, dtype), device=like.sharding))


class Cupy(Producer):
    name = "cupy"

    def read(self, x, stream):
        if self.fast or x.dtype.name != "bfloat16":
            return super().read(x, stream)
        # CuPy refuses bfloat16 over DLPack in some releases; its memory is the same.
        return from_array_interface(x.__cuda_array_interface__, (abi.CUDA, x.device.id), x)

    def current_stream(self, x, device):
        with x.device:  # CuPy's current stream is one a device and thread
            return sys.modules["cupy"].cuda.get_current_stream().ptr

    def empty(self, like, shape, dtype=None):
        cupy = sys.modules["cupy"]
        with like.device:
            return cupy.empty(shape, _numpy_dtype(like, dtype))


class CudaArray(Producer):
    """Anything with __cuda_array_interface__ and no DLPack."""

    name = "cuda_array"

    def device(self, x):
        pointer = x.__cuda_array_interface__["data"][0] or 0  # first: what is no array must not be told to install cuda-bindings
        from .cuda import device_of_pointer

        return device_of_pointer(pointer)

    def read(self, x, stream):
        interface = x.__cuda_array_interface__
        if interface.get("version", 0) < 2:
            raise BufferError(f"__cuda_array_interface__ version {interface.get('version')}, cula reads 2 and 3")
        return from_array_interface(interface, self.device(x), x)

    def current_stream(self, x, device):
        stream = x.__cuda_array_interface__.get("stream")
        return None if stream is None else int(stream)


class SpecProducer(Producer):
    """cula.query's operands without memory."""

    name = "spec"
    has_memory = False

    def device(self, x):
        return x.device

    def read(self, x, stream):
        return x.read()

    def empty(self, like, shape, dtype=None):
        return Spec(shape, dtype or like.dtype, like.device)


_LONG = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def _numpy_dtype(like, dtype: str | None):
    if dtype is None:
        return like.dtype
    if dtype == "bf16":
        import ml_dtypes  # numpy has no bfloat16 of its own

        return ml_dtypes.bfloat16
    return _LONG[dtype]


_KNOWN = (("torch", "Tensor", Torch), ("numpy", "ndarray", Numpy), ("jax", "Array", Jax), ("cupy", "ndarray", Cupy))
_cache: dict[type, Producer] = {}


def producer_of(kind: type) -> Producer:
    """The producer of a type. Raises InvalidArgumentError for a type that offers no array protocol."""
    found = _cache.get(kind)
    if found is None:
        found = _cache[kind] = _make(kind)  # two threads may both make one: they are equal
    return found


def _make(kind: type) -> Producer:
    if kind is Spec:
        return SpecProducer(kind)
    for module, name, producer in _KNOWN:
        base = getattr(sys.modules.get(module), name, None)
        if base is not None and issubclass(kind, base):
            return producer(kind)
    tracer = getattr(getattr(sys.modules.get("jax"), "core", None), "Tracer", None)
    if tracer is not None and issubclass(kind, tracer):
        return Jax(kind)
    if hasattr(kind, "__dlpack_c_exchange_api__") or (hasattr(kind, "__dlpack__") and hasattr(kind, "__dlpack_device__")):
        return Producer(kind)
    return CudaArray(kind)  # the interface may be an attribute of the object, so the reading finds out


def type_name(kind: type) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
