"""The decode cases: axes, what cannot be combined, and the covering selection of them. One list for the CPU and the GPU.

Every pair of axis values of an op occurs, and every combination of the groups in groups_of: every kernel of the matrix among
them. N = 0 has its own test, because it covers nothing else, and
N = 4096 a shorter list.
To add a value: one entry in an axis here and, if it is a new form, its branch in problem.py.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from tests.numerics.covering import combinations, covering, pairs

GATES = {
    "kda": ("none", "log_channel", "raw", "raw_noA", "raw_nobias", "raw_bound", "raw_bound_noA"),
    "gdn": ("none", "log_head", "raw", "raw_noA", "raw_nobias"),
    "gla": ("none", "log_channel"),
    "lightning": ("none", "log_head", "const_head"),
}
DTYPES = ("bf16", "fp16", "fp32")

# How the rows lie in memory.
ROWS = (
    "nhk",           # q, k [N,H,K], v [N,HV,V], compact
    "n1hk",          # [N,1,H,K]
    "1nhk",          # [1,N,H,K]
    "gap_wide",      # row and head strides larger than compact, all rows 16-byte aligned
    "gap_odd",       # row and head strides with odd gaps
    "fused_views",   # q, k, v are views into one row per token; gate and beta too where their dtype allows
    "mixed",         # mixed_qkv [N, 2*H*K + HV*V], compact
    "mixed_gap",     # mixed_qkv with a row stride that is larger, odd
)

# Where the states come from and go to.
POOLS = (
    "compact",       # in place
    "slot_gap",      # in place, slots further apart than their size (a page that holds other things too)
    "head_gap",      # in place, gaps between the heads of a slot as well
    "out_of_place",  # state_out is another pool, with another slot stride
    "write_only",    # no state: every row starts from zero, and is stored
    "none",          # no state at all
)

# Which slots a row uses. Rows that neither read nor write carry NaN in every operand.
INDICES = (
    "none",          # row n uses slot n
    "read_i32",      # a permutation, also for the writes
    "read_i64_pad",  # int64, with -1 rows
    "rw_i32_pad",    # read and write differ for some rows; -1 in either and in both
    "rw_i64_null",   # null_slot 0 beside negative ones
    "rw_oob",        # indices at and far beyond the end of the pool count as negative
    "rw_column",     # int32 reads and int64 writes, each a column of a table (strided)
)

AXES = dict(
    io=DTYPES, state=("fp32", "bf16"), k=(64, 128, 256), v=(64, 128, 192, 256, 512), layout=("vk", "kv"),
    gate=(), gate_dtype=DTYPES, param_dtype=DTYPES, beta=("value", "logit", "logit_twice"), beta_dtype=DTYPES,
    l2norm=(False, True), scale=(None, 1.0, 0.0, -0.37), heads=((1, 1), (2, 2), (1, 4), (3, 6), (5, 5)), rows=ROWS, pool=POOLS,
    index=INDICES, n=(7, 33, 1, 257), offset=(0, 1, 2, 3, 4, 5, 6, 7),
)

LARGE_N = 4096

# Elements of state that one case may touch: keeps a float64 row-by-row reference within a fraction of a second.
MAX_ELEMENTS = 1 << 20


@dataclass(frozen=True)
class Case:
    op: str
    io: str
    state: str
    k: int
    v: int
    layout: str
    gate: str
    gate_dtype: str
    param_dtype: str
    beta: str
    beta_dtype: str
    l2norm: bool
    scale: float | None
    heads: tuple[int, int]
    rows: str
    pool: str
    index: str
    n: int
    offset: int

    @property
    def id(self) -> str:
        gate = self.gate if self.gate in ("none", "const_head") else f"{self.gate}_{self.gate_dtype}"
        if self.gate.startswith("raw"):
            gate += f"_{self.param_dtype}"
        beta = f"-{self.beta}_{self.beta_dtype}" if self.op in ("kda", "gdn") else ""
        return (f"{self.op}-{self.io}-s{self.state}-k{self.k}v{self.v}{self.layout}-h{self.heads[0]}x{self.heads[1]}-n{self.n}"
                f"-{gate}{beta}-l2{int(self.l2norm)}-sc{self.scale}-{self.rows}+{self.offset}-{self.pool}-{self.index}")

    def kernel_id(self, arch: str) -> str:
        return f"{self.op}_decode.{arch}.{self.io}.s{self.state}.k{self.k}.{self.layout}"


def feasible(row: dict) -> bool:
    """May these values be combined? A missing axis counts as its smallest value."""
    n = row.get("n", 0)
    if n != LARGE_N and n * row.get("heads", (1, 1))[1] * row.get("k", 64) * row.get("v", 64) > max(MAX_ELEMENTS, n * 64 * 64):
        return False
    # Without a pool there is no slot that an index could name, no state dtype, and nothing that tells K of a packed row.
    if row.get("pool") == "none" and (row.get("index", "none") != "none" or row.get("state", "fp32") != "fp32" or
                                      row.get("rows", "nhk").startswith("mixed")):
        return False
    # These forms do not have the operand whose dtype the axis varies.
    if row.get("gate") in ("none", "const_head") and row.get("gate_dtype", "fp32") != "fp32":
        return False
    return row.get("gate") in (None, "raw", "raw_nobias", "raw_noA", "raw_bound", "raw_bound_noA") or \
        row.get("param_dtype", "fp32") == "fp32"


def axes_of(op: str) -> dict:
    axes = dict(AXES, gate=GATES[op])
    if op in ("gla", "lightning"):
        axes.update(beta=("value",), beta_dtype=("fp32",), param_dtype=("fp32",))
    return axes


def groups_of(op: str) -> list[tuple[str, ...]]:
    return [*pairs(axes_of(op)),
            ("io", "state", "k", "layout", "v"),              # the kernels, and the tiles of the state
            ("layout", "state", "pool", "index"),             # addresses of slots
            ("io", "rows", "offset"),                         # alignment of rows
            ("layout", "gate", "gate_dtype", "param_dtype"),  # the decay
            ("layout", "k", "heads", "beta", "l2norm")]       # scalars of a head


def cases_of(op: str) -> list[Case]:
    return [Case(op=op, **row) for row in covering(axes_of(op), groups_of(op), feasible, seed=len(op),
                                                    cheap_first=("n",))]


def large_cases() -> list[Case]:
    """N = 4096, where a case costs seconds: every op, layout, state dtype, pool and index form, but not their pairs."""
    axes = dict(AXES, op=tuple(GATES), gate=("none",), gate_dtype=("fp32",), param_dtype=("fp32",), beta=("value",),
                beta_dtype=("fp32",), n=(LARGE_N,), k=(64,), v=(64,), heads=((1, 1),), pool=tuple(p for p in POOLS if p != "none"))
    groups = [("op",), ("layout", "state"), ("pool",), ("index",), ("io",), ("rows",)]
    return [Case(**row) for row in covering(axes, groups, feasible, seed=1)]


CASES = (*(case for op in GATES for case in cases_of(op)), *large_cases())

assert {f.name for f in fields(Case)} == {"op", *AXES}
__all__ = ["CASES", "Case", "axes_of", "cases_of", "combinations", "feasible", "groups_of"]
