"""`ringspan bench hilbert`: the study of orders behind docs/hilbert.md."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ringspan.cli.console import make_console
from ringspan.cli.options import writing_to

if TYPE_CHECKING:
    from rich.console import Console

    from ringspan.evidence.pages import Page

MARKER = "ringspan bench hilbert"


def bench_hilbert(
    progress: Console, out: Path | None, command: str, *, quick: bool, threads: int, as_json: bool
) -> None:
    """Measure, then write the tables: into docs/hilbert.md under ``out``, or, if quick, as a page of their own."""
    import torch  # noqa: PLC0415

    from ringspan.bench.hilbert import QUICK, Scale, study  # noqa: PLC0415
    from ringspan.bench.hilbert_page import make_hilbert_page  # noqa: PLC0415
    from ringspan.evidence.machine import describe_machine  # noqa: PLC0415
    from ringspan.evidence.pages import print_page, write_page  # noqa: PLC0415

    root = out or (Path("ringspan-report/quick") if quick else Path())
    target = root / "docs/hilbert.md"
    if not quick and not target.exists():
        raise typer.BadParameter(
            f"there is no {target}: run it in the project's folder, or with --quick", param_hint="hilbert"
        )
    raw = root / "benchmarks/results/hilbert.json"
    with writing_to("--out", root):  # before anything is measured
        raw.parent.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(threads)
    found = study(QUICK if quick else Scale(), lambda text: progress.print(f"{text} ..", highlight=False))
    page = make_hilbert_page(found, command)
    if quick:
        write_page(page, root, "hilbert")
        target = root / "hilbert.md"
    else:
        _write_into(target, page)
    document = {"command": command, "machine": describe_machine(), **found.as_json()}
    raw.write_text(json.dumps(document, indent=1) + "\n")
    if as_json:
        typer.echo(json.dumps(document))
        return
    console = make_console()
    print_page(page, console)
    console.print(page.sentence, highlight=False, soft_wrap=True)
    console.print(f"Written: {target}, {raw}", highlight=False, soft_wrap=True)


def _write_into(target: Path, page: Page) -> None:
    """Between the markers of docs/hilbert.md: what stands around them is written by hand."""
    from ringspan.evidence.pages import Picture, markdown, write_into  # noqa: PLC0415

    (target.parent / "figures").mkdir(exist_ok=True)
    for part in page.parts:
        if isinstance(part, Picture):
            part.figure.savefig(target.parent / "figures" / f"{part.name}.png", dpi=130)
    lines = markdown(page, "figures").replace("\n## ", "\n### ").splitlines()
    write_into(target, MARKER, ["", f"## {page.title}", *lines[1:], ""])
