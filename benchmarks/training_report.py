"""Tables and figures from what `training.py` measured: printed, and written to docs/training_results.md."""

from __future__ import annotations

import itertools
import statistics
from pathlib import Path
from typing import Any

from matplotlib import pyplot
from rich.console import Console

from benchmarks.tables import Cells, markdown_table, rich_table, yes

MIB = 2**20


def write_report(results: dict[str, Any], machine: str, root: Path, console: Console) -> None:
    """Print every table, and write docs/training_results.md and its figures."""
    learning, long = results["learning"], results["long"]
    tables = {
        "A quarter of a million tokens in one sequence": (
            "`ringspan train --preset long`, one thread a rank. Memory is the peak of a process, Python and torch "
            "included; foretold by `--dry-run`, without them.",
            long_table(long),
        ),
        "Two ranks against one": (
            f"Whole steps of the same preset, one rank and two in turn. Speed-up: **{speed_up(results['speed'])}**. "
            "Asked: at least 1.8 x.",
            speed_table(results["speed"]),
        ),
        "Ten minutes of training": (
            "`ringspan train --preset laptop` on Python's own sources, two ranks, then the last steps with 64K tokens "
            f"(`--resume auto --tokens 64k --steps {len(learning['steps'])}`): {len(learning['steps'])} steps, "
            f"{sum(step['seconds'] for step in learning['steps']) / 60:.1f} minutes. Then `ringspan evaluate`: bits "
            "per byte on text that was held out, with the context cut; every context is scored on the same bytes. "
            f"A bigram has {learning['bigram']:.3f}.",
            context_table(learning["scores"]),
        ),
        "How far the model looks": (
            "Checkpoints of the same run, over 4,096 bytes of context, with the pattern cut (`ringspan evaluate --step "
            "N --contexts 4k`): the shortest segments at a quarter, at half and whole, then one branch more each time. "
            "Bits per byte with the whole pattern, and what each step outwards is worth.",
            reach_table(learning["progress"]),
        ),
        "One curve, whatever the ring": (
            "50 steps from one seed on rings of 1, 2 and 4: the largest difference of a loss (nats) from that of one "
            "rank. Asked: within 1e-9 in fp64.",
            curve_table(results["curves"]),
        ),
        "Resuming": (
            "A run of two ranks that goes on from a checkpoint, beside one that was never stopped.",
            resume_table(results["resuming"]),
        ),
    }
    page = ["# Training, measured", "", "Written by `python -m benchmarks.training`; do not edit.", ""]
    page += [f"Machine: {machine}.", "", "![Losses and context](figures/training.png)"]
    for title, (text, cells) in tables.items():
        console.print(rich_table(title, cells))
        page += ["", f"## {title}", "", text, "", *markdown_table(cells)]
    (root / "docs/training_results.md").write_text("\n".join(page) + "\n")
    draw(results, machine, root / "docs/figures/training.png")
    console.print(f"Machine: {machine}\nWritten: docs/training_results.md and docs/figures/training.png")


def long_table(found: dict[str, Any]) -> Cells:
    cells = [["ranks", "steps", "memory a rank", "foretold", "first loss", "last loss"]]
    for ranks, name, needs in ((1, "one", found["needs"][0]), (2, "two", found["needs"][1])):
        steps = found[name]
        cells.append(
            [
                str(ranks),
                str(len(steps)),
                f"{steps[-1]['peak_bytes'] / MIB:,.0f} MiB",
                f"{needs['bytes']['total'] / MIB:,.0f} MiB",
                f"{steps[0]['bits_per_byte']:.3f} bits/byte",
                f"{steps[-1]['bits_per_byte']:.3f} bits/byte",
            ]
        )
    return cells


def speed_table(rows: list[dict[str, Any]]) -> Cells:
    cells = [["round", "ranks", "seconds a step", "tokens/s"]]
    for row in rows:
        seconds = statistics.median(row["seconds"])
        cells.append([str(row["round"] + 1), str(row["ranks"]), f"{seconds:.2f}", f"{row['tokens'] / seconds:,.0f}"])
    return cells


def speed_up(rows: list[dict[str, Any]]) -> str:
    """Ratio of medians over all rounds, and that of each round."""
    seconds: dict[int, list[float]] = {1: [], 2: []}
    rounds: dict[int, dict[int, float]] = {}
    for row in rows:
        seconds[row["ranks"]] += row["seconds"]
        rounds.setdefault(row["round"], {})[row["ranks"]] = statistics.median(row["seconds"])
    each = ", ".join(f"{found[1] / found[2]:.2f}" for found in rounds.values())
    return f"{statistics.median(seconds[1]) / statistics.median(seconds[2]):.2f} x (by rounds: {each})"


def context_table(scores: list[dict[str, Any]]) -> Cells:
    cells = [["context", "bits per byte", "better than the shortest by"]]
    for row in scores:
        better = f"{row['gain']:+.4f} ± {row['standard_error']:.4f}" if row is not scores[0] else ""
        cells.append([f"{row['context']:,}", f"{row['bits_per_byte']:.4f}", better])
    return cells


def reach_table(progress: list[dict[str, Any]]) -> Cells:
    names = [f"{row['segments'][-1]:,}" for row in progress[0]["branches"]]
    cells = [["steps", "bits per byte", *(f"{a} → {b}" for a, b in itertools.pairwise(names))]]
    for stage in progress:
        bits = [row["bits_per_byte"] for row in stage["branches"]]
        worth = [f"{nearer - farther:+.4f}" for nearer, farther in itertools.pairwise(bits)]
        cells.append([str(stage["step"]), f"{bits[-1]:.4f}", *worth])
    return cells


def curve_table(rows: list[dict[str, Any]]) -> Cells:
    cells = [["dtype", "ranks", "first loss", "last loss", "largest difference"]]
    for row in rows:
        alone = next(each for each in rows if each["dtype"] == row["dtype"] and each["ranks"] == 1)
        apart = max(abs(a - b) for a, b in zip(row["losses"], alone["losses"], strict=True))
        losses = [f"{row['losses'][i]:.6f}" for i in (0, -1)]
        cells.append([row["dtype"], str(row["ranks"]), *losses, f"{apart:.1e}" if row is not alone else ""])
    return cells


def resume_table(found: dict[str, Any]) -> Cells:
    return [
        ["stopped at", "steps", "every loss is the same", "the weights are the same, bit for bit"],
        [str(found["stopped_at"]), str(found["steps"]), yes(found["same_losses"]), yes(found["same_weights"])],
    ]


def draw(results: dict[str, Any], machine: str, path: Path) -> None:
    """Four pictures: long, learning, contexts, and rings on top of one another."""
    figure, ((long, learning), (contexts, rings)) = pyplot.subplots(2, 2, figsize=(11, 7.5), layout="constrained")
    steps = results["long"]["two"]
    long.plot([s["number"] + 1 for s in steps], [s["bits_per_byte"] for s in steps], marker=".")
    long.set(title=f"{steps[0]['tokens']:,} tokens in a sequence, two ranks", xlabel="step", ylabel="bits per byte")
    steps, bigram = results["learning"]["steps"], results["learning"]["bigram"]
    minutes = [seconds / 60 for seconds in itertools.accumulate(step["seconds"] for step in steps)]
    bits = [step["bits_per_byte"] for step in steps]
    learning.plot(minutes, bits, alpha=0.25, linewidth=0.8)
    around = [statistics.mean(bits[max(0, i - 12) : i + 13]) for i in range(len(bits))]
    learning.plot(minutes, around, color="tab:blue", label="mean of 25 steps")
    learning.legend(frameon=False)
    learning.axhline(bigram, color="gray", linestyle="--")
    learning.annotate("bigram", (minutes[-1], bigram), va="bottom", ha="right", color="gray")
    learning.set(title="Ten minutes on Python's sources", xlabel="minutes", ylabel="bits per byte")
    scores = results["learning"]["scores"]
    contexts.errorbar(
        [s["context"] for s in scores], [s["gain"] for s in scores], [2 * s["standard_error"] for s in scores],
        marker="o", capsize=3,
    )  # fmt: skip
    contexts.set_xscale("log", base=2)
    contexts.set(
        title="What context is worth (± 2 standard errors)",
        xlabel="context (bytes)",
        ylabel="bits per byte gained over the shortest",
    )
    contexts.set_xticks([s["context"] for s in scores], [f"{s['context'] // 1024}K" for s in scores])
    for row, style in zip([r for r in results["curves"] if r["dtype"] == "float32"], ("-", "--", ":"), strict=True):
        rings.plot(row["losses"], style, linewidth=5 - row["ranks"], label=f"{row['ranks']} rank(s)")
    rings.set(title="One seed, three rings, fp32", xlabel="step", ylabel="loss (nats)")
    rings.legend(frameon=False)
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    figure.text(0.5, -0.02, machine, ha="center", fontsize=8, color="gray")
    figure.savefig(path, dpi=130, bbox_inches="tight")
    pyplot.close(figure)
