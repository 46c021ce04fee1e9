"""`ringspan evaluate`: bits per byte of a trained model on held-out text, by context length."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from ringspan.cli.options import AsJson, Step, make_console, read_as, read_counts, run_settings, trained_model
from ringspan.models import LongNet
from ringspan.runtime.device import local_device
from ringspan.runtime.settings import RunError
from ringspan.train.config import TrainSettings
from ringspan.train.data import Corpus, Selection
from ringspan.train.evaluate import (
    Score,
    ablated_configs,
    bigram_bits_per_byte,
    check_contexts,
    count_windows,
    default_contexts,
    score_branches,
    score_contexts,
)
from ringspan.train.metrics import METRICS, read_metrics


def evaluate(
    run: Annotated[Path, typer.Argument(help="Folder of a run of `ringspan train`.")] = Path("ringspan-run"),
    contexts: Annotated[
        str,
        typer.Option(
            help="Context lengths to compare, such as 1k,4k,16k; shorter than the held-out text.",
            show_default="four lengths, up to the training length",
        ),
    ] = "",
    windows: Annotated[
        int | None,
        typer.Option(
            help="Number of windows in the held-out text; all contexts use the same.",
            min=1,
            show_default="up to 64, reading no more than training did",
        ),
    ] = None,
    scored: Annotated[
        int | None,
        typer.Option(
            help="Bytes scored at the end of each window.", min=1, show_default="512, fewer if the text is short"
        ),
    ] = None,
    step: Step = 0,
    branches: Annotated[bool, typer.Option(help="Also score with patterns cut to a shorter reach.")] = True,
    as_json: AsJson = False,
) -> None:
    """Does more context help? Bits per byte on held-out text, by context length, compared with a bigram model.

    All contexts are scored on the same bytes, so only the context differs. Then the same weights are scored at the
    longest context with the patterns of all layers cut to a shorter reach: how far does the model look?

    The text is that of the run, regardless of the working directory; files that have changed since are an error.

    **Examples**

    `ringspan evaluate runs/books`

    `ringspan evaluate runs/books --contexts 1k,8k,64k --windows 128 --json`

    `ringspan evaluate runs/books --step 500`
    """
    console = make_console(stderr=as_json)
    try:
        settings = run_settings(run)
        model = trained_model(run, step).to(local_device().device)
        trained_on, held_out = Corpus(Selection.of_run(run, settings.data)).split(settings.held_out)
    except (FileNotFoundError, RunError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error
    if len(held_out) < 2:
        raise typer.BadParameter(
            f"{run} held out only {len(held_out)} bytes of its text: train with a larger --held-out"
        )
    scored = scored or max(1, min(512, settings.tokens // 2, len(held_out) // 16))
    room = len(held_out) - 1 - 8 * scored  # longest context with space for nine windows
    if contexts:
        lengths = _read_contexts(contexts, held_out, scored)
    else:
        lengths = default_contexts(max(scored, min(settings.tokens, room)), scored)
    cuts = len(ablated_configs(model.config, max(lengths))) if branches else 0
    window_bytes = sum(lengths) + cuts * max(lengths)
    training_windows = _trained_bytes(run, settings) // window_bytes
    windows = _windows(windows, count_windows(held_out, max(lengths), scored), training_windows)
    console.print(trained_on.selection.lines()[0], highlight=False, soft_wrap=True, markup=False)
    console.print(
        f"{len(held_out):,} bytes of it are held out. Reading {windows * window_bytes:,} bytes: "
        f"{windows} windows, {len(lengths)} contexts, {cuts} patterns.",
        highlight=False,
        soft_wrap=True,
    )
    scores, by_branches = _score(console, model, held_out, lengths, cuts, windows, scored)
    bigram = bigram_bits_per_byte(trained_on, held_out)
    if as_json:
        rows = {"scores": _as_rows(scores), "branches": _as_rows(by_branches)}
        typer.echo(json.dumps({"bigram": bigram, "windows": windows, "scored": scored, **rows}))
        return
    console.print(_table("context", scores, f"{windows} windows of {run}, last {scored} bytes of each"))
    if by_branches:
        console.print(_table("reach", by_branches, f"with patterns cut to a reach, context {max(lengths):,}"))
    console.print(f"Bigram model: {bigram:.3f} bits per byte.", highlight=False)


def _read_contexts(text: str, held_out: Corpus, scored: int) -> list[int]:
    """Parse ``--contexts`` and check that the held-out text has room for them."""
    lengths = sorted(set(read_as("--contexts", read_counts, text)))
    try:
        check_contexts(held_out, lengths, scored)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--contexts") from error
    return lengths


def _windows(wanted: int | None, available: int, training_windows: int) -> int:
    """The number of windows; by default, at least 4, and no more than read as many bytes as training did."""
    if (wanted or 1) > available:
        raise typer.BadParameter(
            f"{wanted or 1}: the held-out text has room for {available} such windows; give fewer, shorter --contexts, "
            "a smaller --scored, or train with a larger --held-out",
            param_hint="--windows",
        )
    return wanted or min(available, max(4, min(64, training_windows)))


def _trained_bytes(run: Path, settings: TrainSettings) -> int:
    """The number of bytes that the run has read so far."""
    if (run / METRICS).is_file():
        return sum(int(step["tokens"]) for step in read_metrics(run))
    return settings.steps * settings.tokens * settings.batch * settings.accumulate


def _score(
    console: Console, model: LongNet, held_out: Corpus, lengths: list[int], cuts: int, windows: int, scored: int
) -> tuple[list[Score], list[Score]]:
    """Score all contexts and all reduced patterns, with a progress bar."""
    columns = (TextColumn("{task.description}"), BarColumn(20), TextColumn("{task.percentage:.0f}%"))
    with Progress(*columns, TimeRemainingColumn(elapsed_when_finished=True), console=console) as bars:
        bar = bars.add_task("contexts", total=windows * (sum(lengths) + cuts * max(lengths)))

        def on_window(read: int) -> None:
            bars.advance(bar, read)

        options: dict[str, Any] = dict(windows=windows, scored=scored, on_window=on_window)
        scores = list(score_contexts(model, held_out, lengths, **options))
        bars.update(bar, description="patterns" if cuts else "contexts")
        return scores, list(score_branches(model, held_out, max(lengths), **options)) if cuts else []


def _as_rows(scores: list[Score]) -> list[dict[str, Any]]:
    rows = []
    for score in scores:
        gain, error = score.gain_over(scores[0])
        row = dict(context=score.context, reach=score.reach, bits_per_byte=score.bits_per_byte)
        rows.append(dict(**row, gain=gain, standard_error=error))
    return rows


def _table(column: str, scores: list[Score], title: str) -> Table:
    table = Table(column, "bits per byte", "gain over the first", title=title, title_justify="left")
    for number, row in enumerate(_as_rows(scores)):
        better = f"{row['gain']:+.4f} ± {row['standard_error']:.4f}" if number else ""
        table.add_row(f"{row[column]:,}", f"{row['bits_per_byte']:.4f}", better)
    return table
