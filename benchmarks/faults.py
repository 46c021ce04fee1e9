"""Kill training runs, at scripted points and at random, and compare what they end with to a run that was left alone.

    python -m benchmarks.faults              # everything, about twenty minutes on two cores
    python -m benchmarks.faults --random 3   # fewer random kills
    python -m benchmarks.faults --quick      # two kills: does it run? Nothing is written.

Every run is `ringspan train` on two ranks under torchrun. Writes benchmarks/results/faults.json and its part of
docs/faults.md. Exit status: 0 if every run ended as the one that was left alone, and 1 otherwise.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.progress import Progress

from benchmarks.fault_points import POINTS
from benchmarks.faults_report import write_report
from ringspan.tools.measure import describe_machine, one_line
from ringspan.train.metrics import read_metrics

ROOT = Path(__file__).parent.parent
STEPS, SAVE_EVERY = 24, 4
LONGEST = 400  # seconds that a run may take, restarts and a busy machine included
FLAGS = (
    *("--model", "nano", "--segment-lengths", "128,1024", "--dilation-rates", "1,8", "--tokens", "2048"),
    *("--steps", str(STEPS), "--save-every", str(SAVE_EVERY), "--resume", "auto"),
)
# Which attempt is struck where: a checkpoint is loaded only by a second attempt, so that the first must die as well.
SCRIPTS = {
    "between": "1:10:between",
    "hop": "1:10:hop",
    "backward": "0:10:backward",
    "writing": "1:12:writing",
    "loading": "1:10:between,0:0:loading",
    "launcher": "0:10:launcher",
}


class Run:
    """A training run in a folder, under a launcher that may be struck and started again."""

    def __init__(self, out: Path, script: str = "") -> None:
        self.out, self.script = out, script
        self.starts = 0
        self.seen: list[psutil.Process] = []  # the workers when they were last looked for
        self.start()

    def start(self) -> None:
        """The same command, each time; a script strikes the first time only."""
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
        """The workers of now; those of a launcher that is gone are in ``seen``."""
        with contextlib.suppress(psutil.NoSuchProcess):
            found = sorted(psutil.Process(self.launcher.pid).children(), key=lambda process: process.pid)
            self.seen = found or self.seen
            return found
        return []

    def finish(self) -> dict[str, Any]:
        """Wait for the end; where the launcher was killed, see its workers stop, and give the command again."""
        start = time.monotonic()
        while self.launcher.poll() is None:
            self.workers()
            if time.monotonic() - start > LONGEST:
                self.launcher.terminate()
                raise TimeoutError(f"{self.out.name} did not end within {LONGEST} s:\n{self.said()}")
            time.sleep(0.02)
        if self.launcher.returncode == -signal.SIGKILL:
            start = time.monotonic()
            if psutil.wait_procs(self.seen, timeout=60)[1]:
                raise TimeoutError(f"workers of {self.out.name} outlived their launcher by a minute:\n{self.said()}")
            stopped = time.monotonic() - start
            self.start()
            return {**self.finish(), "workers_stopped_after": stopped}
        if self.launcher.returncode:
            raise RuntimeError(f"{self.out.name} ended with {self.launcher.returncode}:\n{self.said()}")
        lines = map(json.loads, (self.out / "metrics.jsonl").read_text().splitlines())
        return {"lost": lost_steps([line["number"] for line in lines if "number" in line]), "commands": self.starts}

    def said(self) -> str:
        """The end of what it said, for errors: the folder is gone by then."""
        return Path(self.log.name).read_text()[-5000:]

    def ended(self) -> tuple[list[float], bytes]:
        return [s["loss"] for s in read_metrics(self.out)], (self.out / "model/model.safetensors").read_bytes()


def lost_steps(numbers: list[int]) -> int:
    """The most steps that were done again after a restart."""
    return max((before + 1 - after for before, after in itertools.pairwise(numbers)), default=0)


def strike_at_random(run: Run, chance: random.Random, duration: float) -> dict[str, Any]:
    """Kill a rank, or now and then the launcher, some time between the start and the end of the run."""
    delay = chance.uniform(0, duration)
    time.sleep(delay)
    victims = ["launcher"] if chance.random() < 0.2 else chance.sample(["rank 0", "rank 1"], 2)
    workers = run.workers()
    if run.launcher.poll() is not None or len(workers) < 2:
        return {"victim": "nobody", "after": delay}
    steps = (run.out / "metrics.jsonl").read_text().count('"number"') if (run.out / "metrics.jsonl").exists() else 0
    victim = run.launcher.pid if victims[0] == "launcher" else workers[int(victims[0][-1])].pid
    os.kill(victim, signal.SIGKILL)
    return {"victim": victims[0], "after": delay, "steps_done": steps}


def holds(run: dict[str, Any]) -> bool:
    """Whether a run that was killed ended as the one that was left alone, and lost no more than an interval."""
    return bool(run["same_losses"] and run["same_weights"] and run["lost"] <= SAVE_EVERY)


def name_a_stopped_rank(folder: Path) -> dict[str, Any]:
    """Stop rank 1 with SIGSTOP in the middle of a run: how soon it is named, and how the run ends after SIGCONT."""
    run = Run(folder / "stopped")
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--random", type=int, default=20, help="how many random kills")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="two kills; nothing is written")
    arguments = parser.parse_args()
    chance, console = random.Random(arguments.seed), Console()
    points = ["hop"] if arguments.quick else list(POINTS)
    kills = 1 if arguments.quick else arguments.random
    results: dict[str, Any] = {"machine": describe_machine(), "steps": STEPS, "save_every": SAVE_EVERY}
    with Progress(console=console) as progress, tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        bar = progress.add_task("a run that is left alone", total=len(points) + kills + 2)
        start = time.monotonic()
        alone = Run(folder / "alone")
        alone.finish()
        duration, wanted = time.monotonic() - start, alone.ended()
        progress.advance(bar)

        def compared(run: Run, found: dict[str, Any]) -> dict[str, Any]:
            losses, weights = run.ended()
            progress.advance(bar)
            return {**found, "same_losses": losses == wanted[0], "same_weights": weights == wanted[1]}

        results["scripted"] = []
        for point in points:
            progress.update(bar, description=f"killed {POINTS[point]}")
            run = Run(folder / point, SCRIPTS[point])
            results["scripted"].append(compared(run, {"point": point, **run.finish()}))
        results["random"], results["missed"] = [], 0
        while len(results["random"]) < kills:
            progress.update(bar, description=f"random kill {len(results['random']) + 1}")
            run = Run(folder / f"random{time.monotonic_ns()}")
            struck = strike_at_random(run, chance, duration * 0.95)
            found = {**struck, **run.finish()}
            if struck["victim"] == "nobody":  # it was over, or had not begun
                results["missed"] += 1
            else:
                results["random"].append(compared(run, found))
        progress.update(bar, description="a rank that stands still")
        stopped = name_a_stopped_rank(folder)
        results["stopped"] = compared(stopped.pop("run"), stopped)
    if arguments.quick:
        console.print_json(json.dumps(results))
    else:
        (ROOT / "benchmarks/results/faults.json").write_text(json.dumps(results) + "\n")
        write_report(results, one_line(results["machine"]), ROOT, console)
    if not all(map(holds, [*results["scripted"], *results["random"], results["stopped"]])):
        sys.exit("Not every run ended as the one that was left alone.")


if __name__ == "__main__":
    main()
