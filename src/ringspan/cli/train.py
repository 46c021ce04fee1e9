"""`ringspan train`: a LongNet on the bytes of any files, alone or under torchrun."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ringspan.cli.flags import flags_of, with_flags
from ringspan.cli.options import AsJson
from ringspan.models.config import NAMED, LongNetConfig
from ringspan.train.presets import PRESETS
from ringspan.train.settings import TrainSettings

if TYPE_CHECKING:
    from rich.console import Console

    from ringspan.train.figures import Step
    from ringspan.train.loop import Trainer
    from ringspan.train.metrics import Metrics


def train(
    data: Annotated[
        list[str] | None, typer.Argument(help="Files and folders; without any, Python's own sources.")
    ] = None,
    preset: Annotated[str, typer.Option(help=f"Where to start from: {', '.join(PRESETS)}.")] = "quick",
    config: Annotated[Path | None, typer.Option(help="A settings.json of a run, instead of a preset.")] = None,
    model: Annotated[str, typer.Option(help=f"A named size: {', '.join(NAMED)}.", show_default=False)] = "",
    resume: Annotated[
        Literal["auto", "never"], typer.Option(help="auto: from the last checkpoint in --out.")
    ] = "never",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what the run will need, and stop.")] = False,
    ranks: Annotated[int, typer.Option(help="For --dry-run: how many; 0 is those that torchrun started.", min=0)] = 0,
    as_json: AsJson = False,
    **given: Any,
) -> None:
    """Train a LongNet on bytes. Every setting has a flag, and the run writes all of them into its folder.

    **Examples**

    `ringspan train`

    `ringspan train ~/books --preset laptop --out runs/books`

    `ringspan train --preset long --dry-run --ranks 2`

    `torchrun --nproc-per-node=2 -m ringspan train --preset long --resume auto`
    """
    try:
        settings = _settings(preset, config, model, given)
        if data:
            settings = dataclasses.replace(settings, data=tuple(data))
        if dry_run:
            _say_needs(settings, ranks, as_json)
            return
        trainer = _start(settings, resume == "auto")
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    with trainer:
        _train(trainer, as_json)


def _settings(preset: str, config: Path | None, model: str, given: dict[str, Any]) -> TrainSettings:
    if config is None and preset not in PRESETS:
        raise ValueError(f"--preset {preset}: must be one of {', '.join(PRESETS)}")
    settings = PRESETS[preset] if config is None else TrainSettings.read(config)
    if model:
        settings = dataclasses.replace(settings, model=LongNetConfig.named(model))
    return settings.changed({name: value for name, value in given.items() if value is not None})


def _say_needs(settings: TrainSettings, ranks: int, as_json: bool) -> None:
    import os  # noqa: PLC0415

    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    from ringspan.train.needs import needs_of  # noqa: PLC0415

    if int(os.environ.get("RANK", "0")):
        return
    world = ranks or int(os.environ.get("WORLD_SIZE", "1"))
    needs = needs_of(settings, world)
    figures = {**dataclasses.asdict(needs), "total": needs.total}
    if as_json:
        typer.echo(json.dumps({"ranks": world, "parameters": settings.model.parameters, "bytes": figures}))
        return
    table = Table(
        "what", "of one rank", "", title=f"{settings.tokens:,} tokens on {world} rank(s)", title_justify="left"
    )
    for entry in dataclasses.fields(needs):
        table.add_row(entry.name, f"{figures[entry.name] / 2**20:,.1f} MiB", entry.metadata["help"])
    table.add_row("total", f"{needs.total / 2**20:,.1f} MiB", "Python, torch and workspaces of kernels come on top")
    console = Console()
    console.print(table)
    console.print(f"{settings.model.parameters:,} weights", highlight=False)


def _start(settings: TrainSettings, resume: bool) -> Trainer:
    from ringspan.train.loop import Trainer  # noqa: PLC0415

    return Trainer.resumed(settings) if resume else Trainer(settings)


def _train(trainer: Trainer, as_json: bool) -> None:
    from rich.console import Console  # noqa: PLC0415

    from ringspan.train.metrics import Metrics  # noqa: PLC0415

    folder = Path(trainer.settings.out)
    console = Console(stderr=as_json, quiet=not trainer.crew.is_speaker)
    _say_start(console, trainer)
    with Metrics(folder, trainer.crew.is_speaker) as metrics:
        last = _run(trainer, metrics, console)
    trainer.save_model(folder / "model")
    console.print(f"The model is in {folder / 'model'}, the figures in {folder / 'metrics.jsonl'}.", soft_wrap=True)
    if as_json and trainer.crew.is_speaker and last is not None:
        typer.echo(json.dumps({**dataclasses.asdict(last), "bits_per_byte": last.bits_per_byte, "out": str(folder)}))


def _say_start(console: Console, trainer: Trainer) -> None:
    settings, crew = trainer.settings, trainer.crew
    if trainer.next_step:
        console.print(f"Going on from step {trainer.next_step} of {settings.out}.", highlight=False)
    console.print(
        f"{settings.model.parameters:,} weights, {settings.tokens:,} tokens a sequence, {crew.ring.size} rank(s) share "
        f"one, {crew.data_size} sequence(s) side by side, {len(trainer.corpus):,} bytes of text, {settings.dtype}",
        highlight=False,
        soft_wrap=True,
    )


def _run(trainer: Trainer, metrics: Metrics, console: Console) -> Step | None:
    """All steps, with a bar that says how it goes."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn  # noqa: PLC0415

    columns = (TextColumn("step {task.completed:.0f}/{task.total:.0f}"), BarColumn(20), TimeRemainingColumn())
    last: list[Step] = []
    with Progress(*columns, TextColumn("{task.fields[figures]}"), console=console) as progress:
        task = progress.add_task("", total=trainer.settings.steps, completed=trainer.next_step, figures="")

        def report(step: Step) -> None:
            last[:] = [step]
            metrics.write(step)
            progress.update(task, completed=step.number + 1, figures=str(step))
            if not console.is_terminal:
                console.print(f"step {step.number + 1}: {step}", highlight=False, soft_wrap=True)

        trainer.run(report)
    return last[0] if last else None


with_flags(train, [*flags_of(TrainSettings), *flags_of(LongNetConfig, "Model")])
