"""Training: long sequences, memory, speed-up, learning curves, resuming, and the gain from context.

Every run is the command `ringspan train`, started by torchrun.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import statistics
from pathlib import Path
from typing import Any

from benchmarks.suite import (
    MIB,
    Measuring,
    Page,
    Picture,
    Results,
    Rows,
    Suite,
    Table,
    empty_figure,
    run_python,
    yes,
)
from ringspan.train.metrics import read_metrics

ROUNDS = 3  # one rank and two ranks take turns
SMALL = ("--model", "nano", "--tokens", "4096", "--pattern", "256x1,4096x16", "--pattern", "256x1,4096x16 shift 128")

Steps = list[dict[str, Any]]


def train(ranks: int, out: Path, *flags: str) -> Steps:
    """Run `ringspan train` with one thread per rank, and return the metrics of its steps."""
    torchrun = ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
    run_python(*torchrun, "-m", "ringspan", "train", "--out", str(out), *flags)
    return read_metrics(out)


def long_sequences(measuring: Measuring) -> dict[str, Any]:
    """262,144 tokens in one sequence: up to 20 steps on two ranks, and the memory of one rank for comparison."""
    folder = measuring.folder
    sizes = measuring.sized(["--tokens", "16k", "--steps", "3"], ["--steps", "5"], [])
    flags = ["--preset", "long", *sizes]
    return {
        "two": train(2, folder / "two", *flags),
        "one": train(1, folder / "one", *flags, "--steps", "2"),
        "needs": [
            json.loads(run_python("-m", "ringspan", "train", *flags, "--dry-run", "--ranks", str(k), "--json"))
            for k in (1, 2)
        ],
    }


def learning(measuring: Measuring) -> dict[str, Any]:
    """Minutes on Python's sources, short sequences first; then evaluation with less context and fewer branches."""
    folder = measuring.folder
    short = measuring.sized(["--steps", "3", "--save-every", "1"], ["--steps", "300", "--save-every", "100"], [])
    long = ["--tokens", measuring.sized("8k", "64k", "64k"), "--steps", measuring.sized("4", "306", "1525")]
    train(2, folder / "run", "--preset", "laptop", *short)
    stages = [int(path.name.removeprefix("step-")) for path in sorted((folder / "run/checkpoints").iterdir())]
    windows = ["--windows", measuring.sized("2", "12", "48")]
    progress = [
        {"step": step, **evaluate(folder / "run", "--step", str(step), "--contexts", "4k", *windows)} for step in stages
    ]
    steps = train(2, folder / "run", "--config", str(folder / "run/settings.json"), "--resume", "auto", *long)
    contexts = measuring.sized("1k,4k", "1k,4k,16k,64k", "1k,4k,16k,64k")
    found = evaluate(folder / "run", "--contexts", contexts, "--no-branches", *windows)
    return {"steps": steps, "progress": progress, "bigram": found["bigram"], "scores": found["scores"]}


def evaluate(folder: Path, *flags: str) -> dict[str, Any]:
    """Run `ringspan evaluate` with all threads."""
    command = ("-m", "ringspan", "evaluate", str(folder), *flags, "--json")
    found: dict[str, Any] = json.loads(run_python(*command, threads=os.cpu_count() or 1))
    return found


def curves(measuring: Measuring) -> Steps:
    """The losses of some steps from one seed, on rings of 1, 2 and 4 ranks."""
    folder, steps = measuring.folder, measuring.sized("5", "20", "50")
    found = []
    for dtype in ("float64", "float32"):
        for ranks in (1, 2, 4):
            done = train(ranks, folder / f"{dtype}-{ranks}", *SMALL, "--dtype", dtype, "--steps", steps)
            found.append(dict(dtype=dtype, ranks=ranks, losses=[step["loss"] for step in done]))
    return found


def speed(measuring: Measuring) -> Steps:
    """Tokens per second of whole steps, one rank and two in turns. The first step of each run warms up."""
    folder = measuring.folder
    sizes = measuring.sized(["--tokens", "16k", "--steps", "4"], ["--tokens", "64k", "--steps", "3"], ["--steps", "4"])
    flags = ["--preset", "long", *sizes]
    return [
        dict(round=number, ranks=ranks, seconds=[step["seconds"] for step in done[1:]], tokens=done[0]["tokens"])
        for number in range(measuring.sized(1, ROUNDS, ROUNDS))
        for ranks in (1, 2)
        for done in [train(ranks, folder / f"{number}-{ranks}", *flags)]
    ]


def resuming(measuring: Measuring) -> dict[str, Any]:
    """Stop half-way, resume, and compare the last step with a run that was not stopped, bit for bit."""
    folder = measuring.folder
    stop, steps = measuring.sized((2, 4), (10, 20), (20, 40))
    flags = [*SMALL, "--steps", str(steps), "--save-every", str(stop)]
    whole = train(2, folder / "whole", *flags)
    # As if the run had been killed right after its first checkpoint: later ones are deleted, and it resumes.
    train(2, folder / "cut", *flags)
    for late in sorted((folder / "cut/checkpoints").iterdir())[1:]:
        shutil.rmtree(late)
    again = train(2, folder / "cut", *flags, "--resume", "auto")
    weights = [(folder / name / "model/model.safetensors").read_bytes() for name in ("whole", "cut")]
    return {
        "stopped_at": stop,
        "steps": steps,
        "same_losses": [s["loss"] for s in whole] == [s["loss"] for s in again],
        "same_weights": weights[0] == weights[1],
    }


def report(results: Results) -> Page:
    learning, long = results["learning"], results["long"]
    steps = learning["steps"]
    long_text = (
        "`ringspan train --preset long`, one thread per rank. Memory is the peak of a process, including Python and "
        "torch. The prediction of `--dry-run` excludes them."
    )
    speed_text = (
        f"Whole steps of the same preset with {results['speed'][0]['tokens']:,} tokens, one rank and two in turns, "
        f"{len(results['speed'][0]['seconds'])} steps per round. Speed-up: "
        f"**{overall_speed_up(results['speed'])}**. Required: at least 1.8 x."
    )
    learning_text = (
        "`ringspan train --preset laptop` on Python's sources, two ranks, then the last steps with 64K tokens "
        f"(`--resume auto --tokens 64k --steps {len(steps)}`): {len(steps)} steps, "
        f"{sum(step['seconds'] for step in steps) / 60:.1f} minutes. `ringspan evaluate` then gives bits per byte on "
        "held-out text with shorter contexts; every context is scored on the same bytes. A bigram model has "
        f"{learning['bigram']:.3f}."
    )
    reach_text = (
        "Checkpoints of the same run, over 4,096 bytes of context, with parts of the pattern (`ringspan evaluate "
        "--step N --contexts 4k`): the shortest segments at a quarter, at half and in full, then one more branch each "
        "time. Bits per byte with the whole pattern, and the gain of each step outwards."
    )
    curve_text = (
        f"{len(results['curves'][0]['losses'])} steps from one seed on rings of 1, 2 and 4 ranks: the largest "
        "difference of a loss (nats) from that of one rank. Required: within 1e-9 in fp64."
    )
    return Page(
        "Training, measured",
        "Runs of `ringspan train` on local processes: memory, speed-up, learning, and exact resuming.",
        "python -m benchmarks training",
        f"Machine: {results.machine}",
        [
            training_picture(results),
            Table(f"{long['two'][0]['tokens']:,} tokens in one sequence", long_table(long), long_text),
            Table("Two ranks against one", speed_table(results["speed"]), speed_text),
            Table("What the model learns", context_table(learning["scores"]), learning_text),
            Table("How far the model looks", reach_table(learning["progress"]), reach_text),
            Table("The same curve on every ring", curve_table(results["curves"]), curve_text),
            Table(
                "Resuming",
                resume_table(results["resuming"]),
                "A run of two ranks that resumes from a checkpoint, compared with one that was never stopped.",
            ),
        ],
    )


def long_table(found: dict[str, Any]) -> Rows:
    cells: Rows = [["ranks", "steps", "memory per rank", "predicted", "first loss", "last loss"]]
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


def speed_table(rows: list[dict[str, Any]]) -> Rows:
    cells: Rows = [["round", "ranks", "seconds per step", "tokens/s"]]
    for row in rows:
        seconds = statistics.median(row["seconds"])
        cells.append([str(row["round"] + 1), str(row["ranks"]), f"{seconds:.2f}", f"{row['tokens'] / seconds:,.0f}"])
    return cells


def overall_speed_up(rows: list[dict[str, Any]]) -> str:
    """Ratio of the medians over all rounds, and the ratio of each round."""
    seconds: dict[int, list[float]] = {1: [], 2: []}
    rounds: dict[int, dict[int, float]] = {}
    for row in rows:
        seconds[row["ranks"]] += row["seconds"]
        rounds.setdefault(row["round"], {})[row["ranks"]] = statistics.median(row["seconds"])
    each = ", ".join(f"{found[1] / found[2]:.2f}" for found in rounds.values())
    return f"{statistics.median(seconds[1]) / statistics.median(seconds[2]):.2f} x (by rounds: {each})"


def context_table(scores: list[dict[str, Any]]) -> Rows:
    cells: Rows = [["context", "bits per byte", "gain over the shortest"]]
    for row in scores:
        better = f"{row['gain']:+.4f} ± {row['standard_error']:.4f}" if row is not scores[0] else ""
        cells.append([f"{row['context']:,}", f"{row['bits_per_byte']:.4f}", better])
    return cells


def reach_table(progress: list[dict[str, Any]]) -> Rows:
    names = [f"{row['reach']:,}" for row in progress[0]["branches"]]
    cells = [["steps", "bits per byte", *(f"{a} → {b}" for a, b in itertools.pairwise(names))]]
    for stage in progress:
        bits = [row["bits_per_byte"] for row in stage["branches"]]
        worth = [f"{nearer - farther:+.4f}" for nearer, farther in itertools.pairwise(bits)]
        cells.append([str(stage["step"]), f"{bits[-1]:.4f}", *worth])
    return cells


def curve_table(rows: list[dict[str, Any]]) -> Rows:
    cells: Rows = [["dtype", "ranks", "first loss", "last loss", "largest difference"]]
    for row in rows:
        alone = next(each for each in rows if each["dtype"] == row["dtype"] and each["ranks"] == 1)
        apart = max(abs(a - b) for a, b in zip(row["losses"], alone["losses"], strict=True))
        losses = [f"{row['losses'][i]:.6f}" for i in (0, -1)]
        cells.append([row["dtype"], str(row["ranks"]), *losses, f"{apart:.1e}" if row is not alone else ""])
    return cells


def resume_table(found: dict[str, Any]) -> Rows:
    return [
        ["stopped at", "steps", "same loss at every step", "same weights, bit for bit"],
        [str(found["stopped_at"]), str(found["steps"]), yes(found["same_losses"]), yes(found["same_weights"])],
    ]


def training_picture(results: Results) -> Picture:
    figure, (long, learning, contexts, rings) = empty_figure(2, 2, (11, 7.5))
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
    learning.set(title="Training on Python's sources", xlabel="minutes", ylabel="bits per byte")
    scores = results["learning"]["scores"]
    contexts.errorbar(
        [s["context"] for s in scores],
        [s["gain"] for s in scores],
        [2 * s["standard_error"] for s in scores],
        marker="o",
        capsize=3,
    )
    contexts.set_xscale("log", base=2)
    contexts.set(
        title="Gain from context (± 2 standard errors)",
        xlabel="context (bytes)",
        ylabel="gain over the shortest (bits per byte)",
    )
    contexts.set_xticks([s["context"] for s in scores], [f"{s['context'] // 1024}K" for s in scores])
    for row, style in zip([r for r in results["curves"] if r["dtype"] == "float32"], ("-", "--", ":"), strict=True):
        rings.plot(row["losses"], style, linewidth=5 - row["ranks"], label=f"{row['ranks']} rank(s)")
    rings.set(title="One seed, three ring sizes, fp32", xlabel="step", ylabel="loss (nats)")
    rings.legend(frameon=False)
    figure.supxlabel(results.machine, fontsize=8, color="gray")
    caption = "Losses with a long and with short sequences, the gain from context, and losses on three ring sizes."
    return Picture("training", figure, caption)


SUITE = Suite(
    "docs/training_results.md",
    {"long": long_sequences, "learning": learning, "curves": curves, "speed": speed, "resuming": resuming},
    report,
)
