"""`ringspan evaluate`: how good is a trained model, and does more context help?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ringspan.cli.options import AsJson, read_as, read_counts
from ringspan.cli.trained import Step, trained_model
from ringspan.train.errors import RunError
from ringspan.train.settings import TrainSettings

if TYPE_CHECKING:
    from ringspan.train.evaluate import Score


def evaluate(
    run: Annotated[Path, typer.Argument(help="Folder of a run of `ringspan train`.")] = Path("ringspan-run"),
    contexts: Annotated[str, typer.Option(help="Lengths that the context is cut to.")] = "1k,4k,16k,64k",
    windows: Annotated[int, typer.Option(help="Places in the held-out text; all contexts see the same.")] = 64,
    scored: Annotated[int, typer.Option(help="Bytes at the end of each window that count.")] = 512,
    step: Step = 0,
    branches: Annotated[bool, typer.Option(help="Also score with branches of the pattern left out.")] = True,
    as_json: AsJson = False,
) -> None:
    """Does more context help? Bits per byte on text that the run held out, with its context cut; a bigram beside it.

    Every context is scored on the same bytes, so that only the context differs. Then the same weights with branches of
    their pattern left out, over the longest context: which ones does the model use, and how far does it look?

    **Examples**

    `ringspan evaluate runs/books`

    `ringspan evaluate runs/books --contexts 1k,8k,64k --windows 128 --json`

    `ringspan evaluate runs/books --step 500`
    """
    from rich.console import Console  # noqa: PLC0415
    from rich.progress import track  # noqa: PLC0415

    from ringspan.evidence.device import this_ranks_device  # noqa: PLC0415
    from ringspan.train.corpus import Corpus  # noqa: PLC0415
    from ringspan.train.evaluate import bigram_bits_per_byte, score_branches, score_contexts  # noqa: PLC0415

    lengths = read_as("--contexts", read_counts, contexts)
    console = Console(stderr=as_json)
    try:
        settings = TrainSettings.read(run / "settings.json")
        model = trained_model(run, step).to(this_ranks_device().device)
        trained_on, held_out = Corpus.of(settings.data).split(settings.held_out)
        found = score_contexts(model, held_out, lengths, windows=windows, scored=scored)
        scores = list(track(found, "contexts", total=len(lengths), console=console))
        by_branches: list[Score] = []
        if branches and model.config.segment_lengths:
            cut = score_branches(model, held_out, max(lengths), windows=windows, scored=scored)
            by_branches = list(track(cut, "branches", total=len(model.config.segment_lengths) + 2, console=console))
    except (FileNotFoundError, RunError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error
    bigram = bigram_bits_per_byte(trained_on, held_out)
    if as_json:
        rows = {"scores": _as_rows(scores), "branches": _as_rows(by_branches)}
        typer.echo(json.dumps({"bigram": bigram, **rows}))
        return
    console.print(_table("context", scores, f"{windows} windows of {run}, the last {scored} bytes of each"))
    if by_branches:
        console.print(_table("segments", by_branches, f"the same with branches left out, {max(lengths):,} bytes"))
    console.print(f"A bigram: {bigram:.3f} bits per byte.", highlight=False)


def _as_rows(scores: list[Score]) -> list[dict[str, Any]]:
    rows = []
    for score in scores:
        gain, error = score.gain_over(scores[0])
        row = dict(context=score.context, segments=score.segments, bits_per_byte=score.bits_per_byte)
        rows.append(dict(**row, gain=gain, standard_error=error))
    return rows


def _table(column: str, scores: list[Score], title: str) -> object:
    from rich.table import Table  # noqa: PLC0415

    table = Table(column, "bits per byte", "better than the first by", title=title, title_justify="left")
    for number, row in enumerate(_as_rows(scores)):
        better = f"{row['gain']:+.4f} ± {row['standard_error']:.4f}" if number else ""
        what = f"{row['context']:,}" if column == "context" else ", ".join(map(str, row["segments"]))
        table.add_row(what, f"{row['bits_per_byte']:.4f}", better)
    return table
