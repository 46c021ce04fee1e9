"""Tables and plots of one process: the longest run, growth with the length, and whether it is flat."""

from __future__ import annotations

import datetime
import statistics
from collections import defaultdict
from typing import Any

from matplotlib.figure import Figure

from ringspan.tools.pages import Picture, Rows, Table

Growth = dict[int, list[dict[str, Any]]]  # runs by length
FLAT_FROM = 2**20
GROWTH_TEXT = """\
One process, two heads of 32, fp32, causal, rows made on demand from their positions, results digested. Every pattern
selects 256 rows of each segment, and its largest segment is the whole sequence. Each length is a run of `ringspan
stream` with a budget of 8 GiB in a process of its own, and each is checked by its sampled proof. Lengths below
2**26 were run three times, in turns: medians. *Steady* is the median shard of a run: without the first ones, which also
pay for memory that the system gives page by page, and for the first read, which has nothing beside it."""
FLAT_TEXT = """\
A stretch of shards from the middle of each length, in turns, in one process that has its memory already (`python -m
benchmarks.warm`): the median shard, over {rounds} rounds. *Beside the others* is over the mean of the same round, since
the machine drifts."""


def runs_by_length(results: dict[str, Any]) -> Growth:
    by_length: defaultdict[int, list[dict[str, Any]]] = defaultdict(list)
    for run in [*results.get("growth", {}).values(), *([results["billion"]] if "billion" in results else [])]:
        by_length[run["settings"]["tokens"]].append(run)
    return dict(sorted(by_length.items()))


def _per_token(runs: list[dict[str, Any]], which: str = "seconds_per_token") -> float:
    """Microseconds, the median of the runs of one length."""
    return statistics.median(run[which] for run in runs) * 1e6


def _flatness(growth: Growth, which: str) -> float | None:
    """How far the slowest length lies above the fastest, of the long ones; None if there are not two."""
    return _off_flat([_per_token(runs, which) for tokens, runs in growth.items() if tokens >= FLAT_FROM])


def _off_flat(times: list[float]) -> float | None:
    return max(times) / min(times) - 1 if len(times) > 1 else None


def _beside_the_others(warm: dict[str, list[float]]) -> dict[int, list[float]]:
    """For each length, its time in each round over the mean of that round: free of a machine that drifts."""
    means = [statistics.mean(times) for times in zip(*warm.values(), strict=True)]
    return {int(name): [x / mean for x, mean in zip(times, means, strict=True)] for name, times in warm.items()}


def farthest_from_the_mean(warm: dict[str, list[float]]) -> float:
    return max(abs(statistics.median(ratios) - 1) for ratios in _beside_the_others(warm).values())


def flat_table(warm: dict[str, list[float]]) -> Table:
    rows: Rows = [["tokens", "µs a token", "from", "to", "beside the others", "from", "to"]]
    for (name, times), ratios in zip(warm.items(), _beside_the_others(warm).values(), strict=True):
        clock = [1e6 * time for time in (statistics.median(times), min(times), max(times))]
        beside = (statistics.median(ratios), min(ratios), max(ratios))
        rows.append([f"{int(name):,}", *(f"{x:.3f}" for x in clock), *(f"{x:.3f}" for x in beside)])
    by_clock = _off_flat([statistics.median(times) for times in warm.values()])
    beside_others = _off_flat([statistics.median(ratios) for ratios in _beside_the_others(warm).values()])
    text = FLAT_TEXT.format(rounds=len(next(iter(warm.values()))))
    text += (
        f" Asked: flat within 10 %. Found: no length is farther than {farthest_from_the_mean(warm):.1%} from the mean"
    )
    text += f" of all; the slowest lies above the fastest by {beside_others:.1%}, by the clock alone by {by_clock:.1%}."
    return Table("Is it flat?", rows, text)


def growth_table(growth: Growth) -> Table:
    rows: Rows = [
        ["tokens", "shards", "seconds", "µs a token", "steady", "peak memory, MiB", "bytes a token", "samples", "wrong"]
    ]
    for tokens, runs in growth.items():
        peak = max(run["peak_bytes"] for run in runs)
        rows.append(
            [
                f"{tokens:,}",
                f"{runs[0]['shards']:,}",
                f"{statistics.median(run['seconds'] for run in runs):,.2f}",
                f"{_per_token(runs):.3f}",
                f"{_per_token(runs, 'steady_seconds_per_token'):.3f}",
                f"{peak / 2**20:,.0f}",
                f"{peak / tokens:,.1f}",
                f"{runs[0]['proof']['samples']:,}",
                f"{max(run['proof']['wrong'] for run in runs)}",
            ]
        )
    steady, whole = (_flatness(growth, which) for which in ("steady_seconds_per_token", "seconds_per_token"))
    text = GROWTH_TEXT
    if steady is not None:
        text += f" From {FLAT_FROM:,} tokens on the slowest length lies above the fastest by {steady:.1%} when steady,"
        text += f" by {whole:.1%} over whole runs."
    return Table("Time and memory by length", rows, text)


def growth_picture(growth: Growth) -> Picture:
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    tokens = list(growth)
    for which, style, color, label in (
        ("seconds_per_token", "o:", "#56B4E9", "the whole run"),
        ("steady_seconds_per_token", "o-", "#0072B2", "the median shard"),
    ):
        times = [_per_token(runs, which) for runs in growth.values()]
        left.semilogx(tokens, times, style, color=color, base=2, label=label)
    left.legend()
    left.set_ylim(bottom=0)
    left.set(xlabel="tokens", title="µs a token")
    peaks = [max(run["peak_bytes"] for run in runs) / 2**30 for runs in growth.values()]
    right.semilogx(tokens, peaks, "s-", color="#D55E00", base=2)
    right.set_ylim(bottom=0)
    right.set(xlabel="tokens", title="peak memory of the process, GiB")
    for axis in (left, right):
        axis.grid(alpha=0.3)
    caption = (
        "Left: below some million tokens a run pays for its beginning; then time grows with the length, and no faster. "
        "Right: the budget decides, not the length."
    )
    return Picture("scale_growth", figure, caption)


def billion_tables(run: dict[str, Any], log: list[dict[str, Any]]) -> list[Table | Picture]:
    settings, proof = run["settings"], run["proof"]
    facts: Rows = [["what", "figure"]]
    facts += [
        ["tokens", f"{settings['tokens']:,}"],
        ["pattern", settings["pattern"]],
        ["causal", "yes" if settings["causal"] else "no"],
        ["heads", f"{settings['heads']} of {settings['dim']}, {settings['dtype']}"],
        ["time", f"{run['seconds'] / 3600:.2f} hours, {run['seconds_per_token'] * 1e6:.3f} µs a token"],
        ["shards", f"{run['shards']:,}"],
        ["parcels read", f"{run['parcel_bytes'] / 2**20:,.1f} MiB"],
        ["peak memory of the process", f"{run['peak_bytes'] / 2**30:.2f} GiB of {settings['budget_bytes'] / 2**30:g}"],
        ["SHA-256 of the shards' SHA-256", f"`{run['digest']}`"],
        ["places computed anew in fp64", f"{proof['samples']:,}, of up to {proof['most_keys']:,} keys each"],
        ["wrong", f"{proof['wrong']}"],
        [
            "largest error of an output",
            f"{proof['worst_out']:.1e} ({proof['worst_ratio']:.0%} of what rounding may do)",
        ],
        ["share of wrong places, 95 % confidence", f"at most {proof['wrong_share_bound']:.3%}"],
    ]
    strata: Rows = [["places", "there are", "samples", "wrong", "worst error"]]
    hops = [stratum for stratum in proof["strata"] if stratum["name"].startswith("hop ")]
    strata += [
        [s["name"], f"{s['population']:,}", f"{s['samples']:,}", f"{s['wrong']}", f"{s['worst_out']:.1e}"]
        for s in proof["strata"]
        if s not in hops
    ]
    if hops:
        fewest = min(hops, key=lambda hop: hop["samples"])
        strata.append(
            [
                f"{len(hops):,} hops; fewest samples in one: {fewest['samples']} of {fewest['population']:,}",
                f"{sum(hop['population'] for hop in hops):,}",
                f"{sum(hop['samples'] for hop in hops):,}",
                f"{sum(hop['wrong'] for hop in hops)}",
                f"{max(hop['worst_out'] for hop in hops):.1e}",
            ]
        )
    lines: Rows = [["time (UTC)", "finished shards", "tokens", "tokens/s of the last shard", "peak memory, MiB"]]
    step = max(1, len(log) // 16)
    for line in [*log[::step], *([log[-1]] if (len(log) - 1) % step else [])]:
        when = datetime.datetime.fromtimestamp(line["time"], datetime.timezone.utc)
        lines.append(
            [
                f"{when:%Y-%m-%d %H:%M:%S}",
                f"{line['finished']:,} of {line['shards']:,}",
                f"{line['finished'] * line['rows']:,}",
                f"{line['rows'] / line['seconds']:,.0f}",
                f"{line['peak_bytes'] / 2**20:,.0f}",
            ]
        )
    title = "A billion tokens" if settings["tokens"] >= 10**9 else f"The longest run: {settings['tokens']:,} tokens"
    command = f"ringspan stream --tokens {settings['tokens']} --budget {settings['budget_bytes'] // 2**30}G"
    return [
        Table(title, facts, f"`{command}`, one process; rows made on demand, results digested."),
        Table("Its samples", strata, "At least 30 of each kind, or all there are. The first line bounds the whole."),
        Table("Its log", lines, "Every shard has a line; some of them."),
    ]
