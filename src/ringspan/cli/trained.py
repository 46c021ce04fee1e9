"""The model of a run: as it was at the end, or after some of its steps. Commands that read one share this."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from ringspan.train.settings import TrainSettings

if TYPE_CHECKING:
    from ringspan.models import LongNet

Step: TypeAlias = Annotated[
    int, typer.Option(help="Take the weights after so many steps, from a checkpoint; 0 is the model at the end.")
]


def run_settings(run: Path) -> TrainSettings:
    """The settings that a run wrote into its folder."""
    path = run / "settings.json"
    if not path.is_file():
        raise ValueError(f"{path}: no such file; give the folder of a run of `ringspan train`, its --out")
    return TrainSettings.read(path)


def trained_model(run: Path, step: int) -> LongNet:
    """The model in a run's folder, after ``step`` steps if not 0; refuses a model that the run has left behind."""
    from ringspan.models import LongNet  # noqa: PLC0415
    from ringspan.train.checkpoints import STEPS, Checkpoints  # noqa: PLC0415

    settings = run_settings(run)
    checkpoints = Checkpoints(run / "checkpoints", settings.keep)
    if not step:
        steps, written = checkpoints.steps(), run / "model" / STEPS
        if steps and not written.is_file():
            raise ValueError(f"{run} has not written its model yet: say --step {steps[-1]}, its last checkpoint")
        if steps and written.read_text().strip() != str(steps[-1]):
            raise ValueError(f"{run} went on after its model was written: say --step {steps[-1]}, its last checkpoint")
        return LongNet.from_pretrained(run / "model")
    model = LongNet(settings.model)
    checkpoints.load_weights(step, model)
    return model
