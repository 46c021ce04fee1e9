"""`ringspan train`: a LongNet on the bytes of any files, alone or under torchrun."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ringspan.cli.flags import flags_of, with_flags
from ringspan.cli.options import AsJson
from ringspan.models.config import NAMED, LongNetConfig
from ringspan.train.errors import RunError
from ringspan.train.guard import Guard
from ringspan.train.presets import PRESETS
from ringspan.train.settings import TrainSettings

if TYPE_CHECKING:
    from rich.console import Console

    from ringspan.cli.train_display import Display
    from ringspan.train.loop import Trainer


def train(
    data: Annotated[
        list[str] | None, typer.Argument(help="Files and folders; without any, Python's own sources.")
    ] = None,
    preset: Annotated[str, typer.Option(help=f"Where to start from: {', '.join(PRESETS)}.")] = "quick",
    config: Annotated[Path | None, typer.Option(help="A settings.json of a run, instead of a preset.")] = None,
    model: Annotated[str, typer.Option(help=f"A named size: {', '.join(NAMED)}.", show_default=False)] = "",
    resume: Annotated[
        Literal["auto", "never"],
        typer.Option(help="auto: from the last checkpoint in --out, if there is one. Restarts by torchrun need it."),
    ] = "never",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what the run will need, and stop.")] = False,
    ranks: Annotated[int, typer.Option(help="For --dry-run: how many; 0 is those that torchrun started.", min=0)] = 0,
    metrics_port: Annotated[int, typer.Option(help="Serve figures to Prometheus on this port; 0 opens none.")] = 0,
    metrics_address: Annotated[
        str, typer.Option(help="Address of that port. Beyond this machine, whoever reaches it can read it.")
    ] = "127.0.0.1",
    as_json: AsJson = False,
    **given: Any,
) -> None:
    """Train a LongNet on bytes. Every setting has a flag, and the run writes all of them into its folder.

    Exit status: 0 when the run is finished; 1 when it had to stop, with the reason; 2 for settings that cannot be; 3
    for a worker whose launcher has died.

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
    try:
        # The guard comes first: torch takes seconds to import, and a launcher may die meanwhile.
        with Guard(Path(settings.out), rank, os.getppid() if launched else None) as guard:
            _train(settings, resume == "auto", guard, (metrics_address, metrics_port), as_json)
    except (OSError, RuntimeError) as error:
        sentence = _sentence(error)
        if sentence is None:
            raise
        typer.secho(sentence if sentence.startswith("rank ") else f"rank {rank}: {sentence}", fg="red", err=True)
        raise typer.Exit(1) from None


def _settings(preset: str, config: Path | None, model: str, given: dict[str, Any]) -> TrainSettings:
    if config is None and preset not in PRESETS:
        raise ValueError(f"--preset {preset}: must be one of {', '.join(PRESETS)}")
    settings = PRESETS[preset] if config is None else TrainSettings.read(config)
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


def _sentence(error: OSError | RuntimeError) -> str | None:
    """An error as a sentence for the user; None for a defect, which needs its traceback."""
    from torch.distributed import DistError  # noqa: PLC0415

    import ringspan as rs  # noqa: PLC0415

    if isinstance(error, (OSError, RunError, rs.RingError)):
        return str(error)
    if isinstance(error, DistError) or "gloo" in str(error):
        return f"another rank is gone, or could not be reached ({error})"
    return None


def _say_needs(settings: TrainSettings, ranks: int, as_json: bool) -> None:
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


def _train(settings: TrainSettings, resume: bool, guard: Guard, endpoint: tuple[str, int], as_json: bool) -> None:
    from rich.console import Console  # noqa: PLC0415

    from ringspan.cli.train_display import Display  # noqa: PLC0415

    trainer = _start(settings, resume)
    folder = Path(settings.out)
    console = Console(stderr=as_json, quiet=not trainer.crew.is_speaker)
    _say_start(console, trainer)
    with (
        Display(trainer, console) as display,
        guard.following(trainer, display.show_beats),
        _served(display, *endpoint, console),
    ):
        trainer.run(display.show_step)
        trainer.save_model(folder / "model")
    trainer.close()
    console.print(f"The model is in {folder / 'model'}, the figures in {folder / 'metrics.jsonl'}.", soft_wrap=True)
    last = display.last
    if as_json and not console.quiet and last is not None:
        typer.echo(json.dumps({**dataclasses.asdict(last), "bits_per_byte": last.bits_per_byte, "out": str(folder)}))


def _start(settings: TrainSettings, resume: bool) -> Trainer:
    from ringspan.train.loop import Trainer  # noqa: PLC0415

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
        from ringspan.train.endpoint import serve  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise RunError(f"--metrics-port needs {error.name}: pip install 'ringspan[train]'") from None
    with serve(display, address, port):
        console.print(f"Figures for Prometheus: http://{address}:{port}/metrics", highlight=False, soft_wrap=True)
        yield


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


with_flags(train, [*flags_of(TrainSettings), *flags_of(LongNetConfig, "Model")])
