"""Rings over two hosts with links of several rates: step time, hidden communication and bytes, predicted and measured.

The hosts are network namespaces of this machine (`benchmarks.hosts`), each with one core for all that its ranks, gloo
and the network do. What the ranks measure is in `benchmarks.networks_ranks`; predictions are made for the report.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import ringspan as rs
from benchmarks.hosts import Job, TestBed, parse_rate
from benchmarks.networks_ranks import LINKS, TOKENS, Case, cases, names, rates_of
from benchmarks.suite import Measuring, Page, Results, Rows, Suite, Table
from ringspan.planning.cost import traffic
from ringspan.planning.timing import modelled_ranks, rank_times, timeline

HOSTS = 2
BEDS = {"2 x 1": 1, "2 x 2": 2}  # ranks on each host
RATES, MORE_RATES = ("100mbit", "1gbit", "10gbit"), ("100mbit", "200mbit", "500mbit", "1gbit", "2.5gbit", "10gbit")
QUICK_FACTOR = 8  # lengths are divided by this
SWITCH = "40gbit"  # never the limit: hosts limit what they send
LONGEST_SECONDS = 600.0  # for one item


def measure(run: Measuring) -> None:
    """Measure the rings of a test bed, one after the other, in one job."""
    ranks_per_host = BEDS[run.part]
    rates = run.sized(RATES[1:], RATES, MORE_RATES)
    tokens = {name: n // run.sized(QUICK_FACTOR, 1, 1) for name, n in TOKENS.items()}
    every = names(ranks_per_host, rates)
    known = run.results.get(run.part, {}) if run.resume else {}
    missing = [name for name in every if name not in known]
    rounds = 1 if run.size == "quick" else int(run.options["rounds"])
    settings = dict(names=missing, known=known, rounds=rounds, tokens=tokens)
    with TestBed(HOSTS, SWITCH) as bed:
        job = bed.torchrun(ranks_per_host, "-m", "benchmarks.networks_ranks", json.dumps(settings))
        found = printed(job)
        run.each(every, lambda name: dict(next(found), **({} if name == LINKS else {"tokens": tokens})))
        job.wait()


def printed(job: Job) -> Iterator[Any]:
    """The lines of JSON that rank 0 of a job prints, as they come."""
    read = 0
    while True:
        status, output = job.poll(), job.output(job.hosts[0])
        lines = output[read:].splitlines(keepends=True)
        for line in lines:
            if line.endswith("\n"):
                read += len(line)
                yield json.loads(line)
        if any(status) or not lines and None not in status:
            job.wait()
            return
        time.sleep(0.05)


@dataclass(frozen=True)
class Cell:
    """A ring over links of a rate: what was measured, and what was predicted without running it."""

    ranks_per_host: int
    rate: str
    case: Case
    found: dict[str, Any]
    rates: rs.DeviceRates

    @cached_property
    def plan(self) -> rs.RingPlan:
        return self.case.plan(HOSTS, self.ranks_per_host, self.found["tokens"])

    @property
    def measured(self) -> float:
        return statistics.median(self.found["seconds"])

    @cached_property
    def planned(self) -> float:
        return max(time.total for time in rank_times(self.plan, self.rates, self.ranks_per_host).values())

    @property
    def rehearsed(self) -> float:
        return max(sum(rank) for rank in self.found["rehearsed"])


def cells(results: Results) -> list[Cell]:
    found = []
    for bed, ranks_per_host in BEDS.items():
        stored = results.get(bed, {})
        for name, value in stored.items():
            if name.count(", ") == 3:
                rate, pattern, layout, routing = name.split(", ")
                rates = rates_of(rate, stored[LINKS], stored[f"alone, {pattern}"], ranks_per_host)
                found.append(Cell(ranks_per_host, rate, Case(pattern, layout, routing), value, rates))
    return found


def report(results: Results) -> Page:
    rows: Rows = [["ring", "link", "case", "measured", "plan", "", "rehearse", ""]]
    for cell in cells(results):
        rows.append([f"2 x {cell.ranks_per_host}", cell.rate, str(cell.case), f"{cell.measured:.3f}", f"{cell.planned:.3f}", f"{cell.planned/cell.measured-1:+.0%}", f"{cell.rehearsed:.3f}", f"{cell.rehearsed/cell.measured-1:+.0%}"])
    return Page("Networks", "s", "python -m benchmarks networks", results.machine, [Table("All", rows)])


SUITE = Suite(
    "docs/networks.md",
    {bed: measure for bed in BEDS},
    report,
    options={"rounds": "2"},
    long_options={"rounds": "3"},
)
