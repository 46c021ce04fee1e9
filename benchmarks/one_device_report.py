"""Tables and a plot from what `one_device.py` measured: printed, and written to docs/benchmarks.md."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from matplotlib import pyplot
from matplotlib.axes import Axes
from rich.console import Console

from benchmarks.tables import Cells, markdown_table, rich_table, yes

MODES = {"forward": "forward", "both": "forward + backward"}
ASKED_SHARE = {"forward": 0.93, "both": 0.95}
ASKED_GROWTH = 2.1
ASKED_MEMORY_MIB = 32
STYLES = {"ringspan": ("#0072B2", ""), "SDPA with a mask": ("#E69F00", "//"), "FlexAttention": ("#999999", "..")}


def write_report(results: dict[str, Any], machine: str, root: Path, console: Console) -> None:
    """Print every table, and write docs/benchmarks.md and its figure."""
    tables = {
        "Share of the bare kernel": (
            "Throughput as a share of the flash kernel called on contiguous tiles of the same shapes: nothing but "
            "the kernel, without segments, merging, or gradients to add up. Both take turns; the share is given as the "
            "median of the ratios of turns and as the ratio of medians, with the lowest and the highest turn.",
            share_table(results["kernel_share"]),
        ),
        "Growth with length": (
            f"Time at 2n over time at n, taking turns in the same rounds (asked: at most {ASKED_GROWTH}).",
            growth_table(results["growth"]),
        ),
        "Beside torch's own": (
            "The same function by `scaled_dot_product_attention` with the pattern as a mask, and by compiled "
            "FlexAttention with a block mask; forward, each in a process of its own. Memory is the peak beyond inputs, "
            "masks included.",
            peer_table(results["peers"]),
        ),
        "Memory of the forward pass": (
            f"Peak beyond inputs, output and lse (asked: under {ASKED_MEMORY_MIB} MiB).",
            memory_table(results["memory"]),
        ),
    }
    page = [
        "# Benchmarks: one device",
        "",
        "Written by `make bench`; do not edit. "
        "8 heads of 64, fp32, batch 1; segments 2048, 4096 .. 32768 with rates 1, 2 .. 16.",
        "",
        f"Machine: {machine}.",
        "",
        "![Time and memory beside torch's own attention](figures/one_device.png)",
    ]
    for title, (text, cells) in tables.items():
        console.print(rich_table(title, cells))
        page += ["", f"## {title}", "", text, "", *markdown_table(cells)]
    console.print(f"Machine: {machine}")
    (root / "docs/benchmarks.md").write_text("\n".join(page) + "\n")
    figure = root / "docs/figures/one_device.png"
    figure.parent.mkdir(exist_ok=True)
    draw(results, machine, figure)
    console.print(f"Written: docs/benchmarks.md and {figure.relative_to(root)}")


def share_table(rows: list[dict[str, Any]]) -> Cells:
    cells = [
        ["n", "causal", "pass", "ringspan", "bare kernel", "median of ratios", "ratio of medians", "spread", "asked"]
    ]
    for row in rows:
        seconds = [f"{statistics.median(row[side]):.2f} s" for side in ("ours", "bare")]
        start = [str(row["n"]), yes(row["causal"]), MODES[row["mode"]], *seconds]
        cells.append([*start, *_both_statistics(row["bare"], row["ours"]), f"{ASKED_SHARE[row['mode']]:.2f}"])
    return cells


def growth_table(rows: list[dict[str, Any]]) -> Cells:
    """Time at 2n over time at n, by both statistics."""
    cells = [["n", "2n", "causal", "pass", "median of ratios", "ratio of medians", "spread", "asked"]]
    for row in rows:
        seconds = {int(n): found for n, found in row["seconds"].items() if n != "foreign_cores"}
        for n, short in seconds.items():
            if 2 * n in seconds:
                start = [str(n), str(2 * n), yes(row["causal"]), MODES[row["mode"]]]
                cells.append([*start, *_both_statistics(seconds[2 * n], short), f"{ASKED_GROWTH}"])
    return cells


def _both_statistics(above: list[float], below: list[float]) -> list[str]:
    """The median of the ratios of turns, the ratio of the medians, and the spread of the ratios."""
    ratios = [a / b for a, b in zip(above, below, strict=True)]
    of_medians = statistics.median(above) / statistics.median(below)
    return [f"{statistics.median(ratios):.3f}", f"{of_medians:.3f}", f"{min(ratios):.2f} - {max(ratios):.2f}"]


def peer_table(rows: list[dict[str, Any]]) -> Cells:
    ours = {(r["n"], r["causal"]): r for r in rows if r["name"] == "ringspan"}
    cells = [["n", "causal", "implementation", "time", "ours is faster by", "peak memory", "ours is smaller by"]]
    for row in rows:
        ref = ours[row["n"], row["causal"]]
        start = [str(row["n"]), yes(row["causal"]), row["name"]]
        if row["failure"]:
            cells.append([*start, row["failure"], "", "", ""])
            continue
        times = "" if row is ref else f"{row['seconds'] / ref['seconds']:.1f} x"
        bytes_ = "" if row is ref else f"{row['peak_bytes'] / ref['peak_bytes']:.1f} x"
        cells.append([*start, f"{row['seconds']:.2f} s", times, f"{row['peak_bytes'] / 2**20:.0f} MiB", bytes_])
    return cells


def memory_table(rows: list[dict[str, Any]]) -> Cells:
    cells = [["n", "causal", "beyond inputs, output and lse"]]
    return cells + [
        [str(r["n"]), yes(r["causal"]), r["failure"] or f"{r['beyond_results_bytes'] / 2**20:.1f} MiB"] for r in rows
    ]


def draw(results: dict[str, Any], machine: str, path: Path) -> None:
    """Bars: time and peak memory of each implementation at each length, not causal and causal."""
    cases = sorted({(r["n"], r["causal"]) for r in results["peers"]})
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for axis, key, scale, unit in ((axes[0], "seconds", 1.0, "s"), (axes[1], "peak_bytes", 2**20, "MiB")):
        for i, name in enumerate(STYLES):
            rows = {(r["n"], r["causal"]): r for r in results["peers"] if r["name"] == name}
            for x, case in enumerate(cases):
                _bar(axis, x + (i - 1) * 0.28, rows[case], key, scale, name, label=x == 0)
        axis.set_yscale("log")
        axis.margins(y=0.15)
        axis.set_xticks(range(len(cases)), [f"{n:,}\n{'causal' if causal else 'not causal'}" for n, causal in cases])
        axis.set_xlabel("tokens")
        axis.set_ylabel(f"{'time' if key == 'seconds' else 'peak memory'} ({unit}, log scale)")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False, loc="upper left")
    figure.suptitle("Dilated attention, forward: lower is better", fontsize=12)
    figure.supxlabel(f"8 heads of 64, fp32; {machine}", fontsize=8, color="#555555")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _bar(axis: Axes, x: float, row: dict[str, Any], key: str, scale: float, name: str, label: bool) -> None:
    if row["failure"]:
        bottom = axis.get_xaxis_transform()
        axis.text(x, 0.02, "does not fit", rotation=90, ha="center", va="bottom", fontsize=8, transform=bottom)
        return
    value, (colour, hatch) = row[key] / scale, STYLES[name]
    axis.bar(x, value, 0.26, color=colour, hatch=hatch, edgecolor="white", label=name if label else None)
    axis.text(x, value, f"{value:.2g}" if value < 10 else f"{value:.0f}", ha="center", va="bottom", fontsize=8)
