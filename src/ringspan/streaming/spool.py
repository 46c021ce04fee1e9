"""The spool: gradients of parcels, on disk, from the shard that used a parcel until the shard that owns it is walked.

Each shard has one file of its own, written anew if the shard is walked again: an interrupted run leaves nothing half
added, since nothing is added here.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ringspan.planning import Message, Parcel, RankPlan
from ringspan.streaming.mapped_files import make_room


@dataclass(frozen=True)
class Spool:
    """A folder of gradients; ``row_numbers`` is how many numbers a row of a parcel has, keys and values together."""

    folder: Path
    dtype: torch.dtype
    row_numbers: int

    def of_shard(self, shard: int, plan: RankPlan, keep: bool) -> ShardGradients:
        """What a shard's walk puts and takes; without ``keep``, what it puts is known already."""
        return ShardGradients(self, shard, plan, keep)

    def path_of(self, shard: int) -> Path:
        return self.folder / f"{shard}.gradients"

    def index_of(self, shard: int) -> Path:
        return self.folder / f"{shard}.json"


class ShardGradients:
    """One shard's access to the spool."""

    def __init__(self, spool: Spool, shard: int, plan: RankPlan, keep: bool) -> None:
        self._spool = spool
        self._rows: dict[str, int] = {}  # where each received parcel begins, in rows
        end = 0
        for hop in plan.hops:
            for message in hop.receives:
                self._rows[_name(message.parcel)] = end
                end += message.parcel.rows
        self._files = (spool.path_of(shard), spool.index_of(shard)) if keep and end else ()
        if self._files:
            spool.folder.mkdir(parents=True, exist_ok=True)
            data, index = self._files
            data.write_bytes(b"")
            make_room(data, end * spool.row_numbers * spool.dtype.itemsize)
            index.write_text(json.dumps(self._rows))

    def put(self, parcel: Parcel, gradient: Tensor) -> None:
        if self._files:
            self._mapped(self._files[0], self._rows, parcel, gradient.numel()).copy_(gradient.reshape(-1))

    def take(self, message: Message, into: Tensor) -> None:
        there = self._spool.index_of(message.peer)
        index = json.loads(there.read_text()) if there.exists() else {}
        theirs = self._mapped(self._spool.path_of(message.peer), index, message.parcel, into.numel())
        into.copy_(theirs.view(into.shape))

    def keep(self) -> None:
        """All that was put lasts from here on."""
        for path in self._files:
            with path.open("r+b") as file:
                os.fsync(file.fileno())

    def _mapped(self, path: Path, index: dict[str, int], parcel: Parcel, count: int) -> Tensor:
        """Where one parcel lies in a file; mapped for as long as it is used, so that little counts as memory."""
        start = index.get(_name(parcel), 0) * self._spool.row_numbers
        there = path.stat().st_size if path.exists() and _name(parcel) in index else 0
        if there < (start + count) * self._spool.dtype.itemsize:
            raise RuntimeError(
                f"{path} lacks rows that an earlier shard put there: delete {self._spool.folder.parent} and start again"
            )
        return torch.from_file(str(path), shared=True, size=start + count, dtype=self._spool.dtype)[start:]


def _name(parcel: Parcel) -> str:
    return f"{parcel.branch} {parcel.start}"
