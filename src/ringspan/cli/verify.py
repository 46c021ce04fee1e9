"""`ringspan verify`: check that a ring is exact, sharded and fast."""

from __future__ import annotations

import dataclasses
import json
import shlex
import signal
from pathlib import Path
from typing import Annotated, NoReturn, cast

import torch.distributed as dist
import typer
from rich.console import Console

from ringspan.cli.options import (
    PATTERN_TERMS_HELP,
    AsJson,
    make_console,
    read_as,
    read_count,
    read_counts,
    read_dtype,
    read_pattern,
    refuse_balanced,
    writing_to,
)
from ringspan.layout import LayoutName, check_layout_name
from ringspan.runtime.settings import RunError
from ringspan.tools.acceptance.plan import AcceptanceSettings
from ringspan.tools.acceptance.run import Progress, acceptance_settings, run_acceptance
from ringspan.tools.acceptance.steps import Step, StepReport
from ringspan.tools.pages import Page, print_page, split_at_markers, write_into, write_page
from ringspan.tools.verify.check import ByRing
from ringspan.tools.verify.run import MEASUREMENTS, failed_ring, find_ranks, judge_all, measure_rank
from ringspan.tools.verify.verify_page import FAIL, PASS, as_json_document, make_page, readme_lines, status
from ringspan.tools.verify.workload import (
    AttentionUnderTest,
    VerifySettings,
    default_tokens,
    import_function,
    settings_for,
)
from ringspan.tools.verify_training.judge import judge_training
from ringspan.tools.verify_training.rings import TrainingReport, measure_rings, settings_for_training
from ringspan.tools.verify_training.training_page import as_training_json, make_training_page

_MARKER, _ACCEPTANCE_MARKER = "ringspan verify", "ringspan verify --acceptance"
_NOT_FOR_ACCEPTANCE = ("pattern", "attention", "training", "layout", "tokens", "dtype")
_PATTERN = "2048x1,16384x8,65536x32"


def verify(
    context: typer.Context,
    ranks: Annotated[
        str, typer.Option(help="Ring sizes to verify, separated by commas; 1 is always included.")
    ] = "1,2,4",
    pattern: Annotated[str, typer.Option(help=PATTERN_TERMS_HELP, show_default=f"{_PATTERN}, for ringspan only")] = "",
    attention: Annotated[
        str,
        typer.Option(metavar="MODULE:FUNCTION", help="Verify another implementation.", show_default="ringspan"),
    ] = "",
    training: Annotated[
        str,
        typer.Option(
            metavar="MODULE:NAME",
            help="Verify whole training steps of an adapter: see docs/verify_training.md.",
            show_default="none",
        ),
    ] = "",
    acceptance: Annotated[
        bool,
        typer.Option(
            "--acceptance", help="Accept this machine: kernels, rings, speed, memory and training, in one report."
        ),
    ] = False,
    device: Annotated[
        str,
        typer.Option(
            help="With --acceptance: cuda, cpu, or auto: GPUs if there are any, else the CPU, whose verdict is then at "
            "best INCOMPLETE."
        ),
    ] = "auto",
    quick: Annotated[bool, typer.Option("--quick", help="With --acceptance: tiny sizes, to see that it runs.")] = False,
    layout: Annotated[str, typer.Option(help="zigzag or contiguous; for ringspan only.")] = "zigzag",
    tokens: Annotated[
        str,
        typer.Option(
            help="Sequence length of the long runs.",
            show_default="the longest segment, up to 64k; 64k for windows; less if long; 8k if full",
        ),
    ] = "",
    dtype: Annotated[
        str,
        typer.Option(
            help="Dtype of the exactness checks; with --training, of the step whose rounding is compared.",
            show_default="float64, or float32 with --attention or --training",
        ),
    ] = "",
    out: Annotated[Path, typer.Option(help="Folder for the report: JSON, Markdown, HTML.")] = Path("ringspan-report"),
    into: Annotated[
        Path | None, typer.Option(help="Also write the checks into this Markdown file, between its markers.")
    ] = None,
    timeout: Annotated[
        float,
        typer.Option(help="Seconds after which a ring that does not finish, or a step of --acceptance, has failed."),
    ] = 600.0,
    as_json: AsJson = False,
) -> None:
    """Check on this machine that a ring is exact, sharded and fast, and write a report.

    Measures every rank of each ring size in local processes; under torchrun, in the ranks that torchrun started. Each
    check reports a result and a verdict. `--acceptance` starts its own ranks, one for each GPU, and also checks
    kernels, speed, memory and training: see docs/acceptance.md. Exit status: 0 if all checks pass, 1 if one fails, 3 if
    an essential check could not be measured here.

    **Examples**

    `ringspan verify`

    `ringspan verify --ranks 1,2,4,8 --pattern full`

    `ringspan verify --pattern "window 1023"`

    `ringspan verify --attention ringspan.tools.peers:ring_attention_pytorch`

    `ringspan verify --training ringspan.tools.verify_training.own_trainers:longnet`

    `torchrun --nproc-per-node=8 -m ringspan verify`

    `ringspan verify --acceptance`

    `ringspan verify --acceptance --device cpu --ranks 1,2`
    """

    given = _given(context)
    if acceptance:
        _check_unused({f"--{name}": name in given for name in _NOT_FOR_ACCEPTANCE}, "--acceptance")
        _check_markers(into, _ACCEPTANCE_MARKER)
        sizes = read_as("--ranks", read_counts, ranks) if "ranks" in given else []
        _verify_acceptance(_accepted(device, sizes, timeout, quick), out, into, given, as_json)
    _check_unused({"--device": "device" in given, "--quick": quick}, "a run without --acceptance")
    if training:
        _check_unused({"--attention": attention, "--pattern": pattern, "--into": into}, "--training")
        _verify_training(training, ranks, tokens, dtype, out, timeout, as_json)
    implementation = _implementation(attention, pattern, layout)
    wanted = read_as("--ranks", read_counts, ranks)
    _check_markers(into, _MARKER)
    processes = find_ranks(timeout)
    sizes = processes.sizes(wanted)
    settings = _settings(implementation, sizes, tokens, dtype)
    console = make_console(stderr=as_json, quiet=not processes.is_main)
    console.print(f"Verifying {implementation.name} on {processes.where}", style="bold")
    measured: ByRing = {}
    with console.status("") as progress:
        for size in sorted({*sizes, *(size for size in settings.memory_rings if size <= processes.max_ranks)}):
            names = tuple(MEASUREMENTS) if size in sizes else ("memory",)
            progress.update(f"ring of {size}: measuring {', '.join(names)}")
            timed = settings if size <= processes.parallel_ranks else dataclasses.replace(settings, trials=0)
            try:
                measured[size] = processes.run(size, measure_rank, implementation, timed, names)
            except (RuntimeError, TimeoutError) as error:  # a rank died or timed out
                measured[size] = failed_ring(size, str(error))
            only = "" if size in sizes else " (memory only)"
            console.print(f"  ring of {size}: measured{only}", highlight=False)
    checks = judge_all(measured, settings)
    exit_status = status(checks)
    if not processes.is_main:
        raise typer.Exit(exit_status)
    command = _command(attention, pattern, layout, ranks, tokens, dtype)
    page = make_page(implementation, settings, processes.where, measured, checks, command)
    document = as_json_document(implementation, settings, processes.where, measured, checks, page)
    paths = write_page(page, out, "verify")
    (out / "verify.json").write_text(json.dumps(document, indent=1) + "\n")
    if into is not None:
        write_into(into, _MARKER, readme_lines(page))
    if as_json:
        typer.echo(json.dumps(document))
    else:
        print_page(page, console)
        for check in checks:
            if check.verdict == "FAIL":
                console.print(f"{check.name}: {check.reason}", style="red", highlight=False, soft_wrap=True)
        _print_verdict(page, paths["html"], exit_status, console)
    raise typer.Exit(exit_status)


def _given(context: typer.Context) -> set[str]:
    """The options on the command line."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}


def _check_unused(options: dict[str, object], run: str) -> None:
    for option, value in options.items():
        if value:
            raise typer.BadParameter(f"does not apply to {run}: leave it out", param_hint=option)


def _check_markers(into: Path | None, marker: str) -> None:
    """Before the checks, which take a while."""
    if into is not None:
        try:
            split_at_markers(into, marker)
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--into") from error


def _accepted(device: str, sizes: list[int], timeout: float, quick: bool) -> AcceptanceSettings:
    if dist.is_torchelastic_launched():
        raise RunError(
            "--acceptance starts its own ranks: run it without torchrun, once on each machine; docs/acceptance.md has "
            "the commands for rings over several machines"
        )
    try:
        return acceptance_settings(device, sizes, timeout, quick=quick)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _verify_acceptance(
    settings: AcceptanceSettings, out: Path, into: Path | None, given: set[str], as_json: bool
) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a scheduler's: ends the step and all its processes
    console = make_console(stderr=as_json)
    sizes = ", ".join(map(str, settings.sizes))
    console.print(f"Accepting {settings.device}, rings of {sizes} over {settings.backend}", style="bold")
    if settings.fallback:
        console.print(
            f"No GPU: {settings.fallback}. The verdict is at best INCOMPLETE.", style="yellow", soft_wrap=True
        )
    with console.status("") as shown:

        def before(number: int, total: int, step: Step) -> None:
            shown.update(f"{number} of {total}: {step.title} (at most {settings.limit_seconds:g} s)")

        def after(number: int, total: int, report: StepReport) -> None:
            style = None if report.finished else "red"
            text = f"  {number} of {total}: {report.title}: {report.outcome}, {report.seconds:.0f} s"
            console.print(f"{text}{f': {report.reason}' * (not report.finished)}", style=style, soft_wrap=True)

        with writing_to("--out", out):
            run = run_acceptance(settings, out, _acceptance_command(settings, given), Progress(before, after))
    if into is not None:
        write_into(into, _ACCEPTANCE_MARKER, readme_lines(run.page))
    if as_json:
        typer.echo(json.dumps(run.document))
    else:
        print_page(run.page, console)
        for check in run.document["checks"]:
            if check["verdict"] == "FAIL":
                console.print(f"{check['name']}: {check['reason']}", style="red", soft_wrap=True)
        console.print(f"Send back: {run.paths['archive']}", soft_wrap=True)
        _print_verdict(run.page, run.paths["html"], run.document["status"], console)
    raise typer.Exit(run.document["status"])


def _acceptance_command(settings: AcceptanceSettings, given: set[str]) -> str:
    device = f" --device {settings.device}" if "device" in given and not settings.fallback else ""
    sizes = f" --ranks {','.join(map(str, settings.sizes))}" if "ranks" in given else ""
    return f"ringspan verify --acceptance{device}{sizes}{' --quick' * settings.quick}"


def _verify_training(
    target: str, ranks: str, tokens: str, dtype: str, out: Path, timeout: float, as_json: bool
) -> NoReturn:
    wanted = read_as("--ranks", read_counts, ranks)
    length = read_as("--tokens", read_count, tokens) if tokens else 1024
    rounded = read_as("--dtype", read_dtype, dtype or "float32")
    try:
        import_function(target)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--training") from error
    processes = find_ranks(timeout)
    settings = settings_for_training(target, processes.sizes(wanted), length, rounded)
    console = make_console(stderr=as_json, quiet=not processes.is_main)
    console.print(f"Verifying training steps of {target} on {processes.where}", style="bold", soft_wrap=True)
    with console.status("") as progress:
        measured = measure_rings(settings, processes, on_ring=lambda size: progress.update(f"ring of {size}"))
    report = TrainingReport(settings, judge_training(measured, settings), measured, processes.where)
    exit_status = status(report.checks)
    if processes.is_main:
        more = "".join(f" --{name} {value}" for name, value in (("tokens", tokens), ("dtype", dtype)) if value)
        page = make_training_page(report, f"ringspan verify --training {target} --ranks {ranks}{more}")
        paths = write_page(page, out, "verify_training")
        document = as_training_json(report, page)
        (out / "verify_training.json").write_text(json.dumps(document, indent=1) + "\n")
        if as_json:
            typer.echo(json.dumps(document))
        else:
            print_page(page, console)
            _print_verdict(page, paths["html"], exit_status, console)
    raise typer.Exit(exit_status)


def _print_verdict(page: Page, path: Path, exit_status: int, console: Console) -> None:
    console.print(f"Report: {path} (also .md and .json)", highlight=False, soft_wrap=True)
    style = {PASS: "bold green", FAIL: "bold red"}.get(exit_status, "bold yellow")
    console.print(f"{page.badge}: {page.sentence}", style=style, highlight=False, soft_wrap=True)


def _implementation(attention: str, pattern: str, layout: str) -> AttentionUnderTest:
    if attention and pattern:
        way_out = "the function computes one pattern: set its attribute, function.pattern = 'window 1023' for example"
        raise typer.BadParameter(f"{pattern!r}: applies to ringspan only; {way_out}", param_hint="--pattern")
    try:
        if attention:
            return AttentionUnderTest.load(attention)
        check_layout_name(layout)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    refuse_balanced(layout)
    wanted = read_as("--pattern", read_pattern, pattern or _PATTERN)
    return AttentionUnderTest(pattern=wanted, layout=cast("LayoutName", layout))


def _settings(implementation: AttentionUnderTest, sizes: list[int], tokens: str, dtype: str) -> VerifySettings:
    exact_dtype = read_as("--dtype", read_dtype, dtype or ("float64" if implementation.is_ringspan else "float32"))
    length = read_as("--tokens", read_count, tokens) if tokens else default_tokens(implementation.pattern)
    return settings_for(implementation, sizes, length, exact_dtype)


def _command(attention: str, pattern: str, layout: str, ranks: str, tokens: str, dtype: str) -> str:
    what = (
        f"--attention {attention}" if attention else f"--pattern {shlex.quote(pattern or _PATTERN)} --layout {layout}"
    )
    more = "".join(f" --{name} {value}" for name, value in (("tokens", tokens), ("dtype", dtype)) if value)
    return f"ringspan verify {what} --ranks {ranks}{more}"
