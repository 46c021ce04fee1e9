"""`ringspan evaluate`: how good is a trained model, and does more context help?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ringspan.cli.options import AsJson, read_as, read_counts
from ringspan.train.settings import TrainSettings

if TYPE_CHECKING:
    from ringspan.train.evaluate import Score


def evaluate(
    run: Annotated[Path, typer.Argument(help="Folder of a run of `ringspan train`.")] = Path("ringspan-run"),
    contexts: Annotated[str, typer.Option(help="Lengths that the context is cut to.")] = "1k,4k,16k,64k",
    windows: Annotated[int, typer.Option(help="Places in the held-out text; all contexts see the same.")] = 64,
    scored: Annotated[int, typer.Option(help="Bytes at the end of each window that count.")] = 512,
    as_json: AsJson = False,
) -> None:
    """Does more context help? Bits per byte on text that the run held out, with its context cut; a bigram beside it.

    Every context is scored on the same bytes, so that only the context differs.

    **Examples**

    `ringspan evaluate runs/books`

    `ringspan evaluate runs/books --contexts 1k,8k,64k --windows 128 --json`
    """
    from rich.console import Console  # noqa: PLC0415
    from rich.progress import track  # noqa: PLC0415

    from ringspan.evidence.device import this_ranks_device  # noqa: PLC0415
    from ringspan.models import LongNet  # noqa: PLC0415
    from ringspan.train.corpus import Corpus  # noqa: PLC0415
    from ringspan.train.evaluate import bigram_bits_per_byte, score_contexts  # noqa: PLC0415

    lengths = read_as("--contexts", read_counts, contexts)
    console = Console(stderr=as_json)
    try:
        settings = TrainSettings.read(run / "settings.json")
        model = LongNet.from_pretrained(run / "model").to(this_ranks_device().device)
        trained_on, held_out = Corpus.of(settings.data).split(settings.held_out)
        found = score_contexts(model, held_out, lengths, windows=windows, scored=scored)
        scores = list(track(found, "contexts", total=len(lengths), console=console))
    except (FileNotFoundError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error
    bigram = bigram_bits_per_byte(trained_on, held_out)
    if as_json:
        typer.echo(json.dumps({"bigram": bigram, "scores": _as_rows(scores)}))
        return
    console.print(_table(scores, f"{windows} windows of {run}, the last {scored} bytes of each"))
    console.print(f"A bigram: {bigram:.3f} bits per byte.", highlight=False)


def _as_rows(scores: list[Score]) -> list[dict[str, float]]:
    rows = []
    for score in scores:
        gain, error = score.gain_over(scores[0])
        rows.append(dict(context=score.context, bits_per_byte=score.bits_per_byte, gain=gain, standard_error=error))
    return rows


def _table(scores: list[Score], title: str) -> object:
    from rich.table import Table  # noqa: PLC0415

    table = Table("context", "bits per byte", "better than the shortest by", title=title, title_justify="left")
    for row in _as_rows(scores):
        better = "" if row["context"] == scores[0].context else f"{row['gain']:+.4f} ± {row['standard_error']:.4f}"
        table.add_row(f"{row['context']:,}", f"{row['bits_per_byte']:.4f}", better)
    return table
