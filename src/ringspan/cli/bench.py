"""`ringspan bench hilbert`: the study of orders behind docs/hilbert.md."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from ringspan.cli.console import make_console
from ringspan.cli.options import (
    PATTERN_HELP,
    SPANNING,
    AsJson,
    Dim,
    Heads,
    read_as,
    read_bytes,
    read_counts,
    read_dtype,
    read_layout,
    read_lengths,
    read_pattern,
    warn_of_unselected,
    writing_to,
)

if TYPE_CHECKING:
    from rich.console import Console

    from ringspan.tools.bench.cases import Case
    from ringspan.tools.bench.ladder import Settings, Store
    from ringspan.tools.bench.suites import Part
    from ringspan.tools.bench.trials import Trial
    from ringspan.tools.pages import Page


MARKER = "ringspan bench hilbert"


def bench_hilbert(
    progress: Console, out: Path | None, command: str, *, quick: bool, threads: int, as_json: bool
) -> None:
    """Measure, then write the tables: into docs/hilbert.md under ``out``, or, if quick, as a page of their own."""
    import torch  # noqa: PLC0415

    from ringspan.tools.bench.hilbert import QUICK, Scale, study  # noqa: PLC0415
    from ringspan.tools.bench.hilbert_page import make_hilbert_page  # noqa: PLC0415
    from ringspan.tools.measure import describe_machine  # noqa: PLC0415
    from ringspan.tools.pages import print_page, write_page  # noqa: PLC0415

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
    from ringspan.tools.pages import Picture, markdown, write_into  # noqa: PLC0415

    (target.parent / "figures").mkdir(exist_ok=True)
    for part in page.parts:
        if isinstance(part, Picture):
            part.figure.savefig(target.parent / "figures" / f"{part.name}.png", dpi=130)
    lines = markdown(page, "figures").replace("\n## ", "\n### ").splitlines()
    write_into(target, MARKER, ["", f"## {page.title}", *lines[1:], ""])


_SHARE_OF_FREE_MEMORY = 0.8
_STUDIES = ("hilbert",)
_NOT_FOR_SUITES = (
    *("tokens", "ranks", "pattern", "causal", "layout", "dtype", "heads", "dim", "forward_only", "peers", "rounds"),
    *("time_limit", "threads"),
)
_NOT_FOR_STUDIES = (
    *(name for name in _NOT_FOR_SUITES if name != "threads"),
    "suite",
    "memory",
    "fresh",
    "repeat_disturbed",
    "dry_run",
)


class Keep(NamedTuple):
    """Which trials of an earlier run are measured again."""

    fresh: bool
    repeat_disturbed: bool


def bench(
    context: typer.Context,
    study: Annotated[
        str,
        typer.Argument(
            metavar="[STUDY]", help="A study instead: hilbert asks what orders cost and buy.", show_default=False
        ),
    ] = "",
    tokens: Annotated[
        str, typer.Option("--tokens", "-n", metavar="COUNTS", help="Lengths with commas, or doubling: 4k..32k.")
    ] = "4k..32k",
    ranks: Annotated[str, typer.Option("--ranks", "-k", metavar="COUNTS", help="Ring sizes, with commas.")] = "1,2",
    pattern: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN",
            help=f"{PATTERN_HELP} Say it again for another.",
            show_default=SPANNING,
        ),
    ] = None,
    causal: Annotated[bool, typer.Option(help="Whether a query sees only keys up to itself.")] = True,
    layout: Annotated[str, typer.Option(help="contiguous, zigzag, or best: the faster one for each case.")] = "best",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16 or float64.")] = "float32",
    heads: Heads = 8,
    dim: Dim = 64,
    forward_only: Annotated[bool, typer.Option("--forward-only", help="Leave the backward pass out.")] = False,
    peers: Annotated[
        bool,
        typer.Option("--peers", help="Others beside it: for full, other rings and SDPA; for dilated, masks and Flex."),
    ] = False,
    rounds: Annotated[int, typer.Option(help="How often each case is measured, in turns.", min=1)] = 3,
    memory: Annotated[
        str,
        typer.Option(
            metavar="BYTES", help="Budget of all processes together: 8GiB.", show_default="80 % of what is free"
        ),
    ] = "",
    time_limit: Annotated[
        float, typer.Option(metavar="SECONDS", help="For one trial, its start included.", min=1)
    ] = 120.0,
    threads: Annotated[int, typer.Option(help="Threads of each process.", min=1)] = 1,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Where trials and the report go.",
            show_default="ringspan-report; with --suite the current folder",
        ),
    ] = None,
    suite: Annotated[
        str, typer.Option(metavar="NAME", help="A fixed set of cases: results writes docs/results.md.")
    ] = "",
    quick: Annotated[
        bool, typer.Option("--quick", help="With --suite or a study: tiny sizes, to see that it all runs.")
    ] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure everything anew, instead of going on.")] = False,
    repeat_disturbed: Annotated[
        bool, typer.Option("--repeat-disturbed", help="Measure again what other programs disturbed.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the cases with the memory they need; run none.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Measure speed, memory and the longest length, over lengths and ring sizes; write a report.

    Safe to run: each trial has its own processes and a memory limit, lengths grow step by step, and what does not fit
    is a row of the result with its reason. Ctrl-C loses nothing: the same command goes on where it stopped. Times are
    medians over rounds in which all cases take turns; those of trials that other programs disturbed do not count, or
    are marked if there are no others. Without options it takes about three minutes on two cores, and --suite results
    about 20.

    **Examples**

    `ringspan bench`

    `ringspan bench --tokens 16k..1M --memory 8GiB --dry-run`

    `ringspan bench --pattern full --ranks 1,2,4 --peers`

    `ringspan bench --tokens 512k --rounds 1 --time-limit 900`

    `ringspan bench --suite results --quick`

    `ringspan bench hilbert --quick`
    """

    from ringspan.geometry import Full  # noqa: PLC0415
    from ringspan.tools.bench.cases import PEER_NAMES, make_cases  # noqa: PLC0415
    from ringspan.tools.bench.ladder import Settings  # noqa: PLC0415
    from ringspan.tools.bench.suites import Part  # noqa: PLC0415
    from ringspan.tools.bench.trials import Limits  # noqa: PLC0415

    progress = make_console(stderr=True)
    if study:
        _check_study(context, study)
        bench_hilbert(progress, out, _command_line(), quick=quick, threads=threads, as_json=as_json)
        return
    budget = read_as("--memory", read_bytes, memory) if memory else _free_share()
    keep = Keep(fresh, repeat_disturbed)
    if suite or quick:
        _check_suite(context, suite)
        _run_suite(progress, budget, out, keep, quick=quick, dry_run=dry_run, as_json=as_json)
        return
    settings = Settings(Limits(budget, time_limit), rounds, threads)
    cases = make_cases(
        ("ringspan", *PEER_NAMES) if peers else ("ringspan",),
        [SPANNING if text == SPANNING else read_as("--pattern", read_pattern, text) for text in pattern or [SPANNING]],
        read_as("--tokens", read_lengths, tokens),
        read_as("--ranks", read_counts, ranks),
        causal=causal,
        layout=read_as("--layout", read_layout, layout),
        dtype=read_as("--dtype", read_dtype, dtype),
        heads=heads,
        dim=dim,
        backward=not forward_only,
    )
    if peers and not any(isinstance(case.pattern, Full) for case in cases):
        progress.print("Other rings know plain attention only: add --pattern full to see them.", highlight=False)
    for each in dict.fromkeys(case.pattern for case in cases):
        warn_of_unselected(progress, each, max(case.tokens for case in cases), heads)
    if dry_run:
        _show_cases([Part("cases", cases, settings)], as_json)
        return
    _measure(progress, cases, settings, out or Path("ringspan-report"), keep, as_json=as_json)


def _measure(
    progress: Console, cases: Sequence[Case], settings: Settings, out: Path, keep: Keep, *, as_json: bool
) -> None:

    from ringspan.tools.bench import report  # noqa: PLC0415
    from ringspan.tools.bench.summaries import summarize  # noqa: PLC0415
    from ringspan.tools.bench.tables import idle_rings, terminal_tables  # noqa: PLC0415
    from ringspan.tools.pages import rich_table  # noqa: PLC0415

    command = _command_line()
    store = _open_store(out, "bench.jsonl", settings.threads, keep)
    _say_what_is_there(progress, store)
    trials = _run(progress, cases, settings, store)
    summaries = summarize(trials)
    page = report.make_page(trials, command)
    document = report.as_json(trials, settings, store, command)
    with writing_to("--out", out):
        paths = report.write_report(page, document, out)
    if as_json:
        typer.echo(json.dumps(document))
    else:
        console = make_console()
        for table in terminal_tables(summaries):
            console.print(rich_table(table))
        for sentence in [page.sentence, *idle_rings(summaries)]:
            console.print(sentence, highlight=False, soft_wrap=True)
        console.print(f"Report: {paths['html']} (also .md and .json)", highlight=False, soft_wrap=True)
    _exit(progress, trials)


def _run_suite(
    progress: Console,
    budget: int,
    out: Path | None,
    keep: Keep,
    *,
    quick: bool,
    dry_run: bool,
    as_json: bool,
) -> None:

    from ringspan.tools.bench import report, results_page, suites  # noqa: PLC0415

    scale = suites.QUICK_SCALE if quick else suites.FULL_SCALE
    root = out or (Path("ringspan-report/quick") if quick else Path())
    parts = suites.results_parts(scale, budget)
    if dry_run:
        _show_cases(parts, as_json)
        return
    store = _open_store(root, "benchmarks/results/results.jsonl", 1, keep)
    _say_what_is_there(progress, store)
    found = {part.name: _run(progress, part.cases, part.settings, store, part.name) for part in parts}
    page = results_page.make_results_page(found, scale, _command_line())
    with writing_to("--out", root):
        paths = results_page.write_results(page, root)
    trials = [trial for part in found.values() for trial in part]
    if as_json:
        typer.echo(json.dumps(report.as_json(trials, parts[0].settings, store, _command_line())))
    else:
        console = make_console()
        console.print(page.sentence, highlight=False, soft_wrap=True)
        console.print(f"Written: {paths['markdown']}, {paths['html']}, {store.path}", highlight=False, soft_wrap=True)
    _exit(progress, trials)


def _run(progress: Console, cases: Sequence[Case], settings: Settings, store: Store, title: str = "") -> list[Trial]:
    """All trials, with a line of progress; Ctrl-C ends cleanly."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: PLC0415
    from rich.table import Column  # noqa: PLC0415

    from ringspan.tools.bench.ladder import run_cases  # noqa: PLC0415

    what = TextColumn(
        "{task.description}", markup=False, table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")
    )
    columns = (BarColumn(bar_width=16), MofNCompleteColumn(), TimeElapsedColumn(), what)
    seen = progress.is_terminal
    bar = Progress(*columns, console=progress, refresh_per_second=2, expand=True, transient=True, disable=not seen)
    steps, trials = len(cases) * settings.rounds, []
    task = bar.add_task("", total=steps)

    def announce(step: int, text: str) -> None:
        line = f"{title}: {text}" if title else text
        bar.update(task, completed=step - 1, description=line)
        if not seen:
            progress.print(f"{step} of {steps}: {line}", highlight=False, soft_wrap=True)

    try:
        with bar:
            for trial in run_cases(cases, settings, store, announce=announce):
                trials.append(trial)
                if not trial.measured:
                    row = f"{trial.case}: {trial.outcome}: {trial.reason}"
                    progress.print(row, highlight=False, style="yellow", soft_wrap=True, markup=False)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"Interrupted. {len(store)} trials are kept in {store.path}: run the same command to continue."
        ) from None
    return trials


def _open_store(folder: Path, name: str, threads: int, keep: Keep) -> Store:
    from ringspan.tools.bench.ladder import Store  # noqa: PLC0415

    with writing_to("--out", folder):
        return Store(folder / name, threads, fresh=keep.fresh, repeat_disturbed=keep.repeat_disturbed)


def _say_what_is_there(progress: Console, store: Store) -> None:
    if len(store):
        progress.print(
            f"Going on: {store.path} has {len(store)} trials of these conditions, which are not run again "
            "(--fresh measures everything anew).",
            highlight=False,
        )
    if store.others:
        progress.print(f"{store.others} trials there are of other versions or settings: left alone.", highlight=False)


def _show_cases(parts: Sequence[Part], as_json: bool) -> None:
    """What would be run, with the memory that each case is planned to need, if that can be known before."""

    from ringspan.tools.bench.ladder import foretell  # noqa: PLC0415
    from ringspan.tools.bench.tables import forecast_table  # noqa: PLC0415
    from ringspan.tools.pages import rich_table  # noqa: PLC0415

    found = {part.name: [foretell(case, part.settings.limits) for case in part.cases] for part in parts}
    if as_json:
        typer.echo(json.dumps({name: [forecast.as_json() for forecast in part] for name, part in found.items()}))
        return
    for part in parts:
        make_console().print(rich_table(forecast_table(part.name, found[part.name], part.settings.limits)))


def _exit(progress: Console, trials: Sequence[Trial]) -> None:
    """Status 0 if something was measured and ringspan never crashed; running out of memory or time is a result."""
    from ringspan.tools.bench.report import ringspan_crashed  # noqa: PLC0415

    crashed = ringspan_crashed(trials)
    for trial in crashed:
        progress.print(f"Crashed: {trial.case}: {trial.reason}", style="red", highlight=False, markup=False)
    if crashed or not any(trial.measured for trial in trials):
        raise typer.Exit(1)


def _check_suite(context: typer.Context, suite: str) -> None:
    from ringspan.tools.bench.suites import SUITES  # noqa: PLC0415

    if suite not in SUITES:
        if not suite:
            raise typer.BadParameter("is a size of a suite: say which, such as --suite results", param_hint="--quick")
        raise typer.BadParameter(f"{suite!r}: must be {' or '.join(SUITES)}", param_hint="--suite")
    given = [name for name in _NOT_FOR_SUITES if _was_given(context, name)]
    if given:
        options = ", ".join("--" + name.replace("_", "-") for name in given)
        raise typer.BadParameter(f"a suite has its own: leave out {options}, or --suite", param_hint="--suite")


def _check_study(context: typer.Context, study: str) -> None:
    if study not in _STUDIES:
        raise typer.BadParameter(f"{study!r}: must be {' or '.join(_STUDIES)}", param_hint="STUDY")
    given = [name for name in _NOT_FOR_STUDIES if _was_given(context, name)]
    if given:
        options = ", ".join("--" + name.replace("_", "-") for name in given)
        raise typer.BadParameter(f"a study has its own: leave out {options}", param_hint="STUDY")


def _was_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _free_share() -> int:
    import psutil  # noqa: PLC0415

    return int(_SHARE_OF_FREE_MEMORY * psutil.virtual_memory().available)


def _command_line() -> str:
    import shlex  # noqa: PLC0415
    import sys  # noqa: PLC0415

    return shlex.join(["ringspan", *sys.argv[1:]])
