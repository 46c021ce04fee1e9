"""Tables and plots of growth: printed, and written to docs/scale.md."""

from __future__ import annotations

import datetime
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console

from benchmarks import walls
from ringspan.evidence.pages import Page, Picture, Rows, Table, markdown, print_page

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
RING_TEXT = """\
Rehearsed by `ringspan rehearse`, {rows:,} rows a rank, the pattern as above, contiguous, forward and backward: what the
slowest of the first, the middle, the last and the busiest rank works (measured here) and sends (counted), and by how
much it grows."""
REALITY_TEXT = """\
Rings of local processes (gloo), a step forward and backward, 4 heads, fp32, causal, zigzag, segments of 256 at rate 1
and the whole sequence at rate 32; beside it the same ranks rehearsed alone. Asked: bytes exactly, memory within 10 %.
Found: {bytes}; memory within {large:.1%} where every tensor of a rank has 32 MiB or more, and within {small:.1%} where
they are smaller. Of such, glibc keeps what is freed, each process as it happens: medians of three."""
COMMUNICATION_TEXT = """\
Bytes that the busiest rank receives in a forward pass, from the plan, and what it holds of others at a time. A plain
ring passes every row of K and V to everybody; an all-gather moves the same bytes and holds them all at once. LongNet's
ladder (segments 2048, 8192, .. up to all, rates 1, 4, ..), 32 heads, 8 KV heads of 128, bf16, causal."""
NODE_TEXT = """\
Bytes of a backward pass that cross from node to node, all ranks together, from the plans; its parcels are those of a
forward pass again. `direct`: the owner sends to each rank, and each sends its gradient home. `relay`: neighbours pass
parcels on, and their gradients, to which each adds its share. `ByNode`: relay, but a parcel never comes back into its
owner's node."""
WALL_TEXT = """\
Computed from plans and public figures, not measured: one attention layer, forward and backward, on NVIDIA H100 SXM
(80 GB, 989 TFLOP/s of dense bf16, of which 40 % are assumed; NVLink 450 GB/s each way inside a node of 8; one 400 Gb/s
adapter for each device between nodes, 50 GB/s; 20 µs a hop). A model of many layers divides the length that memory
holds by about as many, unless it recomputes. Waiting is what the slowest of three ranks waits for links that are
slower than its work."""


def write_report(results: dict[str, Any], machine: str, root: Path, console: Console) -> None:
    """Print every table, and write docs/scale.md and its figures."""
    page = Page(
        "Growth: from eight thousand tokens to a billion", _sentence(results), "python -m benchmarks.scale", machine
    )
    if "billion" in results:
        page.parts.extend(billion_tables(results["billion"], results["billion_log"]))
    growth = _with_billion(results)
    if growth:
        page.parts.extend([growth_table(growth), growth_picture(growth)])
    if results.get("warm"):
        page.parts.append(flat_table(results["warm"]["all"]))
    tables = {
        "rings": ring_table,
        "reality": reality_table,
        "communication": communication_table,
        "nodes": node_table,
        "walls": wall_table,
    }
    page.parts.extend(table(list(results[name].values())) for name, table in tables.items() if results.get(name))
    print_page(page, console)
    figures = root / "docs/figures"
    figures.mkdir(parents=True, exist_ok=True)
    for part in page.parts:
        if isinstance(part, Picture):
            part.figure.savefig(figures / f"{part.name}.png", dpi=130)
    (root / "docs/scale.md").write_text(markdown(page, "figures"))


def _sentence(results: dict[str, Any]) -> str:
    growth = _with_billion(results)
    if not growth:
        return "Nothing of growth has been measured yet."
    longest = max(growth)
    seconds = statistics.median(run["seconds"] for run in growth[longest])
    flat = _farthest_from_the_mean(results["warm"]["all"]) if results.get("warm") else None
    words = (
        f" Warm, time per token stays within {flat:.1%} of its mean from {FLAT_FROM:,} tokens on."
        if flat is not None
        else ""
    )
    return f"{longest:,} tokens through exact dilated attention in {seconds / 3600:.2f} hours, in one process.{words}"


def _with_billion(results: dict[str, Any]) -> dict[int, list[dict[str, Any]]]:
    by_length: defaultdict[int, list[dict[str, Any]]] = defaultdict(list)
    for run in [*results.get("growth", {}).values(), *([results["billion"]] if "billion" in results else [])]:
        by_length[run["settings"]["tokens"]].append(run)
    return dict(sorted(by_length.items()))


def _per_token(runs: list[dict[str, Any]], which: str = "seconds_per_token") -> float:
    """Microseconds, the median of the runs of one length."""
    return statistics.median(run[which] for run in runs) * 1e6


def _flatness(growth: dict[int, list[dict[str, Any]]], which: str) -> float | None:
    """How far the slowest length lies above the fastest, of the long ones; None if there are not two."""
    return _off_flat([_per_token(runs, which) for tokens, runs in growth.items() if tokens >= FLAT_FROM])


def _off_flat(times: list[float]) -> float | None:
    return max(times) / min(times) - 1 if len(times) > 1 else None


def _beside_the_others(warm: dict[str, list[float]]) -> dict[int, list[float]]:
    """For each length, its time in each round over the mean of that round: free of a machine that drifts."""
    means = [statistics.mean(times) for times in zip(*warm.values(), strict=True)]
    return {int(name): [x / mean for x, mean in zip(times, means, strict=True)] for name, times in warm.items()}


def _farthest_from_the_mean(warm: dict[str, list[float]]) -> float:
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
        f" Asked: flat within 10 %. Found: no length is farther than {_farthest_from_the_mean(warm):.1%} from the mean"
    )
    text += f" of all; the slowest lies above the fastest by {beside_others:.1%}, by the clock alone by {by_clock:.1%}."
    return Table("Is it flat?", rows, text)


def growth_table(growth: dict[int, list[dict[str, Any]]]) -> Table:
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


def growth_picture(growth: dict[int, list[dict[str, Any]]]) -> Picture:
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


def ring_table(rings: list[dict[str, Any]]) -> Table:
    rows: Rows = [["ranks", "tokens", "worked, s", "waits, s", "sent, MiB", "tiles", "hops", "grew by, MiB"]]
    for ring in rings:
        slowest = max(
            ring["rehearsed"], key=lambda r: r["measured"]["working_seconds"] + r["computed"]["waiting_seconds"]
        )
        sent = sum(figures["bytes_sent"] for figures in slowest["counted"].values())
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
    text += f" Waiting is computed, at {network['bandwidth'] / 1e9:g} GB/s and {network['latency'] * 1e6:g} µs a hop."
    return Table("Rings from 1 to 10,000 ranks", rows, text)


def reality_table(found: list[dict[str, Any]]) -> Table:
    rows: Rows = [
        [
            "ranks",
            "tokens",
            "dim",
            "rank",
            "sent: real, bytes",
            "rehearsed",
            "grew by: real, MiB",
            "rehearsed",
            "off by",
        ]
    ]
    for ring in found:
        for line in ring["lines"]:
            real, rehearsed = line["real_growth"], line["rehearsed_growth"]
            rows.append(
                [
                    f"{ring['ranks']}",
                    f"{line['tokens']:,}",
                    f"{line['dim']}",
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
        bytes="bytes exactly" if exact else "bytes that DIFFER",
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
            "held: ringspan",
            "plain ring",
            "all-gather",
        ]
    ]
    for line in found:
        names = ("ringspan", "plain_ring", "all_gather", "ringspan_held", "plain_ring_held", "all_gather_held")
        rows.append([f"{line['ranks']:,}", f"{line['tokens']:,}", *(f"{line[name] / 2**20:,.0f}" for name in names)])
    return Table("What a rank receives", rows, COMMUNICATION_TEXT)


def node_table(found: list[dict[str, Any]]) -> Table:
    ways = ["direct, MiB", "relay", "ByNode", "of direct"]
    columns = ["ranks", "per node", "layout", *(f"{what}: {way}" for what in ("parcels", "gradients") for way in ways)]
    rows: Rows = [columns]
    for ring in found:
        for line in ring["lines"]:
            rows.append(
                [
                    f"{ring['ranks']:,}",
                    f"{ring['ranks_per_node']}",
                    line["layout"],
                    *_before_and_after([line[name]["parcels"] for name in ("direct", "relay", "by_node")]),
                    *_before_and_after([line[name]["gradients"] for name in ("direct", "relay", "by_node")]),
                ]
            )
    return Table("Across nodes", rows, NODE_TEXT)


def _before_and_after(sizes: list[int]) -> list[str]:
    """Each size, and the last as a share of the first."""
    return [*(f"{size / 2**20:,.1f}" for size in sizes), f"{sizes[-1] / sizes[0]:.1%}" if sizes[0] else ""]


def wall_table(found: list[dict[str, Any]]) -> Table:
    rows: Rows = [
        [
            "devices",
            "longest that memory holds",
            "memory there, GB",
            "works, s",
            "waits, s",
            "latency, s",
            "wall there",
            "links keep up from",
        ]
    ]
    for line in found:
        lost = line["waiting"] + line["latency"]
        wall = "network" if lost > line["work"] else "memory, then compute"
        from_length = f"{line['keeps_up_from']:,}" if line["keeps_up_from"] else "never"
        rows.append(
            [
                f"{line['ranks']:,} at {line['bandwidth'] / 1e9:g} GB/s",
                f"{line['longest']:,}",
                f"{line['memory'] / 1e9:.1f} of {walls.MEMORY_BYTES / 1e9:g}",
                f"{line['work']:.3g}",
                f"{line['waiting']:.3g}",
                f"{line['latency']:.3g}",
                wall,
                from_length,
            ]
        )
    return Table("Where the walls stand", rows, WALL_TEXT)
