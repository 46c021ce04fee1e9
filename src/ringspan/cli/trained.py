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


def trained_model(run: Path, step: int) -> LongNet:
    """The model in a run's folder, after ``step`` steps if not 0; refuses a model that the run has left behind."""
    from ringspan.models import LongNet  # noqa: PLC0415
    from ringspan.train.checkpoints import Checkpoints  # noqa: PLC0415

    settings = TrainSettings.read(run / "settings.json")
    checkpoints = Checkpoints(run / "checkpoints", settings.keep)
    if not step:
        weights, steps = run / "model/model.safetensors", checkpoints.steps()
        if steps and not weights.exists():
            raise ValueError(f"{run} has not written its model yet: say --step {steps[-1]}, its last checkpoint")
        if steps and _written(checkpoints.path_of(steps[-1])) > _written(weights):
            raise ValueError(f"{run} went on after its model was written: say --step {steps[-1]}, its last checkpoint")
        return LongNet.from_pretrained(run / "model")
    model = LongNet(settings.model)
    checkpoints.load_weights(step, model)
    return model


def _written(path: Path) -> float:
    return path.stat().st_mtime
