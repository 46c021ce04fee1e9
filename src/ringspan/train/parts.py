"""The files of a checkpoint: a safetensors file from each rank, and a manifest in JSON with their sizes and checksums.

Neither can hold code, and nothing is unpickled. A part's header says which piece of which tensor each entry is, so that
any number of ranks can read what any other number has written.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.tensor import DTensor

from ringspan.train.errors import RunError
from ringspan.train.files import checksum, sync, write_whole

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
    write_whole(folder / MANIFEST, json.dumps(document, indent=1) + "\n")


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
