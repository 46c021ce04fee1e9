"""Training over two hosts, one of which is killed, powered off, cut off or stalled at a random moment.

Every run is `ringspan train` under torchrun in a test bed of hosts (`benchmarks.hosts`). Where a host's torchrun has
died, the suite starts it again, as systemd or Slurm do. The suite fails unless every run ends with the same losses and
weights as the undisturbed one, bit for bit, and the other host names the lost ranks in time.
"""

from __future__ import annotations

import itertools
import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.faults import FLAGS as OF_FAULTS
from benchmarks.faults import SAVE_EVERY, lost_steps
from benchmarks.hosts import Host, Job, TestBed
from benchmarks.suite import Measuring, Page, Results, Rows, Suite, Table, yes
from ringspan.runtime.files import read_journal
from ringspan.train.metrics import METRICS, read_metrics

HOSTS, RANKS_PER_HOST = 2, 2
STEPS, TIMEOUT = 24, 12
RESTARTS = 8
RESTART_SECONDS = 1.0  # until a dead torchrun is started again
LONGEST_SECONDS = 400  # for a run, including restarts on a busy machine
FLAGS = (*OF_FAULTS, "--steps", str(STEPS), "--timeout", str(TIMEOUT))
SAID = re.compile(r"^rank (\d+) on (\S+): (step .*?) \(", re.MULTILINE)


@dataclass(frozen=True)
class Fault:
    """What happens to a host, and for how many seconds its link is down or silent."""

    text: str
    strike: Callable[[Host], None]
    seconds: tuple[float, float] = (0.0, 0.0)  # shortest and longest
    is_noticed: bool = True


def power_off(host: Host) -> None:
    host.cut()
    host.kill()


FAULTS = {
    "killed": Fault("all its processes are killed", Host.kill),
    "off": Fault("its power fails: it closes no connection", power_off, (TIMEOUT, 2 * TIMEOUT)),
    "cut": Fault("its link is down", Host.cut, (TIMEOUT + 4, 3 * TIMEOUT)),
    "stalled": Fault("its packets are dropped, the link is up", Host.stall, (TIMEOUT + 4, 3 * TIMEOUT)),
    "brief": Fault(
        "its packets are dropped, and it is back within the timeout", Host.stall, (1, TIMEOUT / 4), is_noticed=False
    ),
}


class HostsRun:
    """A training run over the hosts of a test bed, with a manager that restarts a torchrun that has died."""

    def __init__(self, bed: TestBed, out: Path) -> None:
        self.bed, self.out = bed, out
        self.commands = 1  # started by the manager, per host at most
        self.off: tuple[Host, ...] = ()  # without power: nothing can be started there
        self._died: dict[int, float] = {}  # host: when its torchrun was found dead
        self._said: dict[tuple[str, int], tuple[float, str]] = {}  # host, rank: when and what it said first
        self.job: Job = bed.torchrun(
            RANKS_PER_HOST, "-m", "ringspan", "train", *FLAGS, "--out", str(out), restarts=RESTARTS
        )
        self.start = time.monotonic()

    def steps_done(self) -> int:
        return len(read_metrics(self.out)) if (self.out / METRICS).exists() else 0

    def watch(self, seconds: float, until: Callable[[], bool]) -> None:
        """Play the manager until a condition holds. Raises TimeoutError with the end of all output."""
        deadline = time.monotonic() + seconds
        while not until():
            now = time.monotonic()
            if now > deadline:
                tails = [f"{host.name}:\n{self.job.errors(host)[-3000:]}" for host in self.bed.hosts]
                raise TimeoutError("\n".join([f"{self.out.name} did not finish within {seconds:g} s", *tails]))
            for host in self.bed.hosts:
                for found in SAID.finditer(self.job.errors(host)):
                    self._said.setdefault((host.name, int(found[1])), (now, found[3]))
                if self.job.poll()[host.number] not in (None, 0):
                    died = self._died.setdefault(host.number, now)
                    if now - died > RESTART_SECONDS and host not in self.off:
                        del self._died[host.number]
                        self.job.restart(host)
                        self.commands += 1
            time.sleep(0.05)

    def finish(self) -> None:
        """Run until torchrun has succeeded on a host: then all ranks have finished."""
        self.watch(LONGEST_SECONDS, lambda: 0 in self.job.poll())
        deadline = time.monotonic() + 10
        while None in self.job.poll() and time.monotonic() < deadline:
            time.sleep(0.02)
        for host in self.bed.hosts:
            host.kill()

    def disturb(self, kind: str, host: Host, chance: random.Random) -> dict[str, Any]:
        """Let the fault strike during a random step, and return how it was noticed."""
        fault, step = FAULTS[kind], chance.randrange(1, STEPS - 5)
        self.watch(LONGEST_SECONDS, lambda: self.steps_done() >= step)
        self.watch(5, _after(chance.uniform(0, 0.3)))
        struck, done = time.monotonic(), self.steps_done()
        fault.strike(host)
        self.off = (host,) if fault.strike is power_off else ()
        seconds = chance.uniform(*fault.seconds)
        self.watch(seconds + 5, _after(seconds))
        host.mend()
        self.off = ()
        self.finish()
        (other,) = (each for each in self.bed.hosts if each is not host)
        said = {rank: (when - struck, text) for (name, rank), (when, text) in self._said.items() if name == other.name}
        lost = f"ranks {', '.join(map(str, ranks_of(host)))} on {host.name}"
        named = [lost in text for _, text in said.values()]
        return {
            "kind": kind,
            "host": host.name,
            "steps_done": done,
            "seconds": seconds,
            "detected": [when for when, _ in said.values()],
            "said": sorted({f"rank {rank}: {text}" for rank, (_, text) in said.items()}),
            "named": len(named) == RANKS_PER_HOST and all(named),
            "restarts": self.job.output(self.bed.hosts[0]).count(" parameters, ") - 1,
            "commands": self.commands - 1,
            "lost": lost_steps([line["number"] for line in read_journal(self.out / METRICS) if "number" in line]),
            "whole": time.monotonic() - self.start,
        }

    def outcome(self) -> tuple[list[float], bytes]:
        return [step["loss"] for step in read_metrics(self.out)], (self.out / "model/model.safetensors").read_bytes()


def _after(seconds: float) -> Callable[[], bool]:
    end = time.monotonic() + seconds
    return lambda: time.monotonic() >= end


def ranks_of(host: Host) -> range:
    return range(host.number * RANKS_PER_HOST, (host.number + 1) * RANKS_PER_HOST)


@cache
def undisturbed(folder: Path) -> tuple[list[float], bytes]:
    """The outcome of a run without faults."""
    with TestBed(HOSTS, "1gbit") as bed:
        run = HostsRun(bed, folder / "undisturbed")
        run.finish()
    return run.outcome()


def one(folder: Path, kind: str, chance: random.Random) -> dict[str, Any]:
    """A run with one fault on one of the hosts, compared with the undisturbed run."""
    wanted_losses, wanted_weights = undisturbed(folder)
    with TestBed(HOSTS, "1gbit") as bed:
        run = HostsRun(bed, folder / f"{kind}{time.monotonic_ns()}")
        found = run.disturb(kind, chance.choice(bed.hosts), chance)
        losses, weights = run.outcome()
    return {**found, "same_losses": losses == wanted_losses, "same_weights": weights == wanted_weights}


def faults(measuring: Measuring) -> None:
    count = 1 if measuring.size == "quick" else int(measuring.options["faults"])
    names = [f"{kind} {number + 1}" for number, kind in zip(range(count), itertools.cycle(FAULTS), strict=False)]
    seed = measuring.options["seed"]
    measuring.each(names, lambda name: one(measuring.folder, name.split()[0], random.Random(f"{seed} {name}")))


def in_time(row: dict[str, Any]) -> bool:
    """Whether every rank of the other host named all lost ranks within the timeout, or had no reason to."""
    if not FAULTS[row["kind"]].is_noticed:
        return bool(not row["said"])
    return bool(row["named"] and max(row["detected"]) <= TIMEOUT)


def broken(results: Results) -> str:
    rows = results["faults"].values()
    if not all(row["same_losses"] and row["same_weights"] for row in rows):
        return "Not every run ended like the undisturbed one."
    if not all(map(in_time, rows)):
        return "Not every lost host was named in time."
    return ""


def report(results: Results) -> Page:
    rows = list(results["faults"].values())
    same = sum(row["same_losses"] and row["same_weights"] for row in rows)
    noticed = [row for row in rows if FAULTS[row["kind"]].is_noticed]
    timely = sum(in_time(row) for row in noticed)
    sentence = (
        f"Runs of {STEPS} steps on {HOSTS} hosts with {RANKS_PER_HOST} ranks each, with a checkpoint every "
        f"{SAVE_EVERY} steps and a timeout of {TIMEOUT} s. Of {len(rows)} runs in which a host failed at a random "
        f"moment, **{same}** ended with the same loss at every step and the same weights, bit for bit, as an "
        f"undisturbed run. In {timely} of the {len(noticed)} runs that lost a host for longer than the timeout, every "
        "rank of the other host named the lost ranks and their host within the timeout, counted from the fault."
    )
    cells: Rows = [["host", "what happens", "for", "after step", "named after", "timeout", "restarts by torchrun",
                    "torchrun started again", "steps repeated", "same losses", "same weights"]]  # fmt: skip
    for row in rows:
        detected = [f"{when:.1f}" for when in (min(row["detected"], default=0), max(row["detected"], default=0))]
        cells.append([
            row["host"], FAULTS[row["kind"]].text, f"{row['seconds']:.0f} s" if row["seconds"] else "",
            str(row["steps_done"]), f"{' - '.join(dict.fromkeys(detected))} s" if row["said"] else "not noticed",
            f"{TIMEOUT} s",
            str(row["restarts"]), str(row["commands"]), str(row["lost"]),
            yes(row["same_losses"]), yes(row["same_weights"]),
        ])  # fmt: skip
    said: Rows = [["host", "what happens", "what the other ranks said"]]
    said += [[row["host"], FAULTS[row["kind"]].text, "; ".join(row["said"]) or "nothing"] for row in rows]
    text = "Named after: seconds from the fault until the first and the last rank of the other host named the lost."
    return Page(
        "Hosts that fail",
        sentence,
        "python -m benchmarks host_faults",
        f"Machine: {results.machine}",
        [
            Table("Faults", cells, text),
            Table("What ranks said", said, "The first sentence of each rank of the other host."),
        ],
    )


SUITE = Suite(
    "docs/faults.md",
    {"faults": faults},
    report,
    marker="benchmarks.host_faults",
    broken=broken,
    options={"faults": "5", "seed": "0"},
    long_options={"faults": "10"},
)
