"""`ringspan verify`: is the ring real?"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ringspan.cli.options import AsJson, read_as, read_count, read_counts, read_dtype, read_pattern

if TYPE_CHECKING:
    from ringspan.verify.settings import Settings
    from ringspan.verify.subject import Subject


def verify(
    ranks: Annotated[str, typer.Option(help="Ring sizes to examine, with commas; 1 is always among them.")] = "1,2,4",
    pattern: Annotated[str, typer.Option(help="full, or SEGMENTxRATE pairs.")] = "2048x1,16384x8,65536x32",
    attention: Annotated[
        str, typer.Option(metavar="MODULE:FUNCTION", help="Somebody else's attention, instead of ringspan's.")
    ] = "",
    layout: Annotated[str, typer.Option(help="zigzag or contiguous; for ringspan's own attention.")] = "zigzag",
    tokens: Annotated[
        str, typer.Option(help="Length for the memory check; shorter ones are used where it is slow.")
    ] = "",
    dtype: Annotated[
        str, typer.Option(help="Of the exactness checks: float64, or float32 where that is not taken.")
    ] = "",
    out: Annotated[Path, typer.Option(help="Folder for the report: JSON, Markdown, HTML.")] = Path("ringspan-report"),
    into: Annotated[
        Path | None, typer.Option(help="Also write the checks into this Markdown file, between its markers.")
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds after which a ring that does not answer has failed.")] = 300.0,
    as_json: AsJson = False,
) -> None:
    """Is the ring real? Examine it rank by rank, and write a report.

    Starts local processes for each ring size; under torchrun it examines the group that is there (the acceptance test
    for GPUs). Each check has a line, a figure and a verdict; exit status 0 only if none fails.

    **Examples**

    `ringspan verify`

    `ringspan verify --ranks 1,2,4,8 --pattern full`

    `ringspan verify --attention ringspan.evidence.peers:ring_attention_pytorch --ranks 1,2`

    `torchrun --nproc-per-node=8 -m ringspan verify`
    """
    from rich.console import Console  # noqa: PLC0415

    from ringspan.evidence.pages import print_page, write_into, write_page  # noqa: PLC0415
    from ringspan.verify import report  # noqa: PLC0415
    from ringspan.verify.examine import examine  # noqa: PLC0415
    from ringspan.verify.team import find_team  # noqa: PLC0415
    from ringspan.verify.verdicts import ByRing, all_hold, judge  # noqa: PLC0415

    subject = _subject(attention, pattern, layout)
    settings = _settings(subject, tokens, dtype)
    wanted = read_as("--ranks", read_counts, ranks)
    team = find_team(timeout)
    console = Console(stderr=as_json, quiet=not team.is_speaker)
    console.print(f"[bold]{subject.name}[/bold] on {team.where}", highlight=False)
    answers: ByRing = {}
    sizes = team.sizes(wanted)
    with console.status("") as status:
        for size in sizes:
            status.update(f"a ring of {size} is examined: memory, exactness, reach, bytes, work, speed ...")
            timed = settings if size <= team.parallel_ranks else dataclasses.replace(settings, trials=0)
            answers[size] = team.run(size, examine, subject, timed)
            console.print(f"  ring of {size}: {size} rank{'s' if size > 1 else ''} answered", highlight=False)
    checks = judge(answers, team.parallel_ranks)
    if not team.is_speaker:
        raise typer.Exit(0 if all_hold(checks) else 1)
    command = _command(attention, pattern, layout, ranks)
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
        console.print(page.sentence, style="green" if all_hold(checks) else "red", highlight=False, soft_wrap=True)
    raise typer.Exit(0 if all_hold(checks) else 1)


def _subject(attention: str, pattern: str, layout: str) -> Subject:
    from ringspan.layout import check_layout_name  # noqa: PLC0415
    from ringspan.verify.subject import Subject  # noqa: PLC0415

    try:
        if attention:
            return Subject.load(attention)
        check_layout_name(layout)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    return Subject(pattern=read_as("--pattern", read_pattern, pattern), layout=layout)  # type: ignore[arg-type]


def _settings(subject: Subject, tokens: str, dtype: str) -> Settings:
    from ringspan.geometry import Full  # noqa: PLC0415
    from ringspan.verify.settings import Settings  # noqa: PLC0415

    exact_dtype = read_as("--dtype", read_dtype, dtype or ("float64" if subject.is_ringspan else "float32"))
    if isinstance(subject.pattern, Full):
        return Settings.for_plain(read_as("--tokens", read_count, tokens or "2048"), exact_dtype)
    return Settings.for_dilated(read_as("--tokens", read_count, tokens or "65536"), exact_dtype)


def _command(attention: str, pattern: str, layout: str, ranks: str) -> str:
    what = f"--attention {attention}" if attention else f"--pattern {pattern} --layout {layout}"
    return f"ringspan verify {what} --ranks {ranks}"
