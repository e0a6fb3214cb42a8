"""The result of a run as a table and as a plot."""

from __future__ import annotations

from pathlib import Path

HEADER = ("op", "state", "heads", "N", "us", "GB/s", "of copy", "kernel")


def line(row: dict) -> str:
    head = f"{row['op']:<10} {row['state']:<5} {row['heads'][0]:>3}/{row['heads'][1]:<3} {row['n']:>5}"
    if "error" in row:
        return f"{head}  {row['error']}"
    return f"{head} {row['us']:>10.2f} {row['GBs']:>9.1f} {row['share']:>8.1%}  {row['kernel']}"


def header() -> str:
    return f"{HEADER[0]:<10} {HEADER[1]:<5} {HEADER[2]:>7} {HEADER[3]:>5} {HEADER[4]:>10} {HEADER[5]:>9} {HEADER[6]:>8}  {HEADER[7]}"


def plot(result: dict, path: Path) -> str:
    """Share of the copy rate over N, a panel for each op and heads. Returns why there is no plot, "" if there is."""
    rows = [row for row in result["rows"] if "us" in row]
    if not rows:
        return "nothing was measured"
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return "matplotlib is not installed"
    panels = sorted({(row["op"], tuple(row["heads"])) for row in rows})
    columns = min(3, len(panels))
    figure = Figure(figsize=(4.5 * columns, 3.4 * -(-len(panels) // columns)))
    axes = figure.subplots(-(-len(panels) // columns), columns, squeeze=False, sharey=True)
    for axis, (op, heads) in zip(axes.flat, panels):
        for state in ("fp32", "bf16"):
            points = sorted((row["n"], row["share"]) for row in rows if (row["op"], tuple(row["heads"]), row["state"]) == (op, heads, state))
            if points:
                axis.plot(*zip(*points), marker="o", label=f"{state} state")
        batches = sorted({row["n"] for row in rows})
        axis.set(title=f"{op} {heads[0]}/{heads[1]} heads", xlabel="N", ylim=(0, None))
        axis.set_xscale("log", base=2)
        axis.set_xticks(batches, batches)
        axis.minorticks_off()
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    for axis in list(axes.flat)[len(panels):]:
        axis.set_visible(False)
    axes[0][0].set_ylabel("share of the copy rate")
    figure.suptitle(f"cula {result['version']} decode, {result['machine']}, copy {result['copy_GBs']:.0f} GB/s")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    return ""
