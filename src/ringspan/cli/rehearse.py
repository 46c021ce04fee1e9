"""`ringspan rehearse`: ranks of a ring that is not there, run for real on this machine."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from ringspan.cli.console import make_console
from ringspan.cli.options import (
    PATTERN_HELP,
    SPANNING,
    AsJson,
    Dim,
    Heads,
    read_as,
    read_count,
    read_dtype,
    read_pattern_at,
    warn_of_unselected,
)
from ringspan.layout import LayoutName, check_layout_name

if TYPE_CHECKING:
    from ringspan.planning import RingPlan, Routing
    from ringspan.tools.pages import Table
    from ringspan.tools.rehearse import Network, RehearsedRing


def rehearse(
    tokens: Annotated[str, typer.Option("--tokens", "-n", metavar="COUNT", help="Length: 131072, 128k or 1e9.")] = "1M",
    ranks: Annotated[str, typer.Option("--ranks", "-k", metavar="COUNT", help="Size of the ring.")] = "64",
    rank: Annotated[
        int | None, typer.Option(help="Rehearse this rank only.", min=0, show_default="first, middle, last, worst")
    ] = None,
    pattern: Annotated[str, typer.Option(metavar="PATTERN", help=PATTERN_HELP)] = SPANNING,
    layout: Annotated[str, typer.Option(help="contiguous or zigzag.")] = "zigzag",
    causal: Annotated[bool, typer.Option(help="Whether a query sees only keys up to itself.")] = True,
    routing: Annotated[str, typer.Option(help="relay or direct; or nodes, which needs --ranks-per-node.")] = "relay",
    heads: Heads = 8,
    kv_heads: Annotated[int | None, typer.Option(help="KV heads.", min=1, show_default="as many as heads")] = None,
    dim: Dim = 64,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16 or float64.")] = "float32",
    backward: Annotated[bool, typer.Option(help="Rehearse backward too.")] = False,
    bandwidth: Annotated[float, typer.Option(help="Bytes/s that a rank sends and receives.")] = 25e9,
    latency: Annotated[float, typer.Option(help="Seconds a hop costs.")] = 20e-6,
    ranks_per_node: Annotated[int, typer.Option(help="Ranks that share a node; 0: all links are alike.", min=0)] = 0,
    bandwidth_across: Annotated[float, typer.Option(help="Bytes/s of a rank between nodes.")] = 25e9,
    threads: Annotated[int, typer.Option(help="CPU threads of the rank; 0 is all cores.", min=0)] = 0,
    timeout: Annotated[float, typer.Option(help="Seconds that one rank may take.")] = 3600.0,
    as_json: AsJson = False,
) -> None:
    """Rehearse ranks of a big ring: run exactly their plans, with their own tiles, on this machine.

    A rank's rows are random, its parcels come from a stand-in, and everything else is what a real rank does. Work and
    memory are measured, bytes are counted, and waiting is computed from the bandwidth. Exit status 0 only if the bytes
    are those of the plan.

    **Examples**

    `ringspan rehearse --tokens 1e9 --ranks 1024 --rank 17`

    `ringspan rehearse --tokens 16M --ranks 64 --backward --heads 2 --dim 32`

    `ringspan rehearse --ranks 16 --ranks-per-node 8 --routing nodes --bandwidth 450e9 --bandwidth-across 50e9`
    """
    import os  # noqa: PLC0415

    import torch  # noqa: PLC0415

    from ringspan.tools.pages import rich_table  # noqa: PLC0415
    from ringspan.tools.rehearse import (  # noqa: PLC0415
        Network,
        ranks_worth_rehearsing,
        rehearse_ring,
    )

    ring_size = read_as("--ranks", read_count, ranks)
    if rank is not None and rank >= ring_size:
        raise typer.BadParameter(f"{rank}: must lie in 0 .. {ring_size - 1}", param_hint="--rank")
    dtype, length = read_as("--dtype", read_dtype, dtype), read_as("--tokens", read_count, tokens)
    try:
        network = Network(bandwidth, latency, ranks_per_node, bandwidth_across)
        plan = _plan(
            read_as("--pattern", read_pattern_at(length), pattern),
            length,
            ring_size,
            layout,
            causal=causal,
            routing=_routing(routing, ranks_per_node),
            heads=heads,
            kv_heads=kv_heads or heads,
            dim=dim,
            dtype=dtype,
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    chosen = ranks_worth_rehearsing(plan) if rank is None else {"asked for": rank}
    _check_memory(plan, chosen, backward)
    progress = make_console(stderr=True)
    warn_of_unselected(progress, plan.pattern, length, plan.sizes.kv_heads)
    with progress.status(f"{len(chosen)} of {ring_size:,} ranks are rehearsed, one after the other ..."):
        ring = rehearse_ring(
            plan,
            chosen,
            network,
            getattr(torch, dtype),
            backward=backward,
            threads=threads or os.cpu_count() or 1,
            timeout_seconds=timeout,
        )
    if as_json:
        typer.echo(json.dumps(_document(plan, network, dtype, ring)))
    else:
        console = make_console()
        console.print(rich_table(_table(plan, dtype, ring)))
        for sentence in _sentences(plan, network, ring):
            console.print(sentence, highlight=False, soft_wrap=True)
    raise typer.Exit(0 if ring.bytes_as_planned else 1)


def _plan(pattern: Any, tokens: int, ring_size: int, layout: str, **options: Any) -> RingPlan:
    from ringspan.tools.plan_report import make_plans  # noqa: PLC0415

    check_layout_name(layout)
    name = cast(LayoutName, layout)
    return make_plans(pattern, tokens, ring_size, (name,), batch=1, **options)[name]


def _routing(name: str, ranks_per_node: int) -> Routing:
    from ringspan.planning import ByNode  # noqa: PLC0415

    if name != "nodes":
        return cast("Routing", name)
    if not ranks_per_node:
        raise ValueError("--routing nodes needs to know them: give --ranks-per-node")
    return ByNode(ranks_per_node)


def _check_memory(plan: RingPlan, ranks: dict[str, int], backward: bool) -> None:
    """Say what a rank needs before it is started, if this machine cannot hold it."""
    import psutil  # noqa: PLC0415

    needed = max(plan.memory(rank, backward=backward).total for rank in ranks.values())
    free = psutil.virtual_memory().available
    if needed > free:
        raise typer.BadParameter(
            f"a rank needs {needed / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free here: "
            "give more --ranks, or fewer --tokens or --heads"
        )


def _table(plan: RingPlan, dtype: str, ring: RehearsedRing) -> Table:
    from ringspan.tools.pages import Table  # noqa: PLC0415
    from ringspan.tools.plan_report import headline  # noqa: PLC0415

    lines = [["rank", "rows", "tiles", "hops", "worked, s", "waits, s", "sent, MiB", "parcels, MiB", "grew by, MiB"]]
    for reason, rank in ring.ranks.items():
        passes = [figures for figures in (rank.forward, rank.backward) if figures is not None]
        lines.append(
            [
                f"{rank.rank:,} ({reason})",
                f"{rank.rows:,}",
                f"{rank.tiles:,}",
                f"{rank.hops:,}",
                f"{rank.working:.3f}{' †' if rank.disturbed else ''}",
                f"{rank.waiting:.3f}",
                f"{sum(figures.bytes_sent for figures in passes) / 2**20:,.1f}",
                f"{max(figures.peak_parcel_bytes for figures in passes) / 2**20:,.1f}",
                f"{rank.peak_growth / 2**20:,.0f}",
            ]
        )
    return Table(headline(plan, dtype), lines)


def _sentences(plan: RingPlan, network: Network, ring: RehearsedRing) -> list[str]:
    across = (
        f" inside nodes of {network.ranks_per_node}, {network.bandwidth_across / 1e9:g} GB/s across"
        if network.ranks_per_node
        else ""
    )
    size = plan.layout.ring_size
    busy = max((rank.foreign_cores for rank in ring.ranks.values() if rank.disturbed), default=0.0)
    return [
        str(plan.reach),
        "Measured here: work and memory. Counted: bytes, "
        + ("exactly those of the plan." if ring.bytes_as_planned else "WHICH ARE NOT THOSE OF THE PLAN."),
        f"Computed: waiting, at {network.bandwidth / 1e9:g} GB/s{across} and {network.latency * 1e6:g} µs a hop.",
        f"Extrapolated: a step of all {size:,} ranks takes about {ring.step_seconds:.3f} s{' †' if busy else ''} on as "
        f"many devices like this; the slowest rehearsed rank is {ring.slowest.rank:,}.",
        *(
            [f"†: other programs kept up to {busy:.1f} cores busy meanwhile: repeat on a quiet machine."]
            if busy
            else []
        ),
    ]


def _document(plan: RingPlan, network: Network, dtype: str, ring: RehearsedRing) -> dict[str, Any]:
    """Everything as one JSON document, each figure under what it is: measured, counted, computed or extrapolated."""
    return {
        "pattern": plan.pattern.text,
        "tokens": plan.layout.rows,
        "ranks": plan.layout.ring_size,
        "layout": plan.layout.name,
        "causal": plan.causal,
        "routing": str(plan.routing),
        "dtype": dtype,
        "reach": dataclasses.asdict(plan.reach),
        "sizes": dataclasses.asdict(plan.sizes),
        "network": dataclasses.asdict(network),
        "rehearsed": [
            {
                "reason": reason,
                "rank": rank.rank,
                "rows": rank.rows,
                "tiles": rank.tiles,
                "hops": rank.hops,
                "work_pairs": rank.work,
                "measured": {
                    "working_seconds": rank.working,
                    "peak_growth_bytes": rank.peak_growth,
                    "foreign_cores": rank.foreign_cores,
                    "disturbed": rank.disturbed,
                },
                "computed": {"waiting_seconds": rank.waiting},
                "counted": {
                    name: dataclasses.asdict(figures)
                    for name, figures in (("forward", rank.forward), ("backward", rank.backward))
                    if figures is not None
                },
                "bytes_as_planned": rank.bytes_as_planned,
            }
            for reason, rank in ring.ranks.items()
        ],
        "extrapolated": {"step_seconds": ring.step_seconds, "peak_growth_bytes": ring.peak_growth},
        "bytes_as_planned": ring.bytes_as_planned,
    }
