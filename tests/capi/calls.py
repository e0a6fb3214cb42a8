"""Valid calls of every op, to be changed in one place by a test."""

from __future__ import annotations

from tests.capi.abi import BETAS, GATES, GPU, Call, tensor

CHANNEL_OPS = ("kda_decode", "gla_decode")
DELTA_OPS = ("kda_decode", "gdn_decode")
LOG_GATE = {"kda_decode": "LOG_CHANNEL", "gla_decode": "LOG_CHANNEL", "gdn_decode": "LOG_HEAD", "lightning_decode": "LOG_HEAD"}


def decode(op="kda_decode", n=4, h=2, hv=4, k=128, v=128, io="bf16", state="fp32", layout="vk", gate=None, gate_dtype="fp32", beta="VALUE",
           slots=None, rows="n", device=(GPU, 0), mixed=False, pools=True, **fields) -> Call:
    """rows: "n" [N,...], "n1" [N,1,...], "1n" [1,N,...]. gate None: the op's log gate. More fields go into the struct."""
    lead = {"n": [n], "n1": [n, 1], "1n": [1, n]}[rows]

    def t(tail, dtype):
        return tensor([*lead, *tail], dtype, device=device)

    gate = gate or LOG_GATE[op]
    x = {"out": t([hv, v], io)}
    if mixed:
        x["mixed_qkv"] = t([2 * h * k + hv * v], io)
    else:
        x.update(q=t([h, k], io), k=t([h, k], io), v=t([hv, v], io))
    if gate == "CONST_HEAD":
        x["gate"] = tensor([hv], "fp32", device=device)
    elif gate != "NONE":
        x["gate"] = t([hv, k] if op in CHANNEL_OPS else [hv], gate_dtype)
    if gate == "RAW":
        x["A_log"] = tensor([hv], "fp32", device=device)
        x["dt_bias"] = tensor([hv, k] if op in CHANNEL_OPS else [hv], "fp32", device=device)
    if op in DELTA_OPS:
        x["beta"] = t([hv], "fp32")
    if pools:
        tile = [v, k] if layout == "vk" else [k, v]
        x["state"] = tensor([n if slots is None else slots, hv, *tile], state, device=device)
    fields = {"gate_kind": GATES[gate], "beta_kind": BETAS[beta], "state_layout": 0 if layout == "vk" else 1, **fields}
    return Call(op, x, **fields)


def prefill(b=2, t=100, h=2, hv=4, k=128, v=128, io="bf16", state="fp32", layout="vk", gate="LOG_CHANNEL", gate_dtype="bf16", beta="VALUE", cu=None,
            packed=False, slots=None, pools=True, device=(GPU, 0), **fields) -> Call:
    """cu: dtype of cu_seqlens, with which there are b sequences in a row of t tokens; packed: no B then. pools: state and state_out.
    More fields go into the struct."""
    lead = [b, t] if cu is None else [t] if packed else [1, t]

    def tokens(tail, dtype):
        return tensor([*lead, *tail], dtype, device=device)

    x = {"q": tokens([h, k], io), "k": tokens([h, k], io), "v": tokens([hv, v], io), "out": tokens([hv, v], io), "gate": tokens([hv, k], gate_dtype),
         "beta": tokens([hv], "fp32")}
    if gate == "RAW":
        x["A_log"], x["dt_bias"] = tensor([hv], "fp32", device=device), tensor([hv, k], "fp32", device=device)
    if cu:
        x["cu_seqlens"] = tensor([b + 1], cu, device=device)
    if pools:
        shape = [b if slots is None else slots, hv, *([v, k] if layout == "vk" else [k, v])]
        x["state"], x["state_out"] = tensor(shape, state, device=device), tensor(shape, state, device=device)
    fields = {"gate_kind": GATES[gate], "beta_kind": BETAS[beta], "state_layout": 0 if layout == "vk" else 1, **fields}
    return Call("kda_prefill", x, **fields)


def gate(op="kda_gate", shape=(5, 4, 128), io="bf16", g="fp32", beta=False, device=(GPU, 0), params=True, **fields) -> Call:
    shape = list(shape)
    hv = shape[-2] if op == "kda_gate" else shape[-1]
    x = {"x": tensor(shape, io, device=device), "g": tensor(shape, g, device=device)}
    if params:
        x["A_log"] = tensor([hv], "fp32", device=device)
        x["dt_bias"] = tensor([hv, shape[-1]] if op == "kda_gate" else [hv], "fp32", device=device)
    if beta:
        lead = shape[:-1] if op == "kda_gate" else shape
        x["beta"], x["beta_out"] = tensor(lead, "bf16", device=device), tensor(lead, "fp32", device=device)
        fields.setdefault("beta_kind", 1)
    return Call(op, x, **fields)


def l2norm(shape=(5, 4, 128), io="bf16", y="bf16", rstd=False, device=(GPU, 0), **fields) -> Call:
    x = {"x": tensor(shape, io, device=device), "y": tensor(shape, y, device=device)}
    if rstd:
        x["rstd"] = tensor(shape[:-1], "fp32", device=device)
    return Call("l2norm", x, **fields)


VALID = {
    "kda_decode": decode, "gdn_decode": lambda: decode("gdn_decode"), "gla_decode": lambda: decode("gla_decode"),
    "lightning_decode": lambda: decode("lightning_decode"), "kda_prefill": prefill, "kda_gate": gate, "gdn_gate": lambda: gate("gdn_gate", (5, 64)),
    "l2norm": l2norm,
}  # fmt: skip
