"""The spool: gradients of parcels, on disk, from the shard that used a parcel until the shard that owns it is walked.

Each shard has one file of its own, written anew if the shard is walked again: an interrupted run leaves nothing half
added, since nothing is added here.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ringspan.planning import Message, Parcel, RankPlan


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
        self._spool, self._keep = spool, keep
        self._rows: dict[str, int] = {}  # where each received parcel begins, in rows
        end = 0
        for hop in plan.hops:
            for message in hop.receives:
                self._rows[_name(message.parcel)] = end
                end += message.parcel.rows
        if keep and end:
            spool.folder.mkdir(parents=True, exist_ok=True)
            spool.index_of(shard).write_text(json.dumps(self._rows))
            self._mine = torch.from_file(
                str(spool.path_of(shard)), shared=True, size=end * spool.row_numbers, dtype=spool.dtype
            )

    def put(self, parcel: Parcel, gradient: Tensor) -> None:
        if self._keep:
            start = self._rows[_name(parcel)] * self._spool.row_numbers
            self._mine[start : start + gradient.numel()].copy_(gradient.reshape(-1))

    def take(self, message: Message, into: Tensor) -> None:
        index = json.loads(self._spool.index_of(message.peer).read_text())
        start = index[_name(message.parcel)] * self._spool.row_numbers
        file = str(self._spool.path_of(message.peer))
        theirs = torch.from_file(file, shared=True, size=start + into.numel(), dtype=self._spool.dtype)
        into.copy_(theirs[start:].view(into.shape))


def _name(parcel: Parcel) -> str:
    return f"{parcel.branch} {parcel.start}"
