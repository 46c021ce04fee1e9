"""`ringspan rehearse`: run some ranks of a large ring on this machine, one at a time."""

from __future__ import annotations

import dataclasses
import json
import os
from typing import Annotated, Any, cast

import psutil
import torch
import typer

from ringspan.balance import Balanced
from ringspan.cli.options import (
    LENGTHS_HELP,
    PATTERN_HELP,
    SPANNING,
    AsJson,
    HeadDim,
    Heads,
    NodeBandwidth,
    NodeLatency,
    RanksPerNode,
    RoutingName,
    TraceFile,
    as_routing,
    check_nodes,
    make_console,
    read_as,
    read_count,
    read_documents,
    read_dtype,
    read_pattern_at,
    warn_of_unselected,
    writing_to,
)
from ringspan.layout import AnyLayout, check_layout_name
from ringspan.planning import RingPlan
from ringspan.planning.timing import ASSUMED_RATES, DeviceRates
from ringspan.runtime.trace_file import lane_text, write_trace
from ringspan.tools.pages import Table, rich_table
from ringspan.tools.plan_report import headline, make_plans
from ringspan.tools.rehearse import Network, RehearsedRing, ranks_worth_rehearsing, rehearse_ring

_LINKS = ("bandwidth", "latency", "node_bandwidth", "node_latency")


def rehearse(
    tokens: Annotated[str, typer.Option("--tokens", "-n", metavar="COUNT", help="Length: 131072, 128k or 1e9.")] = "1M",
    ranks: Annotated[str, typer.Option("--ranks", "-k", metavar="COUNT", help="Ring size.")] = "64",
    rank: Annotated[
        int | None, typer.Option(help="Rehearse this rank only.", min=0, show_default="first, middle, last, worst")
    ] = None,
    pattern: Annotated[str, typer.Option(metavar="PATTERN", help=PATTERN_HELP)] = SPANNING,
    lengths: Annotated[str, typer.Option(metavar="COUNTS", help=LENGTHS_HELP, show_default="one document")] = "",
    layout: Annotated[
        str, typer.Option(help="contiguous, zigzag or balanced (by the work of the pattern).")
    ] = "zigzag",
    causal: Annotated[bool, typer.Option(help="Whether a query attends only to keys up to its own position.")] = True,
    routing: RoutingName = "relay",
    heads: Heads = 8,
    kv_heads: Annotated[int | None, typer.Option(help="KV heads.", min=1, show_default="same as heads")] = None,
    head_dim: HeadDim = 64,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16 or float64.")] = "float32",
    backward: Annotated[bool, typer.Option(help="Run backward, too.")] = False,
    bandwidth: Annotated[float, typer.Option(help="Bytes/s of a rank, in each direction.", show_default="25e9")] = 25e9,
    latency: Annotated[float, typer.Option(help="Latency of a hop in seconds.")] = 20e-6,
    ranks_per_node: RanksPerNode = None,
    node_bandwidth: NodeBandwidth = None,
    node_latency: NodeLatency = None,
    threads: Annotated[int, typer.Option(help="CPU threads of the rank; 0: all cores.", min=0)] = 0,
    timeout: Annotated[float, typer.Option(help="Time limit of one rank in seconds.")] = 3600.0,
    trace: TraceFile = None,
    as_json: AsJson = False,
) -> None:
    """Run some ranks of a large ring on this machine, one at a time, exactly as their plans say.

    Rows are random, parcels come from a stand-in, and everything else is what a real rank does. Work and memory are
    measured, bytes are counted, and waiting is computed from the bandwidth. The exit status is 0 only if the bytes are
    those of the plan.

    **Examples**

    `ringspan rehearse --tokens 1e9 --ranks 1024 --rank 17`

    `ringspan rehearse --tokens 16M --ranks 64 --backward --heads 2 --head-dim 32`

    `ringspan rehearse --tokens 1e9 --ranks 1024 --pattern "window 4095"`

    `ringspan rehearse --tokens 1M --ranks 16 --backward --trace rehearsed.json`

    `ringspan rehearse --ranks 16 --ranks-per-node 8 --routing by-node --bandwidth 450e9 --node-bandwidth 400e9`
    """
    ring_size = read_as("--ranks", read_count, ranks)
    check_nodes(ring_size, ranks_per_node, node_bandwidth, node_latency)
    if rank is not None and rank >= ring_size:
        raise typer.BadParameter(f"{rank}: must be in 0 .. {ring_size - 1}", param_hint="--rank")
    dtype, length = read_as("--dtype", read_dtype, dtype), read_as("--tokens", read_count, tokens)
    packed = read_as("--lengths", read_documents, lengths) if lengths else None
    length = length if packed is None else sum(packed)
    try:
        rates = DeviceRates(
            ASSUMED_RATES.flops, bandwidth, latency, node_bandwidth=node_bandwidth, node_latency=node_latency
        )
        network = Network(rates, ranks_per_node)  # FLOP/s do not count: work is measured
        plan = _plan(
            read_as("--pattern", read_pattern_at(length), pattern),
            length,
            ring_size,
            layout,
            causal=causal,
            routing=as_routing(routing, ranks_per_node),
            heads=heads,
            kv_heads=kv_heads or heads,
            head_dim=head_dim,
            dtype=dtype,
            lengths=packed,
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    chosen = ranks_worth_rehearsing(plan) if rank is None else {"requested": rank}
    _check_memory(plan, chosen, backward)
    progress = make_console(stderr=True)
    warn_of_unselected(progress, plan.pattern, length, plan.sizes.kv_heads)
    with progress.status(f"Rehearsing {len(chosen)} of {ring_size:,} ranks, one after the other ..."):
        ring = rehearse_ring(
            plan,
            chosen,
            network,
            getattr(torch, dtype),
            backward=backward,
            threads=threads or os.cpu_count() or 1,
            timeout_seconds=timeout,
            trace=trace is not None,
        )
    if trace is not None:
        lanes = [rank.lane for rank in ring.ranks.values() if rank.lane is not None]
        with writing_to("--trace", trace):
            about = {"what": "tiles are measured, waiting is computed", "network": dataclasses.asdict(network)}
            write_trace(trace, map(lane_text, lanes), {"plan": headline(plan, dtype), **about})
    if as_json:
        typer.echo(json.dumps(_document(plan, network, dtype, ring)))
    else:
        console = make_console()
        console.print(rich_table(_table(plan, dtype, ring)))
        for sentence in _sentences(plan, network, ring):
            console.print(sentence, highlight=False, soft_wrap=True)
    raise typer.Exit(0 if ring.bytes_as_planned else 1)


def _plan(pattern: Any, tokens: int, ring_size: int, layout: str, **options: Any) -> RingPlan:
    check_layout_name(layout)
    name = Balanced(pattern, options["causal"]) if layout == "balanced" else cast(AnyLayout, layout)
    return make_plans(pattern, tokens, ring_size, (name,), batch=1, **options)[name]


def _check_memory(plan: RingPlan, ranks: dict[str, int], backward: bool) -> None:
    """Raise before the start if this machine does not have the memory that a rank needs."""
    needed = max(plan.memory(rank, backward=backward).total for rank in ranks.values())
    free = psutil.virtual_memory().available
    if needed > free:
        raise typer.BadParameter(
            f"a rank needs {needed / 2**30:.1f} GiB, but {free / 2**30:.1f} GiB are free here: "
            "use more --ranks, or fewer --tokens or --heads"
        )


def _table(plan: RingPlan, dtype: str, ring: RehearsedRing) -> Table:
    lines = [["rank", "rows", "tiles", "hops", "work", "wait", "sent", "buffer", "peak"]]
    for reason, rank in ring.ranks.items():
        passes = [each for each in (rank.forward, rank.backward) if each is not None]
        lines.append(
            [
                f"{rank.rank:,} ({reason})",
                f"{rank.rows:,}",
                f"{rank.tiles:,}",
                f"{rank.hops:,}",
                f"{rank.working:.3f}{'†' if rank.disturbed else ''}",
                f"{rank.waiting:.3f}",
                f"{sum(each.bytes_sent for each in passes) / 2**20:,.1f}",
                f"{max(each.peak_parcel_bytes for each in passes) / 2**20:,.1f}",
                f"{rank.peak_growth / 2**20:,.0f}",
            ]
        )
    return Table(headline(plan, dtype), lines)


def _sentences(plan: RingPlan, network: Network, ring: RehearsedRing) -> list[str]:
    rates = network.rates
    between = f" ({rates.node_bandwidth / 1e9:g} GB/s between nodes)" if rates.node_bandwidth else ""
    size = plan.layout.ring_size
    busy = max((rank.foreign_cores for rank in ring.ranks.values() if rank.disturbed), default=0.0)
    return [
        str(plan.reach),
        "Work and wait in seconds; sent bytes, parcel buffers and peak memory growth in MiB.",
        "Measured: work and peak memory growth. Counted: bytes, which "
        + ("equal the plan." if ring.bytes_as_planned else "DIFFER FROM THE PLAN."),
        f"Computed: waiting, at {rates.bandwidth / 1e9:g} GB/s{between} and {rates.latency * 1e6:g} µs per hop.",
        f"Extrapolated: a step of {size:,} such devices takes about {ring.step_seconds:.3f} s{' †' if busy else ''}; "
        f"the slowest rehearsed rank is {ring.slowest.rank:,}.",
        *([f"†: other programs used up to {busy:.1f} cores meanwhile: repeat on an idle machine."] if busy else []),
    ]


def _document(plan: RingPlan, network: Network, dtype: str, ring: RehearsedRing) -> dict[str, Any]:
    """The JSON document; it separates what is measured, counted, computed and extrapolated."""
    return {
        "pattern": plan.pattern.text,
        "tokens": plan.layout.rows,
        "ranks": plan.layout.ring_size,
        "layout": str(plan.layout.name),
        "causal": plan.causal,
        "routing": str(plan.routing),
        "dtype": dtype,
        "reach": dataclasses.asdict(plan.reach),
        "sizes": dataclasses.asdict(plan.sizes),
        "network": {
            "ranks_per_node": network.ranks_per_node,
            **{name: getattr(network.rates, name) for name in _LINKS},
        },
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
                    name: dataclasses.asdict(each)
                    for name, each in (("forward", rank.forward), ("backward", rank.backward))
                    if each is not None
                },
                "bytes_as_planned": rank.bytes_as_planned,
            }
            for reason, rank in ring.ranks.items()
        ],
        "extrapolated": {"step_seconds": ring.step_seconds, "peak_growth_bytes": ring.peak_growth},
        "bytes_as_planned": ring.bytes_as_planned,
    }
