"""The checkpoints of a run: whole or not there, never over another, and readable on another number of ranks.

A checkpoint is written into a folder with a name of its own, and renamed when every rank has written its part: a killed
write, a full disk or a lost rank leaves a folder that nobody reads, and never touches the last good one. What is in the
files is `ringspan.train.parts`.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import Optimizer

from ringspan.train.errors import RunError
from ringspan.train.files import sync
from ringspan.train.parts import Manifest, check_part, pieces_of, read_manifest, read_pieces, write_manifest, write_part
from ringspan.train.settings import TrainSettings
from ringspan.train.together import together

SETTINGS = "settings.json"
STEPS = "steps.txt"  # beside the weights of a trained model: after how many steps they were written
_WRITING = ".writing"
_NAME = re.compile(r"step-(\d{8,})")


class Checkpoints:
    """The checkpoints of a run, in one folder; the newest ``keep`` are kept."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder, self.keep = folder, keep

    def steps(self) -> list[int]:
        """The steps of which there is a whole checkpoint, oldest first."""
        if not self.folder.is_dir():
            return []
        names = [_NAME.fullmatch(path.name) for path in self.folder.iterdir() if path.is_dir()]
        return sorted(int(name[1]) for name in names if name)

    def path_of(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def last_good(self) -> str:
        """Where the newest whole checkpoint is, for messages."""
        steps = self.steps()
        return f"the last good checkpoint is {self.path_of(steps[-1])}" if steps else "there is no checkpoint yet"

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

    def save(self, step: int, model: nn.Module, optimizer: Optimizer, device: torch.device) -> Path:
        """Write the state after ``step`` steps; all ranks call this together, and all raise if one of them fails."""
        rank = dist.get_rank()
        path = self.path_of(step)
        writing = path.with_name(path.name + _WRITING)
        pieces = pieces_of(_tensors(step, *get_state_dict(model, optimizer)), rank)
        try:
            together(lambda: self._begin(writing, path) if rank == 0 else None, device)
            parts = together(lambda: write_part(writing, rank, pieces), device)
            files = {part["name"]: (part["bytes"], part["sha256"]) for part in parts if part}
            manifest = Manifest(step, dist.get_world_size(), files)
            together(lambda: self._finish(writing, path, manifest) if rank == 0 else None, device)
        except RunError as error:
            if rank == 0:
                shutil.rmtree(writing, ignore_errors=True)  # on a full disk it would only be in the way
            raise RunError(f"step {step} could not be saved: {error}; {self.last_good()}") from error
        return path

    def load_latest(self, model: nn.Module, optimizer: Optimizer, device: torch.device) -> int | None:
        """Load the newest whole checkpoint; how many steps it has seen, or None if there is none.

        Every file is compared with its checksum before anything is read: each rank checks some of them, and a damaged
        one is an error on all. An older checkpoint is never taken in its place in silence.
        """
        rank, world = dist.get_rank(), dist.get_world_size()
        # What rank 0 sees is what counts: on shared file systems others may see a new folder later.
        (latest, *_) = together(lambda: self.steps()[-1:] if rank == 0 else [], device)
        if not latest:
            return None
        folder = self.path_of(latest[0])

        def check() -> None:
            manifest = read_manifest(folder)
            if manifest.step != latest[0]:
                raise RunError(f"{folder}: holds step {manifest.step}, and not what its name says: rename it")
            for name in sorted(manifest.files)[rank::world]:
                check_part(folder, name, manifest)

        together(check, device)
        weights, moments = get_state_dict(model, optimizer)
        state = _tensors(0, weights, moments)
        together(lambda: read_pieces(folder, read_manifest(folder), pieces_of(state, rank)), device)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
        torch.set_rng_state(state["random"])
        return int(state["step"])

    def load_weights(self, step: int, model: nn.Module) -> None:
        """Load the weights alone of a checkpoint, in one process; they take the model's dtype."""
        if step not in self.steps():
            raise FileNotFoundError(f"{self.folder}: no checkpoint of step {step}; there are {self.steps()}")
        folder = self.path_of(step)
        manifest = read_manifest(folder)
        for name in manifest.files:
            check_part(folder, name, manifest)
        weights = {f"model.{name}": weight for name, weight in model.state_dict().items()}
        read_pieces(folder, manifest, pieces_of(weights, rank=0), as_stored=False)

    def _begin(self, writing: Path, path: Path) -> None:
        if path.exists():
            raise RunError(f"{path} is there already, and nothing is written over")
        self.folder.mkdir(parents=True, exist_ok=True)
        for unfinished in self.folder.glob(f"*{_WRITING}"):
            shutil.rmtree(unfinished)
        writing.mkdir()

    def _finish(self, writing: Path, path: Path, manifest: Manifest) -> None:
        write_manifest(writing, manifest)
        sync(writing)
        writing.rename(path)
        sync(self.folder)
        for old in self.steps()[: -self.keep]:
            # Renamed first, so that a killed removal leaves nothing that looks whole.
            going = self.path_of(old).with_name(f"step-{old:08d}{_WRITING}")
            shutil.rmtree(self.path_of(old).rename(going))


def _tensors(step: int, weights: dict[str, Any], moments: dict[str, Any]) -> dict[str, Tensor]:
    """All that a run needs to go on, by name. Rates and betas are not among it: they follow from settings and step."""
    state = {f"model.{name}": weight for name, weight in weights.items()}
    for name, figures in moments["state"].items():
        state |= {f"optimizer.{name}.{figure}": x for figure, x in figures.items()}
    return {**state, "step": torch.tensor(step), "random": torch.get_rng_state()}
