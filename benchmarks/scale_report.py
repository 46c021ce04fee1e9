"""The page of the suite `scale`: lengths in one process, rings, rehearsals against reality, and planned hardware."""

from __future__ import annotations

import datetime
import statistics
from collections import defaultdict
from typing import Any

from benchmarks.hardware_limits import MEMORY_BYTES
from benchmarks.suite import Page, Picture, Results, Rows, Table, empty_figure

Growth = dict[int, list[dict[str, Any]]]  # runs by length
FLAT_FROM = 2**20
GROWTH_TEXT = """\
One process, two heads of 32, fp32, causal. Rows are generated from their positions, and results are reduced to
checksums. Every pattern selects 256 rows of each segment, and its largest segment is the whole sequence. Each length is
a run of `ringspan stream` with a budget of 8 GiB in a process of its own, and each is checked by sampling. Lengths with
several runs took turns: medians. *Steady* is the median shard of a run. It excludes the first shards, which also pay
for page faults of new memory and for the first read, which overlaps with nothing."""
FLAT_TEXT = """\
Consecutive shards from the middle of each length, in turns, in one process that already has its memory (`python -m
benchmarks.warm`): the median shard over {rounds} rounds. *Relative* divides by the mean of the same round, in which a
drift of the machine cancels."""
RING_TEXT = """\
Rehearsed by `ringspan rehearse` with {rows:,} rows per rank, the pattern above, contiguous, forward and backward: the
compute time (measured), the bytes sent (counted) and the memory growth of the slowest of the first, the middle, the
last and the busiest rank."""
REALITY_TEXT = """\
Rings of local processes (gloo), one step forward and backward, 4 heads, fp32, causal, zigzag, segments of 256 at rate 1
and the whole sequence at rate 32, compared with the same ranks rehearsed alone. Required: equal bytes, memory within
10 %. Found: {bytes}; memory within {large:.1%} where every tensor of a rank has 32 MiB or more, and within {small:.1%}
for smaller ones. glibc retains freed memory of small tensors, differently in each process: medians of three runs."""
COMMUNICATION_TEXT = """\
Bytes that the busiest rank receives in a forward pass, and the most bytes of other ranks that it holds at a time, from
the plan. A plain ring passes every row of K and V to every rank; an all-gather moves the same bytes and holds them all
at once. LongNet's ladder (segments 2048, 8192, .. up to all, rates 1, 4, ..), 32 heads, 8 KV heads of 128, bf16,
causal."""
NODE_TEXT = """\
Bytes that cross node boundaries in a backward pass, all ranks together, from the plans. Its parcels are those of a
forward pass, sent again. `direct`: the owner sends to each rank, and each rank returns its gradient. `relay`: parcels
and their gradients are passed from neighbour to neighbour, and each rank adds its share. `ByNode`: like relay, but a
parcel never returns to its owner's node."""
WALL_TEXT = """\
Computed from plans and public specifications, not measured: one attention layer, forward and backward, on NVIDIA H100
SXM (80 GB; 989 TFLOP/s of dense bf16, of which 40 % are assumed; NVLink with 450 GB/s each way inside a node of 8; one
400 Gb/s adapter per device between nodes, 50 GB/s; 20 µs per hop). A model with many layers divides the length that
fits in memory by about their number, unless it recomputes activations. Waiting is the time that the slowest of three
ranks waits for transfers that take longer than its compute."""


def report(results: Results) -> Page:
    page = Page(
        "Growth: from eight thousand tokens to a billion",
        _sentence(results),
        "python -m benchmarks scale",
        f"Machine: {results.machine}",
    )
    if results.get("billion"):
        page.parts.extend(longest_run_tables(**results["billion"]))
    growth = runs_by_length(results)
    if growth:
        page.parts.extend([growth_table(growth), growth_picture(growth)])
    if results.get("warm"):
        page.parts.append(flat_table(results["warm"]))
    tables = {
        "rings": ring_table,
        "reality": reality_table,
        "communication": communication_table,
        "nodes": node_table,
        "walls": wall_table,
    }
    page.parts.extend(table(list(results[name].values())) for name, table in tables.items() if results.get(name))
    return page


def _sentence(results: Results) -> str:
    growth = runs_by_length(results)
    if not growth:
        return "No length has been measured yet."
    longest = max(growth)
    seconds = statistics.median(run["seconds"] for run in growth[longest])
    flat = largest_deviation(results["warm"]) if results.get("warm") else None
    words = (
        f" In a warm process, time per token stays within {flat:.1%} of its mean from {FLAT_FROM:,} tokens on."
        if flat is not None
        else ""
    )
    return f"{longest:,} tokens through exact dilated attention in {seconds / 3600:.2f} hours, in one process.{words}"


def runs_by_length(results: Results) -> Growth:
    by_length: defaultdict[int, list[dict[str, Any]]] = defaultdict(list)
    for run in [*results.get("growth", {}).values(), *([results["billion"]["run"]] if results.get("billion") else [])]:
        by_length[run["settings"]["tokens"]].append(run)
    return dict(sorted(by_length.items()))


def _per_token(runs: list[dict[str, Any]], which: str = "seconds_per_token") -> float:
    """Microseconds per token, the median of the runs of one length."""
    return statistics.median(run[which] for run in runs) * 1e6


def _flatness(growth: Growth, which: str) -> float | None:
    """How much slower the slowest of the long lengths is than the fastest; None if there are fewer than two."""
    return _excess([_per_token(runs, which) for tokens, runs in growth.items() if tokens >= FLAT_FROM])


def _excess(times: list[float]) -> float | None:
    return max(times) / min(times) - 1 if len(times) > 1 else None


def _relative(warm: dict[str, list[float]]) -> dict[int, list[float]]:
    """For each length, its time in each round divided by the mean of that round."""
    means = [statistics.mean(times) for times in zip(*warm.values(), strict=True)]
    return {int(name): [x / mean for x, mean in zip(times, means, strict=True)] for name, times in warm.items()}


def largest_deviation(warm: dict[str, list[float]]) -> float:
    return max(abs(statistics.median(ratios) - 1) for ratios in _relative(warm).values())


def flat_table(warm: dict[str, list[float]]) -> Table:
    rows: Rows = [["tokens", "µs per token", "from", "to", "relative", "from", "to"]]
    for (name, times), ratios in zip(warm.items(), _relative(warm).values(), strict=True):
        clock = [1e6 * time for time in (statistics.median(times), min(times), max(times))]
        relative_times = (statistics.median(ratios), min(ratios), max(ratios))
        rows.append([f"{int(name):,}", *(f"{x:.3f}" for x in clock), *(f"{x:.3f}" for x in relative_times)])
    by_clock = _excess([statistics.median(times) for times in warm.values()])
    relative = _excess([statistics.median(ratios) for ratios in _relative(warm).values()])
    text = FLAT_TEXT.format(rounds=len(next(iter(warm.values()))))
    text += (
        f" Required: flat within 10 %. Found: every length is within {largest_deviation(warm):.1%} of the mean of all; "
        f"the slowest is {relative:.1%} slower than the fastest, and {by_clock:.1%} by the clock alone."
    )
    return Table("Time per token is flat", rows, text)


def growth_table(growth: Growth) -> Table:
    rows: Rows = [
        [
            "tokens",
            "runs",
            "shards",
            "seconds",
            "µs per token",
            "steady",
            "peak memory, MiB",
            "bytes per token",
            "samples",
            "wrong",
        ]
    ]
    for tokens, runs in growth.items():
        peak = max(run["peak_bytes"] for run in runs)
        rows.append(
            [
                f"{tokens:,}",
                str(len(runs)),
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
        text += (
            f" From {FLAT_FROM:,} tokens on, the slowest length is {steady:.1%} slower than the fastest when steady,"
        )
        text += f" and {whole:.1%} over whole runs."
    return Table("Time and memory by length", rows, text)


def growth_picture(growth: Growth) -> Picture:
    figure, (left, right) = empty_figure(1, 2, (9, 3.4))
    tokens = list(growth)
    for which, style, color, label in (
        ("seconds_per_token", "o:", "#56B4E9", "whole run"),
        ("steady_seconds_per_token", "o-", "#0072B2", "median shard"),
    ):
        times = [_per_token(runs, which) for runs in growth.values()]
        left.semilogx(tokens, times, style, color=color, base=2, label=label)
    left.legend()
    left.set_ylim(bottom=0)
    left.set(xlabel="tokens", title="µs per token")
    peaks = [max(run["peak_bytes"] for run in runs) / 2**30 for runs in growth.values()]
    right.semilogx(tokens, peaks, "s-", color="#D55E00", base=2)
    right.set_ylim(bottom=0)
    right.set(xlabel="tokens", title="peak memory of the process, GiB")
    for axis in (left, right):
        axis.grid(alpha=0.3)
    caption = (
        "Left: below a few million tokens start-up costs dominate; beyond, time grows linearly with the length. Right: "
        "the budget determines peak memory, not the length."
    )
    return Picture("scale_growth", figure, caption)


def longest_run_tables(run: dict[str, Any], log: list[dict[str, Any]]) -> list[Table | Picture]:
    settings, proof = run["settings"], run["proof"]
    facts: Rows = [["quantity", "value"]]
    facts += [
        ["tokens", f"{settings['tokens']:,}"],
        ["pattern", settings["pattern"]],
        ["causal", "yes" if settings["causal"] else "no"],
        ["heads", f"{settings['heads']} of {settings['head_dim']}, {settings['dtype']}"],
        ["time", f"{run['seconds'] / 3600:.2f} hours, {run['seconds_per_token'] * 1e6:.3f} µs per token"],
        ["shards", f"{run['shards']:,}"],
        ["parcels read", f"{run['parcel_bytes'] / 2**20:,.1f} MiB"],
        ["peak memory of the process", f"{run['peak_bytes'] / 2**30:.2f} GiB of {settings['budget_bytes'] / 2**30:g}"],
        ["SHA-256 of the shards' SHA-256", f"`{run['digest']}`"],
        ["samples recomputed in fp64", f"{proof['samples']:,}, of up to {proof['most_keys']:,} keys each"],
        ["wrong", f"{proof['wrong']}"],
        [
            "largest error of an output",
            f"{proof['worst_out']:.1e} ({proof['worst_ratio']:.0%} of the rounding bound)",
        ],
        ["share of wrong results, 95 % confidence", f"at most {proof['wrong_share_bound']:.3%}"],
    ]
    strata: Rows = [["results", "number", "samples", "wrong", "worst error"]]
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
        Table(
            title, facts, f"`{command}`, one process; rows are generated on demand, results are reduced to checksums."
        ),
        Table(
            "Samples",
            strata,
            "At least 30 of each kind, or all of them. The first row bounds the error rate of the whole run.",
        ),
        Table("Log", lines, "The log has a line for every shard; some of them are shown."),
    ]


def ring_table(rings: list[dict[str, Any]]) -> Table:
    rows: Rows = [["ranks", "tokens", "compute, s", "waiting, s", "sent, MiB", "tiles", "hops", "memory growth, MiB"]]
    for ring in rings:
        slowest = max(
            ring["rehearsed"], key=lambda r: r["measured"]["working_seconds"] + r["computed"]["waiting_seconds"]
        )
        sent = sum(count["bytes_sent"] for count in slowest["counted"].values())
        rows.append(
            [
                f"{ring['ranks']:,}",
                f"{ring['tokens']:,}",
                f"{slowest['measured']['working_seconds']:.3f}",
                f"{slowest['computed']['waiting_seconds']:.4f}",
                f"{sent / 2**20:,.2f}",
                f"{max(rank['tiles'] for rank in ring['rehearsed']):,}",
                f"{max(rank['hops'] for rank in ring['rehearsed']):,}",
                f"{ring['extrapolated']['peak_growth_bytes'] / 2**20:,.0f}",
            ]
        )
    network = rings[0]["network"]
    text = RING_TEXT.format(rows=rings[0]["tokens"] // rings[0]["ranks"])
    text += f" Waiting is computed for {network['bandwidth'] / 1e9:g} GB/s and {network['latency'] * 1e6:g} µs per hop."
    return Table(f"Rings from 1 to {rings[-1]['ranks']:,} ranks", rows, text)


def reality_table(found: list[dict[str, Any]]) -> Table:
    rows: Rows = [
        [
            "ranks",
            "tokens",
            "head dim",
            "rank",
            "sent: real, bytes",
            "rehearsed",
            "growth: real, MiB",
            "rehearsed",
            "difference",
        ]
    ]
    for ring in found:
        for line in ring["lines"]:
            real, rehearsed = line["real_growth"], line["rehearsed_growth"]
            rows.append(
                [
                    f"{ring['ranks']}",
                    f"{line['tokens']:,}",
                    f"{line['head_dim']}",
                    f"{line['rank']}",
                    f"{line['real_bytes']:,}",
                    f"{line['rehearsed_bytes']:,}",
                    f"{real / 2**20:,.1f}",
                    f"{rehearsed / 2**20:,.1f}",
                    f"{rehearsed / real - 1:+.1%}",
                ]
            )
    lines = [line for ring in found for line in ring["lines"]]
    exact = all(line["real_bytes"] == line["rehearsed_bytes"] for line in lines)
    largest = max(line["tokens"] for line in lines)
    text = REALITY_TEXT.format(
        bytes="equal bytes" if exact else "bytes that DIFFER",
        large=max(_off_by(line) for line in lines if line["tokens"] == largest),
        small=max(_off_by(line) for line in lines if line["tokens"] < largest),
    )
    return Table("Rehearsed and real", rows, text)


def _off_by(line: dict[str, Any]) -> float:
    off: float = abs(line["rehearsed_growth"] / line["real_growth"] - 1)
    return off


def communication_table(found: list[dict[str, Any]]) -> Table:
    rows: Rows = [
        [
            "ranks",
            "tokens",
            "ringspan, MiB",
            "plain ring, MiB",
            "all-gather, MiB",
            "held, MiB: ringspan",
            "plain ring",
            "all-gather",
        ]
    ]
    for line in found:
        names = ("ringspan", "plain_ring", "all_gather", "ringspan_held", "plain_ring_held", "all_gather_held")
        rows.append([f"{line['ranks']:,}", f"{line['tokens']:,}", *(f"{line[name] / 2**20:,.0f}" for name in names)])
    return Table("What a rank receives", rows, COMMUNICATION_TEXT)


def node_table(found: list[dict[str, Any]]) -> Table:
    routings = ["direct, MiB", "relay", "ByNode", "of direct"]
    columns = [
        "ranks",
        "per node",
        "layout",
        *(f"{what}: {way}" for what in ("parcels", "gradients") for way in routings),
    ]
    rows: Rows = [columns]
    for ring in found:
        for line in ring["lines"]:
            rows.append(
                [
                    f"{ring['ranks']:,}",
                    f"{ring['ranks_per_node']}",
                    line["layout"],
                    *_sizes_and_share([line[name]["parcels"] for name in ("direct", "relay", "by_node")]),
                    *_sizes_and_share([line[name]["gradients"] for name in ("direct", "relay", "by_node")]),
                ]
            )
    return Table("Across nodes", rows, NODE_TEXT)


def _sizes_and_share(sizes: list[int]) -> list[str]:
    """Each size, and the last one as a share of the first."""
    return [*(f"{size / 2**20:,.1f}" for size in sizes), f"{sizes[-1] / sizes[0]:.1%}" if sizes[0] else ""]


def wall_table(found: list[dict[str, Any]]) -> Table:
    rows: Rows = [
        [
            "devices",
            "longest in memory",
            "memory, GB",
            "compute, s",
            "waiting, s",
            "latency, s",
            "limited by",
            "transfers hidden from",
        ]
    ]
    for line in found:
        lost = line["waiting"] + line["latency"]
        limit = "network" if lost > line["work"] else "memory, then compute"
        from_length = f"{line['keeps_up_from']:,}" if line["keeps_up_from"] else "never"
        rows.append(
            [
                f"{line['ranks']:,} at {line['bandwidth'] / 1e9:g} GB/s",
                f"{line['longest']:,}",
                f"{line['memory'] / 1e9:.1f} of {MEMORY_BYTES / 1e9:g}",
                f"{line['work']:.3g}",
                f"{line['waiting']:.3g}",
                f"{line['latency']:.3g}",
                limit,
                from_length,
            ]
        )
    return Table("Limits of H100 clusters", rows, WALL_TEXT)
