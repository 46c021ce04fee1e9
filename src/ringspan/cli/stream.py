"""`ringspan stream`: exact attention over a sequence larger than memory, with a spot check of the results."""

from __future__ import annotations

import os

# Must be set before torch is imported. Threads that read and write share the cores with torch's, which by default spin
# while they wait for one another.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import dataclasses
import json
import re
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from ringspan.cli.options import (
    PATTERN_TERMS_HELP,
    AsJson,
    HeadDim,
    Heads,
    make_console,
    read_as,
    read_count,
    read_dtype,
    read_pattern,
    writing_to,
)
from ringspan.streaming import ShardDone
from ringspan.tools.demonstration import Demonstration, DemonstrationSettings, demonstrate, whole_sequence_pattern
from ringspan.tools.pages import Table, rich_table
from ringspan.tools.spot_check import SpotCheck, StratumResult


def stream(
    tokens: Annotated[str, typer.Option("--tokens", "-n", metavar="COUNT", help="Length: 131072, 128k or 1G.")] = "1M",
    pattern: Annotated[
        str, typer.Option(help=PATTERN_TERMS_HELP, show_default="256 rows of each segment, up to all")
    ] = "",
    causal: Annotated[bool, typer.Option(help="Whether a query attends only to keys up to its own position.")] = True,
    heads: Heads = 2,
    kv_heads: Annotated[int | None, typer.Option(help="KV heads.", min=1, show_default="same as heads")] = None,
    head_dim: HeadDim = 32,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16 or float64.")] = "float32",
    seed: Annotated[int, typer.Option(help="Seed of the rows and the samples.")] = 0,
    budget: Annotated[str, typer.Option(metavar="BYTES", help="Memory of the whole process: 2G, 8G.")] = "4G",
    anywhere: Annotated[int, typer.Option(help="Samples from the whole sequence.", min=1)] = 1000,
    each: Annotated[int, typer.Option(help="Samples of each kind of tile, each hop and shard boundary.", min=30)] = 30,
    out: Annotated[Path, typer.Option(help="Folder of the run; an interrupted run in it resumes.")] = Path(
        "ringspan-stream"
    ),
    as_json: AsJson = False,
) -> None:
    """Compute attention over a sequence larger than memory, exactly, shard by shard, and check samples of it.

    Rows are generated on demand from their positions, and results are reduced to a SHA-256, so nothing is stored except
    the sampled positions. Each of these is recomputed in fp64 from the definition. An interrupted run resumes after the
    last finished shard. The exit status is 0 only if all samples are right and memory stayed within the budget.

    **Examples**

    `ringspan stream`

    `ringspan stream --tokens 1G --budget 8G --out runs/billion`

    `ringspan stream --tokens 64k --pattern full --dtype bfloat16`

    `ringspan stream --pattern "window 255 + 64k x256"`
    """
    settings = _settings(
        tokens, pattern, causal, heads, kv_heads or heads, head_dim, dtype, seed, budget, anywhere, each
    )
    progress = make_console(stderr=True)
    try:
        with writing_to("--out", out):
            found = _run(settings, out, progress)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"Interrupted. Finished shards are kept in {out}: run the same command to continue."
        ) from None
    if as_json:
        typer.echo(json.dumps(found.as_json()))
    else:
        _print_summary(make_console(), found, out)
    raise typer.Exit(0 if found.holds else 1)


def _settings(
    tokens: str,
    pattern: str,
    causal: bool,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: str,
    seed: int,
    budget: str,
    anywhere: int,
    each: int,
) -> DemonstrationSettings:
    length = read_as("--tokens", read_count, tokens)
    return DemonstrationSettings(
        tokens=length,
        pattern=read_as("--pattern", read_pattern, pattern) if pattern else whole_sequence_pattern(length),
        causal=causal,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=read_as("--dtype", read_dtype, dtype),
        seed=seed,
        budget_bytes=read_as("--budget", read_count, budget),
        anywhere=anywhere,
        each=each,
    )


def _run(settings: DemonstrationSettings, out: Path, console: Console) -> Demonstration:
    """Run and spot-check, with a progress bar for each."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(20),
        TimeRemainingColumn(),
        TextColumn("{task.fields[text]}", markup=False),
    )
    with Progress(*columns, console=console) as bars:
        shards = bars.add_task("shards", total=None, text="")
        positions = bars.add_task("spot check", total=None, text="", visible=False)

        def on_shard(done: ShardDone) -> None:
            text = f"{done.finished:,} of {done.shards:,}, {done.rows / done.seconds:,.0f} tokens/s"
            bars.update(shards, total=done.shards, completed=done.finished, text=text)

        def on_spot_check(count: int) -> None:
            bars.update(positions, total=count, visible=True, text=f"{count:,} positions recomputed")

        return demonstrate(
            settings,
            out,
            on_shard=on_shard,
            on_spot_check=on_spot_check,
            on_position=lambda: bars.advance(positions),
        )


def _print_summary(console: Console, found: Demonstration, out: Path) -> None:

    settings, checked = found.settings, found.spot_check
    lines = [
        f"{settings.tokens:,} tokens, {settings.pattern.text}, "
        f"{'causal' if settings.causal else 'not causal'}, {settings.heads} heads of {settings.head_dim}, "
        f"{settings.dtype}: {found.seconds:,.1f} s in {found.shards} shards, "
        f"{found.seconds / settings.tokens * 1e6:.3f} µs per token "
        f"({found.steady_seconds_per_token * 1e6:.3f} in the median shard)",
        f"Peak memory of the process: {found.peak_bytes / 2**30:.2f} GiB of {settings.budget_bytes / 2**30:g} GiB"
        + ("." if found.within_budget else ": OVER THE BUDGET."),
        f"SHA-256 of all outputs: {found.digest}",
        spot_check_sentence(checked),
        f"All files of the run are in {out}.",
    ]
    console.print(rich_table(spot_check_table(checked)))
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)


def spot_check_table(checked: SpotCheck) -> Table:
    """One line per stratum, with all hops in one line."""
    hops = [stratum for stratum in checked.strata if re.fullmatch(r"hop \d+", stratum.name)]
    others = [stratum for stratum in checked.strata if stratum not in hops]
    rows = [["stratum", "positions", "samples", "wrong", "error", "/ allowed"]]
    rows += [_line(stratum) for stratum in others]
    if hops:
        fewest = min(hops, key=lambda hop: hop.samples)
        whole = " (all)" if fewest.samples == fewest.population else ""
        all_hops = dataclasses.replace(
            hops[0],
            name=f"{len(hops):,} hops, at least {fewest.samples}{whole} samples each",
            population=sum(hop.population for hop in hops),
            samples=sum(hop.samples for hop in hops),
            wrong=sum(hop.wrong for hop in hops),
            worst_out=max(hop.worst_out for hop in hops),
            worst_ratio=max(hop.worst_ratio for hop in hops),
        )
        rows.append(_line(all_hops))
    return Table("Spot check", rows)


def spot_check_sentence(checked: SpotCheck) -> str:
    if checked.wrong:
        return f"{checked.wrong} of {checked.samples:,} sampled positions are WRONG."
    missing = [stratum.name for stratum in checked.strata if not stratum.covered]
    if missing:
        return f"Too few samples in: {', '.join(missing)}."
    return (
        f"All {checked.samples:,} sampled positions are right (recomputed in fp64, up to {checked.most_keys:,} keys "
        f"each). With 95 % confidence, at most {checked.wrong_share_bound:.2%} of all positions are wrong (3/m for the "
        "m samples drawn from the whole sequence)."
    )


def _line(stratum: StratumResult) -> list[str]:
    return [
        stratum.name,
        f"{stratum.population:,}",
        f"{stratum.samples:,}",
        f"{stratum.wrong}",
        f"{stratum.worst_out:.1e}",
        f"{stratum.worst_ratio:.1%}",
    ]
