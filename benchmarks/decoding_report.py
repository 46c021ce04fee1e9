"""A table and a figure from what `decoding.py` measured: printed, and written into docs/decoding.md."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from matplotlib import pyplot
from rich.console import Console

from benchmarks.tables import Cells, markdown_table, rich_table
from ringspan.tools.pages import write_into

MIB = 2**20
FIRST_FLAT = 16384  # from here on every branch has been full once: the memory is all there


def write_report(results: dict[str, Any], machine: str, root: Path, console: Console) -> None:
    """Print the table, and write it and the figure into the page."""
    bounded, full = results["bounded"], results["full"]
    cells = table(bounded["windows"], full)
    spread, beside, growth = flatness(bounded["windows"])
    most = max(row["most_rows"] for row in bounded["windows"])
    sentence = (
        f"{bounded['windows'][-1]['tokens']:,} tokens, one after another. Time for a token, over tenths of the text: "
        f"within **{beside:.1%}** of their mean, measured in short texts that were written in turns with it (asked: "
        f"10 %); by the clock, which sees a machine that is slower for a while, within {spread:.1%}. "
        f"Memory of the process from token {FIRST_FLAT:,} on: "
        f"grew by {growth / MIB:.1f} MiB. A KV head held at most {most:,} rows in a layer; the bound is "
        f"{bounded['bound']:,}. The last logits differ from those of one forward pass over the whole text by "
        f"{bounded['apart']:.0e} of the largest (fp32). Time is that of the processor, on one thread, so that other "
        "programs count little."
    )
    console.print(rich_table("Decoding", cells))
    console.print(sentence, highlight=False)
    lines = [
        "",
        sentence,
        "",
        *markdown_table(cells),
        "",
        "![Time and memory for each token](figures/decoding.png)",
        "",
    ]
    lines += [f"Written by `python -m benchmarks.decoding`. {machine}.", ""]
    write_into(root / "docs/decoding.md", "benchmarks.decoding", lines)
    draw(bounded["windows"], full, root / "docs/figures/decoding.png")


def flatness(windows: list[dict[str, Any]]) -> tuple[float, float, int]:
    """How far the time of a tenth of the text is from the mean, at most: by the clock, and by short texts beside it.

    And how much resident memory grew once all is full.
    """
    tenth = max(1, len(windows) // 10)
    tenths = [windows[i : i + tenth] for i in range(0, len(windows), tenth)]
    times = [statistics.fmean(row["seconds"] for row in rows) for rows in tenths]
    ratios = [
        time / statistics.fmean(row["short_seconds"] for row in rows) for time, rows in zip(times, tenths, strict=True)
    ]
    later = [row["resident_bytes"] for row in windows if row["tokens"] > FIRST_FLAT]
    return _farthest(times), _farthest(ratios), max(later) - later[0]


def _farthest(numbers: list[float]) -> float:
    mean = statistics.fmean(numbers)
    return max(abs(x / mean - 1) for x in numbers)


def table(windows: list[dict[str, Any]], full: list[dict[str, Any]]) -> Cells:
    cells = [["token", "bounded: time", "of a short text's", "cache", "full: time", "cache"]]
    for there in full:
        here = [row for row in windows if there["tokens"] - 10_000 < row["tokens"] <= there["tokens"]]
        time, short = (statistics.fmean(row[name] for row in here) for name in ("seconds", "short_seconds"))
        cells.append(
            [
                f"{there['tokens']:,}",
                f"{time * 1e3:.2f} ms",
                f"{time / short:.3f}",
                f"{here[-1]['cache_bytes'] / MIB:.1f} MiB",
                f"{there['seconds'] * 1e3:.2f} ms",
                f"{there['cache_bytes'] / MIB:.1f} MiB",
            ]
        )
    return cells


def draw(windows: list[dict[str, Any]], full: list[dict[str, Any]], path: Path) -> None:
    figure, (speed, memory) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for axes, name, unit, scale in ((speed, "seconds", "ms", 1e3), (memory, "cache_bytes", "MiB", 1 / MIB)):
        for label, rows, style in (("full cache", full, "o--"), ("bounded cache", windows, "-")):
            axes.plot([row["tokens"] for row in rows], [row[name] * scale for row in rows], style, label=label)
        axes.set(xlabel="tokens written", ylabel=unit)
        axes.set_ylim(bottom=0)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    speed.set_title("Time for a token")
    memory.set_title("Memory of the cache")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
