"""Turns the result of run.py into Markdown, a plot and the short table at the end. Reads the JSON structure only."""

from __future__ import annotations

from pathlib import Path

from benchmarks.decode_inputs import CPU_SHARE_TARGET, SHARE_TARGET, US_TARGET_N1


def best(timings: list[dict]) -> dict | None:
    return min((t for t in timings if "us" in t), key=lambda t: t["us"], default=None)


def best_peer(row: dict) -> dict | None:
    return best(row["peers"])


def target_of(row: dict) -> tuple[str, bool] | None:
    """The promise for this row in words, and whether it holds; None where nothing is promised."""
    peer = best_peer(row)
    if row["n"] >= 128 and row["heads"][1] == 64:
        want = SHARE_TARGET[row["state"]]
        return f">= {want:.0%} of copy", row["share"] >= want
    if row["n"] == 1 and row["heads"][1] == 64 and row["state"] == "fp32":
        return f"<= {US_TARGET_N1} us", row["us"] <= US_TARGET_N1
    if peer:
        return f"< {peer['us']:.2f} us ({peer['lib']})", row["us"] < peer["us"]
    return None


def table(header: list[str], rows: list[list]) -> str:
    return "\n".join("| " + " | ".join(map(str, r)) + " |" for r in [header, ["---"] * len(header), *rows])


def decode_table(result: dict) -> str:
    rows = []
    for row in result["rows"]:
        head = [row["op"], row["state"], row["layout"], f"{row['heads'][0]}/{row['heads'][1]}", row["n"]]
        if "error" in row:
            rows.append([*head, "failed", row["error"][:60], "", "", "", ""])
            continue
        peer, target = best_peer(row), target_of(row)
        rows.append([*head, f"{row['us']:.2f}", f"{row['GBs']:.0f}", f"{row['share']:.1%}", f"{row['host_us']:.1f}",
                     f"{peer['us']:.2f} {peer['lib']} ({peer['source']})" if peer else "-",
                     f"{target[0]}: {'yes' if target[1] else 'NO'}" if target else "-"])
    return table(["op", "state", "layout", "heads", "N", "us", "GB/s", "share of copy", "host us", "best peer", "target"], rows)


def peers_table(result: dict) -> str:
    rows = []
    for row in result["rows"]:
        if row["layout"] == result["rows"][0]["layout"]:
            for p in row["peers"]:
                rows.append([row["op"], row["state"], f"{row['heads'][0]}/{row['heads'][1]}", row["n"], p["lib"], p["source"],
                             f"{p['us']:.2f}" if "us" in p else p["error"][:60],
                             f"{p['host_us']:.0f}" if "host_us" in p else "-"])
    return table(["op", "state", "heads", "N", "peer", "source", "us", "host us"], rows)


def accuracy_table(rows: list[dict]) -> str:
    return table(["op", "state", "layout", "out", "state error"],
                 [[r["op"], r["state"], r["layout"], f"{r['out']:.2e}", f"{r['state_error']:.2e}"] for r in rows])


def verdict(name: str, value: float, limit: float, unit: str) -> list:
    return [name, f"{value:.3g} {unit}", f"<= {limit:g} {unit}", "yes" if value <= limit else "NO"]


def host_table(result: dict) -> str:
    rows = []
    if "decode" in result:
        rows += [verdict("Python call, nine torch tensors, launch included", result["decode"]["host"]["python_us"], 8, "us"),
                 verdict("cula_run from C++", result["decode"]["host"]["cpp_us"], 5, "us")]
    if "cold" in result:
        rows.append(verdict("first GPU result beyond CUDA's own start", result["cold"]["beyond_cuda_s"], 0.5, "s"))
    rows.append(verdict("import cula", result["import"]["ms"], 100, "ms"))
    return table(["what", "measured", "target", "met"], rows)


def cpu_table(result: dict) -> str:
    rows = []
    for r in result["rows"]:
        bound = r["n"] >= 128  # the promise; a call of a small batch is over before every thread has woken up
        rows.append([r["op"], r["state"], r["layout"], r["n"], f"{r['us']:.0f}", f"{r['us_min']:.0f}", f"{r['GBs']:.1f}", f"{r['share']:.0%}",
                     ("yes" if r["share"] >= CPU_SHARE_TARGET else "NO") if bound else "-"])
    return table(["op", "state", "layout", "N", "us", "best us", "GB/s", "share of memory rate", f">= {CPU_SHARE_TARGET:.0%}"], rows)


def markdown(result: dict) -> str:
    machine = result["machine"]
    parts = ["# Benchmark", ", ".join(f"{k}: {v}" for k, v in machine.items()),
             "us: median time a call in a CUDA graph that rotates over states of 600 MB in all, L2 flushed before each replay. "
             "Share: least bytes (states in and out, rows once) over the time, against the copy rate of the same run. Peers "
             "marked `PEERS.md` are recorded figures of an H200, the others were measured in this run. On the CPU: the wall clock, states of four times "
             "the last-level caches."]
    if "decode" in result:
        d = result["decode"]
        parts += [f"## GPU decode, copy {d['copy_GBs']:.0f} GB/s", decode_table(d), "## Peers", peers_table(d),
                  "## Accuracy (relative RMSE against float64, N = 8)", accuracy_table(d["accuracy"])]
    parts += ["## Host", host_table(result)]
    if "cpu" in result:
        c = result["cpu"]
        parts += [f"## cpu arch, {c['cores']} cores, memory {c['memory_GBs']:.1f} GB/s", cpu_table(c),
                  "## Accuracy on the cpu arch", accuracy_table(c["accuracy"])]
    return "\n\n".join(parts) + "\n"


def short(result: dict) -> str:
    """What fits on a screen: the promised figures."""
    lines = []
    if "decode" in result:
        d = result["decode"]
        lines.append(f"copy {d['copy_GBs']:.0f} GB/s")
        for row in d["rows"]:
            name = f"{row['op']:9} {row['state']} {row['layout']} {row['heads'][0]:>2}/{row['heads'][1]:<2} N={row['n']:<4}"
            if "error" in row:
                lines.append(f"{name} FAILED {row['error'][:80]}")
            elif target := target_of(row):
                lines.append(f"{name} {row['us']:8.2f} us {row['share']:6.1%}  target {target[0]:26} "
                             f"{'ok' if target[1] else 'MISSED'}")
        worst = {kind: max((a for a in d["accuracy"] if a["state"] == kind), key=lambda a: a["state_error"])
                 for kind in ("fp32", "bf16")}
        lines.append("accuracy: out {:.2e}, fp32 state {:.2e}, bf16 state {:.2e} (worst op)".format(
            max(a["out"] for a in d["accuracy"]), worst["fp32"]["state_error"], worst["bf16"]["state_error"]))
    lines += [line.strip("| ").replace(" | ", "  ") for line in host_table(result).splitlines()[2:]]
    if "cpu" in result:
        big = [r for r in result["cpu"]["rows"] if r["n"] >= 128]
        lines.append(f"cpu arch: {min(r['share'] for r in big):.0%} to {max(r['share'] for r in big):.0%} of "
                     f"{result['cpu']['memory_GBs']:.1f} GB/s (target {CPU_SHARE_TARGET:.0%})")
    return "\n".join(lines)


def decode_panels(d: dict) -> dict[str, dict]:
    """Title -> lines of a plot over N: name -> [(N, share of the copy rate)]."""
    panels = {}
    for panel in sorted({(r["op"], r["state"], tuple(r["heads"])) for r in d["rows"]}):
        here = [r for r in d["rows"] if (r["op"], r["state"], tuple(r["heads"])) == panel and "us" in r]
        lines = {f"cula {layout}": [(r["n"], r["share"]) for r in here if r["layout"] == layout] for layout in sorted({r["layout"] for r in here})}
        for r in (r for r in here if r["layout"] == "vk"):
            for p in r["peers"]:
                if "us" in p:
                    lines.setdefault(p["lib"], []).append((r["n"], r["bytes"] / p["us"] / 1e3 / d["copy_GBs"]))
        panels[f"{panel[0]} {panel[1]} {panel[2][0]}/{panel[2][1]}"] = lines
    return panels


def prefill_panels(p: dict) -> dict[str, dict]:
    """Title -> lines of a plot over the shapes, for each kind of gates: name -> [(shape, share of the copy rate)]. Where a variant that
    was asked for is faster than the plan's choice, it shows above it."""
    panels = {}
    for gates in sorted({r["gates"] for r in p["rows"]}):
        lines: dict[str, list] = {}
        for r in (r for r in p["rows"] if r["gates"] == gates):
            shape = f"H={r['heads']}, {r['shape']}"
            variant = best(r["variants"])
            for name, timed in (("cula", r), ("best variant", variant), *((peer["lib"], peer) for peer in r["peers"])):
                if timed and "us" in timed:
                    lines.setdefault(name, []).append((shape, r["floor_us"] / timed["us"]))
        if lines:
            panels[f"kda_prefill, {gates} gates"] = lines
    return panels


def plot(result: dict, path: Path) -> str | None:
    """Share of the copy rate: decode over N, prefill over its shapes. Returns why there is no plot, or None."""
    decode = decode_panels(result["decode"]) if "decode" in result else {}
    prefill = prefill_panels(result["prefill"]) if "prefill" in result else {}
    if not decode and not prefill:
        return "no GPU rows to plot"
    try:
        import matplotlib
    except ImportError:
        return "matplotlib is not installed"
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    columns, wide = 4, 2  # a panel of prefill has fifteen names below it
    above = -(-len(decode) // columns)
    rows = above + -(-len(prefill) * wide // columns)
    figure = plt.figure(figsize=(16, 3.2 * above + 4.2 * (rows - above)))
    grid = figure.add_gridspec(rows, columns)
    places = [grid[i // columns, i % columns] for i in range(len(decode))]
    places += [grid[above + i * wide // columns, i * wide % columns : i * wide % columns + wide] for i in range(len(prefill))]
    for number, (place, (title, lines)) in enumerate(zip(places, [*decode.items(), *prefill.items()])):
        axis, over_n = figure.add_subplot(place), number < len(decode)
        if not over_n:  # all shapes in the order of the rows, also those that only a peer has
            shapes = list(dict.fromkeys(f"H={r['heads']}, {r['shape']}" for r in result["prefill"]["rows"]))
            axis.set_xticks(range(len(shapes)), shapes, fontsize=7, rotation=35, ha="right")
            lines = {name: [(shapes.index(shape), share) for shape, share in line] for name, line in lines.items()}
        for name, line in lines.items():
            ours = name.split()[0] == "cula"
            axis.plot(*zip(*line), marker="o" if ours else ".", label=name, linestyle=("-" if ours else "--") if over_n else "")
        axis.set(title=title, ylim=(0, 1.05), ylabel="share of the copy rate", **({"xscale": "log", "xlabel": "N"} if over_n else {}))
        if lines:
            axis.legend(fontsize=7)
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return None
