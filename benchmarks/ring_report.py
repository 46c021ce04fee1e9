"""Tables and plots from what `ring.py` measured: printed, and written to docs/ring_results.md."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from matplotlib import pyplot
from rich.console import Console

import ringspan as rs
from benchmarks.peers import DIM, HEADS
from benchmarks.tables import Cells, markdown_table, rich_table, yes

SPEED_TEXT = """\
One thread a rank, trials interleaved, the slower rank counting. The ceiling is 2 t1 / t2, where t1 is one process that
computes the whole alone, and t2 two processes that each compute the whole at the same time without any communication:
what caches and memory leave of 2. Times are medians. Each ratio is given twice: the median of the ratios of single
rounds, in which a drift of the machine cancels, and the ratio of the medians; the spread is that of single rounds.
Asked: at least 0.95 of the ceiling, and 1.8 x."""
PEER_TEXT = """\
Plain attention on the same two ranks, in the same rounds: time over ringspan's (median of ratios, ratio of medians).
ring-attention-pytorch is called with its own bucket size (1024), and beside it with the one that is fastest here (512).
Asked: at least 0.97 x for torch's own ring, at least 2.5 x for ring-attention-pytorch, and 5 x under causality."""
MEMORY_TEXT = """\
Fresh processes, 8 heads of 64, fp32, causal, forward and backward, each rank making only its own rows: peak growth of a
rank, fitted as a + b / k over the ring sizes k. Asked: a at most 64 MiB, b within 10 % of the growth at k = 1. A ring
of one has no parcels, so they are fitted apart where they are large (`Full`); they too fall as 1 / k."""
MODES = {"forward": "forward", "both": "forward + backward"}


def write_report(results: dict[str, Any], machine: str, root: Path, console: Console) -> None:
    """Print every table, and write docs/ring_results.md and its figures."""
    fits = {name: fit([r for r in results["memory"] if r["name"] == name]) for name in ("dilated", "full")}
    own = fit([r for r in results["memory"] if r["name"] == "full"], without_parcels=True)
    tables = {
        "Speed: two ranks against one": (SPEED_TEXT, speed_table(results["speed"])),
        "Other rings": (PEER_TEXT, peer_table(results["speed"])),
        "Memory by ring size": (
            f"{MEMORY_TEXT}\n\n"
            f"- {_fit_text('dilated', *fits['dilated'])}\n"
            f"- {_fit_text('full, without parcels', *own)}; {_against_plan(own[1], results['memory'])}",
            memory_table(results["memory"]),
        ),
        "Bytes on the wire": (
            f"Segments (2048, 8192, 32768), rates (1, 4, 16), n = {results['bytes']['n']}, "
            f"{results['bytes']['ranks']} ranks, 8 heads of 64, fp32; bytes sent by all ranks together. The loopback "
            "interface counts frames, acknowledgements and two barriers too.",
            bytes_table(results["bytes"]),
        ),
        "Error by ring size": (
            "Relative error (2-norm) against the dense fp64 oracle, 1,024 tokens, simulated rings.",
            error_table(results["error"]),
        ),
    }
    page = ["# The ring, measured", "", "Written by `make bench`; do not edit.", "", f"Machine: {machine}.", ""]
    page += ["![Memory and error by ring size](figures/ring_memory.png)"]
    for title, (text, cells) in tables.items():
        console.print(rich_table(title, cells))
        page += ["", f"## {title}", "", text, "", *markdown_table(cells)]
    (root / "docs/ring_results.md").write_text("\n".join(page) + "\n")
    draw(results, fits, machine, root / "docs/figures/ring_memory.png")
    console.print(f"Machine: {machine}\nWritten: docs/ring_results.md and docs/figures/ring_memory.png")


def speed_table(rows: list[dict[str, Any]]) -> Cells:
    cells = [
        ["pattern", "n", "causal", "pass", "alone", "ring of 2", "speed-up", "ceiling", "of the ceiling", "spread"]
    ]
    for row in rows:
        alone, two, ring = (row["seconds"][name] for name in ("alone", "two alone", "ring"))
        of_ceiling = _ratios(two, [2 * seconds for seconds in ring])
        cells.append(
            [
                row["name"],
                str(row["n"]),
                yes(row["causal"]),
                MODES[row["mode"]],
                f"{statistics.median(alone):.2f} s",
                f"{statistics.median(ring):.2f} s",
                f"{_both(alone, ring)} x",
                f"{_both([2 * seconds for seconds in alone], two)} x",
                _both(two, [2 * seconds for seconds in ring]),
                f"{min(of_ceiling):.2f} - {max(of_ceiling):.2f}",
            ]
        )
    return cells


def peer_table(rows: list[dict[str, Any]]) -> Cells:
    names = {"torch": "torch's ring", "ring-attention-pytorch": "ring-attention-pytorch", "the same, tuned": "tuned"}
    cells = [["n", "causal", "pass", "ringspan", *names.values()]]
    for row in rows:
        times = row["seconds"]
        if "torch" not in times:
            continue
        peers = []
        for name in names:
            if name not in times:
                peers.append("not installed")
                continue
            peers.append(f"{statistics.median(times[name]):.2f} s: {_both(times[name], times['ring'])} x")
        ours = f"{statistics.median(times['ring']):.2f} s"
        cells.append([str(row["n"]), yes(row["causal"]), MODES[row["mode"]], ours, *peers])
    return cells


def _ratios(over: list[float], under: list[float]) -> list[float]:
    """Round by round, so that a drift of the machine cancels."""
    return [a / b for a, b in zip(over, under, strict=True)]


def _both(over: list[float], under: list[float]) -> str:
    """The median of the ratios, and the ratio of the medians."""
    of_medians = statistics.median(over) / statistics.median(under)
    return f"{statistics.median(_ratios(over, under)):.2f}, {of_medians:.2f}"


def fit(rows: list[dict[str, Any]], without_parcels: bool = False) -> tuple[float, float, float]:
    """Least squares of the largest peak of each ring size as a + b / k; also the growth at k = 1."""
    xs = [1 / row["ring_size"] for row in rows]
    ys = []
    for row in rows:
        parcels = row["parcel_bytes"] if without_parcels else [0] * row["ring_size"]
        ys.append(float(max(peak - held for peak, held in zip(row["peak_bytes"], parcels, strict=True))))
    slope, intercept = statistics.linear_regression(xs, ys)
    return intercept, slope, ys[xs.index(1.0)]


def _fit_text(name: str, a: float, b: float, one: float) -> str:
    return f"{name}: a = {a / 2**20:.0f} MiB, b = {b / 2**20:,.0f} MiB ({b / one:.2f} of the growth at k = 1)"


def _against_plan(b: float, rows: list[dict[str, Any]]) -> str:
    """b beside the rows of one process by the plan: at this length the workspace is a tenth of the growth at k = 1."""
    n = next(row["n"] for row in rows if row["name"] == "full")
    planned = rs.plan(rs.Full(), n, causal=True, heads=HEADS, head_dim=DIM).memory(0, backward=True).rows
    return f"{b / planned:.2f} of the {planned / 2**20:,.0f} MiB that all rows take by the plan"


def memory_table(rows: list[dict[str, Any]]) -> Cells:
    cells = [["pattern", "n", "ranks", "largest peak", "smallest peak", "of the largest, parcels", "parcels x ranks"]]
    for row in rows:
        largest = max(range(row["ring_size"]), key=lambda rank: row["peak_bytes"][rank])
        parcels = row["parcel_bytes"][largest]
        sizes = (max(row["peak_bytes"]), min(row["peak_bytes"]), parcels, parcels * row["ring_size"])
        cells.append([row["name"], str(row["n"]), str(row["ring_size"]), *(f"{x / 2**20:,.0f} MiB" for x in sizes)])
    return cells


def bytes_table(found: dict[str, Any]) -> Cells:
    cells = [["layout", "causal", "pass", "planned", "counted by the ranks", "loopback interface", "of a plain ring"]]
    for row in found["rows"]:
        for what in ("forward", "backward"):
            figures = row[what]
            plain = found["plain_ring"] * (1 if what == "forward" else 2)
            over = f" (+{figures['wire'] / figures['counted'] - 1:.1%})" if figures["counted"] else ""
            cells.append(
                [
                    row["layout"],
                    yes(row["causal"]),
                    what,
                    f"{figures['planned']:,}",
                    f"{figures['counted']:,}",
                    f"{figures['wire']:,}{over}",
                    f"{figures['planned'] / plain:.1%}",
                ]
            )
    plain = f"{found['plain_ring']:,}"
    cells.append(["plain ring of K and V", "no", "forward", plain, "", "", "100.0%"])
    cells.append(["all-gather of K and V", "no", "forward", f"{found['all_gather']:,}", "", "", "100.0%"])
    return cells


def error_table(rows: list[dict[str, Any]]) -> Cells:
    cells = [["dtype", "ranks", "output", "gradients"]]
    return cells + [
        [r["dtype"].removeprefix("torch."), str(r["ring_size"]), f"{r['output']:.2e}", f"{r['gradients']:.2e}"]
        for r in rows
    ]


def draw(results: dict[str, Any], fits: dict[str, tuple[float, float, float]], machine: str, path: Path) -> None:
    """Left: peak memory of a rank by ring size, with the fit. Right: error by ring size."""
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for name, colour, marker in (("dilated", "#0072B2", "o"), ("full", "#E69F00", "s")):
        rows = [r for r in results["memory"] if r["name"] == name]
        sizes = [r["ring_size"] for r in rows]
        left.plot(
            sizes,
            [max(r["peak_bytes"]) / 2**20 for r in rows],
            marker,
            color=colour,
            label=f"{name}, n = {rows[0]['n']:,}",
        )
        a, b, _ = fits[name]
        curve = [1 + i * 0.1 for i in range(71)]
        left.plot(
            curve,
            [(a + b / k) / 2**20 for k in curve],
            color=colour,
            linewidth=1,
            label=f"{a / 2**20:.0f} + {b / 2**20:,.0f} / k MiB",
        )
    left.set(
        xlabel="ranks k", ylabel="peak memory of a rank (MiB, log scale)", title="Memory falls as 1/k", yscale="log"
    )
    left.set_xticks([1, 2, 4, 8])
    left.legend(frameon=False)
    for dtype, colour in (("torch.float32", "#0072B2"), ("torch.bfloat16", "#E69F00")):
        rows = [r for r in results["error"] if r["dtype"] == dtype]
        for key, style in (("output", "-o"), ("gradients", "--s")):
            label = f"{dtype.removeprefix('torch.')}, {key}"
            right.plot(
                [r["ring_size"] for r in rows], [r[key] for r in rows], style, color=colour, markersize=4, label=label
            )
    right.set(
        xlabel="ranks k",
        ylabel="relative error (log scale)",
        title="The error does not grow with the ring",
        yscale="log",
    )
    right.legend(frameon=False, fontsize=8)
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
    figure.supxlabel(f"8 heads of 64, fp32, causal, forward and backward; {machine}", fontsize=8, color="#555555")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
