"""Every rule of cula_prefill_args: the code and the whole message. A rule without a line here is not tested."""

import math

import pytest

from tests.capi import abi
from tests.capi.abi import CPU, INVALID, OK, UNSUPPORTED, tensor
from tests.capi.calls import prefill
from tests.capi.test_decode_rules import aliased, with_

POOL = [2, 4, 128, 128]


def checkpointed(c=3, interval=32, **kw):
    """B 2, T 100: three intervals of 32 tokens."""
    call = prefill(checkpoint_interval=interval, **kw)
    device = (call.tensors["q"].device_type, 0)
    return with_(call, checkpoints=tensor([9, *POOL[1:]], device=device), checkpoint_index=tensor([2, c], "i32", device=device))


def rows(call, name, strides):
    t = call.tensors[name]
    return with_(call, **{name: tensor(t.shape[: t.ndim], (t.code, t.bits), strides)})


# (message, call). Shapes of the default: B 2, T 100, H 2, HV 4, K 128, V 128.
RULES = [
    # options
    ("has_null_slot is 2; must be 0 or 1", lambda: prefill(has_null_slot=2)),
    ("l2norm is -1; must be 0 or 1", lambda: prefill(l2norm=-1)),
    ("has_scale is 7; must be 0 or 1", lambda: prefill(has_scale=7)),
    ("state_layout is 2; must be CULA_STATE_VK (0) or CULA_STATE_KV (1)", lambda: prefill(state_layout=2)),
    ("gate_kind is NONE; allowed: LOG_CHANNEL, RAW", lambda: prefill(gate_kind=0)),
    ("gate_kind is LOG_HEAD; allowed: LOG_CHANNEL, RAW", lambda: prefill(gate_kind=1)),
    ("gate_kind is CONST_HEAD; allowed: LOG_CHANNEL, RAW", lambda: prefill(gate_kind=4)),
    ("gate_kind is 5; allowed: LOG_CHANNEL, RAW", lambda: prefill(gate_kind=5)),
    ("beta_kind is 3; allowed: VALUE, LOGIT, LOGIT_TWICE", lambda: prefill(beta_kind=3)),
    ("lower_bound is -5, but it belongs to the RAW gate", lambda: prefill(lower_bound=-5.0)),
    ("lower_bound is -5.5; must be 0 (softplus form) or in [-5,0)", lambda: prefill(gate="RAW", lower_bound=-5.5)),
    ("lower_bound is nan; must be 0 (softplus form) or in [-5,0)", lambda: prefill(gate="RAW", lower_bound=math.nan)),
    ("scale is inf; must be finite", lambda: prefill(has_scale=1, scale=math.inf)),
    ("scale is nan; must be finite", lambda: prefill(has_scale=1, scale=math.nan)),
    ("scale is 0.5, but has_scale is 0", lambda: prefill(scale=0.5)),
    ("null_slot is 3, but has_null_slot is 0", lambda: prefill(null_slot=3)),
    ("has_null_slot is 1, but there is neither state nor state_out nor checkpoints", lambda: prefill(pools=False, has_null_slot=1)),
    ("variant is 4; allowed: AUTO, SERIAL, OVERLAP, CHAIN", lambda: prefill(variant=4)),
    ("variant is -1; allowed: AUTO, SERIAL, OVERLAP, CHAIN", lambda: prefill(variant=-1)),
    ("variant is OVERLAP; must be AUTO for CPU tensors", lambda: prefill(variant=2, device=(CPU, 0))),
    ("segments is 65; must be 0 (the plan chooses) or from 1 to 64", lambda: prefill(segments=65)),
    ("segments is -1; must be 0 (the plan chooses) or from 1 to 64", lambda: prefill(segments=-1)),
    ("segments is 2; must be 0 or 1 for CPU tensors", lambda: prefill(segments=2, device=(CPU, 0))),
    ("num_threads is -1; must be 0 (all) or more", lambda: prefill(num_threads=-1)),
    ("num_threads is 4; must be 0 for tensors on a GPU", lambda: prefill(num_threads=4)),
    ("exact is 2; must be 0 or 1", lambda: prefill(exact=2)),
    # operands that are missing or have no use
    *((f"{name} is missing (NULL)", lambda name=name: with_(prefill(), **{name: None})) for name in ("q", "k", "v", "out", "gate", "beta")),
    ("A_log is given, but gate_kind is not RAW", lambda: with_(prefill(), A_log=tensor([4]))),
    ("dt_bias is given, but gate_kind is not RAW", lambda: with_(prefill(), dt_bias=tensor([4, 128]))),
    ("read_index is given, but there is no state to read", lambda: with_(prefill(), state=None, read_index=tensor([2], "i32"))),
    ("write_index is given, but there is no state_out to write", lambda: with_(prefill(), state_out=None, write_index=tensor([2], "i32"))),
    ("write_index is missing (NULL); with read_index and state_out it must be given", lambda: with_(prefill(), read_index=tensor([2], "i32"))),
    ("checkpoint_index is given, but there are no checkpoints", lambda: with_(prefill(), checkpoint_index=tensor([2, 3], "i32"))),
    ("checkpoint_index is missing (NULL)", lambda: with_(checkpointed(), checkpoint_index=None)),
    ("checkpoint_interval is 32, but there are no checkpoints", lambda: prefill(checkpoint_interval=32)),
    *((f"checkpoint_interval is {n}; must be a positive multiple of 32 tokens", lambda n=n: checkpointed(interval=n)) for n in (0, -32, 33, 16)),
    # dtypes
    ("q has dtype float64; must be bf16, fp16 or float32", lambda: with_(prefill(), q=tensor([2, 100, 2, 128], "fp64"))),
    ("k is fp16, q is bf16; q, k, v and out have one dtype", lambda: with_(prefill(), k=tensor([2, 100, 2, 128], "fp16"))),
    ("v is float32, q is bf16; q, k, v and out have one dtype", lambda: with_(prefill(), v=tensor([2, 100, 4, 128]))),
    ("out is float32, q is bf16; q, k, v and out have one dtype", lambda: with_(prefill(), out=tensor([2, 100, 4, 128]))),
    ("cu_seqlens has dtype float32; must be int32 or int64", lambda: with_(prefill(cu="i32"), cu_seqlens=tensor([3]))),
    ("state has dtype float16; must be bf16 or float32", lambda: with_(prefill(), state=tensor(POOL, "fp16"))),
    ("state_out is bf16, state is float32; all pools have one dtype", lambda: with_(prefill(), state_out=tensor(POOL, "bf16"))),
    ("checkpoints is bf16, state is float32; all pools have one dtype", lambda: with_(checkpointed(), checkpoints=tensor(POOL, "bf16"))),
    ("checkpoint_index has dtype float32; must be int32 or int64", lambda: with_(checkpointed(), checkpoint_index=tensor([2, 3]))),
    # shapes
    ("q has shape [200,2,128]; expected [B,T,H,K]; [T,H,K] is for sequences packed with cu_seqlens", lambda: with_(prefill(), q=tensor([200, 2, 128], "bf16"))),
    ("q has shape [200,256]; expected [B,T,H,K]", lambda: with_(prefill(), q=tensor([200, 256], "bf16"))),
    ("q has shape [2,100,2,128]; with cu_seqlens expected [T,H,K] or [1,T,H,K]", lambda: with_(prefill(cu="i32"), q=tensor([2, 100, 2, 128], "bf16"))),
    ("q has shape [2,100,0,128]; H and K must be at least 1", lambda: with_(prefill(), q=tensor([2, 100, 0, 128], "bf16"))),
    ("k has shape [2,100,4,128]; expected [B,T,H,K] = [2,100,2,128], as q and v have", lambda: with_(prefill(), k=tensor([2, 100, 4, 128], "bf16"))),
    ("k has shape [100,2,128]; expected [B,T,H,K] = [1,100,2,128], as q and v have", lambda: with_(prefill(cu="i32"), k=tensor([100, 2, 128], "bf16"))),
    ("k has shape [1,100,2,128]; expected [T,H,K] = [100,2,128], as q and v have",
     lambda: with_(prefill(cu="i32", packed=True), k=tensor([1, 100, 2, 128], "bf16"))),
    ("v has shape [2,100,512]; expected [B,T,HV,V] with HV and V at least 1", lambda: with_(prefill(), v=tensor([2, 100, 512], "bf16"))),
    ("v has shape [2,100,0,128]; expected [B,T,HV,V] with HV and V at least 1", lambda: with_(prefill(), v=tensor([2, 100, 0, 128], "bf16"))),
    ("v has shape [2,99,4,128]; expected [B,T,HV,V] = [2,100,4,128], as q and v have", lambda: with_(prefill(), v=tensor([2, 99, 4, 128], "bf16"))),
    ("out has shape [2,100,4,64]; expected [B,T,HV,V] = [2,100,4,128], as q and v have", lambda: with_(prefill(), out=tensor([2, 100, 4, 64], "bf16"))),
    ("gate has shape [2,100,4]; expected [B,T,HV,K] = [2,100,4,128], as q and v have", lambda: with_(prefill(), gate=tensor([2, 100, 4]))),
    ("gate has shape [100,2,128]; expected [T,HV,K] = [100,4,128], as q and v have",
     lambda: with_(prefill(cu="i32", packed=True), gate=tensor([100, 2, 128]))),
    ("beta has shape [2,100,2]; expected [B,T,HV] = [2,100,4], as q and v have", lambda: with_(prefill(), beta=tensor([2, 100, 2]))),
    ("HV = 3 value heads (v) for H = 2 heads (q); HV must be a multiple of H", lambda: prefill(hv=3)),
    ("A_log has shape [3]; expected HV = 4 elements", lambda: with_(prefill(gate="RAW"), A_log=tensor([3]))),
    ("dt_bias has shape [4]; expected HV*K = 512 elements", lambda: with_(prefill(gate="RAW"), dt_bias=tensor([4]))),
    ("cu_seqlens has shape [3,1]; expected [N+1]", lambda: with_(prefill(cu="i32"), cu_seqlens=tensor([3, 1], "i32"))),
    ("cu_seqlens has shape [0]; expected [N+1]", lambda: with_(prefill(cu="i32"), cu_seqlens=tensor([0], "i32"))),
    ("read_index has shape [3]; expected [N] = [2]", lambda: with_(prefill(), read_index=tensor([3], "i32"))),
    ("write_index has shape [2,1]; expected [N] = [2]", lambda: with_(prefill(), write_index=tensor([2, 1], "i32"))),
    ("checkpoint_index has shape [3,3]; expected [N,C] with N = 2", lambda: with_(checkpointed(), checkpoint_index=tensor([3, 3], "i32"))),
    ("checkpoint_index has shape [2]; expected [N,C] with N = 2", lambda: with_(checkpointed(), checkpoint_index=tensor([2], "i32"))),
    ("checkpoint_index has shape [2,2]; 100 tokens with checkpoint_interval 32 need C of at least 3", lambda: checkpointed(c=2)),
    ("state has shape [2,4,64,128]; expected [slots,HV,V,K] = [slots,4,128,128]", lambda: with_(prefill(), state=tensor([2, 4, 64, 128]))),
    ("state has shape [0,4,128,128]; a pool has at least one slot", lambda: prefill(slots=0)),
    ("state has 1 slots for 2 sequences; without read_index sequence n uses slot n", lambda: prefill(slots=1)),
    ("state_out has 1 slots for 2 sequences; without write_index sequence n uses slot n", lambda: with_(prefill(), state_out=tensor([1, *POOL[1:]]))),
    # strides
    *((f"the last stride of {name} is 2; must be 1", lambda name=name, heads=heads: rows(prefill(), name, [100 * heads * 256, heads * 256, 256, 2]))
      for name, heads in (("q", 2), ("k", 2), ("v", 4), ("out", 4), ("gate", 4))),
    ("out has shape [2,100,4,128] and stride 0 in dimension 1: two of its elements share memory, but it is written",
     lambda: rows(prefill(), "out", [512, 0, 128, 1])),
    ("cu_seqlens has stride 2 in dimension 0; it must be compact, stride 1 there", lambda: with_(prefill(cu="i32"), cu_seqlens=tensor([3], "i32", [2]))),
    ("read_index has stride 2 in dimension 0; it must be compact, stride 1 there", lambda: with_(prefill(), read_index=tensor([2], "i32", [2]))),
    ("checkpoint_index has stride 8 in dimension 0; it must be compact, stride 3 there",
     lambda: with_(checkpointed(), checkpoint_index=tensor([2, 3], "i32", [8, 1]))),
    ("the last two strides of state are 256 and 1; must be 128 and 1: a state is compact inside a head",
     lambda: with_(prefill(), state=tensor(POOL, "fp32", [4 * 32768, 32768, 256, 1]))),
    # aliasing
    ("out overlaps v in memory", lambda: aliased(prefill(), "out", "v", shape=[2, 100, 4, 128], dtype="bf16")),
    ("out overlaps gate in memory", lambda: aliased(prefill(), "out", "gate", shape=[2, 100, 4, 128], dtype="bf16")),
    ("out overlaps state in memory", lambda: aliased(prefill(), "state", "out", shape=POOL)),
    ("state_out overlaps q in memory", lambda: aliased(prefill(), "q", "state_out", shape=[2, 100, 2, 128], dtype="bf16")),
    ("checkpoints overlaps checkpoint_index in memory", lambda: aliased(checkpointed(), "checkpoint_index", "checkpoints", shape=[2, 3], dtype="i32")),
    ("state_out overlaps state in memory, but starts elsewhere or has other strides; it must be the same pool or another",
     lambda: aliased(prefill(), "state_out", "state", shape=POOL, byte_offset=64 * 1024)),
    ("checkpoints overlaps state_out in memory, but starts elsewhere or has other strides; it must be the same pool or another",
     lambda: aliased(checkpointed(), "checkpoints", "state_out", shape=[9, *POOL[1:]], byte_offset=64 * 1024)),
]


@pytest.mark.parametrize("message, make", RULES, ids=[message[:60] for message, _ in RULES])
def test_rule(lib, message, make):
    call = make()
    arch = "cpu" if call.tensors["v"] is not None and call.tensors["v"].device_type == CPU else "sm90"
    status, _ = call.query(lib, arch)
    assert abi.last_error(lib) == f"kda_prefill: {message}"
    assert status == INVALID


def at(name, offset):
    """The default call with `name` moved by bytes."""
    call = prefill(gate="RAW", gate_dtype="fp32" if name == "gate" else "bf16")
    call.tensors[name].byte_offset = offset
    return call


def long(t):
    """One sequence whose inputs are one token over and over, and whose out has room."""
    call = prefill(b=1, t=1, pools=False)
    for name in ("q", "k", "v", "gate", "beta"):
        x = call.tensors[name]
        shape = [1, t, *x.shape[2 : x.ndim]]
        with_(call, **{name: tensor(shape, (x.code, x.bits), [0, 0, *abi.compact(shape)[2:]])})
    return with_(call, out=tensor([1, t, 4, 128], "bf16", data=1 << 50))


UNALIGNED = "with strides {0}, {1} and {2} of batch, token and head, of {3}; on a GPU address and strides must be multiples of {4} bytes"
# What a GPU does not support: (part of the message, call).
REFUSED = [
    ("q is float32; on a GPU q, k, v and out must be bf16 or fp16", lambda: prefill(io="fp32")),
    ("head_dim_k is 64 and head_dim_v 64; on a GPU built for 128 and 128", lambda: prefill(k=64, v=64)),
    ("head_dim_k is 128 and head_dim_v 256; on a GPU built for 128 and 128", lambda: prefill(v=256)),
    (UNALIGNED.format(51200, 512, 128, "bf16", 16), lambda: at("v", 8)),
    (UNALIGNED.format(51200, 512, 128, "bf16", 16), lambda: at("out", 8)),
    (UNALIGNED.format(25600, 256, 128, "bf16", 8), lambda: at("q", 4)),
    (UNALIGNED.format(25600, 256, 128, "bf16", 8), lambda: at("k", 4)),
    (UNALIGNED.format(51200, 512, 128, "float32", 16), lambda: at("gate", 8)),
    (UNALIGNED.format(51600, 516, 129, "bf16", 16), lambda: rows(prefill(), "v", [51600, 516, 129, 1])),
    (UNALIGNED.format(51300, 513, 128, "bf16", 8), lambda: rows(prefill(), "gate", [51300, 513, 128, 1])),
    ("on a GPU the address of a float32 dt_bias must be a multiple of 16 bytes", lambda: at("dt_bias", 4)),
    ("chunks * HV and the blocks of a launch must be below 2^31 on a GPU", lambda: prefill(b=1 << 25, t=1, cu="i32", pools=False)),  # of carry
    ("chunks * HV and the blocks of a launch must be below 2^31 on a GPU", lambda: long(1 << 34)),
]


@pytest.mark.parametrize("message, make", REFUSED, ids=[str(i) for i in range(len(REFUSED))])
def test_unsupported_on_a_gpu(lib, message, make):
    status, _ = make().query(lib, "sm90")
    assert abi.last_error(lib).startswith("kda_prefill: ") and message in abi.last_error(lib)
    assert status == UNSUPPORTED


def test_what_alignment_leaves_free(lib):
    """16-bit rows of q, k and gate at 8 bytes, beta and a 16-bit dt_bias anywhere, strides of an extent of 1 at anything."""
    call = prefill(gate="RAW")
    for name in ("q", "k", "gate"):
        call.tensors[name].byte_offset = 8
    call.tensors["beta"].byte_offset = 4
    with_(call, dt_bias=tensor([4, 128], "bf16", byte_offset=2))
    assert call.query(lib)[0] == OK, abi.last_error(lib)
    call = prefill(b=1, h=1, hv=1)
    for name in ("q", "k", "v", "out", "gate"):
        rows(call, name, [7, 128, 3, 1])
    assert call.query(lib)[0] == OK, abi.last_error(lib)


def test_the_longest_sequence(lib):
    """The limit is on records: with 4 heads 2^34 tokens, less the 2^9 or so that are kept for the segments."""
    status, r = long((1 << 34) - 32 * 70).query(lib)
    assert status == OK and r.workspace_bytes > (1 << 31) * 29184 * 0.999, abi.last_error(lib)


def test_archs_without_kernels_are_named(lib):
    for arch in ("sm100", "sm103"):
        assert prefill().query(lib, arch)[0] == UNSUPPORTED
        assert abi.last_error(lib) == f"kda_prefill: no {arch} kernels in this library; built archs: cpu, sm90, sm120"


# What is allowed although it looks like a mistake.
ALLOWED = {
    "final states over the initial ones": lambda: aliased(prefill(), "state_out", "state", shape=POOL),
    "initial states only": lambda: with_(prefill(), state_out=None),
    "final states only": lambda: with_(prefill(), state=None),
    "read by index, no final states": lambda: with_(prefill(slots=1), state_out=None, read_index=tensor([2], "i64")),
    "write by index alone": lambda: with_(prefill(), write_index=tensor([2], "i64"), state_out=tensor([1, *POOL[1:]])),
    "no pool": lambda: prefill(pools=False),
    "raw without A_log and dt_bias": lambda: with_(prefill(gate="RAW"), A_log=None, dt_bias=None),
    "packed without B": lambda: prefill(cu="i64", packed=True),
    "a cu_seqlens of more sequences than tokens": lambda: prefill(b=300, t=100, cu="i32"),
    "columns of one fused row": lambda: fused(),
    "out too as a column of the fused row": lambda: fused(out_at=1024),
    "a broadcast beta": lambda: rows(prefill(), "beta", [0, 0, 0]),
    "backwards in time": lambda: rows(prefill(), "q", [25600, -256, 128, 1]),
}


def fused(out_at=None):
    """q, k, v of one projection row of two batches, and out elsewhere or as its last column."""
    width = 1024 if out_at is None else 1536
    row = tensor([2, 100, width], "bf16")
    call = prefill()
    for name, heads, offset in (("q", 2, 0), ("k", 2, 256), ("v", 4, 512), ("out", 4, out_at)):
        if offset is not None:
            with_(call, **{name: tensor([2, 100, heads, 128], "bf16", [100 * width, width, 128, 1], data=row.data, byte_offset=2 * offset)})
    return call


@pytest.mark.parametrize("out_at, other", [(1023, "v"), (1025, "q"), (512, "v"), (0, "q")])
def test_columns_of_a_fused_row_that_meet(lib, out_at, other):
    assert (fused(out_at).query(lib)[0], abi.last_error(lib)) == (INVALID, f"kda_prefill: out overlaps {other} in memory")


@pytest.mark.parametrize("name", ALLOWED)
def test_allowed(lib, name):
    assert ALLOWED[name]().query(lib)[0] == OK, abi.last_error(lib)


def test_scale_of_zero_is_a_scale(lib):
    assert prefill(has_scale=1, scale=0.0).query(lib)[0] == OK


def test_empty_calls(lib):
    """N = 0 does nothing, whatever the arch has; T = 0 copies initial states, and nothing without state_out."""
    for call in (prefill(b=0), prefill(b=0, cu="i32"), prefill(b=0, t=0, k=64), prefill(b=0, pools=False)):
        for arch in ("sm90", "sm100"):
            status, r = call.query(lib, arch)
            assert (status, r.launch_count, r.workspace_bytes) == (OK, 0, 0), abi.last_error(lib)
    for cu in (None, "i32"):
        status, r = prefill(t=0, cu=cu).query(lib)
        assert (status, r.launch_count, r.workspace_bytes, r.workspace_align) == (OK, 1, 0, 1)
        assert abi.kernel_id(lib, r.kernels[0]).endswith(".vk.state")
        status, r = with_(prefill(t=0, cu=cu), state_out=None).query(lib)
        assert (status, r.launch_count) == (OK, 0)


def test_tensors_on_different_devices(lib):
    call = with_(prefill(cu="i32"), cu_seqlens=tensor([3], "i32", device=(CPU, 0)))
    assert call.query(lib)[0] == INVALID
    assert abi.last_error(lib) == "kda_prefill: cu_seqlens is on cpu, q is on cuda:0; all tensors of a call must be on one device"


def test_workspace_must_be_there(lib):
    call = prefill()
    status, r = call.query(lib)
    assert status == OK and r.workspace_align == 128 and r.workspace_bytes > 0
    for workspace, size in ((None, 1 << 40), (0x10000, r.workspace_bytes - 1), (0x10040, r.workspace_bytes)):
        assert call.bind(lib, workspace=workspace, bytes=size)[0] == abi.WORKSPACE
        assert f"needed are {r.workspace_bytes} bytes, aligned to 128" in abi.last_error(lib)
    status, b = call.bind(lib, workspace=0x10080, bytes=r.workspace_bytes)
    assert status == OK and b.count == r.launch_count


def test_data_of_a_tracing_framework_is_refused(lib):
    for name in ("q", "out", "cu_seqlens", "state_out"):
        call = prefill(cu="i32")
        call.tensors[name].data = None
        assert call.query(lib)[0] == INVALID and f"kda_prefill: {name} has shape" in abi.last_error(lib)
