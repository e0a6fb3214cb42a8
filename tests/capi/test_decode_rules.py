"""Every rule of cula_decode_args: the code and the whole message. A rule without a line here is not tested."""

import ctypes
import math
from functools import partial

import pytest

from tests.capi import abi
from tests.capi.abi import CPU, CUDA_HOST, CUDA_MANAGED, GPU, INVALID, OK, ROCM, UNSUPPORTED, tensor
from tests.capi.calls import decode

kda, gdn, gla, lightning = (partial(decode, f"{op}_decode") for op in ("kda", "gdn", "gla", "lightning"))


def with_(call, **tensors):
    for name, t in tensors.items():
        call.tensors[name] = t
        setattr(call.args, name, ctypes.pointer(t) if t is not None else None)
    return call


def aliased(call, name, of, **kw):
    """`name` placed on the memory of `of`."""
    x = call.tensors[of]
    base = tensor(**kw)
    base.data = x.data
    return with_(call, **{name: base})


# (message, call). Shapes of the default: N 4, H 2, HV 4, K 128, V 128.
RULES = [
    # options
    ("kda_decode: has_null_slot is 2; must be 0 or 1", lambda: kda(has_null_slot=2)),
    ("kda_decode: l2norm is -1; must be 0 or 1", lambda: kda(l2norm=-1)),
    ("kda_decode: has_scale is 7; must be 0 or 1", lambda: kda(has_scale=7)),
    ("kda_decode: state_layout is 2; must be CULA_STATE_VK (0) or CULA_STATE_KV (1)", lambda: kda(state_layout=2)),
    ("kda_decode: gate_kind is 5; allowed: NONE, LOG_CHANNEL, RAW", lambda: kda(gate_kind=5)),
    ("kda_decode: gate_kind is -1; allowed: NONE, LOG_CHANNEL, RAW", lambda: kda(gate_kind=-1)),
    ("kda_decode: gate_kind is LOG_HEAD; allowed: NONE, LOG_CHANNEL, RAW", lambda: kda(gate_kind=1)),
    ("kda_decode: gate_kind is CONST_HEAD; allowed: NONE, LOG_CHANNEL, RAW", lambda: kda(gate_kind=4)),
    ("gdn_decode: gate_kind is LOG_CHANNEL; allowed: NONE, LOG_HEAD, RAW", lambda: gdn(gate_kind=2)),
    ("gla_decode: gate_kind is RAW; allowed: NONE, LOG_CHANNEL", lambda: gla(gate_kind=3)),
    ("lightning_decode: gate_kind is RAW; allowed: NONE, LOG_HEAD, CONST_HEAD", lambda: lightning(gate_kind=3)),
    ("kda_decode: beta_kind is 3; allowed: VALUE, LOGIT, LOGIT_TWICE", lambda: kda(beta_kind=3)),
    ("gla_decode: beta_kind is LOGIT, but this op has no delta rule and takes no beta", lambda: gla(beta_kind=1)),
    ("kda_decode: lower_bound is -5, but it belongs to the RAW gate of kda_decode", lambda: kda(lower_bound=-5.0)),
    ("gdn_decode: lower_bound is -5, but it belongs to the RAW gate of kda_decode", lambda: gdn(gate="RAW", lower_bound=-5.0)),
    ("kda_decode: lower_bound is -5.5; must be 0 (softplus form) or in [-5,0)", lambda: kda(gate="RAW", lower_bound=-5.5)),
    ("kda_decode: lower_bound is 1; must be 0 (softplus form) or in [-5,0)", lambda: kda(gate="RAW", lower_bound=1.0)),
    ("kda_decode: lower_bound is nan; must be 0 (softplus form) or in [-5,0)", lambda: kda(gate="RAW", lower_bound=math.nan)),
    ("kda_decode: lower_bound is -inf; must be 0 (softplus form) or in [-5,0)", lambda: kda(gate="RAW", lower_bound=-math.inf)),
    ("kda_decode: scale is inf; must be finite", lambda: kda(has_scale=1, scale=math.inf)),
    ("kda_decode: scale is nan; must be finite", lambda: kda(has_scale=1, scale=math.nan)),
    ("kda_decode: scale is 0.5, but has_scale is 0", lambda: kda(scale=0.5)),
    ("kda_decode: scale is nan, but has_scale is 0", lambda: kda(scale=math.nan)),
    ("kda_decode: null_slot is 3, but has_null_slot is 0", lambda: kda(null_slot=3)),
    ("kda_decode: num_threads is -1; must be 0 (all) or more", lambda: kda(num_threads=-1)),
    ("kda_decode: num_threads is 4; must be 0 for tensors on a GPU", lambda: kda(num_threads=4)),
    ("kda_decode: reserved0 is 1; must be 0", lambda: kda(reserved0=1)),
    # operands that are missing or have no use
    *((f"kda_decode: {name} is missing (NULL)", lambda name=name: with_(kda(), **{name: None})) for name in ("q", "k", "v", "out", "gate", "beta")),
    ("kda_decode: q is given, but mixed_qkv holds q, k and v", lambda: with_(kda(mixed=True), q=tensor([4, 2, 128], "bf16"))),
    ("kda_decode: k is given, but mixed_qkv holds q, k and v", lambda: with_(kda(mixed=True), k=tensor([4, 2, 128], "bf16"))),
    ("kda_decode: v is given, but mixed_qkv holds q, k and v", lambda: with_(kda(mixed=True), v=tensor([4, 4, 128], "bf16"))),
    ("kda_decode: gate is given, but gate_kind is NONE", lambda: kda(gate_kind=0)),
    ("kda_decode: A_log is given, but gate_kind is not RAW", lambda: with_(kda(), A_log=tensor([4]))),
    ("gdn_decode: dt_bias is given, but gate_kind is not RAW", lambda: with_(gdn(), dt_bias=tensor([4]))),
    ("gla_decode: beta is given, but this op has no delta rule", lambda: with_(gla(), beta=tensor([4, 4]))),
    ("kda_decode: read_index is given, but there is no state to read",
     lambda: with_(kda(), state=None, state_out=tensor([4, 4, 128, 128]), read_index=tensor([4], "i32"))),
    ("kda_decode: write_index is given, but there is neither state nor state_out",
     lambda: with_(kda(pools=False), write_index=tensor([4], "i32"))),
    ("kda_decode: has_null_slot is 1, but there is neither state nor state_out", lambda: kda(pools=False, has_null_slot=1)),
    # dtypes
    ("kda_decode: q has dtype float64; must be bf16, fp16 or float32", lambda: with_(kda(), q=tensor([4, 2, 128], "fp64"))),
    ("kda_decode: q has dtype bool8; must be bf16, fp16 or float32", lambda: with_(kda(), q=tensor([4, 2, 128], "bool"))),
    ("kda_decode: q has dtype float16x4; must be bf16, fp16 or float32", lambda: with_(kda(), q=tensor([4, 2, 128], "fp16", lanes=4))),
    ("kda_decode: q has dtype DLPack code 10 with 8 bits; must be bf16, fp16 or float32", lambda: with_(kda(), q=tensor([4, 2, 128], (10, 8)))),
    ("kda_decode: state has dtype fp16; must be float32 or bf16".replace("fp16", "float16").replace("float32 or bf16", "bf16 or float32"),
     lambda: with_(kda(), state=tensor([4, 4, 128, 128], "fp16"))),
    ("lightning_decode: gate has dtype bfloat16; must be float32",
     lambda: with_(lightning(gate="CONST_HEAD"), gate=tensor([4], "bf16"))),
    ("kda_decode: read_index has dtype float32; must be int32 or int64", lambda: with_(kda(), read_index=tensor([4]))),
    ("kda_decode: write_index has dtype int16; must be int32 or int64", lambda: with_(kda(), write_index=tensor([4], "i16"))),
    ("kda_decode: k is float32, q is bf16; q, k, v, mixed_qkv and out have one dtype", lambda: with_(kda(), k=tensor([4, 2, 128]))),
    ("kda_decode: v is fp16, q is bf16; q, k, v, mixed_qkv and out have one dtype", lambda: with_(kda(), v=tensor([4, 4, 128], "fp16"))),
    ("kda_decode: out is float32, q is bf16; q, k, v, mixed_qkv and out have one dtype", lambda: with_(kda(), out=tensor([4, 4, 128]))),
    ("kda_decode: out is fp16, mixed_qkv is bf16; q, k, v, mixed_qkv and out have one dtype",
     lambda: with_(kda(mixed=True), out=tensor([4, 4, 128], "fp16"))),
    ("kda_decode: state_out is bf16, state is float32; both pools have one dtype",
     lambda: with_(kda(), state_out=tensor([4, 4, 128, 128], "bf16"))),
    # shapes
    ("kda_decode: out has shape [4,512]; expected [N,HV,V]", lambda: with_(kda(), out=tensor([4, 512], "bf16"))),
    ("kda_decode: out has shape [2,2,4,128]; expected [N,HV,V], with the rows as [N,1,...] or [1,N,...]: one token a row",
     lambda: with_(kda(), out=tensor([2, 2, 4, 128], "bf16"))),
    ("kda_decode: out has shape [4,0,128]; expected [N,HV,V] with HV and V at least 1", lambda: with_(kda(), out=tensor([4, 0, 128], "bf16"))),
    ("kda_decode: q has shape [2,4,128]; expected [N,H,K] with N = 4, as out has", lambda: with_(kda(), q=tensor([2, 4, 128], "bf16"))),
    ("kda_decode: q has shape [4,0,128]; expected [N,H,K] with H and K at least 1",
     lambda: with_(kda(), q=tensor([4, 0, 128], "bf16"), k=tensor([4, 0, 128], "bf16"))),
    ("kda_decode: k has shape [4,4,128]; expected [N,H,K] = [4,2,128]", lambda: with_(kda(), k=tensor([4, 4, 128], "bf16"))),
    ("kda_decode: k has shape [4,2,64]; expected [N,H,K] = [4,2,128]", lambda: with_(kda(), k=tensor([4, 2, 64], "bf16"))),
    ("kda_decode: v has shape [4,4,64]; expected [N,HV,V] = [4,4,128]", lambda: with_(kda(), v=tensor([4, 4, 64], "bf16"))),
    ("kda_decode: v has shape [4,512]; expected [N,HV,V]", lambda: with_(kda(), v=tensor([4, 512], "bf16"))),
    ("gdn_decode: HV = 3 value heads (out) for H = 2 heads (q); HV must be a multiple of H", lambda: gdn(h=2, hv=3)),
    ("gdn_decode: HV = 3 value heads (out) for H = 2 heads (mixed_qkv); HV must be a multiple of H", lambda: gdn(h=2, hv=3, mixed=True)),
    ("kda_decode: mixed_qkv has shape [4,1000]; expected [N, H*K + H*K + HV*V] with N = 4, K = 128, HV*V = 4*128 of out",
     lambda: with_(kda(mixed=True), mixed_qkv=tensor([4, 1000], "bf16"))),
    ("kda_decode: mixed_qkv has shape [4,512]; expected [N, H*K + H*K + HV*V] with N = 4, K = 128, HV*V = 4*128 of out",
     lambda: with_(kda(mixed=True), mixed_qkv=tensor([4, 512], "bf16"))),
    ("kda_decode: mixed_qkv has shape [3,1024]; expected [N, H*K + H*K + HV*V] with N = 4, K = 128, HV*V = 4*128 of out",
     lambda: with_(kda(mixed=True), mixed_qkv=tensor([3, 1024], "bf16"))),
    ("gdn_decode: head_dim_k of mixed_qkv is not known without state, state_out or a gate per channel; give one, or q, k and v",
     lambda: gdn(mixed=True, pools=False)),
    ("kda_decode: gate has shape [4,4]; expected [N,HV,K] = [4,4,128]".replace(" = [4,4,128]", ""), lambda: with_(kda(), gate=tensor([4, 4]))),
    ("kda_decode: gate has shape [4,2,128]; expected [N,HV,K] = [4,4,128]", lambda: with_(kda(), gate=tensor([4, 2, 128]))),
    ("gdn_decode: gate has shape [4,3]; expected [N,HV] = [4,4]", lambda: with_(gdn(), gate=tensor([4, 3]))),
    ("lightning_decode: gate has shape [4,4]; CONST_HEAD expects [HV] = [4]",
     lambda: with_(lightning(gate="CONST_HEAD"), gate=tensor([4, 4]))),
    ("kda_decode: A_log has shape [3]; expected HV = 4 elements", lambda: with_(kda(gate="RAW"), A_log=tensor([3]))),
    ("kda_decode: dt_bias has shape [4]; expected HV*K = 512 elements", lambda: with_(kda(gate="RAW"), dt_bias=tensor([4]))),
    ("gdn_decode: dt_bias has shape [4,128]; expected HV = 4 elements", lambda: with_(gdn(gate="RAW"), dt_bias=tensor([4, 128]))),
    ("kda_decode: beta has shape [4,2]; expected [N,HV] = [4,4]", lambda: with_(kda(), beta=tensor([4, 2]))),
    ("kda_decode: state has shape [4,4,128]; expected [slots,HV,V,K] = [slots,4,128,128]", lambda: with_(kda(), state=tensor([4, 4, 128]))),
    ("kda_decode: state has shape [4,4,128,64]; expected [slots,HV,V,K] = [slots,4,64,128]",
     lambda: with_(kda(v=64), state=tensor([4, 4, 128, 64]))),
    ("kda_decode: state has shape [4,4,64,128]; expected [slots,HV,K,V] = [slots,4,128,64]",
     lambda: with_(kda(v=64, layout="kv"), state=tensor([4, 4, 64, 128]))),
    ("kda_decode: state_out has shape [4,2,128,128]; expected [slots,HV,V,K] = [slots,4,128,128]",
     lambda: with_(kda(), state_out=tensor([4, 2, 128, 128]))),
    ("kda_decode: state has shape [0,4,128,128]; a pool has at least one slot", lambda: kda(slots=0)),
    ("kda_decode: state has 3 slots for 4 rows; without read_index row n uses slot n", lambda: kda(slots=3)),
    ("kda_decode: state_out has 3 slots for 4 rows; without write_index row n uses slot n",
     lambda: with_(kda(), state_out=tensor([3, 4, 128, 128]))),
    ("kda_decode: read_index has shape [3]; expected [N] = [4]", lambda: with_(kda(), read_index=tensor([3], "i32"))),
    ("kda_decode: write_index has shape [4,1]; expected [N] = [4]", lambda: with_(kda(), write_index=tensor([4, 1], "i64"))),
    # strides
    *((f"kda_decode: the last stride of {name} is 2; must be 1",
       lambda name=name, heads=heads: with_(kda(), **{name: tensor([4, heads, 128], "bf16", [heads * 256, 256, 2])}))
      for name, heads in (("q", 2), ("k", 2), ("v", 4), ("out", 4), ("gate", 4))),
    ("kda_decode: the last stride of mixed_qkv is 2; must be 1", lambda: with_(kda(mixed=True), mixed_qkv=tensor([4, 1024], "bf16", [2048, 2]))),
    ("kda_decode: the last two strides of state are 256 and 1; must be 128 and 1: a state is compact inside a head",
     lambda: with_(kda(), state=tensor([4, 4, 128, 128], "fp32", [131072, 32768, 256, 1]))),
    ("kda_decode: the last two strides of state are 1 and 128; must be 128 and 1: a state is compact inside a head",
     lambda: with_(kda(), state=tensor([4, 4, 128, 128], "fp32", [65536, 16384, 1, 128]))),
    ("kda_decode: A_log has stride 2 in dimension 0; it must be compact, stride 1 there", lambda: with_(kda(gate="RAW"), A_log=tensor([4], "fp32", [2]))),
    ("kda_decode: dt_bias has stride 256 in dimension 0; it must be compact, stride 128 there",
     lambda: with_(kda(gate="RAW"), dt_bias=tensor([4, 128], "fp32", [256, 1]))),
    ("kda_decode: out has shape [4,4,128] and stride 0 in dimension 0: two of its elements share memory, but it is written",
     lambda: with_(kda(), out=tensor([4, 4, 128], "bf16", [0, 128, 1]))),
    ("kda_decode: out has shape [4,4,128] and stride 256 in dimension 0: two of its elements share memory, but it is written",
     lambda: with_(kda(), out=tensor([4, 4, 128], "bf16", [256, 128, 1]))),
    ("kda_decode: state has shape [4,4,128,128] and stride 0 in dimension 0: two of its elements share memory, but it is written",
     lambda: with_(kda(), state=tensor([4, 4, 128, 128], "fp32", [0, 16384, 128, 1]))),
    # what no kernel has
    ("kda_decode: v has shape [4,4,96]; head_dim_v must be a multiple of 64 from 64 to 512", lambda: kda(v=96)),
    ("kda_decode: v has shape [4,4,576]; head_dim_v must be a multiple of 64 from 64 to 512", lambda: kda(v=576)),
    ("kda_decode: v has shape [4,4,32]; head_dim_v must be a multiple of 64 from 64 to 512", lambda: kda(v=32)),
    ("kda_decode: head_dim_k 96 is not built for sm90 bf16; built: 64, 128, 256", lambda: kda(k=96)),
    ("kda_decode: head_dim_k 131072 is not built; no kernel has more than 65535", lambda: kda(k=1 << 17)),
    ("gdn_decode: out has shape [1,65536,64]; on a GPU HV must be at most 65535 and N at most 524280",
     lambda: gdn(n=1, h=1, hv=65536, k=64, v=64)),
    ("gdn_decode: out has shape [524281,1,64]; on a GPU HV must be at most 65535 and N at most 524280",
     lambda: gdn(n=524281, h=1, hv=1, k=64, v=64)),
]

UNSUPPORTED_WORDS = ("head_dim_v", "is not built", "on a GPU HV", "below 2^31", "need read_index")


@pytest.mark.parametrize("message, make", RULES, ids=[message for message, _ in RULES])
def test_rule(lib, message, make):
    call = make()
    status, _ = call.query(lib)
    assert abi.last_error(lib) == message
    assert status == (UNSUPPORTED if any(word in message for word in UNSUPPORTED_WORDS) else INVALID)


def test_one_rule_one_line():
    assert len({message for message, _ in RULES}) == len(RULES)


# ------------------------------------------------------------------------------------------------------------ tensors

def bad_q(**kw):
    return with_(kda(), q=tensor([4, 2, 128], "bf16", **kw))


def q_with(**fields):
    q = tensor([4, 2, 128], "bf16")
    for name, value in fields.items():
        setattr(q, name, value)
    return with_(kda(), q=q)


def test_device_rules(lib):
    for call, message in (
        (with_(kda(), out=tensor([4, 4, 128], "bf16", device=(ROCM, 0))), "kda_decode: out is on rocm:0; tensors must be on the CPU or on a CUDA device (kDLCPU, kDLCUDA, kDLCUDAManaged)"),
        (with_(kda(), out=tensor([4, 4, 128], "bf16", device=(CUDA_HOST, 0))), "kda_decode: out is on cuda_host:0; tensors must be on the CPU or on a CUDA device (kDLCPU, kDLCUDA, kDLCUDAManaged)"),
        (with_(kda(), out=tensor([4, 4, 128], "bf16", device=(99, 0))), "kda_decode: out is on device type 99; tensors must be on the CPU or on a CUDA device (kDLCPU, kDLCUDA, kDLCUDAManaged)"),
        (with_(kda(), out=tensor([4, 4, 128], "bf16", device=(GPU, -1))), "kda_decode: out has device_id -1"),
        (bad_q(device=(GPU, 1)), "kda_decode: q is on cuda:1, out is on cuda:0; all tensors of a call must be on one device"),
        (bad_q(device=(CPU, 0)), "kda_decode: q is on cpu, out is on cuda:0; all tensors of a call must be on one device"),
        (with_(kda(), read_index=tensor([4], "i32", device=(CPU, 0))), "kda_decode: read_index is on cpu, out is on cuda:0; all tensors of a call must be on one device"),
        (with_(kda(device=(CPU, 0)), state=tensor([4, 4, 128, 128], device=(GPU, 0))), "kda_decode: state is on cuda:0, out is on cpu; all tensors of a call must be on one device"),
    ):
        status, _ = call.query(lib)
        assert (status, abi.last_error(lib)) == (INVALID, message)
    for device_type in (-1, 0, 99, 2**31 - 1):  # all tensors agree on what is no device
        status, _ = kda(device=(device_type, 0)).query(lib)
        assert status == INVALID and f"kda_decode: out is on device type {device_type}; tensors must be on" in abi.last_error(lib)
    assert bad_q(device=(CUDA_MANAGED, 0)).query(lib)[0] == OK
    assert kda(device=(CUDA_MANAGED, 0)).query(lib)[0] == OK
    mixed = with_(kda(device=(CPU, 0)), q=tensor([4, 2, 128], "bf16", device=(CPU, 5)))  # the CPU is one device, whatever its number
    assert mixed.query(lib, "cpu")[0] == OK


def test_arch_and_device_must_agree(lib):
    status, _ = kda(device=(CPU, 0)).query(lib, "sm90")
    assert (status, abi.last_error(lib)) == (INVALID, "kda_decode: arch sm90 is asked for, but the tensors are on the CPU")
    status, _ = kda().query(lib, "cpu")
    assert (status, abi.last_error(lib)) == (INVALID, "kda_decode: arch cpu is asked for, but the tensors are on cuda:0")


def test_arch_that_is_not_built(lib):
    status, _ = kda().query(lib, "sm100")
    assert (status, abi.last_error(lib)) == (UNSUPPORTED, "kda_decode: no sm100 kernels in this library; built archs: cpu, sm90, sm120")


def test_shape_that_is_not_there(lib):
    for call, message in (
        (q_with(ndim=-1), "kda_decode: q has ndim -1; from 0 to 8, with a shape"),
        (q_with(ndim=9), "kda_decode: q has ndim 9; from 0 to 8, with a shape"),
        (q_with(ndim=2**31 - 1), "kda_decode: q has ndim 2147483647; from 0 to 8, with a shape"),
        (q_with(shape=None), "kda_decode: q has ndim 3 and shape NULL; from 0 to 8, with a shape"),
        (with_(kda(), q=tensor([4, -2, 128], "bf16")), "kda_decode: q has shape [4,-2,128]; extents must not be negative"),
        (with_(kda(), q=tensor([], "bf16")), "kda_decode: q has shape []; expected [N,H,K]"),
    ):
        status, _ = call.query(lib)
        assert (status, abi.last_error(lib)) == (INVALID, message)


@pytest.mark.parametrize("shape, strides, offset", [
    ([2**62, 2**62, 128], None, 0), ([4, 2, 128], [2**62, 2**62, 1], 0), ([4, 2, 128], [-(2**63), 128, 1], 0),
    ([2**40, 2**20, 128], [0, 2**50, 1], 0), ([4, 2, 128], None, 2**64 - 256), ([4, 2, 128], [-(2**46), 128, 1], 0),
])  # fmt: skip
def test_memory_that_cannot_exist(lib, shape, strides, offset):
    status, _ = with_(kda(), q=tensor(shape, "bf16", strides, data=1 << 40, byte_offset=offset)).query(lib)
    assert status == INVALID
    assert "with its strides and byte_offset it does not fit in the address space" in abi.last_error(lib)


def test_null_data_means_a_tensor_without_storage(lib):
    status, _ = q_with(data=None).query(lib)
    message = "kda_decode: q has shape [4,2,128] and data NULL; a tensor without storage (torch's FakeTensor or meta tensors) cannot be computed with"
    assert (status, abi.last_error(lib)) == (INVALID, message)


@pytest.mark.parametrize("name, dtype, shape", [("q", "bf16", [4, 2, 128]), ("gate", "fp32", [4, 4, 128]), ("read_index", "i64", [4])])
def test_element_alignment(lib, name, dtype, shape):
    size = abi.ITEMSIZE[dtype]
    for step in range(1, size):
        status, _ = with_(kda(), **{name: tensor(shape, dtype, data=0x1000000 + step)}).query(lib)
        assert (status, abi.last_error(lib)) == (INVALID, f"kda_decode: {name} is at {0x1000000 + step:#x}; its address must be a multiple of {size} bytes, "
                                                 f"the size of {dict(bf16='bf16', fp32='float32', i64='int64')[dtype]}")
    assert with_(kda(), **{name: tensor(shape, dtype, data=0x1000000 + size)}).query(lib)[0] == OK


@pytest.mark.parametrize("state, step", [("fp32", 4), ("bf16", 2)])
def test_state_alignment(lib, state, step):
    """Base (data + byte_offset), slot stride and head stride are multiples of 16 bytes; strides of an extent of 1 are not looked at."""
    def pool(slots=4, hv=4, **kw):
        return with_(kda(state=state, n=slots, hv=hv, h=1), state=tensor([slots, hv, 128, 128], state, **kw))

    per16 = 16 // step
    for off in range(step, 16, step):
        status, _ = pool(byte_offset=off).query(lib)
        assert status == INVALID and "state is at" in abi.last_error(lib) and "multiples of 16 bytes" in abi.last_error(lib)
    for gap in range(1, per16):
        for strides in ([65536 + gap, 16384, 128, 1], [4 * (16384 + gap), 16384 + gap, 128, 1] if gap % per16 else None):
            assert pool(strides=strides).query(lib)[0] == INVALID
    assert pool(byte_offset=16).query(lib)[0] == OK
    assert pool(strides=[65536 + per16, 16384, 128, 1]).query(lib)[0] == OK
    assert pool(slots=1, strides=[3, 16384, 128, 1]).query(lib)[0] == OK
    assert pool(hv=1, strides=[16384, 5, 128, 1]).query(lib)[0] == OK


# ----------------------------------------------------------------------------------------------------------- aliasing

def test_out_may_not_overlap_an_input(lib):
    for name, heads in (("q", 2), ("k", 2), ("v", 4)):
        call = aliased(kda(), name, "out", shape=[4, heads, 128], dtype="bf16")
        assert (call.query(lib)[0], abi.last_error(lib)) == (INVALID, f"kda_decode: out overlaps {name} in memory")
    for name, shape, dtype in (("gate", [4, 4, 128], "fp32"), ("beta", [4, 4], "fp32"), ("read_index", [4], "i32"), ("write_index", [4], "i64")):
        call = aliased(kda(), name, "out", shape=shape, dtype=dtype)
        assert (call.query(lib)[0], abi.last_error(lib)) == (INVALID, f"kda_decode: out overlaps {name} in memory")
    for name in ("state", "state_out"):
        call = with_(kda(), state_out=tensor([4, 4, 128, 128]))
        call.tensors["out"].data = call.tensors[name].data + 4096
        assert (call.query(lib)[0], abi.last_error(lib)) == (INVALID, f"kda_decode: out overlaps {name} in memory")
    call = aliased(kda(gate="RAW"), "A_log", "out", shape=[4], dtype="fp32")
    assert (call.query(lib)[0], abi.last_error(lib)) == (INVALID, "kda_decode: out overlaps A_log in memory")
    call = aliased(kda(mixed=True), "mixed_qkv", "out", shape=[4, 1024], dtype="bf16")
    assert (call.query(lib)[0], abi.last_error(lib)) == (INVALID, "kda_decode: out overlaps mixed_qkv in memory")


def test_written_pool_may_not_overlap_an_input(lib):
    call = aliased(kda(), "beta", "state", shape=[4, 4], dtype="fp32")
    assert (call.query(lib)[0], abi.last_error(lib)) == (INVALID, "kda_decode: state overlaps beta in memory")
    call = with_(kda(), state_out=tensor([4, 4, 128, 128]))
    call = aliased(call, "q", "state_out", shape=[4, 2, 128], dtype="bf16")
    assert (call.query(lib)[0], abi.last_error(lib)) == (INVALID, "kda_decode: state_out overlaps q in memory")


def pools(slots_in, strides_in, at_in, slots_out, strides_out, at_out):
    base = 0x7E0000000000
    index = tensor([4], "i32")
    return with_(kda(), state=tensor([slots_in, 4, 128, 128], "fp32", strides_in, data=base + at_in),
                 state_out=tensor([slots_out, 4, 128, 128], "fp32", strides_out, data=base + at_out), read_index=index)


def test_pools_are_the_same_or_apart(lib):
    dense, slot = [65536, 16384, 128, 1], 65536 * 4
    two_layers = [2 * 65536, 16384, 128, 1]
    assert pools(8, dense, 0, 8, dense, 0).query(lib)[0] == OK                      # in place, spelled out
    assert pools(8, dense, 0, 5, dense, 0).query(lib)[0] == OK
    assert pools(8, dense, 0, 8, dense, 8 * slot).query(lib)[0] == OK               # one behind the other
    assert pools(8, two_layers, 0, 8, two_layers, slot).query(lib)[0] == OK         # layers of one pool: interleaved, not overlapping
    assert pools(8, two_layers, slot, 8, two_layers, 0).query(lib)[0] == OK
    message = "kda_decode: state_out overlaps state in memory, but starts elsewhere or has other strides; it must be the same pool or another"
    for call in (pools(8, dense, 0, 8, dense, 3 * slot), pools(8, two_layers, 0, 8, two_layers, slot // 2), pools(8, two_layers, 0, 8, dense, 0),
                 pools(8, dense, 0, 8, [65536, 16384 + 4, 128, 1][:1] + [16384, 128, 1], 16)):
        assert (call.query(lib)[0], abi.last_error(lib)) == (INVALID, message)


def test_columns_of_one_fused_row_are_apart(lib):
    """q, k, v, gate, beta and out as columns of one row: their byte ranges interleave, their elements do not."""
    h, hv, k, v = 2, 4, 128, 128
    width, base = 2 * h * k + 2 * hv * v, 0x7D0000000000
    def column(start, heads, dim, row=width):
        return tensor([4, heads, dim], "bf16", [row, dim, 1], data=base + 2 * start)

    def call(out_at):
        return with_(kda(), q=column(0, h, k), k=column(h * k, h, k), v=column(2 * h * k, hv, v), out=column(out_at, hv, v))

    at = 2 * h * k + hv * v
    assert call(at).query(lib)[0] == OK
    assert (call(at - 1).query(lib)[0], abi.last_error(lib)) == (INVALID, "kda_decode: out overlaps v in memory")
    assert (call(at + 1).query(lib)[0], abi.last_error(lib)) == (INVALID, "kda_decode: out overlaps q in memory")  # of the next row
    other = call(at)
    other = with_(other, q=column(0, h, k, row=width + 1))
    assert other.query(lib)[0] == INVALID  # other period: not known to be apart


# ------------------------------------------------------------------------------------------------- what is accepted

ACCEPTED = [
    lambda: kda(rows="n1"), lambda: kda(rows="1n"), lambda: kda(n=0), lambda: kda(n=0, rows="n1"), lambda: kda(n=0, slots=0),
    lambda: kda(pools=False), lambda: with_(kda(), state=None, state_out=tensor([4, 4, 128, 128])), lambda: kda(gate="NONE"),
    lambda: kda(gate="RAW", lower_bound=-5.0), lambda: kda(gate="RAW", lower_bound=-1e-6), lambda: kda(lower_bound=-0.0),
    lambda: with_(kda(gate="RAW"), A_log=None), lambda: with_(kda(gate="RAW"), dt_bias=None),
    lambda: with_(kda(gate="RAW"), A_log=tensor([1, 1, 4, 1], "bf16", [9, 7, 1, 5])),
    lambda: with_(kda(gate="RAW"), dt_bias=tensor([512], "fp16")), lambda: kda(mixed=True), lambda: kda(mixed=True, rows="1n"),
    lambda: kda(mixed=True, pools=False), lambda: kda(has_scale=1, scale=0.0), lambda: kda(has_scale=1, scale=-3.5),
    lambda: with_(kda(slots=9), read_index=tensor([4], "i64", [3])), lambda: with_(kda(slots=9), write_index=tensor([4], "i32", [0])),
    lambda: with_(kda(slots=1), read_index=tensor([4], "i32")), lambda: kda(has_null_slot=1, null_slot=-(2**63)),
    lambda: with_(kda(), beta=tensor([4, 4], "bf16", [0, 0])), lambda: with_(kda(), q=tensor([4, 2, 128], "bf16", [-512, 128, 1])),
    lambda: with_(kda(), out=tensor([4, 4, 128], "bf16", [128, 512, 1])), lambda: with_(kda(), out=tensor([4, 4, 128], "bf16", [-512, 128, 1])),
    lambda: with_(kda(), q=tensor([4, 2, 128], "bf16", [0, 0, 1])), lambda: with_(gdn(), gate=tensor([4, 4], "fp32", [1, 4])),
    lambda: lightning(gate="CONST_HEAD"), lambda: kda(n=1, h=1, hv=1), lambda: kda(n=65535), lambda: kda(n=524280, h=1, hv=1, k=64, v=64),
    lambda: with_(kda(), state=tensor([4, 4, 128, 128], "fp32", [-65536, 16384, 128, 1])),
]  # fmt: skip


@pytest.mark.parametrize("make", ACCEPTED)
def test_accepted(lib, make):
    call = make()
    assert call.query(lib)[0] == OK, abi.last_error(lib)


def test_no_rows_touch_nothing(lib):
    """N = 0: OK, no launch, data may be NULL; the rest is still checked. No arch is needed, so no driver either."""
    call = kda(n=0)
    for name in ("q", "k", "v", "out", "gate", "beta"):
        call.tensors[name].data = None
    for arch in ("sm90", "sm100", "device"):
        status, r = call.query(lib, arch)
        assert status == OK and r.launch_count == 0 and list(r.kernels) == [-1] * 8
    assert kda(n=0, gate_kind=1).query(lib)[0] == INVALID
    assert kda(n=0, device=(CPU, 0)).run(lib) == OK
