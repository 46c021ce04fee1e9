"""Checkpoints by torch.distributed.checkpoint: whole or not there, and readable on another number of ranks.

A checkpoint is written into a folder with a name of its own, and renamed when every rank has written its part: a killed
write leaves a folder that nobody reads, and never touches the last good one.
"""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import Optimizer

from ringspan.train.settings import TrainSettings

SETTINGS = "settings.json"
_WRITING = ".writing"


class Checkpoints:
    """The checkpoints of a run, in one folder; the newest ``keep`` are kept."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder, self.keep = folder, keep

    def steps(self) -> list[int]:
        """The steps of which there is a whole checkpoint, oldest first."""
        if not self.folder.is_dir():
            return []
        names = [path.name for path in self.folder.iterdir() if path.is_dir() and not path.name.endswith(_WRITING)]
        return sorted(int(name.removeprefix("step-")) for name in names if name.startswith("step-"))

    def path_of(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def check_before(self, settings: TrainSettings, resume: bool) -> None:
        """Refuse to write over another run, and to go on with a model of another shape."""
        steps = self.steps()
        if steps and not resume:
            raise ValueError(
                f"{self.folder.parent} holds a run of {steps[-1]} steps: say --resume auto, or give another --out"
            )
        written = self.folder.parent / SETTINGS
        if steps and written.is_file() and TrainSettings.read(written).model != settings.model:
            raise ValueError(f"{written} has a model of another shape: go on with --config {written}, or another --out")

    def save(self, step: int, model: nn.Module, optimizer: Optimizer) -> Path:
        """Write the state after ``step`` steps; all ranks call this together."""
        path = self.path_of(step)
        writing = path.with_name(path.name + _WRITING)
        if dist.get_rank() == 0:
            shutil.rmtree(writing, ignore_errors=True)
            writing.parent.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        dcp.state_dict_saver.save(_state(step, model, optimizer), checkpoint_id=writing)
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(path, ignore_errors=True)
            writing.rename(path)
            for old in self.steps()[: -self.keep]:
                shutil.rmtree(self.path_of(old))
        dist.barrier()
        return path

    def load_latest(self, model: nn.Module, optimizer: Optimizer) -> int | None:
        """Load the newest whole checkpoint; how many steps it has seen, or None if there is none."""
        steps = self.steps()
        if not steps:
            return None
        state = _state(0, model, optimizer)
        dcp.state_dict_loader.load(state, checkpoint_id=self.path_of(steps[-1]))
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        torch.set_rng_state(state["random"])
        return int(state["step"])

    def load_weights(self, step: int, model: nn.Module) -> None:
        """Load the weights alone of a checkpoint, in one process."""
        if step not in self.steps():
            raise FileNotFoundError(f"{self.folder}: no checkpoint of step {step}; there are {self.steps()}")
        state: dict[str, Any] = {"model": model.state_dict()}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process is what is wanted
            dcp.state_dict_loader.load(state, checkpoint_id=self.path_of(step), no_dist=True)
        model.load_state_dict(state["model"])


def _state(step: int, model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments, "step": torch.tensor(step), "random": torch.get_rng_state()}
