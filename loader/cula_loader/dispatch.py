"""One call of an op: operands -> args struct -> libcula's plan -> launch.

Two readers fill the args struct. `_bind_fast` hands all operands of one framework to cula_bind_objects in a single foreign call;
`_bind_slow` reads each operand by whatever protocol it has, and is also what explains a failure by naming the operand. Everything a
thread needs is in a `_State` that is taken from a thread-local list and put back, so a call inside a call (a signal handler, a
finaliser) gets a state of its own. Host time of the fast path is the product: what looks unrolled here was measured.
"""

from __future__ import annotations

import ctypes
import numbers
import sys
import threading
from ctypes import addressof, byref, c_void_p
from typing import NamedTuple

from . import abi
from . import stream as streams
from .errors import CulaError, InvalidArgumentError
from .library import Library, library
from .ops import BY_NAME, L2NORM, Op
from .producers import Producer, _cache, producer_of, type_name

# Word indices into cula_launches, for memoryviews: reading a ctypes field costs three times as much.
_STREAM = abi.Launches.stream.offset // 8
_COUNT, _DEVICE_TYPE, _DEVICE_ID = (getattr(abi.Launches, name).offset // 4 for name in ("count", "device_type", "device_id"))
_LAUNCH = abi.Launches.launch.offset
_KERNELS = tuple((_LAUNCH + i * ctypes.sizeof(abi.Launch) + abi.Launch.kernel.offset) // 4 for i in range(abi.MAX_LAUNCHES))
_KERNEL = _KERNELS[0]
_CPU = abi.CPU
_NO_WORKSPACE = abi.STATUS["CULA_ERR_WORKSPACE"]
_COUNT_AND_TYPE = _COUNT // 2  # the same two words read as one
_ONE_ON_CUDA = 1 | abi.CUDA << 32
if _COUNT % 2 or _DEVICE_TYPE != _COUNT + 1 or sys.byteorder != "little":
    raise ImportError("count and device_type of cula_launches are not one little-endian 64-bit word")

# Objects go to C as the item array inside a tuple, which saves filling a (py_object * n) one by one, 0.7 us for a decode call.
_TUPLE_ITEMS = tuple.__basicsize__
_probe = (object(), object())
if [c_void_p.from_address(id(_probe) + _TUPLE_ITEMS + 8 * i).value for i in range(2)] != [id(x) for x in _probe]:
    raise ImportError("cula's loader needs CPython's tuple layout")

_PREPARED_LIMIT = 64  # option sets kept for each op and thread; a scale that changes every call must not grow a dict for ever
_local = threading.local()


class _Prepared:
    """The args struct of one op and one set of options, with the argument lists of the foreign calls on it."""

    __slots__ = ("args", "bind_args", "bound_kind", "fields", "grad_enabled", "kind", "op", "options", "query_args", "requires_grad", "run_args", "state")

    def __init__(self, op: Op, options: tuple, state: _State):
        self.op, self.options, self.state, self.args = op, options, state, abi.new(op.struct)
        try:
            op.fill(self.args, *options)
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f"{op.name}: {error}") from None
        self.kind = self.bound_kind = self.bind_args = self.grad_enabled = self.requires_grad = None
        self.run_args = (op.number, byref(self.args), None, None, state.run_stream)
        self.query_args = (op.number, byref(self.args), byref(state.needs))
        first = getattr(op.struct, op.tensors[0]).offset
        self.fields = memoryview(self.args).cast("B")[first: first + 8 * len(op.tensors)].cast("Q")

    def use(self, kind: type, objects: tuple) -> bool:
        """Gets ready for operands that are all read by the exchange API of `kind`; False if that cannot be."""
        producer = _cache.get(kind)
        if producer is None or not producer.fast:
            return False
        if not producer.checks_types and any(x is not None and type(x) is not kind for x in objects):
            return False
        if kind is self.bound_kind:
            return True
        self.bound_kind = kind
        self.kind = kind if producer.checks_types else None  # unset, this is asked in every call
        op, state = self.op, self.state
        self.grad_enabled, self.requires_grad = producer.grad_enabled or _never, producer.any_requires_grad
        # None is a 64-bit 0. Constant pointers are byref() objects, which ctypes passes on without making anything.
        self.bind_args = (op.number, byref(self.args), _pointer(producer.exchange.address), byref(op.offsets), len(op.tensors), state.objects,
                          _pointer(id(None)), byref(state.tensors), None, None, byref(state.launches))
        return True


def _pointer(address: int):
    return byref(ctypes.c_char.from_address(address))


def _never() -> bool:
    return False


class _State:
    """What one call works in: the launch list, and prepared calls for the option sets that were used."""

    __slots__ = ("config", "configs", "last", "launches", "lib", "longs", "needs", "objects", "param", "params", "prepared", "run_stream", "tensors",
                 "words", "workspace")

    def __init__(self, lib: Library):
        self.lib = lib
        self.launches, self.needs = abi.new(abi.Launches), abi.new(abi.Requirements)
        raw = memoryview(self.launches).cast("B")
        self.words, self.longs = raw.cast("i"), raw.cast("q")
        self.tensors = (abi.Tensor * abi.MAX_OBJECTS)()
        self.objects, self.run_stream = c_void_p(), c_void_p()
        self.prepared: dict[Op, dict[tuple, _Prepared]] = {op: {} for op in BY_NAME.values()}
        self.last = _Prepared(L2NORM, (1e-6, 0), self)  # of the last call: engines repeat themselves
        self.workspace = None  # memory of the call that is being made
        self.config = self.configs = None  # wrapped for cuda.bindings at the first GPU launch
        base = addressof(self.launches) + _LAUNCH
        self.params = [base + i * ctypes.sizeof(abi.Launch) + abi.Launch.params.offset for i in range(abi.MAX_LAUNCHES)]
        self.param = self.params[0]

    def prepare(self, op: Op, options: tuple) -> _Prepared:
        """The prepared call for the options, which become those of the last call."""
        known = self.prepared[op]
        try:
            found = known.get(options)
        except TypeError:  # an unhashable option is no valid one, and filling says which
            found = None
        if found is None:
            found = _Prepared(op, options, self)
            if len(known) >= _PREPARED_LIMIT:
                known.clear()
            known[options] = found
        self.last = found
        return found


_bind_objects = _run = _query = None  # set with the library


def _new_pool() -> list[_State]:
    global _bind_objects, _run, _query
    lib = library()
    _bind_objects, _run, _query = (lib.fast(name) for name in ("cula_bind_objects", "cula_run", "cula_query"))
    _local.pool = pool = []
    return pool


def call(op: Op, objects: tuple, options: tuple, stream=None, donate: bool = False, fresh: tuple[str, ...] = ()) -> None:
    """Runs an op.

    objects: operands in the order of op.tensors, None for absent ones; they may be of different frameworks. options: op.options.
    stream: None for the current stream of the operands' framework, or see stream.handle_of. donate: immutable arrays (JAX) that are
    written are given up by the caller. fresh: names of operands that were allocated for this call.
    A `Query` as stream asks instead of running.
    Raises InvalidArgumentError, UnsupportedError, ArtifactError, CudaError, ... with a message that starts with the op's name.
    """
    try:
        pool = _local.pool
    except AttributeError:
        pool = _new_pool()
    state = pool.pop() if pool else _State(library())
    words, prepared, handle = state.words, state.last, stream
    try:
        try:
            same = prepared.op is op and prepared.options == options
        except Exception:  # an array among the options: no valid one, and filling says which
            same = False
        if not same:
            prepared = state.prepare(op, options)
        if stream is not None and (type(stream) is not int or not 0 <= stream < 2**63):
            if type(stream) is Query:
                return stream.ask(op, objects, options)
            try:
                handle = streams.handle_of(stream)
            except InvalidArgumentError as error:
                raise InvalidArgumentError(f"{op.name}: {error}") from None
        if donate is not False and donate is not True:
            raise InvalidArgumentError(f"{op.name}: donate={donate!r}: allowed: True, False")
        status, keep, kind = -1, None, type(objects[op.lead_index])
        if kind is prepared.kind or prepared.use(kind, objects):
            if not prepared.grad_enabled() or not prepared.requires_grad(*objects):
                state.objects.value = id(objects) + _TUPLE_ITEMS
                state.longs[_STREAM] = -1 if handle is None else handle
                try:
                    status = _bind_objects(*prepared.bind_args)
                except Exception:  # an operand that this exchange API does not read: another way may
                    pass
                if status == _NO_WORKSPACE:
                    _bind_with_workspace(state, prepared, objects[op.lead_index], handle)
                    status = 0
        if status:
            keep = _bind_slow(state, prepared, objects, handle, donate, fresh)
        if state.longs[_COUNT_AND_TYPE] == _ONE_ON_CUDA:
            gpu = _gpus.get(words[_DEVICE_ID])
            if gpu is None or state.config is None:
                gpu = _first_launch(state, words[_DEVICE_ID])
            function = gpu.functions.get(words[_KERNEL]) or _cuda.load(gpu, words[_KERNEL])
            if not gpu.sole or _launch_kernel(state.config, function, state.param, 0)[0] is not _ok:
                _launch_all(state, gpu)
        elif words[_DEVICE_TYPE] == _CPU:
            state.run_stream.value = handle
            status = _query(*prepared.query_args) or _run(*prepared.run_args)  # the query is for last_kernels, 0.5 us
            if status:
                state.lib.check(status)
        elif words[_COUNT]:
            _launch_all(state, _first_launch(state, words[_DEVICE_ID]))
        del keep  # operands' exports live until the launch has been issued
    except BaseException:
        words[_COUNT] = state.needs.launch_count = 0  # last_kernels: nothing ran
        raise
    finally:
        if state.workspace is not None:
            _release_workspace(state)
        pool.append(state)


# ------------------------------------------------------------------------------------------------------------- binding


def _bind_slow(state: _State, prepared: _Prepared, objects: tuple, handle: int | None, donate: bool, fresh: tuple[str, ...]) -> list:
    """Reads every operand by itself and binds. Returns what must stay alive until the launch."""
    op = prepared.op
    operands = _locate(op, objects)
    written = op.written({o.name for o in operands})
    for o in operands:
        if not o.producer.has_memory:
            raise InvalidArgumentError(f"{op.name}: {o.name}: a Spec has no memory; it is for cula.query")
        if o.producer.immutable and o.name in written and o.name not in fresh and not donate:
            raise InvalidArgumentError(f"{op.name}: {o.name}: is written, and {o.producer.name} arrays are immutable: pass donate=True to give "
                                       "this array up (it then holds the result, and so does every other reference to its buffer)")
    on_gpu = [o for o in operands if o.device[0] in (abi.CUDA, abi.CUDA_MANAGED)]  # of other devices the library says what it thinks
    own: dict[str, int] = {}  # operand: the stream its framework works on, where it has one
    for o in on_gpu:
        with _naming(op, o.name):
            current = o.producer.current_stream(o.x, o.device)
            if current is not None:
                own[o.name] = current
    # On its own stream a framework need not hand anything over; else it makes its data ready for the stream of the launch.
    if handle is not None:
        hand_over = dict.fromkeys((o.name for o in on_gpu), streams.as_dlpack(handle))
    elif on_gpu:
        handle = streams.agreed([(o.name, o.producer.name, own[o.name]) for o in on_gpu if o.name in own], op.name)
        hand_over = {o.name: -1 if o.name in own else streams.as_dlpack(handle) for o in on_gpu}
    else:
        hand_over = {}
    keep = _read(prepared, operands, hand_over, written)
    if on_gpu:
        state.longs[_STREAM] = handle
        status = state.lib.c.cula_bind(op.number, addressof(prepared.args), None, 0, addressof(state.launches))
        if status == _NO_WORKSPACE:
            _bind_with_workspace(state, prepared, objects[op.lead_index], handle)
        else:
            state.lib.check(status)
    else:
        state.words[_DEVICE_TYPE], state.words[_COUNT] = _CPU, 0
    return keep


# ----------------------------------------------------------------------------------------------------------- workspace


def _bind_with_workspace(state: _State, prepared: _Prepared, lead, handle: int | None) -> None:
    """Binds a call whose args struct and stream are filled, with memory that is the call's own: two streams, or two threads, that shared one
    would race. It is given back in stream order once the launches are issued.

    From torch's allocator where torch works on the stream, so that the memory is accounted for and captured as every tensor is; else
    from the driver's allocator of the stream. handle: the stream that the caller named, None for the lead's own."""
    lib, needs = state.lib, state.needs
    lib.check(_query(*prepared.query_args))
    device = abi.Tensor.from_address(prepared.fields[0])
    producer = producer_of(type(lead))
    stream = state.longs[_STREAM]
    size = needs.workspace_bytes + needs.workspace_align - 1
    if producer.allocates_in_stream_order and (handle is None or handle == producer.current_stream(lead, (device.device_type, device.device_id))):
        state.workspace, address = producer.workspace(lead, size)
    else:
        gpu = _first_launch(state, device.device_id)
        state.workspace, address = _cuda.take_memory(gpu, size, stream)
    address = -(-address // needs.workspace_align) * needs.workspace_align
    lib.check(lib.c.cula_bind(prepared.op.number, addressof(prepared.args), address, needs.workspace_bytes, addressof(state.launches)))


def _release_workspace(state: _State) -> None:
    memory, state.workspace = state.workspace, None
    if callable(memory):
        memory()


# -------------------------------------------------------------------------------------------------------- reading


class _Operand(NamedTuple):
    name: str
    x: object
    producer: Producer
    device: tuple[int, int]


def _locate(op: Op, objects: tuple) -> list[_Operand]:
    found = []
    for name, x in zip(op.tensors, objects, strict=True):
        if x is not None:
            with _naming(op, name):
                producer = producer_of(type(x))
                try:
                    found.append(_Operand(name, x, producer, producer.device(x)))
                except AttributeError:
                    raise InvalidArgumentError(f"{type_name(type(x))} offers neither DLPack nor __cuda_array_interface__") from None
    return found


def _read(prepared: _Prepared, operands: list[_Operand], hand_over: dict[str, int], written: set[str]) -> list:
    """Fills the tensor fields of the args struct. hand_over: operand -> DLPack's stream argument, where it needs one."""
    addresses, keep = dict.fromkeys(prepared.op.tensors, 0), []
    for o in operands:
        with _naming(prepared.op, o.name):
            reading = o.producer.read(o.x, hand_over.get(o.name, -1))
            if reading.read_only and o.name in written:
                raise InvalidArgumentError("is written, and this array is read-only")
        addresses[o.name] = reading.address
        keep.append(reading)
    for i, address in enumerate(addresses.values()):
        prepared.fields[i] = address
    return keep


class _naming:
    """Puts the op and the operand in front of what a producer raises, and keeps only the first line: torch adds a C++ backtrace."""

    __slots__ = ("name", "op")

    def __init__(self, op: Op, name: str):
        self.op, self.name = op, name

    def __enter__(self):
        pass

    def __exit__(self, kind, error, _trace):
        if error is None or not isinstance(error, Exception):
            return
        text = f"{self.op.name}: {self.name}: {(str(error) or kind.__name__).splitlines()[0]}"
        raise (kind if isinstance(error, CulaError) else InvalidArgumentError)(text) from error


# ----------------------------------------------------------------------------------------------------------- launching

_cuda = _launch_kernel = _ok = None  # module `cuda` and two of its names, once a GPU operand came
_gpus: dict = {}


def _first_launch(state: _State, ordinal: int):
    global _cuda, _launch_kernel, _ok, _gpus
    from . import cuda

    _cuda, _launch_kernel, _ok, _gpus = cuda, cuda.launch_kernel, cuda.OK, cuda.gpus
    if state.configs is None:
        # The struct is CUlaunchConfig bit for bit, so the binding's object is a view of it and is made once.
        base = addressof(state.launches) + _LAUNCH
        state.configs = [cuda.driver.CUlaunchConfig(_ptr=base + i * ctypes.sizeof(abi.Launch)) for i in range(abi.MAX_LAUNCHES)]
        state.config = state.configs[0]
    return cuda.gpu(ordinal)


def _launch_all(state: _State, gpu) -> None:
    """The launches in order, with the device's context current for them. Repeats a single launch that failed for want of a context."""
    for i in range(state.words[_COUNT]):
        index = state.words[_KERNELS[i]]
        function = gpu.functions.get(index) or _cuda.load(gpu, index)
        arguments = state.configs[i], function, state.params[i]
        status = _launch_kernel(*arguments, 0)[0] if _cuda.is_current(gpu) else _cuda.launch_elsewhere(gpu, *arguments)[0]
        if status is not _ok:
            raise _cuda.CudaError(f"{state.lib.kernel(index).id}: cuLaunchKernelEx: {_cuda.describe(status)}")


# --------------------------------------------------------------------------------------------------------- other calls


def last_kernels() -> tuple[str, ...]:
    """Ids of the kernels that this thread's last call launched, in order; () if it failed or had nothing to do."""
    pool = getattr(_local, "pool", None)
    if not pool:
        return ()
    state = pool[-1]
    if state.words[_DEVICE_TYPE] == _CPU:
        indices = state.needs.kernels[: state.needs.launch_count]
    else:
        indices = [state.words[_KERNELS[i]] for i in range(state.words[_COUNT])]
    return tuple(state.lib.kernel(i).id for i in indices)


class Requirements(NamedTuple):
    """What a call would need: ids of the kernels in launch order, device memory beside its operands."""

    kernels: tuple[str, ...]
    workspace_bytes: int
    workspace_align: int


class Query:
    """Given to `call` in place of a stream: the call is validated and planned, not made, and `answer` says what it needs.

    arch: None for that of the operands' device, else a name, which needs no such device. sm_count: 0 for the arch's usual count; of several
    counts the answer is that of the one which needs the most workspace.
    """

    def __init__(self, arch: str | None = None, sm_count: int | range = 0):
        if arch is not None and arch not in abi.ARCHS:
            raise InvalidArgumentError(f"arch={arch!r}: allowed: {', '.join(map(repr, abi.ARCHS))}")
        if not isinstance(sm_count, range) and (isinstance(sm_count, bool) or not isinstance(sm_count, numbers.Integral) or not 0 <= sm_count < 2**31):
            raise InvalidArgumentError(f"sm_count={sm_count!r}: allowed: a number of multiprocessors, or 0 for the device's or the arch's usual one")
        self.arch, self.sm_count, self.answer = arch, sm_count, None

    def ask(self, op: Op, objects: tuple, options: tuple) -> None:
        lib = library()
        prepared = _Prepared(op, options, _State(lib))
        keep = _read(prepared, _locate(op, objects), {}, set())
        needs = abi.new(abi.Requirements)
        needs.arch, self.answer = abi.ARCHS[self.arch or "device"], None
        for needs.sm_count in self.sm_count if isinstance(self.sm_count, range) else (self.sm_count,):
            lib.check(lib.c.cula_query(op.number, addressof(prepared.args), addressof(needs)))
            if self.answer is None or needs.workspace_bytes > self.answer.workspace_bytes:
                ids = tuple(lib.kernel(i).id for i in needs.kernels[: needs.launch_count])
                self.answer = Requirements(ids, needs.workspace_bytes, needs.workspace_align)
        del keep


def empty(like, name: str, shape: tuple[int, ...], dtype: str | None = None):
    """Operand `name`, allocated by the framework of `like`. dtype: "fp32", "bf16", "fp16"; None for that of `like`."""
    try:
        return producer_of(type(like)).empty(like, shape, dtype)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"{error}; pass {name}=") from None


def prepare(device: int = 0) -> None:
    """Loads every kernel for a CUDA device now, so that no later call loads anything. Idempotent; legal from any thread.

    Raises UnsupportedError if these artifacts have no kernels for the device, CudaError if CUDA cannot be used.
    """
    library()
    from . import cuda

    if not isinstance(device, int) or isinstance(device, bool):
        raise InvalidArgumentError(f"prepare: device={device!r}: allowed: a CUDA device ordinal")
    cuda.prepare(device)
