"""One op as a custom call of XLA's typed FFI; cula.h says what the handlers in libcula.so read.

A plain call is a jitted one. Reading JAX arrays through DLPack, as the loader does, takes longer (0.35 ms a decode call on two CPU cores,
0.04 ms here); on a GPU the jitted call is in order with the rest of JAX's work, whose stream a library cannot ask for; and JAX
itself sees to it that a donated pool is not used again.
"""

from __future__ import annotations

import functools
import threading
from ctypes import c_void_p, cast

import numpy as np

from cula_loader import InvalidArgumentError, NotFoundError, Query, Spec, UnsupportedError, abi, library
from cula_loader.ops import BY_NAME

from .._outputs import refuse_no_integers

try:
    import jax
    import jax.custom_batching
    import jax.ffi
except ImportError as error:
    raise ImportError(f"cula.jax needs jax 0.6 or later ({error})") from error

_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float64": "fp64", "int32": "int32", "int64": "int64"}
_NAMES = {short: long for long, short in _DTYPES.items()}

_WITH_WORKSPACE = frozenset({"kda_prefill"})  # ops whose GPU kernels use device memory beside their operands
_WORKSPACE = -1  # in the attribute fields
_SM_COUNTS = range(1, 193)  # of all GPUs, parts of one (MIG) among them; 192 is the most that any has

_lock = threading.Lock()
_registered = False


def register() -> None:
    """Makes the custom calls known to XLA. Every function of cula.jax does it; needed only to run a program that was traced in another
    process (jax.export), where none of them is called. Idempotent. Raises ArtifactError if there is no library."""
    global _registered
    if _registered:
        return
    with _lock:
        lib = library()
        cpu, cuda, initialize = (_capsule(getattr(lib.c, f"cula_xla_{name}")) for name in ("cpu", "cuda", "cuda_initialize"))
        for op in BY_NAME:
            jax.ffi.register_ffi_target(f"cula_{op}", cpu, platform="cpu")
            jax.ffi.register_ffi_target(f"cula_{op}", {"execute": cuda, "initialize": initialize}, platform="CUDA")
        _registered = True


def _capsule(function):
    return jax.ffi.pycapsule(cast(function, c_void_p).value)


@functools.lru_cache(maxsize=256)
def _args_bytes(name: str, *options) -> bytes:
    """The args struct of an op with these options and no operands."""
    op = BY_NAME[name]
    args = abi.new(op.struct)
    try:
        op.fill(args, *options)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"{name}: {error}") from None
    return bytes(args)[: args.struct_size]


def arrays(name: str, **operands) -> dict:
    """The operands that are given, as JAX arrays or tracers."""
    given = {key: x for key, x in operands.items() if x is not None}
    for key, x in given.items():
        if isinstance(x, np.ndarray):
            given[key] = jax.numpy.asarray(x)  # with x64 off, float64 and int64 become what JAX makes of them everywhere
        elif not isinstance(x, jax.Array):
            raise InvalidArgumentError(f"{name}: {key}: {type(x).__module__}.{type(x).__qualname__} is no JAX or NumPy array")
    return given


def call(name: str, options: tuple, operands: dict, results: dict, pools: tuple[tuple[str, str], ...] = (), donate: bool = False) -> tuple:
    """Results of an op, in the order of `results`, and then the new contents of each pool.

    operands: of `arrays`. results: name in the args struct -> (shape, dtype), of cula's dtype names. options: as op.options.
    pools: (operand, tensor of the args struct that is written): the operand's memory is the result's where XLA may. The two are the
    same name, or, where the op reads one tensor and writes another, two.
    """
    named = dict(zip(BY_NAME[name].options, options, strict=True))
    refuse_no_integers(name, named["num_threads"], named.get("null_slot"), **{key: named[key] for key in ("segments", "checkpoint_interval") if key in named})
    try:
        _args_bytes(name, *options)
    except TypeError:  # an unhashable option is no valid one: filling says which
        _args_bytes.__wrapped__(name, *options)
    if donate is not False and donate is not True:
        raise InvalidArgumentError(f"{name}: donate={donate!r}: allowed: True, False")
    if donate and not pools:
        raise InvalidArgumentError(f"{name}: donate=True gives up a pool, and there is none")
    register()
    updated = {key: operands.pop(key) for key, _ in pools}
    return (_giving if donate else _keeping)((name, options, tuple(results.items()), pools), updated, operands)


def _traced(static: tuple, updated: dict, given: dict) -> tuple:
    """static: (op, options, results, pools) of `call`."""
    name, options, results, pools = static
    operands = {**given, **updated}
    for key, x in operands.items():
        if not all(isinstance(extent, int) for extent in x.shape):
            raise UnsupportedError(f"{name}: {key} has shape {list(x.shape)}: symbolic sizes of jax.export are not supported; export for a capacity, and run it with "
                                   "padding indices or repeated cu_seqlens, or export a program a shape")
    outputs = {key: (shape, dtype) for key, (shape, dtype) in results}
    aliases = {}
    for operand, written in pools:
        aliases[list(operands).index(operand)] = len(outputs)  # without donation or a last use XLA copies the pool first
        outputs[written] = (operands[operand].shape, dtype_of(name, operand, operands[operand]))
    specs = _specs(name, operands, outputs)
    _check(name, options, specs)
    raw = np.frombuffer(_args_bytes(name, *options), np.uint8)
    order = BY_NAME[name].tensors
    fields = [order.index(key) for key in (*operands, *outputs)]
    shapes = [jax.ShapeDtypeStruct(shape, _NAMES[dtype]) for shape, dtype in outputs.values()]

    def custom_call(*arrays, workspace: int):
        extra = [jax.ShapeDtypeStruct((workspace,), np.uint8)] if workspace else []
        made = jax.ffi.ffi_call(f"cula_{name}", (*shapes, *extra), input_output_aliases=aliases)(
            *arrays, op=np.int32(BY_NAME[name].number), args=raw, fields=np.array(fields + [_WORKSPACE] * len(extra), np.int32))
        return tuple(made[: len(shapes)])

    on_gpu = gpu_workspace(name, options, specs) if name in _WITH_WORKSPACE else 0

    @jax.custom_batching.custom_vmap
    def batched(*arrays):
        if not on_gpu:
            return custom_call(*arrays, workspace=0)
        return jax.lax.platform_dependent(*arrays, cpu=functools.partial(custom_call, workspace=0), default=functools.partial(custom_call, workspace=on_gpu))

    @batched.def_vmap
    def refuse_vmap(*_):
        raise UnsupportedError(f"{name}: vmap is not supported: the operands have a dimension for the batch already (rows N, tokens T); "
                               "reshape into it, or use jax.lax.map")

    @jax.custom_jvp
    def forward(*arrays):
        return batched(*arrays)

    @forward.defjvp
    def refuse_jvp(*_):
        raise UnsupportedError(f"{name}: cula's kernels are forward only: differentiate with respect to something else, or put "
                               "jax.lax.stop_gradient around the operands")

    return forward(*operands.values())


_keeping = jax.jit(_traced, static_argnums=0)
_giving = jax.jit(_traced, static_argnums=0, donate_argnums=1)


def _specs(name: str, operands: dict, outputs: dict) -> dict[str, tuple]:
    """Shape and dtype of every tensor of the args struct."""
    return {key: (tuple(x.shape), dtype_of(name, key, x)) for key, x in operands.items()} | {key: (tuple(shape), dtype) for key, (shape, dtype) in outputs.items()}


def _check(name: str, options: tuple, specs: dict) -> None:
    """The library's own validation of the call, on shapes and dtypes alone. Which kernels there are is asked of the cpu arch: the platform
    that a traced program will run on is not known yet."""
    op = BY_NAME[name]
    there = {key: Spec(shape, dtype, (abi.CPU, 0)) for key, (shape, dtype) in specs.items()}
    Query().ask(op, tuple(map(there.get, op.tensors)), options)


def gpu_workspace(name: str, options: tuple, specs: dict) -> int:
    """Bytes that the call needs on any GPU that the library has kernels for: the program is traced before its device is known, and the plan
    goes by the number of multiprocessors, of which fewer may need more. 0: no GPU kernel takes the call, and the program runs on the CPU only."""
    op = BY_NAME[name]
    there = {key: Spec(shape, dtype) for key, (shape, dtype) in specs.items()}
    most = 0
    for arch in library().artifacts.archs:
        if arch == "cpu":
            continue
        asked = Query(arch, _SM_COUNTS)
        try:
            asked.ask(op, tuple(map(there.get, op.tensors)), options)
        except (InvalidArgumentError, UnsupportedError, NotFoundError):  # said again when the program runs there
            continue
        most = max(most, asked.answer.workspace_bytes)
    return most


def dtype_of(name: str, key: str, x) -> str:
    """cula's name of an array's dtype."""
    found = _DTYPES.get(x.dtype.name)
    if found is None:
        raise InvalidArgumentError(f"{name}: {key}: dtype {x.dtype.name} is none that cula reads ({', '.join(_NAMES.values())})")
    return found
