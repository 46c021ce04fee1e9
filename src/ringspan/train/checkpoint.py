"""The files of a checkpoint: a safetensors file from each rank, and a manifest in JSON with their sizes and checksums.

Neither can hold code, and nothing is unpickled. A part's header says which piece of which tensor each entry is, so that
any number of ranks can read what any other number has written.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ringspan.runtime.collectives import run_on_all_ranks
from ringspan.runtime.files import checksum, sync, write_atomic
from ringspan.runtime.settings import RunError
from ringspan.train.config import TrainSettings

MANIFEST = "manifest.json"
FORMAT = "ringspan checkpoint 1"
_PART = re.compile(r"part-\d{5,}\.safetensors")
_DAMAGED = "remove {folder} to go on from the checkpoint before it, or put back the files as they were written"

Box = tuple[slice, ...]


@dataclass(frozen=True)
class Piece:
    """What this rank holds of a tensor of ``size``: ``local``, which begins at ``offsets``."""

    name: str
    size: tuple[int, ...]
    offsets: tuple[int, ...]
    local: Tensor
    is_written: bool  # by this rank; other replicas leave it to the first


@dataclass(frozen=True)
class Manifest:
    """What a whole checkpoint consists of. ``files`` are sizes in bytes and checksums by name."""

    step: int
    ranks: int
    files: dict[str, tuple[int, str]]


def pieces_of(state: dict[str, Tensor], rank: int) -> list[Piece]:
    """What this rank holds of each tensor; torch's own planner of checkpoints says where it begins."""
    pieces = []
    for item in create_default_local_save_plan(state, is_coordinator=True).items:
        assert item.tensor_data is not None
        tensor, where = state[item.index.fqn], item.tensor_data
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        written = _is_first_replica(tensor) if isinstance(tensor, DTensor) else rank == 0
        pieces.append(Piece(item.index.fqn, tuple(where.size), tuple(where.chunk.offsets), local.detach(), written))
    return pieces


def write_part(folder: Path, rank: int, pieces: list[Piece]) -> dict[str, Any]:
    """Write this rank's pieces; the name, size and checksum of the file, or nothing if there was nothing to write."""
    mine = [piece for piece in pieces if piece.is_written and piece.local.numel()]
    if not mine:
        return {}
    path = folder / f"part-{rank:05d}.safetensors"
    places = {piece.name: {"size": piece.size, "offsets": piece.offsets} for piece in mine}
    # Tied weights share memory, which safetensors refuses: each name gets a copy of its own.
    tensors = {piece.name: piece.local.cpu().clone().contiguous() for piece in mine}
    try:
        folder.mkdir(parents=True, exist_ok=True)  # rank 0 has made it, but this machine may not see it yet
        save_file(tensors, path, {"format": FORMAT, "places": json.dumps(places)})
        sync(path)
        return {"name": path.name, "bytes": path.stat().st_size, "sha256": checksum(path)}
    except (OSError, SafetensorError) as error:
        raise RunError(f"{path}: cannot be written ({error})") from error


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """The last file of a checkpoint."""
    files = {name: {"bytes": size, "sha256": total} for name, (size, total) in manifest.files.items()}
    document = {"format": FORMAT, "step": manifest.step, "ranks": manifest.ranks, "files": files}
    document["sha256"] = _checksum_of(document)
    write_atomic(folder / MANIFEST, json.dumps(document, indent=1) + "\n")


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint; anything that is not one is an error that says what it is instead."""
    path = folder / MANIFEST
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise RunError(f"{folder}: no {MANIFEST} in it, so it is not a checkpoint of ringspan: remove it") from None
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(f"{path}: cannot be read ({error}): {_DAMAGED.format(folder=folder)}") from error
    if not isinstance(found, dict) or "sha256" not in found:
        raise RunError(f"{path}: not the manifest of a checkpoint: {_DAMAGED.format(folder=folder)}")
    if found.get("format") != FORMAT:
        raise RunError(f"{path}: its format is {found.get('format')!r}, and this ringspan reads {FORMAT!r}")
    if found.pop("sha256") != _checksum_of(found):
        raise RunError(f"{path}: not what was written: {_DAMAGED.format(folder=folder)}")
    try:
        files = {str(name): (int(entry["bytes"]), str(entry["sha256"])) for name, entry in found["files"].items()}
        manifest = Manifest(int(found["step"]), int(found["ranks"]), files)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise RunError(f"{path}: not the manifest of a checkpoint: {_DAMAGED.format(folder=folder)}") from error
    for name in files:
        if not _PART.fullmatch(name):  # no path leads out of the folder
            raise RunError(f"{path}: {name!r} is not the name of a part: {_DAMAGED.format(folder=folder)}")
    return manifest


def _checksum_of(document: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def check_part(folder: Path, name: str, manifest: Manifest) -> None:
    """Raise if a file is missing, has another size, or other content than was written."""
    path, (size, total) = folder / name, manifest.files[name]
    found = path.stat().st_size if path.is_file() else None
    if found is None:
        raise RunError(f"{path}: missing: {_DAMAGED.format(folder=folder)}")
    if found != size:
        raise RunError(f"{path}: has {found} bytes of {size}: {_DAMAGED.format(folder=folder)}")
    if checksum(path) != total:
        raise RunError(f"{path}: its checksum is not that of what was written: {_DAMAGED.format(folder=folder)}")


def read_pieces(folder: Path, manifest: Manifest, pieces: list[Piece], *, as_stored: bool = True) -> None:
    """Fill the pieces from the parts of any number of ranks. Files are checked before (`check_part`).

    ``as_stored`` refuses numbers of another dtype: a run that goes on must be the run that was.
    """
    wanted = {piece.name: piece for piece in pieces}
    filled = dict.fromkeys(wanted, 0)
    for name in manifest.files:
        path = folder / name
        try:
            with safe_open(path, framework="pt") as part:
                places = json.loads((part.metadata() or {})["places"])
                for entry in set(part.keys()) & set(wanted):
                    filled[entry] += _fill(wanted[entry], part, places[entry], as_stored)
        except Exception as error:  # whatever a file may hold, it is this one error
            raise RunError(f"{path}: not a part of a checkpoint ({error}): {_DAMAGED.format(folder=folder)}") from error
    for entry, piece in wanted.items():
        if filled[entry] != piece.local.numel():
            raise RunError(
                f"{folder}: has {filled[entry]} of the {piece.local.numel()} numbers of {entry} that this rank needs: "
                "it was written by a model of another shape, or parts of it are missing"
            )


def _fill(piece: Piece, part: Any, place: dict[str, Any], as_stored: bool) -> int:
    """Copy what a part and a piece have in common; how many numbers that is."""
    entry = part.get_slice(piece.name)
    if tuple(place["size"]) != piece.size:
        raise ValueError(f"{piece.name} has the size {place['size']}, but here it is {list(piece.size)}")
    common = _common(place["offsets"], entry.get_shape(), piece)
    if common is None:
        return 0
    theirs, ours = common
    found = entry[theirs] if piece.size else part.get_tensor(piece.name)
    if as_stored and found.dtype != piece.local.dtype:
        raise ValueError(f"{piece.name} is {found.dtype}, but here it is {piece.local.dtype}: --dtype is another")
    piece.local[ours].copy_(found)
    return int(found.numel())


def _common(offsets: list[int], shape: list[int], piece: Piece) -> tuple[Box, Box] | None:
    """The box that a part's entry and a piece share, in the coordinates of each; None if there is none."""
    theirs, ours = [], []
    for first, count, own_first, own_count in zip(offsets, shape, piece.offsets, piece.local.shape, strict=True):
        start, stop = max(first, own_first), min(first + count, own_first + own_count)
        if start >= stop:
            return None
        theirs.append(slice(start - first, stop - first))
        ours.append(slice(start - own_first, stop - own_first))
    return tuple(theirs), tuple(ours)


def _is_first_replica(tensor: DTensor) -> bool:
    """Whether this rank is the one of those with the same piece that writes it."""
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    return not any(
        place and placement.is_replicate() for place, placement in zip(coordinate, tensor.placements, strict=True)
    )


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
            run_on_all_ranks(lambda: self._begin(writing, path) if rank == 0 else None, device)
            parts = run_on_all_ranks(lambda: write_part(writing, rank, pieces), device)
            files = {part["name"]: (part["bytes"], part["sha256"]) for part in parts if part}
            manifest = Manifest(step, dist.get_world_size(), files)
            run_on_all_ranks(lambda: self._finish(writing, path, manifest) if rank == 0 else None, device)
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
        (latest, *_) = run_on_all_ranks(lambda: self.steps()[-1:] if rank == 0 else [], device)
        if not latest:
            return None
        folder = self.path_of(latest[0])

        def check() -> None:
            manifest = read_manifest(folder)
            if manifest.step != latest[0]:
                raise RunError(f"{folder}: holds step {manifest.step}, and not what its name says: rename it")
            for name in sorted(manifest.files)[rank::world]:
                check_part(folder, name, manifest)

        run_on_all_ranks(check, device)
        weights, moments = get_state_dict(model, optimizer)
        state = _tensors(0, weights, moments)
        run_on_all_ranks(lambda: read_pieces(folder, read_manifest(folder), pieces_of(state, rank)), device)
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
