"""`ringspan plan`: what a ring would do and cost, before there is one. Needs no torch, unless it measures or draws."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast, get_args

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
    read_pattern_at,
    warn_of_unselected,
    writing_to,
)
from ringspan.geometry import Dilated
from ringspan.layout import LayoutName, check_layout_name
from ringspan.runtime.extras import missing_package

if TYPE_CHECKING:
    from rich.console import Console

    from ringspan.planning import RingPlan, Routing
    from ringspan.planning.breakeven import BreakEven
    from ringspan.tools.pages import Table
    from ringspan.tools.rates import KnownRates


def plan(
    pattern: Annotated[str, typer.Option(metavar="PATTERN", help=PATTERN_HELP)] = SPANNING,
    tokens: Annotated[
        str, typer.Option("--tokens", "-n", metavar="COUNT", help="Length: 131072, 128k or 1e9.")
    ] = "128k",
    ranks: Annotated[str, typer.Option("--ranks", "-k", metavar="COUNT", help="Size of the ring.")] = "4",
    rank: Annotated[
        int | None, typer.Option(help="Price this rank only.", min=0, show_default="all, or a sample")
    ] = None,
    layout: Annotated[str, typer.Option(help="contiguous, zigzag or both.")] = "both",
    causal: Annotated[bool, typer.Option(help="Whether a query sees only keys up to itself.")] = True,
    routing: Annotated[str, typer.Option(help="relay (neighbour to neighbour) or direct (from the owner).")] = "relay",
    heads: Heads = 8,
    kv_heads: Annotated[int | None, typer.Option(help="KV heads.", min=1, show_default="as many as heads")] = None,
    dim: Dim = 64,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16 or float64.")] = "float32",
    batch: Annotated[int, typer.Option(help="Sequences at a time.", min=1)] = 1,
    flops: Annotated[float | None, typer.Option(help="FLOP/s of a device.", show_default="measured")] = None,
    bandwidth: Annotated[float | None, typer.Option(help="Bytes/s a rank sends.", show_default="measured")] = None,
    latency: Annotated[
        float | None, typer.Option(help="Seconds a hop costs.", show_default="measured, or 20e-6 if bandwidth is given")
    ] = None,
    measure: Annotated[
        bool,
        typer.Option(
            help="Ask from what length on a ring pays, and measure the rates not given. Otherwise they are assumed: "
            "1e14 FLOP/s, 25e9 bytes/s, 20e-6 s."
        ),
    ] = True,
    draw: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Draw pictures, as PNG and SVG.")] = None,
    as_json: AsJson = False,
) -> None:
    """Plan a ring: what each rank computes, sends and holds, which layout is faster, and from what length on it pays.

    No tensors, no processes: one rank of ten thousand, with a billion tokens, is planned in a second. Which layout is
    faster, and from what length on a ring beats one device, depends on rates: give them, or they are measured here in a
    few seconds.

    **Examples**

    `ringspan plan --tokens 1M --ranks 8 --no-measure`

    `ringspan plan --pattern full --ranks 16 --dtype bfloat16 --flops 4e14 --bandwidth 25e9`

    `ringspan plan --tokens 1e9 --ranks 10000 --rank 17 --no-measure`

    `ringspan plan --ranks 4 --draw pictures`
    """

    from ringspan.planning.breakeven import advise_layout  # noqa: PLC0415
    from ringspan.tools import plan_report  # noqa: PLC0415
    from ringspan.tools.plan_report import make_plans, price_layout  # noqa: PLC0415

    ring_size, length = read_as("--ranks", read_count, ranks), read_as("--tokens", read_count, tokens)
    planned = read_as("--pattern", read_pattern_at(length), pattern)
    try:
        plans = make_plans(
            planned,
            length,
            ring_size,
            _layouts(layout),
            causal=causal,
            routing=cast("Routing", routing),
            batch=batch,
            heads=heads,
            kv_heads=kv_heads or heads,
            dim=dim,
            dtype=dtype,
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if rank is not None and rank >= ring_size:
        raise typer.BadParameter(f"{rank}: must lie in 0 .. {ring_size - 1}", param_hint="--rank")

    progress = make_console(stderr=True)
    warning = warn_of_unselected(progress, planned, length, kv_heads or heads)
    measure = measure and ring_size > 1
    with progress.status("planning ...") as status:
        prices = {name: price_layout(ring, rank) for name, ring in plans.items()}
        if measure:
            status.update("measuring how fast this machine computes and sends ...")
        known = _rates(flops, bandwidth, latency, dtype, dim, measure)
        compare = len(plans) > 1 and ring_size > 1 and (measure or rank is None)  # one rank is priced alone
        advice = advise_layout(plans, known.rates) if compare else None
        answers = {}
        if measure:
            status.update("looking for the length from which on a ring pays ...")
            name = advice.layout if advice else next(iter(plans))
            answers = {name: _break_even(plans[name], known, pattern)}
        pictures = []
        if draw is not None:
            status.update("drawing ...")
            pictures = _draw(plans, draw)

    if as_json:
        paths, warnings = list(map(str, pictures)), [warning] if warning else []
        used = known if advice or answers else None
        typer.echo(json.dumps(plan_report.as_document(dtype, prices, advice, used, answers, paths, warnings)))
        return
    tables = [plan_report.side_by_side(prices)]
    tables += [plan_report.rank_table(price) for price in prices.values()] if rank is None else []
    sentences = [f"Layout: {advice}."] if advice else []
    sentences += [plan_report.break_even_sentence(plans[name], *answer) for name, answer in answers.items()]
    sentences += [f"Rates: {known}."] if sentences else []
    sentences += [f"Picture: {path}" for path in pictures]
    headline = plan_report.headline(next(iter(plans.values())), dtype)
    _print_page(headline, plan_report.reach_sentences(prices), tables, sentences)


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


def _layouts(name: str) -> tuple[LayoutName, ...]:
    if name == "both":
        return get_args(LayoutName)
    try:
        check_layout_name(name)
    except ValueError as error:
        raise typer.BadParameter(f"{error}, or both", param_hint="--layout") from error
    return (cast(LayoutName, name),)


def _rates(
    flops: float | None, bandwidth: float | None, latency: float | None, dtype: str, dim: int, measure: bool
) -> KnownRates:
    from ringspan.tools.rates import find_rates  # noqa: PLC0415

    try:
        return find_rates(flops, bandwidth, latency, dtype=dtype, dim=dim, measure=measure)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    except (RuntimeError, TimeoutError) as error:  # no gloo, no second process, no memory
        way_out = "give --flops and --bandwidth, or say --no-measure"
        raise typer.BadParameter(f"this machine could not be measured: {error}; {way_out}") from error


def _break_even(plan: RingPlan, known: KnownRates, pattern: str) -> tuple[BreakEven, float]:
    """From what length on the ring pays, and how much faster it is at the length asked for."""
    from ringspan.planning.breakeven import LONGEST, break_even, speedup  # noqa: PLC0415

    pattern_at = Dilated.spanning if pattern == SPANNING else None
    longest = max(LONGEST, plan.layout.rows)
    return break_even(plan, known.rates, longest, pattern_at), speedup(plan, known.rates)


def _draw(plans: dict[LayoutName, RingPlan], folder: Path) -> list[Path]:
    try:
        from ringspan.draw import draw_plans  # noqa: PLC0415

        with writing_to("--draw", folder):
            return draw_plans(plans, folder)
    except ModuleNotFoundError as error:
        raise typer.BadParameter(missing_package("drawing", error.name, "plot"), param_hint="--draw") from error


def _print_table(console: Console, table: Table) -> None:
    from ringspan.tools.pages import rich_table  # noqa: PLC0415

    shown = rich_table(table)
    shown.box = None  # so that ten columns fit a terminal of 80
    shown.title = None  # it would be broken to the width of a narrow table
    shown.columns[0].no_wrap = True
    for column in shown.columns[1:]:
        column.justify = "right"
    console.print()
    console.print(table.title, style="italic", highlight=False)
    console.print(shown)
