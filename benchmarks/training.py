"""Training, measured: long sequences, memory, speed, curves, resuming, and whether context helps.

    python -m benchmarks.training                # everything, about forty minutes on two cores
    python -m benchmarks.training --only curves  # one part; the others keep their last results
    python -m benchmarks.training --quick        # short runs, a few minutes: does it run? Nothing is written.

Every run is the command line's own, started by torchrun. Writes benchmarks/results/training.json,
docs/training_results.md and its figures.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from benchmarks.training_report import write_report
from ringspan.tools.measure import describe_machine, one_line
from ringspan.train.metrics import read_metrics

ROOT = Path(__file__).parent.parent
LENGTHEN = ["--tokens", "64k", "--steps", "1525"]  # how the preset "laptop" ends
ROUNDS = 3  # of one rank and two in turn
SMALL = ("--model", "nano", "--tokens", "4096", "--segment-lengths", "256,4096", "--dilation-rates", "1,16")

Rows = list[dict[str, Any]]


def train(ranks: int, out: Path, *flags: str) -> Rows:
    """Run `ringspan train` on this many ranks, with one thread each; the figures of its steps."""
    torchrun = ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
    run([*torchrun, "-m", "ringspan", "train", "--out", str(out), *flags])
    return read_metrics(out)


def run(arguments: list[str], threads: int = 1) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False, cwd=ROOT
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments)} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    return done.stdout


def long_sequences(folder: Path, quick: bool) -> dict[str, Any]:
    """A quarter of a million tokens in one sequence: 20 steps on two ranks; memory of one rank beside it."""
    flags = ["--preset", "long", *(["--tokens", "16k", "--steps", "3"] if quick else [])]
    return {
        "two": train(2, folder / "two", *flags),
        "one": train(1, folder / "one", *flags, "--steps", "2"),
        "needs": [json.loads(run(["-m", "ringspan", "train", *flags, "--dry-run", "--ranks", str(k), "--json"]))
                  for k in (1, 2)],
    }  # fmt: skip


def learning(folder: Path, quick: bool) -> dict[str, Any]:
    """Ten minutes on Python's own sources, short sequences first; then with context and pattern cut."""
    short = ["--steps", "3", "--save-every", "1"] if quick else []
    long = ["--steps", "4", "--tokens", "8k"] if quick else LENGTHEN
    train(2, folder / "run", "--preset", "laptop", *short)
    stages = [int(path.name.removeprefix("step-")) for path in sorted((folder / "run/checkpoints").iterdir())]
    windows = ["--windows", "2"] if quick else ["--windows", "48"]
    progress = [
        {"step": step, **evaluate(folder / "run", "--step", str(step), "--contexts", "4k", *windows)} for step in stages
    ]
    steps = train(2, folder / "run", "--config", str(folder / "run/settings.json"), "--resume", "auto", *long)
    contexts = "1k,4k" if quick else "1k,4k,16k,64k"
    found = evaluate(folder / "run", "--contexts", contexts, "--no-branches", *windows)
    return {"steps": steps, "progress": progress, "bigram": found["bigram"], "scores": found["scores"]}


def evaluate(folder: Path, *flags: str) -> dict[str, Any]:
    """Run `ringspan evaluate`, with all threads."""
    command = ["-m", "ringspan", "evaluate", str(folder), *flags, "--json"]
    found: dict[str, Any] = json.loads(run(command, threads=os.cpu_count() or 1))
    return found


def curves(folder: Path, quick: bool) -> Rows:
    """The losses of 50 steps from one seed, on rings of 1, 2 and 4."""
    found = []
    for dtype in ("float64", "float32"):
        for ranks in (1, 2, 4):
            steps = "5" if quick else "50"
            done = train(ranks, folder / f"{dtype}-{ranks}", *SMALL, "--dtype", dtype, "--steps", steps)
            found.append(dict(dtype=dtype, ranks=ranks, losses=[step["loss"] for step in done]))
    return found


def speed(folder: Path, quick: bool) -> Rows:
    """Tokens per second of whole steps, one rank and two in turn; the first step of each run warms up."""
    flags = ["--preset", "long", "--steps", "4", *(["--tokens", "16k"] if quick else [])]
    return [
        dict(round=number, ranks=ranks, seconds=[step["seconds"] for step in done[1:]], tokens=done[0]["tokens"])
        for number in range(1 if quick else ROUNDS)
        for ranks in (1, 2)
        for done in [train(ranks, folder / f"{number}-{ranks}", *flags)]
    ]


def resuming(folder: Path, quick: bool) -> dict[str, Any]:
    """Stop at step 20, resume, and compare step 40 with a run that was not stopped, bit by bit."""
    stop, steps = (2, 4) if quick else (20, 40)
    flags = [*SMALL, "--steps", str(steps), "--save-every", str(stop)]
    whole = train(2, folder / "whole", *flags)
    # As if the run had been killed after the checkpoint: what came later is removed, and it goes on from there.
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


PARTS: dict[str, Callable[[Path, bool], Any]] = {
    "long": long_sequences,
    "learning": learning,
    "curves": curves,
    "speed": speed,
    "resuming": resuming,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="short runs; nothing is written")
    parser.add_argument("--only", choices=PARTS, action="append", help="run these parts; others keep their results")
    arguments = parser.parse_args()
    stored = ROOT / "benchmarks/results/training.json"
    results: dict[str, Any] = json.loads(stored.read_text()) if arguments.only and stored.exists() else {}
    results["machine"] = describe_machine()
    console = Console()
    wanted = arguments.only or list(PARTS)
    with Progress(console=console) as progress, tempfile.TemporaryDirectory() as folder:
        bar = progress.add_task("", total=len(wanted))
        for name in wanted:
            progress.update(bar, description=name)
            results[name] = PARTS[name](Path(folder) / name, arguments.quick)
            progress.advance(bar)
            if not arguments.quick:
                stored.write_text(json.dumps(results) + "\n")
    if arguments.quick:
        console.print_json(json.dumps(results))
        return
    write_report(results, one_line(results["machine"]), ROOT, console)


if __name__ == "__main__":
    main()
