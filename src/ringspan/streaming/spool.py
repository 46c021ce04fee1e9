"""The spool: gradients of parcels on disk, from the shard that used a parcel until its owner is computed.

Each shard has its own file, rewritten when the shard is computed again. Nothing is accumulated here, so an interrupted
run leaves no partial sums.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ringspan.planning import Message, Parcel, RankPlan
from ringspan.runtime.files import sync
from ringspan.streaming.mapped_files import allocate


@dataclass(frozen=True)
class Spool:
    """A folder of gradients; ``row_numbers`` is the count of numbers in a row of a parcel, keys and values together."""

    folder: Path
    dtype: torch.dtype
    row_numbers: int

    def of_shard(self, shard: int, plan: RankPlan, store: bool) -> ShardGradients:
        """The spool as seen by one shard; without ``store``, its gradients are already stored: `put` does nothing."""
        return ShardGradients(self, shard, plan, store)

    def path_of(self, shard: int) -> Path:
        return self.folder / f"{shard}.gradients"

    def index_of(self, shard: int) -> Path:
        return self.folder / f"{shard}.json"


class ShardGradients:
    """One shard's access to the spool."""

    def __init__(self, spool: Spool, shard: int, plan: RankPlan, store: bool) -> None:
        self._spool = spool
        self._rows: dict[str, int] = {}  # the first row of each received parcel in the file
        end = 0
        for hop in plan.hops:
            for message in hop.receives:
                self._rows[_key(message.parcel)] = end
                end += message.parcel.rows
        self._files = (spool.path_of(shard), spool.index_of(shard)) if store and end else ()
        if self._files:
            spool.folder.mkdir(parents=True, exist_ok=True)
            data, index = self._files
            data.write_bytes(b"")
            allocate(data, end * spool.row_numbers * spool.dtype.itemsize)
            index.write_text(json.dumps(self._rows))

    def put(self, parcel: Parcel, gradient: Tensor) -> None:
        """Store the gradient of a parcel that this shard received."""
        if self._files:
            self._mapped(self._files[0], self._rows, parcel, gradient.numel()).copy_(gradient.reshape(-1))

    def take(self, message: Message, into: Tensor) -> None:
        """Read the gradient of a parcel of this shard, as the peer of ``message`` stored it."""
        path = self._spool.index_of(message.peer)
        index = json.loads(path.read_text()) if path.exists() else {}
        stored = self._mapped(self._spool.path_of(message.peer), index, message.parcel, into.numel())
        into.copy_(stored.view(into.shape))

    def flush(self) -> None:
        """Return when all stored gradients are on disk."""
        for path in self._files:
            sync(path)

    def _mapped(self, path: Path, index: dict[str, int], parcel: Parcel, count: int) -> Tensor:
        """One parcel of a file. Mapped only while in use, so that little counts as memory of the process."""
        start = index.get(_key(parcel), 0) * self._spool.row_numbers
        size = path.stat().st_size if path.exists() and _key(parcel) in index else 0
        if size < (start + count) * self._spool.dtype.itemsize:
            raise RuntimeError(
                f"{path} lacks rows that an earlier shard stored: delete {self._spool.folder.parent} to start over"
            )
        return torch.from_file(str(path), shared=True, size=start + count, dtype=self._spool.dtype)[start:]


def _key(parcel: Parcel) -> str:
    return f"{parcel.branch} {parcel.start}"
