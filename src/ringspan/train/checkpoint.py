"""Checkpoints: a safetensors file per rank, and a JSON manifest with the size and checksum of each.

Neither format can hold code, and nothing is unpickled. The header of a file says which part of which tensor it holds,
so any number of ranks can read what any other number has written. A folder gets its name when all of it is written.
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
SETTINGS = "settings.json"
STEPS = "steps.txt"  # in the folder of a trained model: the number of steps it was trained for
FORMAT = "ringspan checkpoint 2"

_UNFINISHED = ".writing"
_CHECKPOINT_NAME = re.compile(r"step-(\d{8,})")
_SHARD_NAME = re.compile(r"shard-\d{5,}\.safetensors")
_DAMAGED = "delete {folder} to continue from the checkpoint before it, or restore its files"

Box = tuple[slice, ...]


class Checkpoints:
    """The checkpoints of a run, in one folder; the newest ``keep`` are kept."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder, self.keep = folder, keep

    def steps(self) -> list[int]:
        """The steps with a complete checkpoint, oldest first."""
        if not self.folder.is_dir():
            return []
        names = [_CHECKPOINT_NAME.fullmatch(path.name) for path in self.folder.iterdir() if path.is_dir()]
        return sorted(int(name[1]) for name in names if name)

    def path_of(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def last_good(self) -> str:
        """Where the newest complete checkpoint is, for messages."""
        steps = self.steps()
        return f"the last good checkpoint is {self.path_of(steps[-1])}" if steps else "there is no checkpoint yet"

    def check_resume(self, settings: TrainSettings, resume: bool) -> None:
        """Raise ValueError if the folder holds a run and ``resume`` is false, or if that run has a different model."""
        steps = self.steps()
        if steps and not resume:
            raise ValueError(
                f"{self.folder.parent} holds a run of {steps[-1]} steps: use --resume auto, or give another --out"
            )
        written = self.folder.parent / SETTINGS
        if steps and written.is_file() and TrainSettings.read(written).model != settings.model:
            raise ValueError(
                f"{written} has a model of a different shape: continue with --config {written}, or give another --out"
            )

    def save(self, step: int, model: nn.Module, optimizer: Optimizer, device: torch.device) -> Path:
        """Write the state after ``step`` steps. A collective: if one rank fails, all raise RunError."""
        rank = dist.get_rank()
        path = self.path_of(step)
        unfinished = path.with_name(path.name + _UNFINISHED)
        shards = local_shards(_state_tensors(step, *get_state_dict(model, optimizer)), rank)
        try:
            run_on_all_ranks(lambda: self._begin(unfinished, path) if rank == 0 else None, device)
            written = run_on_all_ranks(lambda: write_shards(unfinished, rank, shards), device)
            files = {file["name"]: (file["bytes"], file["sha256"]) for file in written if file}
            manifest = Manifest(step, dist.get_world_size(), files)
            run_on_all_ranks(lambda: self._finish(unfinished, path, manifest) if rank == 0 else None, device)
        except RunError as error:
            if rank == 0:
                shutil.rmtree(unfinished, ignore_errors=True)  # frees the space on a full disk
            raise RunError(f"step {step} could not be saved: {error}; {self.last_good()}") from error
        return path

    def load_latest(self, model: nn.Module, optimizer: Optimizer, device: torch.device) -> int | None:
        """Load the newest complete checkpoint and return its number of steps, or None if there is none. A collective.

        Every file is compared with its checksum before anything is read; ranks share that work. If a file is damaged,
        all ranks raise RunError. An older checkpoint is never loaded instead.
        """
        rank, world = dist.get_rank(), dist.get_world_size()
        # Rank 0 decides: on shared file systems, other ranks may see a new folder later.
        (latest, *_) = run_on_all_ranks(lambda: self.steps()[-1:] if rank == 0 else [], device)
        if not latest:
            return None
        folder = self.path_of(latest[0])

        def check() -> None:
            manifest = read_manifest(folder)
            if manifest.step != latest[0]:
                raise RunError(f"{folder}: holds step {manifest.step}, which differs from its name: rename it")
            for name in sorted(manifest.files)[rank::world]:
                check_file(folder, name, manifest)

        run_on_all_ranks(check, device)
        weights, moments = get_state_dict(model, optimizer)
        state = _state_tensors(0, weights, moments)
        run_on_all_ranks(lambda: read_shards(folder, read_manifest(folder), local_shards(state, rank)), device)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
        torch.set_rng_state(state["random"])
        return int(state["step"])

    def load_weights(self, step: int, model: nn.Module) -> None:
        """Load only the weights of a checkpoint, in one process, converted to the model's dtype."""
        if step not in self.steps():
            raise FileNotFoundError(f"{self.folder}: no checkpoint of step {step}; there are {self.steps()}")
        folder = self.path_of(step)
        manifest = read_manifest(folder)
        for name in manifest.files:
            check_file(folder, name, manifest)
        weights = {f"model.{name}": weight for name, weight in model.state_dict().items()}
        read_shards(folder, manifest, local_shards(weights, rank=0), same_dtype=False)

    def _begin(self, unfinished: Path, path: Path) -> None:
        if path.exists():
            raise RunError(f"{path} already exists, and checkpoints are never overwritten: delete or rename it")
        self.folder.mkdir(parents=True, exist_ok=True)
        for abandoned in self.folder.glob(f"*{_UNFINISHED}"):
            shutil.rmtree(abandoned)
        unfinished.mkdir()

    def _finish(self, unfinished: Path, path: Path, manifest: Manifest) -> None:
        write_manifest(unfinished, manifest)
        sync(unfinished)
        unfinished.rename(path)
        sync(self.folder)
        for old in self.steps()[: -self.keep]:
            # Renamed first, so that an interrupted removal leaves nothing that looks complete.
            removing = self.path_of(old).with_name(f"step-{old:08d}{_UNFINISHED}")
            shutil.rmtree(self.path_of(old).rename(removing))


def _state_tensors(step: int, weights: dict[str, Any], moments: dict[str, Any]) -> dict[str, Tensor]:
    """The state of a run, by name. Learning rate and betas are not part of it: they follow from settings and step."""
    state = {f"model.{name}": weight for name, weight in weights.items()}
    for name, values in moments["state"].items():
        state |= {f"optimizer.{name}.{key}": value for key, value in values.items()}
    return {**state, "step": torch.tensor(step), "random": torch.get_rng_state()}


@dataclass(frozen=True)
class TensorShard:
    """This rank's shard of a tensor of shape ``size``: ``local``, whose first element is at ``offsets``."""

    name: str
    size: tuple[int, ...]
    offsets: tuple[int, ...]
    local: Tensor
    is_written: bool  # by this rank; of several replicas, only the first is written


@dataclass(frozen=True)
class Manifest:
    """The content of a complete checkpoint. ``files`` maps a name to its size in bytes and its SHA-256."""

    step: int
    ranks: int
    files: dict[str, tuple[int, str]]


def local_shards(state: dict[str, Tensor], rank: int) -> list[TensorShard]:
    """This rank's shard of each tensor; torch's checkpoint planner computes the offsets."""
    shards = []
    for item in create_default_local_save_plan(state, is_coordinator=True).items:
        assert item.tensor_data is not None
        tensor, where = state[item.index.fqn], item.tensor_data
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        written = _is_first_replica(tensor) if isinstance(tensor, DTensor) else rank == 0
        shards.append(
            TensorShard(item.index.fqn, tuple(where.size), tuple(where.chunk.offsets), local.detach(), written)
        )
    return shards


def _is_first_replica(tensor: DTensor) -> bool:
    """Whether this rank comes first among the ranks with the same shard."""
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    return not any(
        index and placement.is_replicate() for index, placement in zip(coordinate, tensor.placements, strict=True)
    )


def write_shards(folder: Path, rank: int, shards: list[TensorShard]) -> dict[str, Any]:
    """Write this rank's shards to one file; returns its name, size and checksum, or {} if there is nothing to write."""
    mine = [shard for shard in shards if shard.is_written and shard.local.numel()]
    if not mine:
        return {}
    path = folder / f"shard-{rank:05d}.safetensors"
    header = {shard.name: {"size": shard.size, "offsets": shard.offsets} for shard in mine}
    # Tied weights share memory, which safetensors refuses, so every name gets its own copy.
    tensors = {shard.name: shard.local.cpu().clone().contiguous() for shard in mine}
    try:
        folder.mkdir(parents=True, exist_ok=True)  # rank 0 created it, but this machine may not see it yet
        save_file(tensors, path, {"format": FORMAT, "shards": json.dumps(header)})
        sync(path)
        return {"name": path.name, "bytes": path.stat().st_size, "sha256": checksum(path)}
    except (OSError, SafetensorError) as error:
        raise RunError(f"{path}: cannot be written ({error})") from error


def read_shards(folder: Path, manifest: Manifest, shards: list[TensorShard], *, same_dtype: bool = True) -> None:
    """Fill the shards from the files of any number of ranks. Call `check_file` on each file first.

    With ``same_dtype``, a tensor that was stored in another dtype is an error: a resumed run must equal the original.
    """
    by_name = {shard.name: shard for shard in shards}
    filled = dict.fromkeys(by_name, 0)
    for file_name in manifest.files:
        path = folder / file_name
        try:
            with safe_open(path, framework="pt") as file:
                header = json.loads((file.metadata() or {})["shards"])
                for name in set(file.keys()) & set(by_name):
                    filled[name] += _copy_overlap(by_name[name], file, header[name], same_dtype)
        except Exception as error:  # a damaged file can raise anything
            raise RunError(f"{path}: not a checkpoint file ({error}): {_DAMAGED.format(folder=folder)}") from error
    for name, shard in by_name.items():
        if filled[name] != shard.local.numel():
            raise RunError(
                f"{folder}: has {filled[name]} of the {shard.local.numel()} values of {name} that this rank needs: it "
                "was written for a model of a different shape, or files are missing"
            )


def _copy_overlap(shard: TensorShard, file: Any, entry: dict[str, Any], same_dtype: bool) -> int:
    """Copy the values that a file and a shard have in common, and return their number."""
    stored = file.get_slice(shard.name)
    if tuple(entry["size"]) != shard.size:
        raise ValueError(f"{shard.name} has shape {entry['size']}, but the model has {list(shard.size)}")
    overlap = _overlap(entry["offsets"], stored.get_shape(), shard)
    if overlap is None:
        return 0
    source, target = overlap
    values = stored[source] if shard.size else file.get_tensor(shard.name)
    if same_dtype and values.dtype != shard.local.dtype:
        raise ValueError(f"{shard.name} is {values.dtype}, but the run has {shard.local.dtype}: check --dtype")
    shard.local[target].copy_(values)
    return int(values.numel())


def _overlap(offsets: list[int], shape: list[int], shard: TensorShard) -> tuple[Box, Box] | None:
    """The box that a stored shard and a local one share, in the coordinates of each; None if they are disjoint."""
    source, target = [], []
    for first, count, own_first, own_count in zip(offsets, shape, shard.offsets, shard.local.shape, strict=True):
        start, stop = max(first, own_first), min(first + count, own_first + own_count)
        if start >= stop:
            return None
        source.append(slice(start - first, stop - first))
        target.append(slice(start - own_first, stop - own_first))
    return tuple(source), tuple(target)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest, which is the last file of a checkpoint."""
    files = {name: {"bytes": size, "sha256": digest} for name, (size, digest) in manifest.files.items()}
    document = {"format": FORMAT, "step": manifest.step, "ranks": manifest.ranks, "files": files}
    document["sha256"] = _digest(document)
    write_atomic(folder / MANIFEST, json.dumps(document, indent=1) + "\n")


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a checkpoint. Raises RunError if it is missing, damaged or of another format."""
    path = folder / MANIFEST
    damaged = _DAMAGED.format(folder=folder)
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise RunError(f"{folder}: has no {MANIFEST}, so it is not a checkpoint of ringspan: delete it") from None
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(f"{path}: cannot be read ({error}): {damaged}") from error
    if not isinstance(found, dict) or "sha256" not in found:
        raise RunError(f"{path}: not a checkpoint manifest: {damaged}")
    if found.get("format") != FORMAT:
        raise RunError(f"{path}: has format {found.get('format')!r}, but this version of ringspan reads {FORMAT!r}")
    if found.pop("sha256") != _digest(found):
        raise RunError(f"{path}: does not match its own checksum: {damaged}")
    try:
        files = {str(name): (int(entry["bytes"]), str(entry["sha256"])) for name, entry in found["files"].items()}
        manifest = Manifest(int(found["step"]), int(found["ranks"]), files)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise RunError(f"{path}: not a checkpoint manifest: {damaged}") from error
    for name in files:
        if not _SHARD_NAME.fullmatch(name):  # rejects paths that lead out of the folder
            raise RunError(f"{path}: {name!r} is not the name of a checkpoint file: {damaged}")
    return manifest


def _digest(document: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def check_file(folder: Path, name: str, manifest: Manifest) -> None:
    """Raise RunError if a file is missing, or its size or content differs from the manifest."""
    path, (size, digest) = folder / name, manifest.files[name]
    damaged = _DAMAGED.format(folder=folder)
    found = path.stat().st_size if path.is_file() else None
    if found is None:
        raise RunError(f"{path}: missing: {damaged}")
    if found != size:
        raise RunError(f"{path}: has {found} bytes of {size}: {damaged}")
    if checksum(path) != digest:
        raise RunError(f"{path}: does not match its checksum: {damaged}")
