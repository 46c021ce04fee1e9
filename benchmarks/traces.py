"""What a trace costs: training steps over two hosts, traced and not traced, in turns.

Steps are those of `ringspan train`, in one run under torchrun in a test bed of hosts (`benchmarks.hosts`).
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ringspan as rs
from benchmarks.hosts import TestBed
from benchmarks.suite import Measuring, Page, Results, Rows, Suite, Table
from ringspan.models import LongNetConfig
from ringspan.ring.recorder import Recorder, recorded
from ringspan.train.config import TrainSettings
from ringspan.train.trainer import Trainer

RATE = "10gbit"
PATTERN = "512x1,4096x8"
STEPS = 3  # of a trace, after a first one that warms up
LIMIT = 0.01  # of a step


def steps(measuring: Measuring) -> list[dict[str, Any]]:
    lengths, rounds = measuring.sized((2048,), (2048, 8192), (2048, 8192)), measuring.sized(2, 16, 60)
    rows = []
    for tokens in lengths:
        measuring.announce(f"{tokens:,} tokens")
        with TestBed(2, RATE) as bed:
            job = bed.torchrun(1, "-m", "benchmarks.traces", str(measuring.folder), str(tokens), str(rounds))
            rows.append(json.loads(job.wait(timeout=1800)[0].splitlines()[-1]))
    return rows


def run(folder: Path, tokens: int, rounds: int) -> dict[str, Any]:
    """On each rank: seconds of steps without and with a trace, and what rank 0 recorded in a step."""
    model = LongNetConfig.named("nano", patterns=(PATTERN,))
    out, path = folder / f"run{tokens}", folder / f"{tokens}.json"
    settings = TrainSettings(
        model=model,
        data=(str(Path(rs.__file__).parent),),
        tokens=tokens,
        steps=2 * (rounds + 1) * (1 + STEPS),
        out=str(out),
        keep=1,
    )
    seconds: dict[str, list[float]] = {"off": [], "on": []}
    taken: list[float] = []
    with Trainer(settings) as trainer:
        for turn in range(rounds + 1):
            for name in ("off", "on") if turn % 2 else ("on", "off"):
                trace = path if name == "on" else None
                until = trainer.next_step + 1 + STEPS
                trainer.run(lambda step: taken.append(step.seconds), until=until, trace=trace, trace_steps=STEPS)
                if turn:  # the first round warms up
                    seconds[name] += taken[-STEPS:]
        events = json.loads(path.read_text())["traceEvents"] if trainer.context.is_main else []
    records = sum(event["ph"] in "XC" and event["pid"] == 0 for event in events) / STEPS
    costs = dict(records=records, record_seconds=_seconds(_record), check_seconds=_seconds(_check))
    return dict(tokens=tokens, seconds=seconds, **costs)


def _record(count: int) -> None:
    """Record the spans of tiles."""
    (tile, *_) = rs.plan(rs.Full(), 8).rank(0).tiles
    for _ in Recorder().timed([tile] * count, 0):
        pass


def _check(count: int) -> None:
    """Enter blocks that are not recorded."""
    for _ in range(count):
        with recorded(None, "pack"):
            pass


def _seconds(of: Callable[[int], None], count: int = 10_000) -> float:
    start = time.perf_counter()
    of(count)
    return (time.perf_counter() - start) / count


def shares(row: dict[str, Any]) -> tuple[float, float]:
    """What all records of a step cost with a trace, and all checks without one, as shares of the fastest step."""
    step = min(row["seconds"]["off"])
    return row["records"] * row["record_seconds"] / step, row["records"] * row["check_seconds"] / step


def broken(results: Results) -> str:
    return "A trace costs too much." if max(shares(row)[0] for row in results["steps"]) >= LIMIT else ""


def report(results: Results) -> Page:
    rows = results["steps"]
    on, off = (max(shares(row)[i] for row in rows) for i in range(2))
    medians, fastest = (
        " and ".join(f"{of(row['seconds']['on']) / of(row['seconds']['off']) - 1:+.1%}" for row in rows)
        for of in (statistics.median, min)
    )
    sentence = (
        f"Recording takes at most **{on:.2%}** of a step, and {off:.2%} if nothing is traced: the number of records of "
        f"a rank, times the time to record a tile, or of a check. "
        f"Whole steps vary far more on this machine: the median of traced ones differs "
        f"by {medians} from that of others, the fastest by {fastest}."
    )
    cells: Rows = [["tokens", "median step, not traced", "traced", "fastest step, not traced", "traced",
                    "records of a rank", "a record takes", "all records", "a check takes", "all checks"]]  # fmt: skip
    for row in rows:
        share, check_share = shares(row)
        times = [row["seconds"][name] for name in ("off", "on")]
        cells.append([
            f"{row['tokens']:,}", *(f"{statistics.median(each) * 1e3:.0f} ms" for each in times),
            *(f"{min(each) * 1e3:.0f} ms" for each in times), f"{row['records']:.0f}",
            f"{row['record_seconds'] * 1e9:,.0f} ns", f"{share:.3%}", f"{row['check_seconds'] * 1e9:,.0f} ns",
            f"{check_share:.3%}",
        ])  # fmt: skip
    text = (
        f"Steps of `ringspan train` (nano, {PATTERN}) over two hosts with one rank each and links of {RATE}, in one "
        f"run, {STEPS} traced and {STEPS} not traced in turns; {len(rows[0]['seconds']['on'])} of each. Records: "
        "spans, and sizes of buffers. Without a trace there is at most one check for each. Shares are "
        "of the fastest step."
    )
    table = Table("Steps", cells, text)
    return Page("Cost", sentence, "python -m benchmarks traces", f"Machine: {results.machine}", [table])


SUITE = Suite("docs/traces.md", {"steps": steps}, report, marker="benchmarks.traces", broken=broken)


if __name__ == "__main__":
    row = run(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
    sys.stdout.write(f"{json.dumps(row)}\n")
