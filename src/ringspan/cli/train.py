"""`ringspan train`: reads the flags, starts the trainer and displays its progress."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from ringspan.cli.options import AsJson, TraceFile, flags_of, make_console, with_flags
from ringspan.models.config import NAMED, LongNetConfig
from ringspan.train.config import PRESETS, TrainSettings
from ringspan.train.estimate import estimate_memory, estimate_time, reach_of
from ringspan.train.metrics import METRICS, StepMetrics
from ringspan.train.trainer import MODEL, Trainer
from ringspan.train.watchdog import Heartbeat, Straggler


def train(
    data: Annotated[
        list[str] | None,
        typer.Argument(help="Files, and folders of text files. Default: the sources of Python's standard library."),
    ] = None,
    preset: Annotated[str, typer.Option(help=f"Settings to start from: {', '.join(PRESETS)}; see above.")] = "quick",
    config: Annotated[Path | None, typer.Option(help="A settings.json of a run, instead of a preset.")] = None,
    model: Annotated[str, typer.Option(help=f"A named size: {', '.join(NAMED)}.", show_default="the preset's")] = "",
    resume: Annotated[
        Literal["auto", "never"],
        typer.Option(
            help="auto: continue from the last checkpoint in --out, if there is one. Required with torchrun's restarts."
        ),
    ] = "never",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the memory and time that the run needs, and exit.")
    ] = False,
    ranks: Annotated[int, typer.Option(help="For --dry-run: number of ranks; 0 means torchrun's.", min=0)] = 0,
    trace: TraceFile = None,
    trace_steps: Annotated[
        int, typer.Option(help="For --trace: number of steps, after a first one that warms up.", min=1)
    ] = 3,
    as_json: AsJson = False,
    **given: Any,
) -> None:
    """Train a LongNet on bytes. Every setting has a flag, and the run writes all settings into its folder.

    `--dry-run` shows the model, the pattern of each layer, the memory per rank and the expected time.

    Ctrl-C saves a checkpoint after the current step and stops; a second Ctrl-C stops at once.

    Exit status: 0 if the run finished; 1 if it stopped with an error; 2 for invalid settings; 3 for a worker whose
    launcher died; 130 after Ctrl-C; 143 for a rank of several after SIGTERM.

    **Examples**

    `ringspan train`

    `ringspan train ~/books --preset laptop --out runs/books --metrics-port 9400`

    `ringspan train --preset long --dry-run --ranks 2`

    `ringspan train --pattern "window 511 + 2k x4,8k x16" --dry-run`

    `ringspan train --model small --pattern "window 1023" --pattern "window 1023" --pattern full --sinks`

    `torchrun --nproc-per-node=2 -m ringspan train --steps 10 --trace steps.json`

    `torchrun --nproc-per-node=2 --max-restarts=3 -m ringspan train --preset long --resume auto`
    """
    try:
        settings = _settings(preset, config, model, given)
        if data:
            settings = dataclasses.replace(settings, data=tuple(data))
        if dry_run:
            _print_estimates(settings, ranks, as_json)
            return
        trainer = Trainer(settings, resume=resume == "auto")
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    console = make_console(stderr=as_json, quiet=not trainer.context.is_main)
    with trainer:
        _print_start(console, trainer)
        _run(trainer, console, trace, trace_steps)
    folder = Path(settings.out)
    if trace is not None:
        console.print(f"Trace: {trace}", soft_wrap=True)
    console.print(f"The model is in {folder / MODEL}, the metrics are in {folder / METRICS}.", soft_wrap=True)
    latest = trainer.metrics.latest
    if as_json and latest is not None:  # only the main rank records metrics
        typer.echo(json.dumps({**latest.to_dict(), "out": str(folder)}))


def _settings(preset: str, config: Path | None, model: str, given: dict[str, Any]) -> TrainSettings:
    if config is None and preset not in PRESETS:
        raise ValueError(f"--preset {preset}: must be one of {', '.join(PRESETS)}")
    settings = PRESETS[preset].settings if config is None else TrainSettings.read(config)
    if model:
        settings = dataclasses.replace(settings, model=LongNetConfig.named(model))
    return settings.changed({name: value for name, value in given.items() if value not in (None, [])})


def _print_start(console: Console, trainer: Trainer) -> None:
    settings, context = trainer.settings, trainer.context
    if trainer.next_step:
        console.print(f"Resuming from step {trainer.next_step} of {settings.out}.")
    console.print(
        f"{settings.model.parameters:,} parameters, {settings.tokens:,} tokens per sequence, {context.ring.size} "
        f"rank(s) per sequence, {context.data_size} sequence(s) in parallel, {len(trainer.corpus):,} bytes of text, "
        f"{settings.dtype}",
        soft_wrap=True,
    )
    _print_patterns(console, settings, context.ring.size)
    for line in trainer.corpus.selection.lines():
        console.print(line, soft_wrap=True)
    if settings.metrics_port:
        url = f"http://{settings.metrics_address}:{settings.metrics_port}/metrics"
        console.print(f"Metrics for Prometheus: {url}", soft_wrap=True)


def _print_patterns(console: Console, settings: TrainSettings, ring_size: int) -> None:
    """A line for each pattern: its layers, and how far a token reaches in them."""
    for pattern, layers in settings.model.layers_by_pattern.items():
        reach = reach_of(settings, pattern, ring_size)
        console.print(f"Layer{'s' * (len(layers) > 1)} {_ranges(layers)}: {pattern.text}. {reach}", soft_wrap=True)


def _ranges(numbers: list[int]) -> str:
    """Ascending numbers, with runs shortened.

    >>> _ranges([0, 1, 2, 4, 6, 7]), _ranges([3])
    ('0-2, 4, 6-7', '3')
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _run(trainer: Trainer, console: Console, trace: Path | None, trace_steps: int) -> None:
    """Train with a progress bar; an interrupt is raised again with the way to continue."""
    how_to_continue = "To continue, run the same command with --resume auto."
    try:
        with ProgressDisplay(trainer, console) as display:
            callbacks = (display.show_step, display.show_heartbeats, display.show_interrupt)
            trainer.run(*callbacks, trace=trace, trace_steps=trace_steps)
    except KeyboardInterrupt as error:
        what = str(error) or f"Interrupted at once: {trainer.checkpoints.last_good()}."
        raise KeyboardInterrupt(f"{what} {how_to_continue}") from None


class ProgressDisplay:
    """A progress bar; without a terminal, a line per step. Prints stragglers when they appear."""

    def __init__(self, trainer: Trainer, console: Console) -> None:
        self.console = console
        self._stragglers: set[int] = set()
        columns = (TextColumn("step {task.completed:.0f}/{task.total:.0f}"), BarColumn(20), TimeRemainingColumn())
        self._bar = Progress(*columns, TextColumn("{task.fields[metrics]}", markup=False), console=console)
        self._task = self._bar.add_task("", total=trainer.settings.steps, completed=trainer.next_step, metrics="")

    def __enter__(self) -> ProgressDisplay:
        self._bar.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._bar.__exit__(kind, error, at)

    def show_step(self, step: StepMetrics) -> None:
        self._bar.update(self._task, completed=step.number + 1, metrics=str(step))
        if not self.console.is_terminal:
            self.console.print(f"step {step.number + 1}: {step}", soft_wrap=True)

    def show_heartbeats(self, heartbeats: list[Heartbeat], stragglers: list[Straggler]) -> None:
        for found in stragglers:
            self._bar.update(self._task, metrics=f"waiting for {found}")
            if found.rank not in self._stragglers:
                self.console.print(f"waiting for {found}", style="yellow", soft_wrap=True)
        self._stragglers = {found.rank for found in stragglers}

    def show_interrupt(self) -> None:
        notice = "Interrupted: saving a checkpoint after this step. Press Ctrl-C again to stop at once."
        self.console.print(notice, style="yellow", soft_wrap=True)


def _print_estimates(settings: TrainSettings, ranks: int, as_json: bool) -> None:
    if int(os.environ.get("RANK", "0")):
        return
    world = ranks or int(os.environ.get("WORLD_SIZE", "1"))
    model, memory = settings.model, estimate_memory(settings, world)
    with make_console(stderr=True).status("timing small steps on this machine ..."):
        expected = estimate_time(settings, world)
    sizes = {**dataclasses.asdict(memory), "total": memory.total}
    if as_json:
        seconds = {"step": expected.step_seconds, "run": expected.run_seconds, "what": "an estimate"}
        found = {"ranks": world, "model": dataclasses.asdict(model), "parameters": model.parameters}
        found |= {"patterns": {pattern.text: layers for pattern, layers in model.layers_by_pattern.items()}}
        found |= {"tokens": settings.tokens, "steps": settings.steps, "bytes": sizes}
        typer.echo(json.dumps({**found, "flops_per_step": expected.flops, "seconds": seconds}))
        return
    table = Table("memory", "per rank", "", title_justify="left")
    for entry in dataclasses.fields(memory):
        table.add_row(entry.name, f"{sizes[entry.name] / 2**20:,.1f} MiB", entry.metadata["help"])
    table.add_row("total", f"{memory.total / 2**20:,.1f} MiB", "without Python, torch and kernel workspaces")
    console = make_console()
    for line in (
        f"Model: {model.parameters:,} parameters; {model.layers} layers of width {model.width}, {model.heads} heads "
        f"({model.kv_heads} KV), MLP {model.mlp_width}; {settings.dtype}",
        f"Run: {settings.steps:,} steps of {settings.tokens:,} tokens x {settings.batch} x {settings.accumulate} "
        f"(batch x accumulate) on {world} rank(s), {settings.ring_size(world)} per sequence; output in {settings.out}",
        f"Time: about {_duration(expected.step_seconds)} per step, {_duration(expected.run_seconds)} in total. "
        f"An estimate: {expected.flops / 1e9:,.3g} GFLOP per step on the busiest rank, at "
        f"{expected.flops_per_second / 1e9:,.3g} GFLOP/s, measured on this machine. It assumes such a device for each "
        "rank, and does not include transfers.",
    ):
        console.print(line, soft_wrap=True)
    console.print(table)
    _print_patterns(console, settings, settings.ring_size(world))


def _duration(seconds: float) -> str:
    """
    >>> _duration(0.25), _duration(200), _duration(1e5)
    ('0.25 s', '3.3 minutes', '27.8 hours')
    """
    if seconds < 100:
        return f"{seconds:.2g} s"
    return f"{seconds / 60:.1f} minutes" if seconds < 6000 else f"{seconds / 3600:,.1f} hours"


_quick = PRESETS["quick"].settings
with_flags(train, [*flags_of(_quick, "quick"), *flags_of(_quick.model, "quick", "Model")])
_presets = "".join(f"\n\n    `{name}`: {preset}" for name, preset in PRESETS.items())
train.__doc__ = (train.__doc__ or "").replace("**Examples**", f"**Presets**{_presets}\n\n    **Examples**")
