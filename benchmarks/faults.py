"""Training runs that are killed at scripted points and at random, compared with an undisturbed run.

Every run is `ringspan train` on two ranks under torchrun. The suite fails unless every killed run ends with the same
losses and weights as the undisturbed one, bit for bit.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import psutil

from benchmarks.fault_points import POINTS
from benchmarks.suite import ROOT, Measuring, Page, Results, Rows, Suite, Table, yes
from ringspan.train.metrics import read_metrics

STEPS, SAVE_EVERY = 24, 4
LONGEST_SECONDS = 400  # for a run, including restarts on a busy machine
FLAGS = (
    *("--model", "nano", "--pattern", "128x1,1024x8", "--pattern", "128x1,1024x8 shift 64", "--tokens", "2048"),
    *("--steps", str(STEPS), "--save-every", str(SAVE_EVERY), "--resume", "auto"),
)
# Faults by attempt. Only a second attempt loads a checkpoint, so in `loading` the first one is killed as well.
SCRIPTS = {
    "between": "1:10:between",
    "hop": "1:10:hop",
    "backward": "0:10:backward",
    "writing": "1:12:writing",
    "loading": "1:10:between,0:0:loading",
    "launcher": "0:10:launcher",
}


class FaultyRun:
    """A training run in a folder, under a launcher that may be killed and started again."""

    def __init__(self, out: Path, script: str = "") -> None:
        self.out, self.script = out, script
        self.starts = 0
        self.seen: list[psutil.Process] = []  # the workers at the last look
        self.start()

    def start(self) -> None:
        """Run the same command each time; the script of faults applies to the first start only."""
        program = ["benchmarks.fault_points", self.script] if self.script and not self.starts else ["ringspan"]
        torchrun = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=3", "-m", *program]
        self.starts += 1
        self.log = (self.out.parent / f"{self.out.name}.log").open("a")
        self.launcher = subprocess.Popen(
            [sys.executable, *torchrun, "train", *FLAGS, "--out", str(self.out)],
            stdout=self.log,
            stderr=self.log,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def workers(self) -> list[psutil.Process]:
        """The current workers. Those of a launcher that has exited remain in ``seen``."""
        with contextlib.suppress(psutil.NoSuchProcess):
            found = sorted(psutil.Process(self.launcher.pid).children(), key=lambda process: process.pid)
            self.seen = found or self.seen
            return found
        return []

    def finish(self) -> dict[str, Any]:
        """Wait for the end. If the launcher was killed, wait for its workers to stop and run the command again."""
        start = time.monotonic()
        while self.launcher.poll() is None:
            self.workers()
            if time.monotonic() - start > LONGEST_SECONDS:
                self.launcher.terminate()
                raise TimeoutError(f"{self.out.name} did not finish within {LONGEST_SECONDS} s:\n{self.log_tail()}")
            time.sleep(0.02)
        if self.launcher.returncode == -signal.SIGKILL:
            start = time.monotonic()
            if psutil.wait_procs(self.seen, timeout=60)[1]:
                raise TimeoutError(f"{self.out.name}: workers outlived a killed launcher by 60 s:\n{self.log_tail()}")
            stopped = time.monotonic() - start
            self.start()
            return {**self.finish(), "workers_stopped_after": stopped}
        if self.launcher.returncode:
            raise RuntimeError(f"{self.out.name} exited with {self.launcher.returncode}:\n{self.log_tail()}")
        lines = map(json.loads, (self.out / "metrics.jsonl").read_text().splitlines())
        return {"lost": lost_steps([line["number"] for line in lines if "number" in line]), "commands": self.starts}

    def log_tail(self) -> str:
        """The end of the log, for error messages: the folder is deleted afterwards."""
        return Path(self.log.name).read_text()[-5000:]

    def outcome(self) -> tuple[list[float], bytes]:
        return [s["loss"] for s in read_metrics(self.out)], (self.out / "model/model.safetensors").read_bytes()


def lost_steps(numbers: list[int]) -> int:
    """The largest number of steps that a restart repeated."""
    return max((before + 1 - after for before, after in itertools.pairwise(numbers)), default=0)


def kill_at_random(run: FaultyRun, chance: random.Random, duration: float) -> dict[str, Any]:
    """Kill a rank, or in one case of five the launcher, at a random time between start and end of the run."""
    delay = chance.uniform(0, duration)
    time.sleep(delay)
    victims = ["launcher"] if chance.random() < 0.2 else chance.sample(["rank 0", "rank 1"], 2)
    workers = run.workers()
    if run.launcher.poll() is not None or len(workers) < 2:
        return {"victim": "none", "after": delay}
    steps = (run.out / "metrics.jsonl").read_text().count('"number"') if (run.out / "metrics.jsonl").exists() else 0
    victim = run.launcher.pid if victims[0] == "launcher" else workers[int(victims[0][-1])].pid
    os.kill(victim, signal.SIGKILL)
    return {"victim": victims[0], "after": delay, "steps_done": steps}


def holds(run: dict[str, Any]) -> bool:
    """Whether a killed run ends like the undisturbed one and repeats at most one checkpoint interval."""
    return bool(run["same_losses"] and run["same_weights"] and run["lost"] <= SAVE_EVERY)


def stop_a_rank(folder: Path) -> dict[str, Any]:
    """Stop rank 1 with SIGSTOP during a run: how soon it is named, and how the run ends after SIGCONT."""
    run = FaultyRun(folder / "stopped")
    heartbeat = run.out / "heartbeats/rank-00001.json"
    while not heartbeat.exists() or json.loads(heartbeat.read_text())["step"] < 5:
        time.sleep(0.05)
    victim = json.loads(heartbeat.read_text())["pid"]
    os.kill(victim, signal.SIGSTOP)
    start = time.monotonic()
    named: dict[str, Any] = {}
    while not named and time.monotonic() - start < 60:
        time.sleep(0.2)
        lines = [json.loads(line) for line in (run.out / "metrics.jsonl").read_text().splitlines()]
        named = next((line["straggler"] for line in lines if "straggler" in line), {})
    seconds = time.monotonic() - start
    os.kill(victim, signal.SIGCONT)
    return {**run.finish(), "seconds": seconds, "named": named, "run": run}


@cache
def undisturbed(folder: Path) -> tuple[float, tuple[list[float], bytes]]:
    """Seconds and outcome of a run that is not killed."""
    start = time.monotonic()
    run = FaultyRun(folder / "undisturbed")
    run.finish()
    return time.monotonic() - start, run.outcome()


def compared(run: FaultyRun, found: dict[str, Any]) -> dict[str, Any]:
    """A result, with whether losses and weights equal those of the undisturbed run."""
    (losses, weights), (wanted_losses, wanted_weights) = run.outcome(), undisturbed(run.out.parent)[1]
    return {**found, "same_losses": losses == wanted_losses, "same_weights": weights == wanted_weights}


def setup(measuring: Measuring) -> dict[str, int]:
    return {"steps": STEPS, "save_every": SAVE_EVERY}


def scripted(measuring: Measuring) -> list[dict[str, Any]]:
    found = []
    for point in ["hop"] if measuring.size == "quick" else list(POINTS):
        measuring.announce(f"killed {POINTS[point]}")
        run = FaultyRun(measuring.folder / point, SCRIPTS[point])
        found.append(compared(run, {"point": point, **run.finish()}))
    return found


def random_kills(measuring: Measuring) -> dict[str, Any]:
    chance = random.Random(int(measuring.options["seed"]))
    kills: list[dict[str, Any]] = []
    missed, wanted = 0, 1 if measuring.size == "quick" else int(measuring.options["kills"])
    while len(kills) < wanted:
        measuring.announce(f"random kill {len(kills) + 1}")
        duration = undisturbed(measuring.folder)[0]
        run = FaultyRun(measuring.folder / f"random{time.monotonic_ns()}")
        kill = kill_at_random(run, chance, duration * 0.95)
        found = {**kill, **run.finish()}
        if kill["victim"] == "none":  # the run had ended, or its ranks had not started
            missed += 1
        else:
            kills.append(compared(run, found))
    return {"kills": kills, "missed": missed}


def stopped(measuring: Measuring) -> dict[str, Any]:
    found = stop_a_rank(measuring.folder)
    return compared(found.pop("run"), found)


def broken(results: Results) -> str:
    runs = [*results["scripted"], *results["random"]["kills"], results["stopped"]]
    return "" if all(map(holds, runs)) else "Not every run ended like the undisturbed one."


def report(results: Results) -> Page:
    kills, stop, setup = results["random"]["kills"], results["stopped"], results["setup"]
    runs = [*results["scripted"], *kills]
    same = sum(run["same_losses"] and run["same_weights"] for run in runs)
    early = sum(run["steps_done"] == 0 for run in kills)
    sentence = (
        f"Runs of {setup['steps']} steps on two ranks, with a checkpoint every {setup['save_every']} steps. Of "
        f"{len(runs)} killed runs, **{same}** ended with the same loss at every step and the same weights, bit for "
        f"bit, as an undisturbed run. At most {max(run['lost'] for run in runs)} steps had to be repeated; a "
        f"checkpoint interval has {setup['save_every']}."
    )
    scripted_text = (
        "SIGKILL to a rank at exactly this point, or to torchrun itself. torchrun restarts the ranks. If torchrun was "
        "killed, its workers stop by themselves, and the same command is run again."
    )
    random_text = (
        "SIGKILL to a rank, or in some cases to torchrun, at a time drawn uniformly from the duration of the "
        f"undisturbed run, including its start. {early} of {len(kills)} kills came before the first step was "
        f"complete. {results['random']['missed']} more times were drawn when no rank was running; they do not count."
    )
    stopped_text = (
        f"Rank 1 receives SIGSTOP during a run. After {stop['seconds']:.0f} s `metrics.jsonl` named it. It then "
        "received SIGCONT, and the run continued."
    )
    named: Rows = [
        ["named", "why", "ended like the undisturbed run"],
        [
            stop["named"].get("where", "none"),
            stop["named"].get("why", ""),
            yes(stop["same_losses"] and stop["same_weights"]),
        ],
    ]
    return Page(
        "Killed runs",
        sentence,
        "python -m benchmarks faults",
        f"Machine: {results.machine}",
        [
            Table("Killed at a scripted point", scripted_table(results["scripted"]), scripted_text),
            Table("Killed at random", random_table(kills), random_text),
            Table("A stopped rank", named, stopped_text),
        ],
    )


def scripted_table(rows: list[dict[str, Any]]) -> Rows:
    cells: Rows = [["killed", "steps repeated", "workers stopped after", "same losses", "same weights"]]
    return cells + [[POINTS[row["point"]], str(row["lost"]), _seconds(row), *_same(row)] for row in rows]


def random_table(rows: list[dict[str, Any]]) -> Rows:
    cells: Rows = [
        ["killed", "after", "steps completed", "steps repeated", "workers stopped after", "same losses", "same weights"]
    ]
    for row in rows:
        when = [f"{row['after']:.1f} s", str(row["steps_done"]), str(row["lost"])]
        cells.append([row["victim"], *when, _seconds(row), *_same(row)])
    return cells


def _seconds(row: dict[str, Any]) -> str:
    seconds = row.get("workers_stopped_after")
    return "" if seconds is None else f"{seconds:.1f} s"


def _same(row: dict[str, Any]) -> list[str]:
    return [yes(row["same_losses"]), yes(row["same_weights"])]


SUITE = Suite(
    "docs/faults.md",
    {"setup": setup, "scripted": scripted, "random": random_kills, "stopped": stopped},
    report,
    marker="benchmarks.faults",
    broken=broken,
    options={"kills": "5", "seed": "0"},
    long_options={"kills": "20"},
)
