"""cula.engines on the shapes and strides that vLLM and SGLang pass at a decode step, against the float64 recurrence.

Recorded from both engines' calls: `ssm_states` [slots,HV,V,K] as a view of pages that are larger than a state, `mixed_qkv` as columns of the
convolution's output, a and b as columns of one projection, A_log [1,1,H,1] and dt_bias [H*K] of Kimi Linear, indices of a captured batch.
Every byte that a call must not touch holds a canary.
"""

from __future__ import annotations

import pytest
import torch

from cula import InvalidArgumentError, UnsupportedError
from cula.engines import decode_rows, slots_of_blocks, slots_of_step
from tests.numerics.compare import assert_close
from tests.reference import recurrence

PAGE = 540672  # elements from slot to slot in Qwen3-Next's hybrid cache: 32*128*128 of state, the rest is of the convolution
CANARY = 123.25


class Pages:
    """A pool as an engine has it: states in pages that hold something else behind them."""

    def __init__(self, slots, heads, v=128, k=128, page=None, dtype=torch.float32, seed=5):
        size = heads * v * k
        self.memory = torch.full((slots, page or size + 64), CANARY, dtype=dtype)
        self.state = self.memory[:, :size].unflatten(1, (heads, v, k))
        self.state.copy_(torch.randn(self.state.shape, generator=torch.Generator().manual_seed(seed)) * 0.5)
        self.before = self.memory.clone()

    def check(self, want, written):
        """The written slots hold `want` (float64, [slots,HV,V,K]); every other bit of the memory is what it was."""
        written = sorted(written)
        assert_close("state", self.state[written], torch.as_tensor(want)[written])
        expected = self.before.clone()
        expected[:, : self.state[0].numel()][written] = self.state[written].flatten(1)
        assert torch.equal(self.memory.view(torch.uint8), expected.view(torch.uint8)), "memory changed that no row writes"


class Step:
    """Rows of one decode step in the engines' buffers: columns of wider rows."""

    def __init__(self, n, h, hv, d=128, per_channel=False, dtype=torch.bfloat16, seed=1):
        gen = torch.Generator().manual_seed(seed)
        qkv = 2 * h * d + hv * d
        self.n, self.h, self.hv, self.d = n, h, hv, d
        projected = torch.randn(n, qkv + 96, generator=gen).to(dtype)
        gates = torch.randn(n, hv * (d if per_channel else 1) + hv, generator=gen).to(dtype)
        self.mixed_qkv = projected[:, :qkv]
        self.q, self.k, self.v = self.mixed_qkv.split([h * d, h * d, hv * d], dim=-1)
        self.a, self.b = gates.split([gates.shape[1] - hv, hv], dim=-1)
        self.A_log = torch.randn(hv, generator=gen) * 0.3
        self.dt_bias = torch.randn(hv * d if per_channel else hv, generator=gen)
        self.buffer = torch.full((n + 3, hv, d), CANARY, dtype=dtype)  # the output buffer of the largest batch
        self.out = self.buffer[:n]

    def want(self, op, state, read, write, **options):
        f64 = lambda x: x.double().numpy()  # noqa: E731
        n, h, hv, d = self.n, self.h, self.hv, self.d
        a = self.a.unflatten(1, (hv, d)) if op == "kda" else self.a
        return recurrence.decode(op, f64(self.q).reshape(n, h, d), f64(self.k).reshape(n, h, d), f64(self.v).reshape(n, hv, d), gate=f64(a),
                                 gate_kind="raw", A_log=f64(self.A_log), dt_bias=f64(self.dt_bias), beta=f64(self.b), beta_kind="logit",
                                 l2norm=True, state=f64(state), read_index=read, write_index=write, **options)

    def check(self, want):
        assert_close("out", self.out, torch.from_numpy(want.out))
        assert (self.buffer[self.n:] == CANARY).all(), "rows past the step were written"


RAW = ("a", "b", "A_log", "dt_bias")


def raw(step):
    return {name: getattr(step, name) for name in RAW}


@pytest.mark.parametrize("null_slot, padding", [(None, -1), (0, 0)], ids=["pad -1", "null block 0"])
def test_packed_decode_of_qwen3_next(null_slot, padding):
    """fused_recurrent_gated_delta_rule_packed_decode of both engines: mixed_qkv, a, b, out [N,1,HV,V], slots of a captured batch."""
    step, pool = Step(6, 16, 32), Pages(5, 32, page=PAGE)
    indices = torch.tensor([3, 1, 4, 2, padding, padding], dtype=torch.int32)
    read, write = slots_of_step(indices, 6)
    out = step.out.unsqueeze(1)
    returned = decode_rows("gdn", state=pool.state, read_index=read, write_index=write, null_slot=null_slot, mixed_qkv=step.mixed_qkv, **raw(step),
                           l2norm=True, scale=128**-0.5, out=out)
    assert returned is out and pool.state.stride(0) == PAGE and read.data_ptr() == indices.data_ptr()
    slots = [3, 1, 4, 2, -1, -1]
    want = step.want("gdn", pool.before[:, : 32 * 128 * 128].reshape(5, 32, 128, 128), slots, slots)
    step.check(want)
    assert not step.out[4:].any(), "padding rows are zero"
    pool.check(want.state, {1, 2, 3, 4})


def test_separate_rows_of_qwen3_next():
    """fused_sigmoid_gating_delta_rule_update: q, k [1,N,H,K], v [1,N,HV,V] as views of the row; query_start_loc 0..N."""
    step, pool = Step(4, 4, 8), Pages(6, 8)
    read, write = slots_of_step(torch.tensor([5, 0, 2, 1]), 4)
    q, k = (x.unflatten(1, (4, 128)).unsqueeze(0) for x in (step.q, step.k))
    decode_rows("gdn", state=pool.state, read_index=read, write_index=write, q=q, k=k, v=step.v.unflatten(1, (8, 128)).unsqueeze(0),
                **raw(step), l2norm=True, out=step.out.unsqueeze(0))
    want = step.want("gdn", pool.before[:, : 8 * 128 * 128].reshape(6, 8, 128, 128), [5, 0, 2, 1], [5, 0, 2, 1])
    step.check(want)
    pool.check(want.state, {5, 0, 2, 1})


@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_kimi_linear(lower_bound):
    """A [N, H*K] raw gate, A_log [1,1,H,1], dt_bias [H*K], heads in one dimension, 12 heads of a tensor-parallel shard."""
    step, pool = Step(4, 12, 12, per_channel=True), Pages(5, 12)
    read, write = slots_of_step(torch.tensor([4, -1, 0, 2], dtype=torch.int32), 4)
    decode_rows("kda", state=pool.state, read_index=read, write_index=write, q=step.q, k=step.k, v=step.v, a=step.a, b=step.b.unsqueeze(0),
                A_log=step.A_log.view(1, 1, 12, 1), dt_bias=step.dt_bias, lower_bound=lower_bound, l2norm=True, out=step.out.flatten(1))
    want = step.want("kda", pool.before[:, : 12 * 128 * 128].reshape(5, 12, 128, 128), [4, -1, 0, 2], [4, -1, 0, 2],
                     lower_bound=lower_bound or 0.0)
    step.check(want)
    assert not step.out[1].any()
    pool.check(want.state, {4, 0, 2})


def test_kimi_linear_with_activated_gate_and_beta():
    """vLLM's KDA: g float32 from fused_kda_gate, beta float32 after the sigmoid, all [1,N,...]."""
    step, pool = Step(3, 4, 4, per_channel=True), Pages(3, 4)
    g = -torch.rand(1, 3, 4, 128, generator=torch.Generator().manual_seed(3))
    beta = step.b.float().sigmoid()
    rows = {name: getattr(step, name).unflatten(1, (4, 128)).unsqueeze(0) for name in "qkv"}
    out = decode_rows("kda", state=pool.state, read_index=torch.tensor([2, 0, 1]), g=g, beta=beta.unsqueeze(0), l2norm=True, **rows)
    assert out.shape == (3, 4, 128) and out.dtype == torch.bfloat16
    want = recurrence.decode("kda", *(rows[name][0].double().numpy() for name in "qkv"), gate=g[0].double().numpy(), gate_kind="log_channel",
                             beta=beta.double().numpy(), l2norm=True, state=pool.before[:, : 4 * 128 * 128].reshape(3, 4, 128, 128).numpy(),
                             read_index=[2, 0, 1])
    assert_close("out", out, torch.from_numpy(want.out))
    pool.check(want.state, {0, 1, 2})


def test_new_requests_start_from_zero():
    """has_initial_state of a step: a slot of a new request may hold anything, NaN too."""
    step, pool = Step(4, 2, 4), Pages(5, 4)
    pool.state[1].fill_(float("nan"))
    pool.before = pool.memory.clone()
    indices = torch.tensor([3, 1, 4, -1], dtype=torch.int32)
    read, write = slots_of_step(indices, 4, has_initial_state=torch.tensor([True, False, True, False]))
    assert read.tolist() == [3, -1, 4, -1] and read.dtype == torch.int32 and write.tolist() == [3, 1, 4, -1]
    decode_rows("gdn", state=pool.state, read_index=read, write_index=write, mixed_qkv=step.mixed_qkv, **raw(step), l2norm=True, out=step.out)
    want = step.want("gdn", pool.before[:, : 4 * 128 * 128].reshape(5, 4, 128, 128), [3, -1, 4, -1], [3, 1, 4, -1])
    step.check(want)
    assert not step.out[3].any()
    pool.check(want.state, {3, 1, 4})


def test_padded_query_start_loc():
    """Sequences without a token in this step, in the middle and as padding; rows of the captured batch past the last token."""
    step, pool = Step(5, 2, 4), Pages(6, 4)
    start = torch.tensor([0, 1, 1, 2, 3, 3, 3], dtype=torch.int32)  # sequences 0, 2 and 3 have a token
    slots = torch.tensor([5, 1, 2, 4, 3, 3], dtype=torch.int32)  # those of sequences 1, 4 and 5 are live and must not change
    mask = torch.tensor([True, True, True, False, True, True])
    read, write = slots_of_step(slots, 5, query_start_loc=start, has_initial_state=mask)
    assert read.tolist() == [5, 2, -1, -1, -1] and write.tolist() == [5, 2, 4, -1, -1] and write.dtype == torch.int32
    decode_rows("gdn", state=pool.state, read_index=read, write_index=write, mixed_qkv=step.mixed_qkv, **raw(step), l2norm=True, out=step.out)
    want = step.want("gdn", pool.before[:, : 4 * 128 * 128].reshape(6, 4, 128, 128), [5, 2, -1, -1, -1], [5, 2, 4, -1, -1])
    step.check(want)
    assert not step.out[3:].any()
    pool.check(want.state, {5, 2, 4})
    plain = slots_of_step(slots, 5, query_start_loc=start)
    assert plain[0] is plain[1] and plain[0].tolist() == [5, 2, 4, -1, -1]
    both = slots_of_step(slots, 5, query_start_loc=start, write_slots=slots + 10)
    assert both[0].tolist() == [5, 2, 4, -1, -1] and both[1].tolist() == [15, 12, 14, -1, -1]


def test_block_tables():
    """A prefix cache: the state is read from one block of the request and stored to another, which keeps the first."""
    step, pool = Step(3, 2, 4), Pages(8, 4)
    table = torch.tensor([[6, 2, 7, 0], [1, 3, 0, 0], [5, 4, 0, 0]], dtype=torch.int32)
    read = slots_of_blocks(table, torch.tensor([1, 0, -1], dtype=torch.int32))
    write = slots_of_blocks(table, torch.tensor([2, 1, -1]))
    assert read.tolist() == [2, 1, -1] and write.tolist() == [7, 3, -1] and read.dtype == torch.int32
    read, write = slots_of_step(read, 3, write_slots=write)
    decode_rows("gdn", state=pool.state, read_index=read, write_index=write, mixed_qkv=step.mixed_qkv, **raw(step), l2norm=True, out=step.out)
    want = step.want("gdn", pool.before[:, : 4 * 128 * 128].reshape(8, 4, 128, 128), [2, 1, -1], [7, 3, -1])
    step.check(want)
    pool.check(want.state, {7, 3})

    column = slots_of_blocks(table, 0)  # a strided view, taken as it is
    assert column.data_ptr() == table.data_ptr() and column.stride() == (4,)
    again = Pages(8, 4)
    decode_rows("gdn", state=again.state, read_index=column, mixed_qkv=step.mixed_qkv, **raw(step), l2norm=True, out=step.out)
    want = step.want("gdn", again.before[:, : 4 * 128 * 128].reshape(8, 4, 128, 128), [6, 1, 5], [6, 1, 5])
    step.check(want)
    again.check(want.state, {6, 1, 5})


def test_lightning_of_minimax():
    """A constant decay a head, scale 1, the pool k-first, int64 slots; and simple GLA's gate in its place."""
    n, h, d = 3, 4, 128
    step, pool = Step(n, h, h), Pages(4, h)
    decay = torch.exp(-torch.linspace(0.01, 0.8, h))
    heads = {name: getattr(step, name).unflatten(1, (h, d)) for name in "qkv"}
    f64 = {name: x.double().numpy() for name, x in heads.items()}
    state = pool.before[:, : h * d * d].reshape(4, h, d, d).numpy()
    decode_rows("lightning", state=pool.state, state_layout="kv", read_index=torch.tensor([2, 3, 0]), decay=decay, scale=1.0, out=step.out, **heads)
    want = recurrence.decode("lightning", **f64, gate=decay.numpy(), gate_kind="const_head", scale=1.0, state=state, layout="kv",
                             read_index=[2, 3, 0])
    step.check(want)
    pool.check(want.state, {2, 3, 0})

    again, g = Pages(4, h), -torch.rand(n, h, generator=torch.Generator().manual_seed(2))
    decode_rows("lightning", state=again.state, read_index=torch.tensor([2, 3, 0]), g=g, mixed_qkv=step.mixed_qkv, out=step.out)
    want = recurrence.decode("lightning", **f64, gate=g.double().numpy(), gate_kind="log_head", state=state, read_index=[2, 3, 0])
    step.check(want)
    again.check(want.state, {2, 3, 0})


def test_gla_and_doubled_beta():
    n, h, d = 3, 4, 64
    step, pool = Step(n, h, h, d=d), Pages(4, h, d, d)
    g = -torch.rand(n, h * d, generator=torch.Generator().manual_seed(2))
    f64 = {name: getattr(step, name).unflatten(1, (h, d)).double().numpy() for name in "qkv"}
    state = pool.before[:, : h * d * d].reshape(4, h, d, d).numpy()
    decode_rows("gla", state=pool.state, read_index=torch.tensor([2, 3, 0]), g=g, mixed_qkv=step.mixed_qkv, out=step.out)
    want = recurrence.decode("gla", **f64, gate=g.unflatten(1, (h, d)).double().numpy(), gate_kind="log_channel", state=state,
                             read_index=[2, 3, 0])
    step.check(want)
    pool.check(want.state, {2, 3, 0})

    again = Pages(4, h, d, d)
    decode_rows("gdn", state=again.state, read_index=torch.tensor([2, 3, 0]), mixed_qkv=step.mixed_qkv, **raw(step), allow_neg_eigval=True,
                l2norm=True, out=step.out)
    want = recurrence.decode("gdn", **f64, gate=step.a.double().numpy(), gate_kind="raw", A_log=step.A_log.double().numpy(),
                             dt_bias=step.dt_bias.double().numpy(), beta=step.b.double().numpy(), beta_kind="logit_twice", l2norm=True,
                             state=state, read_index=[2, 3, 0])
    step.check(want)
    again.check(want.state, {2, 3, 0})


def test_more_slots_than_rows_and_no_rows():
    indices = torch.tensor([[3], [1], [2]], dtype=torch.int32)
    read, write = slots_of_step(indices, 2)
    assert read.tolist() == [3, 1] and write is read
    step, pool = Step(0, 2, 4), Pages(2, 4)
    read, write = slots_of_step(torch.empty(0, dtype=torch.int64), 0, query_start_loc=torch.zeros(1, dtype=torch.int32))
    out = decode_rows("gdn", state=pool.state, read_index=read, write_index=write, mixed_qkv=step.mixed_qkv, **raw(step), l2norm=True)
    assert out.shape == (0, 4, 128)
    pool.check(pool.before[:, : 4 * 128 * 128].reshape(2, 4, 128, 128), set())


# ------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("options, error, text", [
    (dict(rows=3), UnsupportedError, None),
    (dict(rows=5), UnsupportedError, "which is prefill .of KDA: cula.kda.kda_prefill."),
    (dict(rows=3, max_query_len=7), UnsupportedError, "max_query_len=7: these are rows of one token.*kda_prefill"),
    (dict(rows=3, num_accepted_tokens=torch.ones(3)), UnsupportedError, "num_accepted_tokens"),
    (dict(rows=3, query_start_loc=torch.tensor([0, 4])), UnsupportedError, "3 rows of 1 sequences"),
    (dict(rows=3, query_start_loc=torch.arange(9)), InvalidArgumentError, "slots has 4 entries for 8 sequences"),
    (dict(rows=3, query_start_loc=torch.zeros(2, 2)), InvalidArgumentError, "query_start_loc has shape"),
    (dict(rows=3, has_initial_state=torch.ones(4)), InvalidArgumentError, "torch.bool"),
    (dict(rows=3, has_initial_state=torch.ones(2, dtype=torch.bool)), InvalidArgumentError, "torch.bool"),
    (dict(rows=3, write_slots=torch.arange(3)), InvalidArgumentError, "write_slots has 3"),
    (dict(rows=3, slots=torch.zeros(4, 5, dtype=torch.int32)), UnsupportedError, "slots_of_blocks"),
    (dict(rows=3, slots=torch.zeros(4)), InvalidArgumentError, "expected int32 or int64"),
])
def test_steps_that_are_not_decode(options, error, text):
    slots = options.pop("slots", torch.arange(4))
    if text is None:
        slots_of_step(slots, **options)
        return
    with pytest.raises(error, match=text):
        slots_of_step(slots, **options)


@pytest.mark.parametrize("family, change, text", [
    ("rwkv", {}, "allowed: 'kda', 'gdn', 'gla', 'lightning'"),
    ("gdn", dict(a=None), "give a, the raw gate, or g"),
    ("gdn", dict(g=torch.zeros(3, 4)), "not both"),
    ("gdn", dict(A_log=None), "needs A_log"),
    ("gdn", dict(a=None, g=torch.zeros(3, 4)), "A_log does not apply"),
    ("gdn", dict(b=None), "give b, the logits of beta, or beta"),
    ("gdn", dict(b=None, beta=torch.ones(3, 4), allow_neg_eigval=True), "holds the factor 2"),
    ("gdn", dict(lower_bound=-5.0), "lower_bound does not apply"),
    ("gdn", dict(decay=torch.ones(4)), "decay does not apply"),
    ("gla", {}, "a does not apply"),
    ("gdn", dict(q=torch.zeros(3, 2, 128)), "q does not apply"),
    ("gdn", dict(mixed_qkv=None), "give mixed_qkv, or q, k and v"),
    ("gdn", dict(a=torch.zeros(3, 8)), r"a has shape \[3, 8\]; expected \[3, 4\]"),
    ("kda", {}, r"a has shape \[3, 4\]; expected \[3, 4, 128\].* or \[3, 512\]"),
    ("gdn", dict(out=torch.zeros(4, 4, 128)), r"out has shape \[4, 4, 128\]"),
    ("gdn", dict(state=torch.zeros(5, 4, 128)), "state has shape"),
    ("gdn", dict(mixed_qkv=torch.zeros(1, 1, 3, 1024)), "mixed_qkv has shape"),
])
def test_mixtures_are_refused_by_name(family, change, text):
    step = Step(3, 2, 4)
    given = dict(state=Pages(5, 4).state, read_index=torch.tensor([0, 1, 2]), mixed_qkv=step.mixed_qkv, **raw(step)) | change
    with pytest.raises(InvalidArgumentError, match=text):
        decode_rows(family, **given)


@pytest.mark.parametrize("table, index, text", [
    (torch.zeros(3, dtype=torch.int32), 0, "expected int32 or int64"),
    (torch.zeros(3, 2), 0, "expected int32 or int64"),
    (torch.zeros(3, 2, dtype=torch.int32), 2, "the table has 2 columns"),
    (torch.zeros(3, 2, dtype=torch.int32), torch.zeros(2, dtype=torch.int32), r"expected \[3\]"),
])
def test_bad_block_tables(table, index, text):
    with pytest.raises(InvalidArgumentError, match=text):
        slots_of_blocks(table, index)
