"""How a training run is shown while it goes on: a bar, a line for each step, and whoever keeps the others waiting."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from ringspan.cli.console import make_console
from ringspan.cli.options import AsJson, flags_of, with_flags
from ringspan.models.config import NAMED, LongNetConfig
from ringspan.runtime.extras import missing_package
from ringspan.runtime.settings import RunError
from ringspan.train.config import PRESETS, TrainSettings
from ringspan.train.metrics import Metrics
from ringspan.train.trainer import interrupts_to
from ringspan.train.watchdog import Guard

if TYPE_CHECKING:
    from rich.console import Console

    from ringspan.train.metrics import Step
    from ringspan.train.trainer import Trainer
    from ringspan.train.watchdog import Beat, Straggler


class Display:
    """Steps and heartbeats, to the terminal and to ``metrics.jsonl``; keeps the last of each for whoever asks."""

    def __init__(self, trainer: Trainer, console: Console) -> None:
        self.console = console
        self.last: Step | None = None
        self.beats: list[Beat] = []
        self.late: list[Straggler] = []
        self._metrics = Metrics(Path(trainer.settings.out), trainer.crew.is_speaker)
        columns = (TextColumn("step {task.completed:.0f}/{task.total:.0f}"), BarColumn(20), TimeRemainingColumn())
        self._bar = Progress(*columns, TextColumn("{task.fields[figures]}", markup=False), console=console)
        self._task = self._bar.add_task("", total=trainer.settings.steps, completed=trainer.next_step, figures="")

    def __enter__(self) -> Display:
        self._metrics.__enter__()
        self._bar.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._bar.__exit__(kind, error, at)
        self._metrics.__exit__(kind, error, at)

    def show_step(self, step: Step) -> None:
        self.last = step
        self._metrics.write(step)
        self._bar.update(self._task, completed=step.number + 1, figures=str(step))
        if not self.console.is_terminal:
            self.console.print(f"step {step.number + 1}: {step}", highlight=False, soft_wrap=True)

    def show_beats(self, beats: list[Beat], late: list[Straggler]) -> None:
        """Called by the guard's thread at every beat; a straggler is written down when it begins to be one."""
        known = {found.rank for found in self.late}
        self.beats, self.late = beats, late
        for found in late:
            self._bar.update(self._task, figures=f"waiting for {found}")
            if found.rank not in known:
                self._metrics.write_straggler(found)
                self.console.print(f"waiting for {found}", style="yellow", highlight=False, soft_wrap=True)


def train(
    data: Annotated[
        list[str] | None, typer.Argument(help="Files, and folders of text; without any, Python's own sources.")
    ] = None,
    preset: Annotated[str, typer.Option(help=f"Where to start from: {', '.join(PRESETS)}; see above.")] = "quick",
    config: Annotated[Path | None, typer.Option(help="A settings.json of a run, instead of a preset.")] = None,
    model: Annotated[str, typer.Option(help=f"A named size: {', '.join(NAMED)}.", show_default="the preset's")] = "",
    resume: Annotated[
        Literal["auto", "never"],
        typer.Option(help="auto: from the last checkpoint in --out, if there is one. Restarts by torchrun need it."),
    ] = "never",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what the run will need and how long it will take, and stop.")
    ] = False,
    ranks: Annotated[int, typer.Option(help="For --dry-run: how many; 0 is those that torchrun started.", min=0)] = 0,
    metrics_port: Annotated[int, typer.Option(help="Serve figures to Prometheus on this port; 0 opens none.")] = 0,
    metrics_address: Annotated[
        str, typer.Option(help="Address of that port. Beyond this machine, whoever reaches it can read it.")
    ] = "127.0.0.1",
    as_json: AsJson = False,
    **given: Any,
) -> None:
    """Train a LongNet on bytes. Every setting has a flag, and the run writes all of them into its folder.

    `--dry-run` shows the model, its pattern, the memory of a rank and the expected time.

    Ctrl-C saves a checkpoint after the current step, then stops; a second Ctrl-C stops at once.

    Exit status: 0 when the run is finished; 1 when it had to stop, with the reason; 2 for settings that cannot be; 3
    for a worker whose launcher has died; 130 after Ctrl-C.

    **Examples**

    `ringspan train`

    `ringspan train ~/books --preset laptop --out runs/books --metrics-port 9400`

    `ringspan train --preset long --dry-run --ranks 2`

    `torchrun --nproc-per-node=2 --max-restarts=3 -m ringspan train --preset long --resume auto`
    """
    try:
        settings = _settings(preset, config, model, given)
        if data:
            settings = dataclasses.replace(settings, data=tuple(data))
        if dry_run:
            _say_needs(settings, ranks, as_json)
            return
        _check_restarts(resume)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    rank = int(os.environ.get("RANK", "0"))
    launched = "TORCHELASTIC_RUN_ID" in os.environ
    # The guard comes first: torch takes seconds to import, and a launcher may die meanwhile.
    with Guard(Path(settings.out), rank, os.getppid() if launched else None) as guard:
        _train(settings, resume == "auto", guard, (metrics_address, metrics_port), as_json)


def _settings(preset: str, config: Path | None, model: str, given: dict[str, Any]) -> TrainSettings:
    if config is None and preset not in PRESETS:
        raise ValueError(f"--preset {preset}: must be one of {', '.join(PRESETS)}")
    settings = PRESETS[preset].settings if config is None else TrainSettings.read(config)
    if model:
        settings = dataclasses.replace(settings, model=LongNetConfig.named(model))
    return settings.changed({name: value for name, value in given.items() if value is not None})


def _check_restarts(resume: str) -> None:
    """A run that torchrun would restart must be able to go on."""
    restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    if restarts and resume == "never":
        raise ValueError(
            f"torchrun --max-restarts={restarts} without --resume auto: a restarted run would be refused, since its "
            "folder holds a run. Say --resume auto; without a checkpoint it starts from the beginning"
        )


def _say_needs(settings: TrainSettings, ranks: int, as_json: bool) -> None:
    from rich.table import Table  # noqa: PLC0415

    from ringspan.train.estimate import (  # noqa: PLC0415
        forecast,
        needs_of,
        reach_of,
    )

    if int(os.environ.get("RANK", "0")):
        return
    world = ranks or int(os.environ.get("WORLD_SIZE", "1"))
    model, needs = settings.model, needs_of(settings, world)
    pattern = model.pattern_of(0).text
    with make_console(stderr=True).status("timing small steps on this machine ..."):
        expected = forecast(settings, world)
    figures = {**dataclasses.asdict(needs), "total": needs.total}
    if as_json:
        seconds = {"step": expected.step_seconds, "run": expected.run_seconds, "what": "an estimate"}
        found = {"ranks": world, "model": dataclasses.asdict(model), "parameters": model.parameters}
        found |= {"pattern": pattern, "tokens": settings.tokens, "steps": settings.steps, "bytes": figures}
        typer.echo(json.dumps({**found, "flops_per_step": expected.flops, "seconds": seconds}))
        return
    table = Table("memory", "of one rank", "", title_justify="left")
    for entry in dataclasses.fields(needs):
        table.add_row(entry.name, f"{figures[entry.name] / 2**20:,.1f} MiB", entry.metadata["help"])
    table.add_row("total", f"{needs.total / 2**20:,.1f} MiB", "Python, torch and workspaces of kernels come on top")
    console = make_console()
    for line in (
        f"Model: {model.parameters:,} parameters; {model.layers} layers of width {model.width}, {model.heads} heads "
        f"({model.kv_heads} KV), MLP {model.mlp_width}; {settings.dtype}",
        f"Pattern: {pattern}, causal",
        f"Run: {settings.steps:,} steps of {settings.tokens:,} tokens x {settings.batch} x {settings.accumulate} "
        f"(batch x accumulate) on {world} rank(s), {settings.ring_size(world)} to a sequence; into {settings.out}",
        f"Time: about {_duration(expected.step_seconds)} a step, {_duration(expected.run_seconds)} in all. "
        f"An estimate: {expected.flops / 1e9:,.3g} GFLOP a step on the busiest rank, at "
        f"{expected.flops_per_second / 1e9:,.3g} GFLOP/s, measured on this machine; each rank needs such a device, and "
        "transfers come on top.",
    ):
        console.print(line, soft_wrap=True)
    console.print(table)
    console.print(f"In each layer: {reach_of(settings, settings.ring_size(world))}", soft_wrap=True)


def _duration(seconds: float) -> str:
    """
    >>> _duration(0.25), _duration(200), _duration(1e5)
    ('0.25 s', '3.3 minutes', '27.8 hours')
    """
    if seconds < 100:
        return f"{seconds:.2g} s"
    return f"{seconds / 60:.1f} minutes" if seconds < 6000 else f"{seconds / 3600:,.1f} hours"


def _train(settings: TrainSettings, resume: bool, guard: Guard, endpoint: tuple[str, int], as_json: bool) -> None:

    trainer = _start(settings, resume)
    folder = Path(settings.out)
    console = make_console(stderr=as_json, quiet=not trainer.crew.is_speaker)
    _say_start(console, trainer)
    with (
        Display(trainer, console) as display,
        guard.following(trainer, display.show_beats),
        _served(display, *endpoint, console),
    ):
        _run(trainer, display, console)
        trainer.save_model(folder / "model")
    trainer.close()
    console.print(f"The model is in {folder / 'model'}, the figures in {folder / 'metrics.jsonl'}.", soft_wrap=True)
    last = display.last
    if as_json and not console.quiet and last is not None:
        typer.echo(json.dumps({**dataclasses.asdict(last), "bits_per_byte": last.bits_per_byte, "out": str(folder)}))


def _run(trainer: Trainer, display: Display, console: Console) -> None:
    """All steps; an interrupted run ends with a KeyboardInterrupt that says how to continue it."""
    notice = "Interrupted: saving a checkpoint after this step. Press Ctrl-C again to stop at once."
    go_on = "To continue, run the same command with --resume auto."
    try:
        with interrupts_to(trainer.ask_to_stop, lambda: console.print(notice, style="yellow", soft_wrap=True)):
            trainer.run(display.show_step)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"Interrupted at once: {trainer.checkpoints.last_good()}. {go_on}") from None
    if trainer.is_stopping and trainer.next_step < trainer.settings.steps:
        trainer.close()
        raise KeyboardInterrupt(
            f"Interrupted after step {trainer.next_step} of {trainer.settings.steps}: the checkpoint is "
            f"{trainer.checkpoints.path_of(trainer.next_step)}. {go_on}"
        )


def _start(settings: TrainSettings, resume: bool) -> Trainer:
    from ringspan.train.trainer import Trainer  # noqa: PLC0415

    try:
        return Trainer.resumed(settings) if resume else Trainer(settings)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


@contextmanager
def _served(display: Display, address: str, port: int, console: Console) -> Iterator[None]:
    """The endpoint that was asked for, on the rank that speaks; without a port nothing is opened."""
    if not port or console.quiet:
        yield
        return
    try:
        from ringspan.train.prometheus import serve  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise RunError(missing_package("--metrics-port", error.name, "train")) from None
    with serve(display, address, port):
        console.print(f"Figures for Prometheus: http://{address}:{port}/metrics", highlight=False, soft_wrap=True)
        yield


def _say_start(console: Console, trainer: Trainer) -> None:
    from ringspan.train.estimate import reach_of  # noqa: PLC0415

    settings, crew = trainer.settings, trainer.crew
    if trainer.next_step:
        console.print(f"Going on from step {trainer.next_step} of {settings.out}.", highlight=False)
    console.print(
        f"{settings.model.parameters:,} weights, {settings.tokens:,} tokens a sequence, {crew.ring.size} rank(s) share "
        f"one, {crew.data_size} sequence(s) side by side, {len(trainer.corpus):,} bytes of text, {settings.dtype}",
        highlight=False,
        soft_wrap=True,
    )
    console.print(f"In each layer: {reach_of(settings, crew.ring.size)}", highlight=False, soft_wrap=True)
    for line in trainer.corpus.selection.lines():
        console.print(line, highlight=False, soft_wrap=True, markup=False)


_first = PRESETS["quick"].settings
with_flags(train, [*flags_of(_first, "quick"), *flags_of(_first.model, "quick", "Model")])
_list = "".join(f"\n\n    `{name}`: {preset}" for name, preset in PRESETS.items())
train.__doc__ = (train.__doc__ or "").replace("**Examples**", f"**Presets**{_list}\n\n    **Examples**")
