"""`ringspan stream`: exact attention over a sequence that does not fit in memory, proven by samples."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ringspan.cli.console import make_console
from ringspan.cli.options import AsJson, Dim, Heads, read_as, read_count, read_dtype, read_pattern, writing_to

if TYPE_CHECKING:
    from rich.console import Console

    from ringspan.tools.demonstration import Demonstration, Settings
    from ringspan.tools.pages import Table
    from ringspan.tools.spot_check import SpotCheck, StratumResult


def stream(
    tokens: Annotated[str, typer.Option("--tokens", "-n", metavar="COUNT", help="Length: 131072, 128k or 1G.")] = "1M",
    pattern: Annotated[
        str, typer.Option(help="full, or SEGMENTxRATE pairs.", show_default="256 rows of each segment, up to all")
    ] = "",
    causal: Annotated[bool, typer.Option(help="Whether a query sees only keys up to itself.")] = True,
    heads: Heads = 2,
    kv_heads: Annotated[int | None, typer.Option(help="KV heads.", min=1, show_default="as many as heads")] = None,
    dim: Dim = 32,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16 or float64.")] = "float32",
    seed: Annotated[int, typer.Option(help="Of the rows, and of the samples.")] = 0,
    budget: Annotated[str, typer.Option(metavar="BYTES", help="Memory of this whole process: 2G, 8G.")] = "4G",
    anywhere: Annotated[int, typer.Option(help="Samples from the whole sequence.", min=1)] = 1000,
    each: Annotated[int, typer.Option(help="Samples of each kind of tile, hop and border.", min=30)] = 30,
    out: Annotated[Path, typer.Option(help="Folder of the run; what is there is gone on with.")] = Path(
        "ringspan-stream"
    ),
    as_json: AsJson = False,
) -> None:
    """Stream attention: a length that no memory holds, computed exactly, shard by shard, and proven by samples.

    Rows are made on demand from their positions, and results are digested (SHA-256), so that nothing is stored; only
    the places that the proof will look at are kept. Each of them is computed anew in fp64, from the definition.
    Killed, it goes on from the last finished shard when it is started again. Exit status 0 only if the proof holds and
    memory stayed within the budget.

    **Examples**

    `ringspan stream`

    `ringspan stream --tokens 1G --budget 8G --out runs/billion`

    `ringspan stream --tokens 64k --pattern full --dtype bfloat16`
    """
    import os  # noqa: PLC0415

    # Before torch is there: reading and writing share the cores with torch's threads, which by default burn them while
    # they wait for one another.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    settings = _settings(tokens, pattern, causal, heads, kv_heads or heads, dim, dtype, seed, budget, anywhere, each)
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
        _say(make_console(), found, out)
    raise typer.Exit(0 if found.holds else 1)


def _settings(
    tokens: str,
    pattern: str,
    causal: bool,
    heads: int,
    kv_heads: int,
    dim: int,
    dtype: str,
    seed: int,
    budget: str,
    anywhere: int,
    each: int,
) -> Settings:
    from ringspan.tools.demonstration import Settings, whole_sequence_pattern  # noqa: PLC0415

    length = read_as("--tokens", read_count, tokens)
    return Settings(
        tokens=length,
        pattern=read_as("--pattern", read_pattern, pattern) if pattern else whole_sequence_pattern(length),
        causal=causal,
        heads=heads,
        kv_heads=kv_heads,
        dim=dim,
        dtype=read_as("--dtype", read_dtype, dtype),
        seed=seed,
        budget_bytes=read_as("--budget", read_count, budget),
        anywhere=anywhere,
        each=each,
    )


def _run(settings: Settings, out: Path, console: Console) -> Demonstration:
    """The run and its proof, with a bar for each."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn  # noqa: PLC0415

    from ringspan.streaming import ShardDone  # noqa: PLC0415
    from ringspan.tools.demonstration import demonstrate  # noqa: PLC0415

    columns = (
        TextColumn("{task.description}"),
        BarColumn(20),
        TimeRemainingColumn(),
        TextColumn("{task.fields[text]}", markup=False),
    )
    with Progress(*columns, console=console) as bars:
        shards = bars.add_task("shards", total=None, text="")
        places = bars.add_task("proof", total=None, text="", visible=False)

        def on_shard(done: ShardDone) -> None:
            text = f"{done.finished:,} of {done.shards:,}, {done.rows / done.seconds:,.0f} tokens/s"
            bars.update(shards, total=done.shards, completed=done.finished, text=text)

        def on_proof(count: int) -> None:
            bars.update(places, total=count, visible=True, text=f"{count:,} places computed anew")

        return demonstrate(settings, out, on_shard=on_shard, on_proof=on_proof, on_place=lambda: bars.advance(places))


def _say(console: Console, found: Demonstration, out: Path) -> None:
    from ringspan.tools.pages import rich_table  # noqa: PLC0415

    settings, proof = found.settings, found.proof
    lines = [
        f"{settings.tokens:,} tokens, {settings.pattern.text}, "
        f"{'causal' if settings.causal else 'not causal'}, {settings.heads} heads of {settings.dim}, {settings.dtype}: "
        f"{found.seconds:,.1f} s in {found.shards} shards, {found.seconds / settings.tokens * 1e6:.3f} µs a token "
        f"({found.steady_seconds_per_token * 1e6:.3f} in the median shard)",
        f"Memory of the process: {found.peak_bytes / 2**30:.2f} GiB of {settings.budget_bytes / 2**30:g} GiB"
        + ("." if found.within_budget else ", WHICH IS TOO MUCH."),
        f"Digest of all outputs: {found.digest}",
        spot_check_sentence(proof),
        f"Everything is in {out}.",
    ]
    console.print(rich_table(spot_check_table(proof)))
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)


def spot_check_table(proof: SpotCheck) -> Table:
    """The strata of a proof: one line each, but all hops in one."""
    from ringspan.tools.pages import Table  # noqa: PLC0415

    hops = [finding for finding in proof.findings if re.fullmatch(r"hop \d+", finding.name)]
    others = [finding for finding in proof.findings if finding not in hops]
    rows = [["places", "there are", "samples", "wrong", "worst error", "of what is allowed"]]
    rows += [_line(finding, f"{finding.samples:,}") for finding in others]
    if hops:
        together = dataclasses.replace(
            hops[0],
            name=f"{len(hops):,} hops",
            population=sum(hop.population for hop in hops),
            wrong=sum(hop.wrong for hop in hops),
            worst_out=max(hop.worst_out for hop in hops),
            worst_ratio=max(hop.worst_ratio for hop in hops),
        )
        fewest = min(hops, key=lambda hop: hop.samples)
        all_of_it = ", all there are" if fewest.samples == fewest.population else ""
        samples = f"{sum(hop.samples for hop in hops):,}; fewest in one hop: {fewest.samples}{all_of_it}"
        rows.append(_line(together, samples))
    return Table("The sampled proof", rows)


def spot_check_sentence(proof: SpotCheck) -> str:
    if proof.wrong:
        return f"{proof.wrong} of {proof.samples:,} sampled places are WRONG."
    missing = [finding.name for finding in proof.findings if not finding.covered]
    if missing:
        return f"Too few samples of: {', '.join(missing)}."
    return (
        f"All {proof.samples:,} sampled places are right (up to {proof.most_keys:,} keys each, computed anew in fp64): "
        f"with 95 % confidence at most {proof.wrong_share_bound:.2%} of all places are wrong "
        "(3/m for the m that were drawn anywhere)."
    )


def _line(finding: StratumResult, samples: str) -> list[str]:
    return [
        finding.name,
        f"{finding.population:,}",
        samples,
        f"{finding.wrong}",
        f"{finding.worst_out:.1e}",
        f"{finding.worst_ratio:.1%}",
    ]
