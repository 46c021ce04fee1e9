"""`ringspan plan`: what each rank of a ring would compute, send and hold. Imports torch only to measure or draw."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

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
    read_pattern_at,
    warn_of_unselected,
    writing_to,
)
from ringspan.geometry import Dilated, Pattern
from ringspan.layout import AnyLayout, LayoutName, check_layout_name, layouts_to_compare
from ringspan.planning import RingPlan, Routing
from ringspan.planning.breakeven import LONGEST, BreakEven, LayoutAdvice, advise_layout, break_even, speedup
from ringspan.planning.timing import RankTime
from ringspan.runtime.settings import missing_package
from ringspan.runtime.trace_file import lane_text, write_trace
from ringspan.tools import plan_report
from ringspan.tools.pages import Table, rich_table
from ringspan.tools.plan_report import KnownRates, find_rates, layout_costs, make_plans
from ringspan.tools.plan_trace import modelled_lanes

if TYPE_CHECKING:
    from rich.console import Console


def plan(
    pattern: Annotated[str, typer.Option(metavar="PATTERN", help=PATTERN_HELP)] = SPANNING,
    tokens: Annotated[
        str, typer.Option("--tokens", "-n", metavar="COUNT", help="Sequence length: 131072, 128k or 1e9.")
    ] = "128k",
    ranks: Annotated[str, typer.Option("--ranks", "-k", metavar="COUNT", help="Ring size.")] = "4",
    rank: Annotated[
        int | None, typer.Option(help="Show only this rank of the ring.", min=0, show_default="all, or a sample")
    ] = None,
    lengths: Annotated[str, typer.Option(metavar="COUNTS", help=LENGTHS_HELP, show_default="one document")] = "",
    layout: Annotated[
        str, typer.Option(help="contiguous, zigzag, balanced (by the work of the pattern), or all that differ.")
    ] = "all",
    causal: Annotated[bool, typer.Option(help="Whether a query attends only to keys up to its own position.")] = True,
    routing: RoutingName = "relay",
    ranks_per_node: RanksPerNode = None,
    heads: Heads = 8,
    kv_heads: Annotated[int | None, typer.Option(help="KV heads.", min=1, show_default="same as heads")] = None,
    head_dim: HeadDim = 64,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16 or float64.")] = "float32",
    batch: Annotated[int, typer.Option(help="Batch size.", min=1)] = 1,
    flops: Annotated[float | None, typer.Option(help="FLOP/s of a device.", show_default="measured")] = None,
    bandwidth: Annotated[float | None, typer.Option(help="Bytes/s that a rank sends.", show_default="measured")] = None,
    latency: Annotated[
        float | None,
        typer.Option(help="Latency of a hop in seconds.", show_default="measured, or 20e-6 if bandwidth is given"),
    ] = None,
    node_bandwidth: NodeBandwidth = None,
    node_latency: NodeLatency = None,
    measure: Annotated[
        bool,
        typer.Option(
            help="Compute from which length on a ring is faster, and measure the rates that are not given. Without it, "
            "rates are assumed: 1e14 FLOP/s, 25e9 bytes/s, 20e-6 s."
        ),
    ] = True,
    draw: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Write figures of the plan, as PNG and SVG.")
    ] = None,
    trace: TraceFile = None,
    as_json: AsJson = False,
) -> None:
    """Show what each rank of a ring computes, sends and holds, which layout is faster, and when a ring is worth it.

    Runs no attention: one rank of ten thousand, over a billion tokens, is planned in about a second. Which layout is
    faster, and from which length on a ring beats one device, depends on the speed of devices and links: give these
    rates, or let the command measure this machine for a few seconds.

    **Examples**

    `ringspan plan --tokens 1M --ranks 8 --no-measure`

    `ringspan plan --pattern full --ranks 16 --dtype bfloat16 --flops 4e14 --bandwidth 25e9`

    `ringspan plan --pattern full --ranks 16 --ranks-per-node 8 --flops 4e14 --bandwidth 2e11 --node-bandwidth 5e10`

    `ringspan plan --pattern "window 511 + 4096x4,65536x64" --tokens 1M --no-measure`

    `ringspan plan --tokens 1e9 --ranks 10000 --rank 17 --no-measure`

    `ringspan plan --pattern full --lengths 64k,512*128 --ranks 8 --no-measure`

    `ringspan plan --ranks 4 --draw pictures`

    `ringspan plan --ranks 4 --no-measure --trace predicted.json`
    """

    packed = read_as("--lengths", read_documents, lengths) if lengths else None
    ring_size, length = read_as("--ranks", read_count, ranks), read_as("--tokens", read_count, tokens)
    length = length if packed is None else sum(packed)
    if packed is not None and draw is not None:
        raise typer.BadParameter("figures show one document: give --tokens instead of --lengths", param_hint="--draw")
    planned = read_as("--pattern", read_pattern_at(length), pattern)
    check_nodes(ring_size, ranks_per_node, node_bandwidth, node_latency)
    try:
        plans = make_plans(
            planned,
            length,
            ring_size,
            _layouts(layout, planned, causal, packed),
            causal=causal,
            routing=as_routing(routing, ranks_per_node),
            batch=batch,
            heads=heads,
            kv_heads=kv_heads or heads,
            head_dim=head_dim,
            dtype=dtype,
            lengths=packed,
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if rank is not None and rank >= ring_size:
        way_out = f"give --ranks {rank} for a ring of that size" if rank > 1 else "a ring of 1 has only rank 0"
        raise typer.BadParameter(
            f"{rank}: must be a rank of the ring, 0 .. {ring_size - 1}; {way_out}", param_hint="--rank"
        )

    progress = make_console(stderr=True)
    warning = warn_of_unselected(progress, planned, length, kv_heads or heads)
    measure = measure and ring_size > 1
    with progress.status("planning ...") as status:
        if measure:
            status.update("measuring the compute and transfer rates of this machine ...")
        known = _rates(
            flops=flops,
            bandwidth=bandwidth,
            latency=latency,
            node_bandwidth=node_bandwidth,
            node_latency=node_latency,
            dtype=dtype,
            head_dim=head_dim,
            measure=measure,
        )
        plans = {name: replace(ring, costs=known.rates.costs) for name, ring in plans.items()}
        costs = {name: layout_costs(ring, rank) for name, ring in plans.items()}
        compare = len(plans) > 1 and ring_size > 1 and (measure or rank is None)  # --rank plans that rank only
        advice = advise_layout(plans, known.rates, ranks_per_node) if compare else None
        name = advice.layout if advice else next(iter(plans))
        nodes_of = ranks_per_node if rank is None else None
        routings = plan_report.routing_times(plans[name], known.rates, nodes_of)
        answers = {}
        if measure and packed is None:
            status.update("computing from which length on a ring is faster ...")
            answers = {name: _break_even(plans[name], known, pattern, ranks_per_node)}
        pictures = []
        if draw is not None:
            status.update("drawing ...")
            pictures = _draw(plans, draw)
        if trace is not None:
            _write_trace(plans[name], rank, known, ranks_per_node, trace, plan_report.headline(plans[name], dtype))

    if as_json:
        paths, warnings = list(map(str, pictures)), [warning] if warning else []
        used = known if advice or answers or routings else None
        typer.echo(json.dumps(plan_report.as_document(dtype, costs, advice, routings, used, answers, paths, warnings)))
        return
    tables = [plan_report.side_by_side(costs)]
    tables += [plan_report.rank_table(cost) for cost in costs.values()] if rank is None else []
    sentences = [f"Messages, {name}: {one.proof}" for name, one in costs.items() if one.proof and one.proof.messages]
    sentences += _advice(plans, advice, routings, answers, known)
    sentences += [f"Figure: {path}" for path in pictures] + ([f"Trace: {trace}"] if trace else [])
    headline = plan_report.headline(next(iter(plans.values())), dtype)
    _print_page(headline, plan_report.reach_sentences(costs), tables, sentences)


def _advice(
    plans: dict[AnyLayout, RingPlan],
    advice: LayoutAdvice | None,
    routings: dict[Routing, RankTime],
    answers: dict[AnyLayout, Any],
    known: KnownRates,
) -> list[str]:
    """What the time model says, and its rates; empty if it was not asked."""
    said = [f"Layout: {advice}."] if advice else []
    said += [plan_report.routing_sentence(routings)] if routings else []
    said += [plan_report.break_even_sentence(plans[name], *answer) for name, answer in answers.items()]
    return [*said, f"Rates: {known}."] if said else []


def _print_page(headline: str, reach: Sequence[str], tables: Sequence[Table], sentences: Sequence[str]) -> None:
    console = make_console()
    console.print(headline, style="bold", highlight=False, soft_wrap=True)
    _print_lines(console, reach)
    for table in tables:
        _print_table(console, table)
    console.print()
    _print_lines(console, sentences)


def _print_lines(console: Console, lines: Sequence[str]) -> None:
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)


def _layouts(name: str, pattern: Pattern, causal: bool, lengths: tuple[int, ...] | None) -> tuple[AnyLayout, ...]:
    if name == "all":
        return layouts_to_compare(pattern, causal, lengths)
    try:
        check_layout_name(name)
    except ValueError as error:
        raise typer.BadParameter(f"{error}, or 'all'", param_hint="--layout") from error
    return (Balanced(pattern, causal) if name == "balanced" else cast(AnyLayout, name),)


def _rates(**options: Any) -> KnownRates:
    try:
        return find_rates(**options)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    except (RuntimeError, TimeoutError) as error:  # no gloo, no second process, no memory
        way_out = "give --flops and --bandwidth, or use --no-measure"
        raise typer.BadParameter(f"measuring this machine failed: {error}; {way_out}") from error


def _break_even(plan: RingPlan, known: KnownRates, pattern: str, ranks_per_node: int | None) -> tuple[BreakEven, float]:
    """From which length on the ring is faster, and its speed-up at the planned length."""
    pattern_at = Dilated.spanning if pattern == SPANNING else None
    longest = max(LONGEST, plan.layout.rows)
    found = break_even(plan, known.rates, longest, pattern_at, ranks_per_node)
    return found, speedup(plan, known.rates, ranks_per_node)


def _draw(plans: dict[AnyLayout, RingPlan], folder: Path) -> list[Path]:
    try:
        from ringspan.draw import draw_plans  # noqa: PLC0415

        with writing_to("--draw", folder):
            names = {cast("LayoutName", str(name).split()[0]): plan for name, plan in plans.items()}
            return draw_plans(names, folder)
    except ModuleNotFoundError as error:
        raise typer.BadParameter(missing_package("drawing", error.name, "plot"), param_hint="--draw") from error


def _write_trace(
    plan: RingPlan, rank: int | None, known: KnownRates, ranks_per_node: int | None, path: Path, headline: str
) -> None:
    """Write what one rank, or each of a sample, does in the time model."""
    ranks = plan.sample if rank is None else [rank]
    texts = (lane_text(lane) for lane in modelled_lanes(plan, ranks, known.rates, ranks_per_node))
    with writing_to("--trace", path):
        write_trace(path, texts, {"what": "predicted, nothing was run", "plan": headline, "rates": str(known)})


def _print_table(console: Console, table: Table) -> None:
    shown = rich_table(table)
    shown.box, shown.padding = None, (0, 1, 0, 0)  # ten columns fit 80 characters
    shown.title = None  # rich would wrap it to the width of the table
    shown.columns[0].no_wrap = True
    for column in shown.columns[1:]:
        column.justify = "right"
    console.print()
    console.print(table.title, style="italic", highlight=False)
    console.print(shown)
