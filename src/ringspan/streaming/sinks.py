"""A sink that keeps a digest of everything, and some rows that were named beforehand: results larger than any disk.

The digest of a shard is the SHA-256 of its bytes; the digest of a run is that of its shards' digests, in order. A run
that was killed and went on has the digest of one that was not.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """A row of the sequence and a query head."""

    row: int
    head: int


class DigestedRows:
    """Digests shards, and keeps the output and the lse at some places, so that they can be compared later.

    >>> sink = DigestedRows([Place(row=2, head=1)])
    >>> sink.write("out", 0, torch.ones(1, 4, 2, 8)); sink.write("lse", 0, torch.zeros(1, 2, 4))
    >>> note = sink.finish()
    >>> sink.read("out", range(2, 3), range(1, 2)).shape
    torch.Size([1, 1, 1, 8])
    """

    def __init__(self, keep: Iterable[Place] = ()) -> None:
        self._places = sorted(set(keep))
        self._kept: dict[tuple[str, Place], list[Any]] = {}
        self._shards: dict[int, str] = {}
        self._begin()

    def _begin(self) -> None:
        self._digest, self._start, self._stop = hashlib.sha256(), -1, -1
        self._new: list[tuple[str, Place]] = []

    def write(self, name: str, start: int, rows: Tensor) -> None:
        self._start = start
        self._digest.update(rows.contiguous().view(torch.uint8).numpy().data)
        self._stop = start + rows.shape[2 if name == "lse" else 1]
        for place in self._places_between(start, self._stop):
            row = place.row - start
            found = rows[:, place.head, row] if name == "lse" else rows[:, row, place.head]
            self._kept[name, place] = found.tolist()
            self._new.append((name, place))

    def finish(self) -> dict[str, Any]:
        self._shards[self._start] = self._digest.hexdigest()
        kept = [[name, place.row, place.head, self._kept[name, place]] for name, place in self._new]
        note = {"start": self._start, "stop": self._stop, "sha256": self._shards[self._start], "kept": kept}
        self._begin()
        return note

    def resume(self, notes: Sequence[dict[str, Any]]) -> None:
        for note in notes:
            self._shards[note["start"]] = note["sha256"]
            self._kept |= {(name, Place(row, head)): values for name, row, head, values in note["kept"]}
            kept = {Place(row, head) for _, row, head, _ in note["kept"]}
            for place in self._places_between(note["start"], note["stop"]):
                if place not in kept:
                    raise ValueError(
                        f"row {place.row}, head {place.head} was not kept by the run that is gone on with: "
                        "name the same places, or start another run"
                    )

    def _places_between(self, start: int, stop: int) -> list[Place]:
        first, last = (bisect_left(self._places, Place(row, 0)) for row in (start, stop))
        return self._places[first:last]

    @property
    def digest(self) -> str:
        """Of everything that is finished so far."""
        return hashlib.sha256("".join(self._shards[start] for start in sorted(self._shards)).encode()).hexdigest()

    def read(self, name: str, rows: range, heads: range) -> Tensor:
        """A kept place, as a source would give it: (batch, 1, 1, dim), and lse (batch, 1, 1)."""
        place = Place(rows.start, heads.start)
        if len(rows) != 1 or len(heads) != 1 or (name, place) not in self._kept:
            raise ValueError(f"{name} at rows {rows}, heads {heads} was not kept: name it when the sink is made")
        kept = torch.tensor(self._kept[name, place], dtype=torch.float64)
        return kept[:, None, None]
