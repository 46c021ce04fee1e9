"""Tables and plots of growth: printed, and written to docs/scale.md."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import walls
from benchmarks.length_report import (
    FLAT_FROM,
    billion_tables,
    farthest_from_the_mean,
    flat_table,
    growth_picture,
    growth_table,
    runs_by_length,
)
from ringspan.tools.pages import Page, Picture, Rows, Table, markdown, print_page

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
    growth = runs_by_length(results)
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
    growth = runs_by_length(results)
    if not growth:
        return "Nothing of growth has been measured yet."
    longest = max(growth)
    seconds = statistics.median(run["seconds"] for run in growth[longest])
    flat = farthest_from_the_mean(results["warm"]["all"]) if results.get("warm") else None
    words = (
        f" Warm, time per token stays within {flat:.1%} of its mean from {FLAT_FROM:,} tokens on."
        if flat is not None
        else ""
    )
    return f"{longest:,} tokens through exact dilated attention in {seconds / 3600:.2f} hours, in one process.{words}"


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
