"""`ringspan verify`: is the ring real?"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ringspan.cli.console import make_console
from ringspan.cli.options import AsJson, read_as, read_count, read_counts, read_dtype, read_pattern

if TYPE_CHECKING:
    from ringspan.tools.verify.settings import Settings, Subject


def verify(
    ranks: Annotated[str, typer.Option(help="Ring sizes to examine, with commas; 1 is always among them.")] = "1,2,4",
    pattern: Annotated[str, typer.Option(help="full, or SEGMENTxRATE pairs.")] = "2048x1,16384x8,65536x32",
    attention: Annotated[
        str, typer.Option(metavar="MODULE:FUNCTION", help="Somebody else's attention.", show_default="ringspan's own")
    ] = "",
    layout: Annotated[str, typer.Option(help="zigzag or contiguous; for ringspan's own attention.")] = "zigzag",
    tokens: Annotated[
        str,
        typer.Option(
            help="Length of the long runs.",
            show_default="the longest segment, up to 64k; 8k if full",
        ),
    ] = "",
    dtype: Annotated[
        str, typer.Option(help="Of the exactness checks.", show_default="float64, or float32 with --attention")
    ] = "",
    out: Annotated[Path, typer.Option(help="Folder for the report: JSON, Markdown, HTML.")] = Path("ringspan-report"),
    into: Annotated[
        Path | None, typer.Option(help="Also write the checks into this Markdown file, between its markers.")
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds after which a ring that does not answer has failed.")] = 600.0,
    as_json: AsJson = False,
) -> None:
    """Is the ring real? Examine it rank by rank, and write a report.

    Starts local processes for each ring size; under torchrun it examines the group that is there (the acceptance test
    for GPUs). Each check has a line, a figure and a verdict. Exit status: 0, the ring is real; 1, a check fails; 3, not
    proven, since a check that matters could not be made here.

    **Examples**

    `ringspan verify`

    `ringspan verify --ranks 1,2,4,8 --pattern full`

    `ringspan verify --attention ringspan.tools.peers:ring_attention_pytorch`

    `torchrun --nproc-per-node=8 -m ringspan verify`
    """

    from ringspan.tools.pages import print_page, split_at_markers, write_into, write_page  # noqa: PLC0415
    from ringspan.tools.verify import report  # noqa: PLC0415
    from ringspan.tools.verify.check import NOT_A_RING, REAL, ByRing, status  # noqa: PLC0415
    from ringspan.tools.verify.run import (  # noqa: PLC0415
        QUESTIONS,
        examine,
        find_team,
        judge,
        no_answers,
    )

    subject = _subject(attention, pattern, layout)
    wanted = read_as("--ranks", read_counts, ranks)
    if into is not None:  # before the checks, which take a while
        try:
            split_at_markers(into, "ringspan verify")
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--into") from error
    team = find_team(timeout)
    sizes = team.sizes(wanted)
    settings = _settings(subject, sizes, tokens, dtype)
    console = make_console(stderr=as_json, quiet=not team.is_speaker)
    console.print(f"{subject.name} on {team.where}", style="bold")
    answers: ByRing = {}
    with console.status("") as progress:
        for size in sorted({*sizes, *(size for size in settings.memory_rings if size <= team.most_ranks)}):
            questions = tuple(QUESTIONS) if size in sizes else ("memory",)
            progress.update(f"a ring of {size} is examined: {', '.join(questions)}")
            timed = settings if size <= team.parallel_ranks else dataclasses.replace(settings, trials=0)
            try:
                answers[size] = team.run(size, examine, subject, timed, questions)
            except (RuntimeError, TimeoutError) as error:  # a rank died, or did not answer
                answers[size] = no_answers(size, str(error))
            console.print(f"  ring of {size}: {size} rank{'s' if size > 1 else ''} answered", highlight=False)
    checks = judge(answers, settings)
    found_status = status(checks)
    if not team.is_speaker:
        raise typer.Exit(found_status)
    command = _command(attention, pattern, layout, ranks, tokens, dtype)
    page = report.make_page(subject, settings, team.where, answers, checks, command)
    found = report.as_json(subject, settings, team.where, answers, checks, page)
    paths = write_page(page, out, "verify")
    (out / "verify.json").write_text(json.dumps(found, indent=1) + "\n")
    if into is not None:
        write_into(into, "ringspan verify", report.readme_lines(page))
    if as_json:
        typer.echo(json.dumps(found))
    else:
        print_page(page, console)
        console.print(f"Report: {paths['html']} (also .md and .json)", highlight=False, soft_wrap=True)
        style = {REAL: "green", NOT_A_RING: "red"}.get(found_status, "yellow")
        console.print(page.sentence, style=style, highlight=False, soft_wrap=True)
    raise typer.Exit(found_status)


def _subject(attention: str, pattern: str, layout: str) -> Subject:
    from ringspan.layout import check_layout_name  # noqa: PLC0415
    from ringspan.tools.verify.settings import Subject  # noqa: PLC0415

    try:
        if attention:
            return Subject.load(attention)
        check_layout_name(layout)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    return Subject(pattern=read_as("--pattern", read_pattern, pattern), layout=layout)  # type: ignore[arg-type]


def _settings(subject: Subject, sizes: list[int], tokens: str, dtype: str) -> Settings:
    from ringspan.tools.verify.settings import default_tokens, settings_for  # noqa: PLC0415

    exact_dtype = read_as("--dtype", read_dtype, dtype or ("float64" if subject.is_ringspan else "float32"))
    length = read_as("--tokens", read_count, tokens) if tokens else default_tokens(subject.pattern)
    return settings_for(subject, sizes, length, exact_dtype)


def _command(attention: str, pattern: str, layout: str, ranks: str, tokens: str, dtype: str) -> str:
    what = f"--attention {attention}" if attention else f"--pattern {pattern} --layout {layout}"
    more = "".join(f" --{name} {value}" for name, value in (("tokens", tokens), ("dtype", dtype)) if value)
    return f"ringspan verify {what} --ranks {ranks}{more}"
