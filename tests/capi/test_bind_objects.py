"""cula_bind_objects: with a DLPack exchange API made here, and with torch's own."""

import ctypes
import itertools
from ctypes import CFUNCTYPE, POINTER, Structure, byref, c_int32, c_uint16, c_uint32, c_void_p, py_object

import pytest

from tests.capi import abi, standin
from tests.capi.abi import CPU, GPU, INVALID, NOT_FOUND, OK, UNSUPPORTED, VERSION, tensor
from tests.capi.calls import decode
from tests.capi.test_decode_plan import expected

READ = CFUNCTYPE(c_int32, c_void_p, POINTER(abi.DLTensor))
STREAM = CFUNCTYPE(c_int32, c_int32, c_int32, POINTER(c_void_p))
NONE = 0xDEAD0


class Api(Structure):
    pass


Api._fields_ = [("major", c_uint32), ("minor", c_uint32), ("prev", POINTER(Api)), ("allocator", c_void_p), ("export", c_void_p), ("import_", c_void_p),
                ("read", READ), ("stream", STREAM)]
NAMES = ["q", "k", "v", "out", "gate", "beta", "state", "read_index"]
OFFSETS = {name: getattr(abi.DecodeArgs, name).offset for name in abi.DECODE_TENSORS}


class Producer:
    """Objects are numbers; each stands for a tensor."""

    def __init__(self, call, major=1, minor=3):
        self.objects = {0x1000 + i: t for i, t in enumerate(call.tensors.values())}
        self.names = dict(zip(call.tensors, self.objects))
        self.asked, self.fail_at, self.stream_fails = [], None, False

        def read(obj, out):
            if obj == self.fail_at:
                return -1
            self.asked.append(obj)
            ctypes.memmove(out, byref(self.objects[obj]), ctypes.sizeof(abi.DLTensor))
            return 0

        def stream(device_type, device_id, out):
            self.asked.append(("stream", device_type, device_id))
            out[0] = 0xABC0
            return -1 if self.stream_fails else 0

        self.api = Api(major, minor, None, None, None, None, READ(read), STREAM(stream))


class Binding:
    """The call of a loader: which fields, which objects."""

    def __init__(self, lib, call, producer, names=None):
        self.lib, self.producer = lib, producer
        self.names = list(names or call.tensors)
        self.args = abi.DecodeArgs.from_buffer_copy(call.args)
        self.launches = abi.sized(abi.Launches)
        self.launches.arch, self.launches.stream = 90, (1 << 64) - 1
        self.tensors = (abi.DLTensor * 16)()
        self.offsets = [OFFSETS[name] for name in self.names]
        self.objects = [producer.names.get(name, NONE) for name in self.names]
        self.api = ctypes.addressof(producer.api)
        self.count = None
        for name in abi.DECODE_TENSORS:
            setattr(self.args, name, None)

    def __call__(self, op=1):
        n = len(self.objects)
        return self.lib.cula_bind_objects(op, byref(self.args), self.api, (c_uint16 * max(n, 1))(*self.offsets), n if self.count is None else self.count,
                                          (c_void_p * max(n, 1))(*self.objects), NONE, self.tensors, None, 0, byref(self.launches))


def made(**kw):
    call = decode(**kw)
    call.tensors["read_index"] = tensor([kw.get("n", 4)], "i32", device=kw.get("device", (GPU, 0)))
    return call, Producer(call)


def test_binds_as_cula_bind_does(lib):
    call, producer = made(device=(GPU, 3))
    b = Binding(lib, call, producer)
    assert b() == OK, abi.last_error(lib)
    assert producer.asked == [*producer.names.values(), ("stream", 2, 3)]
    assert (b.launches.count, b.launches.device_type, b.launches.device_id, b.launches.stream) == (1, GPU, 3, 0xABC0)
    assert b.launches.launch[0].config.stream == 0xABC0
    for name in call.tensors:
        setattr(call.args, name, ctypes.pointer(call.tensors[name]))
    got = abi.launch_params("kda_decode", b.launches.launch[0])
    want = expected(call, 4, 2, 4, 128, 128)
    assert {name: got[name] for name in want} == want
    for i, name in enumerate(b.names):  # the struct points at the tensors that were filled
        assert ctypes.addressof(getattr(b.args, name).contents) == ctypes.addressof(b.tensors) + i * ctypes.sizeof(abi.DLTensor)


def test_a_given_stream_is_kept(lib):
    call, producer = made()
    b = Binding(lib, call, producer)
    b.launches.stream = 0x55
    assert b() == OK and b.launches.launch[0].config.stream == 0x55 and len(producer.asked) == len(call.tensors)


def test_none_leaves_the_field_null(lib):
    """Also where an earlier call left a pointer."""
    call, producer = made()
    b = Binding(lib, call, producer)
    assert b() == OK and b.args.read_index
    b.objects[b.names.index("read_index")] = NONE
    assert b() == OK and not b.args.read_index
    b.objects[b.names.index("gate")] = NONE
    assert (b(), abi.last_error(lib)) == (INVALID, "kda_decode: gate is missing (NULL)")
    b.objects = [NONE] * len(b.objects)
    assert (b(), abi.last_error(lib)) == (INVALID, "kda_decode: out is missing (NULL)")


def test_cpu_tensors_are_left_to_cula_run(lib):
    call, producer = made(device=(CPU, 0))
    b = Binding(lib, call, producer)
    b.launches.count, b.launches.device_type = 5, 5
    assert b() == OK and (b.launches.count, b.launches.device_type, b.launches.device_id) == (0, CPU, 0)
    assert ("stream", 1, 0) not in producer.asked
    lib.test_reset_calls()
    assert lib.cula_run(1, byref(b.args), None, 0, None) == OK and lib.test_call_count() > 0


def test_storage_free_tensors_are_named(lib):
    call, producer = made()
    call.tensors["k"].data = None
    b = Binding(lib, call, producer)
    assert b() == INVALID and "k has shape [4,2,128] and data NULL; a tensor without storage (torch's FakeTensor" in abi.last_error(lib)


def test_reader_that_fails(lib):
    call, producer = made()
    b = Binding(lib, call, producer)
    producer.fail_at = b.objects[2]
    assert (b(), abi.last_error(lib)) == (INVALID, "kda_decode: object 2 could not be read through its DLPack exchange API; the Python exception says why")
    producer.fail_at, producer.stream_fails = None, True
    assert (b(), abi.last_error(lib)) == (INVALID, "kda_decode: the DLPack exchange API gave no current stream; the Python exception says why")
    assert b.launches.stream == (1 << 64) - 1


def test_api_without_the_reader(lib):
    call, producer = made()
    b = Binding(lib, call, producer)
    producer.api.read = READ()
    assert (b(), abi.last_error(lib)) == (UNSUPPORTED, "kda_decode: the DLPack exchange API offers no dltensor_from_py_object_no_sync")
    b.api = None
    assert (b(), abi.last_error(lib)) == (INVALID, "kda_decode: cula_bind_objects: exchange_api is NULL")


def test_api_of_another_version(lib):
    """A newer major may look different; the chain of older ones is searched."""
    call, producer = made()
    newer = Api(2, 0, ctypes.pointer(producer.api))
    b = Binding(lib, call, producer)
    b.api = ctypes.addressof(newer)
    assert b() == OK
    newer.prev = None
    assert (b(), abi.last_error(lib)) == (UNSUPPORTED, "kda_decode: the DLPack exchange API has no version 1")


def test_wrong_uses(lib):
    call, producer = made()
    b = Binding(lib, call, producer)
    end = OFFSETS["write_index"]
    for offset in (0, 4, 12, end + 8, end + 16, 65535):
        b.offsets[0] = offset
        assert (b(), abi.last_error(lib)) == (INVALID, f"kda_decode: cula_bind_objects: offset {offset} of object 0 is no tensor field of cula_decode_args")
    b = Binding(lib, call, producer)
    for count in (-1, 17, 2**31 - 1):
        b.count = count
        assert (b(), abi.last_error(lib)) == (INVALID, f"kda_decode: cula_bind_objects got {count} objects; must be 0 to 16")
    b = Binding(lib, call, producer)
    b.objects[3] = 0
    assert (b(), abi.last_error(lib)) == (INVALID, "kda_decode: cula_bind_objects: object 3 is NULL")
    b = Binding(lib, call, producer)
    b.args.struct_size = 40
    assert b() == VERSION
    b = Binding(lib, call, producer)
    b.launches.struct_size = 1 << 40
    assert b() == VERSION
    assert Binding(lib, call, producer)(op=99) == NOT_FOUND
    assert not producer.asked
    args, launches = abi.sized(abi.DecodeArgs), abi.sized(abi.Launches)
    for offsets, objects, tensors in itertools.product([None, (c_uint16 * 1)(8)], [None, (c_void_p * 1)(NONE)], [None, (abi.DLTensor * 1)()]):
        status = lib.cula_bind_objects(1, byref(args), b.api, offsets, 1, objects, NONE, tensors, None, 0, byref(launches))
        assert status == INVALID
        assert ("is NULL" in abi.last_error(lib)) == (None in (offsets, objects, tensors))


def test_torch(lib):
    torch = pytest.importorskip("torch")
    capsule = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    assert capsule is not None, "torch without the exchange API"
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = c_void_p, [py_object, ctypes.c_char_p]
    py = abi.load(standin.build(), ctypes.PyDLL)
    x = dict(q=torch.zeros(4, 2, 128), k=torch.zeros(4, 2, 128), v=torch.zeros(4, 512)[:, 256:].view(4, 2, 128), out=torch.zeros(4, 2, 128), beta=torch.zeros(4, 2),
             state=torch.zeros(4, 2, 128, 128), read_index=None)
    args, launches, tensors = abi.sized(abi.DecodeArgs), abi.sized(abi.Launches), (abi.DLTensor * 16)()
    launches.stream = (1 << 64) - 1
    offsets = (c_uint16 * len(x))(*(OFFSETS[name] for name in x))
    objects = (c_void_p * len(x))(*(id(t) for t in x.values()))
    status = py.cula_bind_objects(1, byref(args), get(capsule, b"dlpack_exchange_api"), offsets, len(x), objects, id(None), tensors, None, 0, byref(launches))
    assert status == OK and launches.device_type == CPU and not args.read_index
    v = args.v.contents
    assert (v.data + v.byte_offset, v.strides[:3], v.shape[:3]) == (x["v"].data_ptr(), [512, 128, 1], [4, 2, 128])
    lib.test_reset_calls()
    assert lib.cula_run(1, byref(args), None, 0, None) == OK and lib.test_call_count() > 0
    objects[0] = id("not a tensor")
    with pytest.raises(RuntimeError, match="(?i)tensor|cast"):  # set by torch, raised as PyDLL returns
        py.cula_bind_objects(1, byref(args), get(capsule, b"dlpack_exchange_api"), offsets, len(x), objects, id(None), tensors, None, 0, byref(launches))
    assert abi.last_error(lib).startswith("kda_decode: object 0 could not be read")
