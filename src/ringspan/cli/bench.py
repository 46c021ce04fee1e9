"""`ringspan bench`: the command line of `ringspan.tools.bench`. Reads options, shows progress, prints and exits."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import psutil
import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column

from ringspan.cli.options import (
    PATTERN_HELP,
    SPANNING,
    AsJson,
    HeadDim,
    Heads,
    TraceFile,
    make_console,
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
from ringspan.geometry import Full
from ringspan.tools.bench import report
from ringspan.tools.bench.cases import PEER_NAMES, BenchCase, make_cases
from ringspan.tools.bench.hilbert import QUICK, StudyScale, study
from ringspan.tools.bench.hilbert_page import make_hilbert_page
from ringspan.tools.bench.ladder import BenchSettings, TrialStore, forecast_case, run_cases
from ringspan.tools.bench.summaries import summarize
from ringspan.tools.bench.trials import Trial, TrialError, TrialLimits, trace_case
from ringspan.tools.measure import describe_machine, one_line
from ringspan.tools.pages import print_page, rich_table, write_page

_SHARE_OF_FREE_MEMORY = 0.8
_STUDY = "hilbert"
_NOT_FOR_STUDIES = (
    *(
        "tokens",
        "ranks",
        "pattern",
        "causal",
        "layout",
        "dtype",
        "heads",
        "head_dim",
        "forward_only",
        "peers",
        "rounds",
    ),
    *("time_limit", "memory", "fresh", "repeat_disturbed", "dry_run", "trace"),
)


def bench(
    context: typer.Context,
    study_name: Annotated[
        str,
        typer.Argument(
            metavar="[STUDY]",
            help="Run a study instead: hilbert measures the benefit and the cost of grid orders.",
            show_default=False,
        ),
    ] = "",
    tokens: Annotated[
        str,
        typer.Option("--tokens", "-n", metavar="COUNTS", help="Sequence lengths: 4k,8k, or 4k..32k, which doubles."),
    ] = "4k..32k",
    ranks: Annotated[str, typer.Option("--ranks", "-k", metavar="COUNTS", help="Ring sizes, such as 1,2,4.")] = "1,2",
    pattern: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help=f"{PATTERN_HELP} Repeatable.", show_default=SPANNING),
    ] = None,
    causal: Annotated[bool, typer.Option(help="Whether a query attends only to keys up to its own position.")] = True,
    layout: Annotated[str, typer.Option(help="contiguous, zigzag, or best: the faster one for each case.")] = "best",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16 or float64.")] = "float32",
    heads: Heads = 8,
    head_dim: HeadDim = 64,
    forward_only: Annotated[bool, typer.Option("--forward-only", help="Skip the backward pass.")] = False,
    peers: Annotated[
        bool,
        typer.Option(
            "--peers", help="Also measure alternatives: other rings and SDPA (full), masks and FlexAttention (dilated)."
        ),
    ] = False,
    rounds: Annotated[int, typer.Option(help="Repetitions of each case, in turns.", min=1)] = 3,
    memory: Annotated[
        str,
        typer.Option(
            metavar="BYTES",
            help="Memory limit of all processes together, such as 8GiB.",
            show_default="80 % of free memory",
        ),
    ] = "",
    time_limit: Annotated[
        float, typer.Option(metavar="SECONDS", help="Limit of one trial, including its start.", min=1)
    ] = 120.0,
    threads: Annotated[int, typer.Option(help="Threads per process.", min=1)] = 1,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Folder of the trials and the report.")] = Path(
        "ringspan-report"
    ),
    quick: Annotated[bool, typer.Option("--quick", help="With a study: tiny sizes, to see that it runs.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Delete stored trials and measure everything again.")] = False,
    repeat_disturbed: Annotated[
        bool, typer.Option("--repeat-disturbed", help="Repeat trials that other programs disturbed.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the cases and the memory they need, and run none.")
    ] = False,
    trace: TraceFile = None,
    as_json: AsJson = False,
) -> None:
    """Measure speed, memory and the longest sequence over lengths and ring sizes, and write a report.

    Every trial runs in fresh processes with a memory limit. Lengths grow step by step; a case that does not fit becomes
    a row of the report, with the reason. Ctrl-C loses nothing: run the same command to continue. Times are medians over
    rounds in which all cases take turns. Trials that other programs disturbed do not count, or are marked if there are
    no others. The defaults take about three minutes on two cores. `--trace` runs the longest case of the largest ring
    once more; that run does not count.

    **Examples**

    `ringspan bench`

    `ringspan bench --tokens 16k..1M --memory 8GiB --dry-run`

    `ringspan bench --pattern full --ranks 1,2,4 --peers`

    `ringspan bench --pattern "window 1023" --pattern full`

    `ringspan bench --tokens 512k --rounds 1 --time-limit 900`

    `ringspan bench --tokens 16k --ranks 2 --trace bench.json`

    `ringspan bench hilbert --quick`
    """
    progress = make_console(stderr=True)
    if study_name:
        _check_study(context, study_name)
        _run_study(progress, out, quick=quick, threads=threads, as_json=as_json)
        return
    if quick:
        raise typer.BadParameter("applies to a study only: name one, such as hilbert", param_hint="--quick")
    free = int(_SHARE_OF_FREE_MEMORY * psutil.virtual_memory().available)
    budget = read_as("--memory", read_bytes, memory) if memory else free
    settings = BenchSettings(TrialLimits(budget, time_limit), rounds, threads)
    cases = make_cases(
        ("ringspan", *PEER_NAMES) if peers else ("ringspan",),
        [SPANNING if text == SPANNING else read_as("--pattern", read_pattern, text) for text in pattern or [SPANNING]],
        read_as("--tokens", read_lengths, tokens),
        read_as("--ranks", read_counts, ranks),
        causal=causal,
        layout=read_as("--layout", read_layout, layout),
        dtype=read_as("--dtype", read_dtype, dtype),
        heads=heads,
        head_dim=head_dim,
        backward=not forward_only,
    )
    if peers and not any(isinstance(case.pattern, Full) for case in cases):
        progress.print("Other rings support plain attention only: add --pattern full to include them.")
    for each in dict.fromkeys(case.pattern for case in cases):
        warn_of_unselected(progress, each, max(case.tokens for case in cases), heads)
    if dry_run:
        _show_cases(cases, settings, as_json)
        return
    with writing_to("--out", out):
        store = TrialStore(out / "bench.jsonl", threads, fresh=fresh, repeat_disturbed=repeat_disturbed)
    trials = _measure(progress, cases, settings, store, out, as_json=as_json)
    if trace is not None:
        _trace(progress, trials, settings, trace)
    crashed = report.ringspan_crashed(trials)
    for trial in crashed:
        progress.print(f"Crashed: {trial.case}: {trial.reason}", style="red")
    if crashed or not any(trial.measured for trial in trials):
        raise typer.Exit(1)  # running out of memory or time is a result; a crash or no result at all is not


def _measure(
    progress: Console,
    cases: Sequence[BenchCase],
    settings: BenchSettings,
    store: TrialStore,
    out: Path,
    *,
    as_json: bool,
) -> list[Trial]:
    if len(store):
        progress.print(f"Continuing: {store.path} has {len(store)} trials of this setup (--fresh deletes them).")
    if store.others:
        progress.print(f"It also has {store.others} trials of other versions or settings, which are ignored.")
    trials = _run(progress, cases, settings, store)
    summaries = summarize(trials)
    page = report.make_page(trials, _command_line())
    document = report.as_json(trials, settings, store, _command_line())
    with writing_to("--out", out):
        paths = report.write_report(page, document, out)
    if as_json:
        typer.echo(json.dumps(document))
    else:
        console = make_console()
        for table in report.terminal_tables(summaries):
            console.print(rich_table(table))
        for sentence in [page.sentence, *report.idle_rings(summaries)]:
            console.print(sentence, soft_wrap=True)
        console.print(f"Report: {paths['html']} (also .md and .json)", soft_wrap=True)
    return trials


def _trace(progress: Console, trials: Sequence[Trial], settings: BenchSettings, path: Path) -> None:
    """Trace the longest case of ringspan on the largest ring among those that were measured."""
    ours = [each.case for each in trials if each.measured and each.case.implementation == "ringspan"]
    rings = [case for case in ours if case.ranks > 1]
    if not rings:
        raise typer.BadParameter("no case of a ring was measured: give --ranks 2 or more", param_hint="--trace")
    case = max(rings, key=lambda case: (case.ranks, case.tokens))
    try:
        trace_case(case, path, settings.limits, settings.threads)
    except TrialError as error:
        raise typer.BadParameter(f"{case}: {error}", param_hint="--trace") from error
    progress.print(f"Trace of {case}: {path}", soft_wrap=True)


def _run(progress: Console, cases: Sequence[BenchCase], settings: BenchSettings, store: TrialStore) -> list[Trial]:
    """Run all trials with a progress bar. Ctrl-C keeps the trials so far."""
    description = TextColumn(
        "{task.description}", markup=False, table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")
    )
    columns = (BarColumn(bar_width=16), MofNCompleteColumn(), TimeElapsedColumn(), description)
    shown = progress.is_terminal
    bar = Progress(*columns, console=progress, refresh_per_second=2, expand=True, transient=True, disable=not shown)
    steps, trials = len(cases) * settings.rounds, []
    task = bar.add_task("", total=steps)

    def announce(step: int, text: str) -> None:
        bar.update(task, completed=step - 1, description=text)
        if not shown:
            progress.print(f"{step} of {steps}: {text}", soft_wrap=True)

    try:
        with bar:
            for trial in run_cases(cases, settings, store, announce=announce):
                trials.append(trial)
                if not trial.measured:
                    progress.print(f"{trial.case}: {trial.outcome}: {trial.reason}", style="yellow", soft_wrap=True)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"Interrupted. {len(store)} trials are stored in {store.path}: run the same command to continue."
        ) from None
    return trials


def _show_cases(cases: Sequence[BenchCase], settings: BenchSettings, as_json: bool) -> None:
    forecasts = [forecast_case(case, settings.limits) for case in cases]
    if as_json:
        typer.echo(json.dumps({"cases": [forecast.as_json() for forecast in forecasts]}))
        return
    console = make_console()
    console.print(rich_table(report.forecast_table(forecasts, settings.limits)))
    for forecast in forecasts:
        if forecast.obstacle:
            console.print(f"{forecast.case}: {forecast.obstacle}", soft_wrap=True)


def _check_study(context: typer.Context, name: str) -> None:
    if name != _STUDY:
        raise typer.BadParameter(f"{name!r}: must be {_STUDY}", param_hint="STUDY")
    sources = {option: context.get_parameter_source(option) for option in _NOT_FOR_STUDIES}
    given = [option for option, source in sources.items() if source is not None and source.name == "COMMANDLINE"]
    if given:
        options = ", ".join("--" + option.replace("_", "-") for option in given)
        raise typer.BadParameter(f"a study has fixed sizes: leave out {options}", param_hint="STUDY")


def _run_study(progress: Console, out: Path, *, quick: bool, threads: int, as_json: bool) -> None:
    """Run the study and write hilbert.md, hilbert.html and hilbert.json."""
    with writing_to("--out", out):  # before anything is measured
        out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(threads)
    found = study(QUICK if quick else StudyScale(), lambda text: progress.print(f"{text} .."))
    page = make_hilbert_page(found, _command_line(), one_line(describe_machine()))
    document = {"command": _command_line(), "machine": describe_machine(), **found.as_json()}
    with writing_to("--out", out):
        paths = write_page(page, out, _STUDY)
        (out / f"{_STUDY}.json").write_text(json.dumps(document, indent=1) + "\n")
    if as_json:
        typer.echo(json.dumps(document))
        return
    console = make_console()
    print_page(page, console)
    console.print(page.sentence, soft_wrap=True)
    console.print(f"Report: {paths['html']} (also .md and .json)", soft_wrap=True)


def _command_line() -> str:
    return shlex.join(["ringspan", *sys.argv[1:]])
