"""Tables from what `faults.py` found: printed, and written into docs/faults.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.fault_points import POINTS
from benchmarks.tables import Cells, markdown_table, rich_table, yes
from ringspan.tools.pages import write_into

MARKER = "benchmarks.faults"


def write_report(results: dict[str, Any], machine: str, root: Path, console: Console) -> None:
    """Print every table, and write them between the markers of docs/faults.md."""
    runs = [*results["scripted"], *results["random"]]
    same = sum(run["same_losses"] and run["same_weights"] for run in runs)
    lost = max(run["lost"] for run in runs)
    stopped = results["stopped"]
    early = sum(run["steps_done"] == 0 for run in results["random"])
    tables = {
        "Killed at a scripted point": (
            "SIGKILL to a rank at that very point, or to torchrun itself. torchrun restarts the ranks; where it was "
            "killed itself, its workers stop by themselves, and the same command is given again.",
            scripted_table(results["scripted"]),
        ),
        "Killed at random": (
            "SIGKILL to a rank, or now and then to torchrun, at a moment drawn evenly from the time that the run took "
            f"that was left alone, its start included. {early} of {len(results['random'])} came before the first step "
            f"was done. {results['missed']} more moments were drawn at which no rank was there, and do not count.",
            random_table(results["random"]),
        ),
        "A rank that stands still": (
            f"Rank 1 gets SIGSTOP in the middle of a run. After {stopped['seconds']:.0f} s `metrics.jsonl` named it; "
            "then it got SIGCONT, and the run went on.",
            [
                ["named", "why", "ended as the run that was left alone"],
                [
                    stopped["named"].get("where", "nobody"),
                    stopped["named"].get("why", ""),
                    yes(stopped["same_losses"] and stopped["same_weights"]),
                ],
            ],
        ),
    }
    page = [
        f"Runs of {results['steps']} steps on two ranks, with a checkpoint every {results['save_every']} steps. Of "
        f"{len(runs)} runs that were killed, **{same}** ended with the same loss at every step and the same weights, "
        f"bit for bit, as a run that was left alone. The most steps that had to be done again were {lost}, and an "
        f"interval has {results['save_every']}.",
    ]
    for title, (text, cells) in tables.items():
        console.print(rich_table(title, cells))
        page += ["", f"### {title}", "", text, "", *markdown_table(cells)]
    page += ["", f"Written by `python -m {MARKER}`. {machine}.", ""]
    write_into(root / "docs/faults.md", MARKER, ["", *page])
    console.print(f"Machine: {machine}\nWritten: docs/faults.md")


def scripted_table(rows: list[dict[str, Any]]) -> Cells:
    cells = [["killed", "steps done again", "workers stopped after", "same losses", "same weights"]]
    return cells + [[POINTS[row["point"]], str(row["lost"]), _seconds(row), *_same(row)] for row in rows]


def random_table(rows: list[dict[str, Any]]) -> Cells:
    cells = [["killed", "after", "steps done by then", "steps done again", "workers stopped after", "same losses",
              "same weights"]]  # fmt: skip
    for row in rows:
        when = [f"{row['after']:.1f} s", str(row["steps_done"]), str(row["lost"])]
        cells.append([row["victim"], *when, _seconds(row), *_same(row)])
    return cells


def _seconds(row: dict[str, Any]) -> str:
    seconds = row.get("workers_stopped_after")
    return "" if seconds is None else f"{seconds:.1f} s"


def _same(row: dict[str, Any]) -> list[str]:
    return [yes(row["same_losses"]), yes(row["same_weights"])]
