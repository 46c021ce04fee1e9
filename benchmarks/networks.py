"""Rings over two hosts with links of several rates: step time, hidden communication and bytes, predicted and measured.

The hosts are network namespaces of this machine (`benchmarks.hosts`), each with one core for all that its ranks, gloo
and the network do. What the ranks measure is in `benchmarks.networks_ranks`; predictions are made for the report.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import ringspan as rs
from benchmarks.hosts import Job, TestBed, parse_rate
from benchmarks.networks_ranks import FASTEST, LINKS, TOKENS, Case, cases, names, pattern_of, rates_of
from benchmarks.suite import HEAD_DIM, HEADS, MIB, Measuring, Page, Picture, Results, Rows, Suite, Table, empty_figure
from ringspan.planning.cost import traffic
from ringspan.planning.timing import rank_times, timeline

HOSTS = 2
BEDS = {"2 x 1": 1, "2 x 2": 2}  # ranks on each host
RATES = ("100mbit", "300mbit", "1gbit", "10gbit")
MORE_RATES = ("100mbit", "200mbit", "300mbit", "500mbit", "1gbit", "2.5gbit", "10gbit")
QUICK_FACTOR = 8  # lengths are divided by this
SWITCH = "40gbit"  # never the limit: hosts limit what they send
ALLOWED, HIDDEN = 0.2, 0.9  # error of a prediction; share of communication that is hidden where links keep up
SHORTEST = 5e-3  # seconds of transfers, of which a share is judged
SEARCHED = (1e6, 1e11)  # bit/s, for the break-even
COLOURS = {"contiguous": "#c2571a", "zigzag": "#1f6fb2"}
SHOWN = {"relay": "-", "by node": "--"}  # routings in the picture


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
        if any(status) or (not lines and None not in status):
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
    alone: float  # seconds of one rank that computes the whole sequence

    @cached_property
    def plan(self) -> rs.RingPlan:
        return self.case.plan(HOSTS, self.ranks_per_host, self.found["tokens"])

    @property
    def measured(self) -> float:
        return statistics.median(self.found["seconds"])

    @cached_property
    def planned(self) -> float:
        return self.planned_at(self.rates)

    def planned_at(self, rates: rs.DeviceRates) -> float:
        return max(time.total for time in rank_times(self.plan, rates, self.ranks_per_host).values())

    @property
    def rehearsed(self) -> float:
        return max(sum(rank) for rank in self.found["rehearsed"])

    def sent(self) -> tuple[float, int]:
        """Bytes between the hosts, forward and backward: by the counters of the interfaces, and as planned."""
        counted = statistics.median(sum(by_host) for by_host in self.found["sent"])
        return counted, sum(traffic(self.plan, self.ranks_per_host, backward=way).across for way in (False, True))

    @cached_property
    def link_seconds(self) -> tuple[float, float]:
        """How long the busiest link between the hosts takes for the bytes of a forward and of a backward pass."""
        node = range(self.ranks_per_host)
        passes = []
        for backward in (False, True):
            sizes: Counter[bool] = Counter()
            for rank in node:
                for batch in self.plan.batches(rank, backward=backward):
                    for is_sent, messages in ((True, batch.sends), (False, batch.receives)):
                        sizes[is_sent] += sum(m.bytes for m in messages if m.peer not in node)
            passes.append(8 * max(sizes.values()) / parse_rate(self.rate))
        return passes[0], passes[1]

    @cached_property
    def hidden(self) -> tuple[Shares, Shares]:
        """The share of the time of the links that is hidden in forward and backward: planned, and measured.

        The rank that waits least is the one on which the others wait: what it waits is not hidden.
        """
        planned = self._planned_waits()
        measured = [
            statistics.median(min(rank[way] for rank in by_rank) for by_rank in self.found["waits"]) for way in (0, 1)
        ]
        forward, backward = (
            Shares(1 - min(planned[way] / seconds, 1), 1 - min(measured[way] / seconds, 1), seconds)
            for way, seconds in enumerate(self.link_seconds)
        )
        return forward, backward

    def _planned_waits(self) -> list[float]:
        ranks = range(self.plan.layout.ring_size)
        waits = {rank: [0.0, 0.0] for rank in ranks}
        for span in timeline(self.plan, ranks, self.rates, self.ranks_per_host):
            if span.kind == "wait":
                waits[span.rank][not span.name.startswith("forward")] += span.end - span.start
        return [min(each[way] for each in waits.values()) for way in (0, 1)]


class Shares(NamedTuple):
    """Shares of communication hidden behind compute, of a pass whose bytes take a link so many seconds."""

    planned: float
    measured: float
    seconds: float

    @property
    def is_asked(self) -> bool:
        """Whether the plan says that the links keep up; transfers of a few milliseconds tell nothing."""
        return self.planned >= HIDDEN and self.seconds >= SHORTEST

    def __str__(self) -> str:
        return f"{self.planned:.0%} / {self.measured:.0%}" + ("" if self.seconds >= SHORTEST else " (short)")


def cells(results: Results) -> list[Cell]:
    found = []
    for bed, ranks_per_host in BEDS.items():
        stored = results[bed]
        for name, value in stored.items():
            if name.count(", ") == 3:
                rate, pattern, layout, routing = name.split(", ")
                alone = stored[f"alone, {pattern}"]
                rates = rates_of(rate, stored[LINKS], alone, ranks_per_host)
                seconds = statistics.median(alone["seconds"])
                found.append(Cell(ranks_per_host, rate, Case(pattern, layout, routing), value, rates, seconds))
    order = {n: cases(n) for n in BEDS.values()}  # items that were measured again are stored last
    return sorted(
        found,
        key=lambda c: (c.ranks_per_host, parse_rate(c.rate), order[c.ranks_per_host].index(c.case)),
    )


def errors(every: list[Cell], kind: str) -> list[float]:
    """Predicted over measured step time, minus 1; ``kind``: "planned" or "rehearsed"."""
    return [getattr(cell, kind) / cell.measured - 1 for cell in every]


def report(results: Results) -> Page:
    every = cells(results)
    off = {kind: sorted(map(abs, errors(every, kind))) for kind in ("planned", "rehearsed")}
    asked = [shares for cell in every for shares in cell.hidden if shares.is_asked]
    good = sum(shares.measured >= HIDDEN for shares in asked)
    sentence = (
        f"Rings over two hosts, in {len(every)} combinations of pattern, layout, routing and link, compared with "
        f"predictions that need no ring: the step times of `rs.plan` differ by {statistics.median(off['planned']):.0%} "
        f"(median), at most {off['planned'][-1]:.0%}, those of `ringspan rehearse` by "
        f"{statistics.median(off['rehearsed']):.0%}, at most {off['rehearsed'][-1]:.0%}; asked: at most {ALLOWED:.0%}. "
        f"The plan says that links keep up, so that at least {HIDDEN:.0%} of the communication of a pass is hidden, in "
        f"{len(asked)} passes; measured, it is in {good} of them."
    )
    parts: list[Table | Picture] = [break_even_table(every), rates_picture(every)]
    parts += [cells_table(bed, [cell for cell in every if cell.ranks_per_host == n]) for bed, n in BEDS.items()]
    parts += [links_table(results), method(), learned()]
    return Page("Networks", sentence, "python -m benchmarks networks", f"Machine: {results.machine}", parts)


def cells_table(bed: str, every: list[Cell]) -> Table:
    rows: Rows = [
        ["case", "link", "measured", "plan", "rehearse", "hidden forward", "hidden backward", "sent, planned"]
    ]
    for cell in every:
        sent, planned = cell.sent()
        rows.append(
            [
                str(cell.case) if cell.ranks_per_host > 1 else str(cell.case).removesuffix(", relay"),
                _rate(cell.rate),
                f"{1e3 * cell.measured:.0f}",
                *(f"{1e3 * t:.0f} ({t / cell.measured - 1:+.0%})" for t in (cell.planned, cell.rehearsed)),
                *map(str, cell.hidden),
                f"{sent / MIB:.1f}, {planned / MIB:.1f}",
            ]
        )
    sent_over = [cell.sent()[0] / cell.sent()[1] - 1 for cell in every]
    text = (
        "Milliseconds of a forward and a backward pass: measured, and as `rs.plan` and `ringspan rehearse` predict. "
        "*Hidden*: the share of the time that the busiest link takes for its bytes in which the rank that waits least "
        "does not wait, planned / measured. Measured shares can be larger: to gloo, a message is sent when the kernel "
        "has buffered the rest of it; in the model, when it has arrived. *Short*: less than "
        f"{1e3 * SHORTEST:.0f} ms. *Sent*: MiB between the hosts by the counters of their interfaces, and the "
        "bytes of the plan; packet headers, acknowledgements and the "
        f"barriers around a step add {min(sent_over):.1%} to {max(sent_over):.1%}."
    )
    return Table(
        f"Two hosts with {bed[-1]} rank{'s' * (bed[-1] != '1')} each", rows, text, terminal_columns=(0, 1, 2, 3, 4)
    )


def break_even_table(every: list[Cell]) -> Table:
    rows: Rows = [["ring", "case", "measured", "plan"]]
    for by_rate in _curves(every):
        first = by_rate[0]
        rows.append(
            [
                f"2 x {first.ranks_per_host}",
                str(first.case),
                measured_break_even(by_rate),
                _bits(planned_break_even(first)),
            ]
        )
    text = (
        "From this rate of the links on, a ring of two hosts is faster than one host, which computes the whole "
        "sequence on its core. *Measured*: between two measured rates, where the step time is taken as linear in the "
        "time of a byte."
    )
    return Table("From which link speed on is a ring of two hosts faster than one?", rows, text)


def _curves(every: list[Cell]) -> list[list[Cell]]:
    """The cells that differ only in the rate, in order of rate."""
    found: dict[tuple[int, Case], list[Cell]] = {}
    for cell in every:
        found.setdefault((cell.ranks_per_host, cell.case), []).append(cell)
    return [sorted(curve, key=lambda cell: parse_rate(cell.rate)) for curve in found.values()]


def measured_break_even(curve: list[Cell]) -> str:
    bits = [parse_rate(cell.rate) for cell in curve]
    gains = [cell.alone - cell.measured for cell in curve]
    if gains[0] > 0:
        return f"below {_bits(bits[0])}"
    if gains[-1] <= 0:
        return f"not up to {_bits(bits[-1])}"
    above = next(i for i, gain in enumerate(gains) if gain > 0)
    share = gains[above] / (gains[above] - gains[above - 1])
    return _bits(1 / (1 / bits[above] + share * (1 / bits[above - 1] - 1 / bits[above])))


def planned_break_even(cell: Cell) -> float:
    """Bits per second, by bisection of the model's step time; infinite if the ring is never faster."""
    low, high = SEARCHED
    if not _is_faster(cell, high):
        return math.inf
    while high / low > 1.001:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if _is_faster(cell, middle) else (middle, high)
    return high


def _is_faster(cell: Cell, bits: float) -> bool:
    return cell.planned_at(replace(cell.rates, node_bandwidth=bits / 8)) < cell.alone


def rates_picture(every: list[Cell]) -> Picture:
    figure, axes = empty_figure(1, 4, (13, 3.6))
    bits = [parse_rate(cell.rate) for cell in every]
    curve = [min(bits) * (max(bits) / min(bits)) ** (i / 30) for i in range(31)]
    shown = [(n, pattern) for n in BEDS.values() for pattern in TOKENS]
    for axis, (ranks_per_host, pattern) in zip(axes, shown, strict=True):
        panel = [c for c in _curves(every) if c[0].ranks_per_host == ranks_per_host and c[0].case.pattern == pattern]
        for cells_of in panel:
            first = cells_of[0]
            if first.case.routing not in SHOWN:
                continue
            colour, style = COLOURS[first.case.layout], SHOWN[first.case.routing]
            times = [first.planned_at(replace(first.rates, node_bandwidth=x / 8)) for x in curve]
            name = f"{first.case.layout}, {first.case.routing}" if ranks_per_host > 1 else first.case.layout
            axis.plot(curve, times, style, color=colour, linewidth=1.2, label=name)
            marker = "o" if first.case.routing == "relay" else "x"
            axis.plot([parse_rate(c.rate) for c in cells_of], [c.measured for c in cells_of], marker, color=colour)
        axis.axhline(panel[0][0].alone, color="#555555", linewidth=0.8, linestyle=":")
        axis.annotate("one host", (max(curve), panel[0][0].alone), ha="right", va="bottom", fontsize=8, color="#555555")
        at = min(planned_break_even(cells_of[0]) for cells_of in panel)
        if at > min(bits):
            axis.plot([at], [panel[0][0].alone], "v", color="black", markersize=5)
            axis.annotate(f"{_bits(at)}  ", (at, panel[0][0].alone), ha="right", va="top", fontsize=8)
        axis.set_xscale("log")
        axis.set_ylim(bottom=0)
        axis.set_title(f"2 hosts x {ranks_per_host}, {pattern}", fontsize=10)
        axis.set_xlabel("link, bit/s", fontsize=9)
        axis.legend(frameon=False, fontsize=7)
    axes[0].set_ylabel("seconds of a step", fontsize=9)
    caption = (
        "Seconds of a forward and a backward pass over links of a rate: lines as `rs.plan` predicts them, points as "
        "measured (crosses: routing by node). Below the dotted line, the ring is faster than one host. The triangle is "
        "the slowest link at which a ring is, as planned; without a triangle, rings are at all these rates."
    )
    return Picture("networks", figure, caption)


def links_table(results: Results) -> Table:
    rows: Rows = [["what", *(f"two hosts x {n}" for n in BEDS.values())]]
    beds = [(results[bed], n) for bed, n in BEDS.items()]

    def line(name: str, value: Callable[[dict[str, Any], int], str]) -> None:
        rows.append([name, *(value(stored, n) for stored, n in beds)])

    def speed(pattern: str) -> Callable[[dict[str, Any], int], str]:
        return lambda stored, n: f"{stored[f'alone, {pattern}']['flops'] / 1e9:.1f}"

    def alone(pattern: str) -> Callable[[dict[str, Any], int], str]:
        return lambda stored, n: f"{1e3 * statistics.median(stored[f'alone, {pattern}']['seconds']):.0f}"

    for pattern in TOKENS:
        line(f"one rank alone, {pattern}: ms", alone(pattern))
        line(f"one rank alone, {pattern}: GFLOP/s", speed(pattern))
    line("latency between hosts, µs", lambda stored, n: f"{1e6 * stored[LINKS]['across']['latency']:.0f}")
    line("copying, s of a core for each GB", lambda stored, n: f"{1e9 * stored[LINKS]['across']['copying'] / n:.2f}")
    line(
        "inside a host, GB/s and µs",
        lambda stored, n: (
            "-"
            if n == 1
            else f"{stored[LINKS]['inside']['bandwidth'] / 1e9:.2f}, {1e6 * stored[LINKS]['inside']['latency']:.0f}"
        ),
    )
    text = (
        "None of them comes from a ring. GFLOP/s: one rank of each host computes the whole sequence alone; the price "
        "of its tiles in the model over its time. Latency: messages of 8 bytes. Copying: by how much an exchange of "
        f"16 MiB over links of {_rate(FASTEST)} delays matrix products, which all ranks compute at the same time. The "
        "bandwidth between hosts is the set rate."
    )
    return Table("What the predictions start from", rows, text)


def method() -> Table:
    full, dilated = (f"{TOKENS[name]:,}" for name in ("full", "dilated"))
    rows: Rows = [
        ["", ""],
        ["hosts", "network namespaces with links of a set rate in each direction (`benchmarks.hosts`); torchrun, gloo"],
        ["cores", "one for each host, for all its ranks, the threads of gloo and the kernel's network"],
        ["calls", f"causal, {HEADS} heads of {HEAD_DIM}, fp32: full attention of {full} tokens; "
                  f"{pattern_of('dilated', TOKENS).text} of {dilated}"],
        ["times", "median of rounds after one that warms up, of the slowest rank; a round that others disturb is "
                  "repeated"],
        ["plan", "the time model of `rs.plan`, `rs.best_layout` and `rs.best_plan`, for the whole ring"],
        ["rehearse", "`rehearse_rank` for all ranks at the same time, which share cores as in the ring: work is "
                     "measured, waiting computed"],
        ["routings", "with one rank on each host, relay, direct and by node send the same messages"],
    ]  # fmt: skip
    return Table("How it is measured", rows)


def learned() -> Table:
    rows: Rows = [
        ["where they parted", "cause", "now"],
        [
            "transfers in both directions: measured times were twice the planned ones",
            "gloo announces a receive on the connection that carries the data. Sends were posted before receives, so "
            "the announcement queued behind a large message, and the peer could not send before that had arrived.",
            "Receives are posted first: both directions of a link are used at once.",
        ],
        [
            "two ranks on a core: planned times were too long",
            "Each rank was planned with half of a core. While one waits, the other has all of it.",
            "`DeviceRates(devices_per_core=2)`: the model divides a core among the ranks that compute.",
        ],
        [
            "slow links: rehearsed times were too long",
            "Each rank had an even share of its host's link, also where the others send nothing in that hop, and its "
            "messages in both directions took turns.",
            "The plans of all ranks of a host say who sends how much at each hop, in each direction.",
        ],
        [
            "slow links, two ranks on a core: some rehearsed times are still too long",
            "A rehearsed rank does not know when the others wait. It assumes that they always take their half of the "
            "core, and that their messages of a hop are always on the link at the same time.",
            "Unchanged. The time model of `rs.plan` simulates all ranks together, and is closer there.",
        ],
        [
            "backward: planned and measured agree that some communication is not hidden",
            "The gradients of the last hop return to their owners after its tiles, when nothing is left to compute.",
            "Unchanged. It takes a schedule that keeps some own tiles for the end.",
        ],
    ]
    return Table("Where prediction and measurement parted", rows)


def broken(results: Results) -> str:
    every = cells(results)
    found = [
        f"{kind}: {error:+.0%} for 2 x {cell.ranks_per_host}, {_rate(cell.rate)}, {cell.case}"
        for kind in ("planned", "rehearsed")
        for cell, error in zip(every, errors(every, kind), strict=True)
        if abs(error) > ALLOWED
    ]
    found += [
        f"{shares.measured:.0%} hidden, planned {shares.planned:.0%}: {name} of 2 x {cell.ranks_per_host}, "
        f"{_rate(cell.rate)}, {cell.case}"
        for cell in every
        for name, shares in zip(("forward", "backward"), cell.hidden, strict=True)
        if shares.is_asked and shares.measured < HIDDEN
    ]
    return "; ".join(found)


def _rate(rate: str) -> str:
    return _bits(parse_rate(rate))


def _bits(bits: float) -> str:
    if bits == math.inf:
        return "never"
    return f"{bits / 1e9:.2g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.3g} Mbit/s"


SUITE = Suite(
    "docs/networks.md",
    dict.fromkeys(BEDS, measure),
    report,
    broken=broken,
    options={"rounds": "2"},
    long_options={"rounds": "5"},
)
