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
            "the kernel, without segments, merging, or gradients to add up. Both take turns; the share is the median "
            "of the ratios of the turns, with the lowest and the highest.",
            share_table(results["kernel_share"]),
        ),
        "Growth with length": (
            f"Time at 2n over time at n, taking turns in the same rounds: the median (asked: at most {ASKED_GROWTH}).",
            growth_table(results["kernel_share"]),
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
    cells = [["n", "causal", "pass", "ringspan", "bare kernel", "share", "spread", "asked"]]
    for row in rows:
        if not row["bare"]:
            continue  # measured for the growth only
        ratios = [bare / ours for ours, bare in zip(row["ours"], row["bare"], strict=True)]
        cells.append(
            [
                str(row["n"]),
                yes(row["causal"]),
                MODES[row["mode"]],
                f"{statistics.median(row['ours']):.2f} s",
                f"{statistics.median(row['bare']):.2f} s",
                f"{statistics.median(ratios):.2f}",
                f"{min(ratios):.2f} - {max(ratios):.2f}",
                f"{ASKED_SHARE[row['mode']]:.2f}",
            ]
        )
    return cells


def growth_table(rows: list[dict[str, Any]]) -> Cells:
    """The median over rounds of (time at 2n / time at n); where n had several turns in a round, their median counts."""
    times = {(r["n"], r["causal"], r["mode"]): r["ours"] for r in rows}
    rounds = min(len(seconds) for seconds in times.values())
    cells = [["n", "2n", "causal", "pass", "time at 2n / time at n", "spread"]]
    for (n, causal, mode), short in times.items():
        long = times.get((2 * n, causal, mode))
        if long is None:
            continue
        turns = len(short) // rounds
        ratios = [long[i] / statistics.median(short[i * turns : (i + 1) * turns]) for i in range(rounds)]
        spread = f"{min(ratios):.2f} - {max(ratios):.2f}"
        cells.append([str(n), str(2 * n), yes(causal), MODES[mode], f"{statistics.median(ratios):.2f}", spread])
    return cells


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
