"""Sinks: where results go. A callback per shard, or a checksum for results larger than any disk.

`ringspan.streaming.TensorRows` writes to tensors, `create_numpy` and `create_safetensors` to files.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ringspan.streaming.sources import seq_dim


class Sink(Protocol):
    """Receives results. One thread calls it, shard by shard, when a shard is complete."""

    def write(self, name: str, start: int, rows: Tensor) -> None:
        """Rows from ``start`` on of ``"out"`` and ``"lse"``, or of ``"dq"``, ``"dk"`` and ``"dv"``, in host memory.

        Called once for each tensor and each span of a shard; a contiguous shard has one span.
        """

    def finish(self) -> dict[str, Any]:
        """The shard is complete: make everything written so far durable.

        Returns a record of JSON values, which is stored in the progress file with the shard.
        """

    def resume(self, records: Sequence[dict[str, Any]]) -> None:
        """Continue an interrupted run; ``records`` is what `finish` returned for each finished shard, in that order."""


@dataclass(frozen=True)
class CallbackSink:
    """Calls ``consume(name, start, rows)`` for each tensor and each span of a finished shard.

    The effect must be durable when it returns, since a resumed run continues with the next shard. If the run was killed
    at that moment, the shard is delivered again, with the same ``start`` and the same rows.
    """

    consume: Callable[[str, int, Tensor], None]

    def write(self, name: str, start: int, rows: Tensor) -> None:
        self.consume(name, start, rows)

    def finish(self) -> dict[str, Any]:
        return {}

    def resume(self, records: Sequence[dict[str, Any]]) -> None:
        """Nothing is kept."""


@dataclass(frozen=True, slots=True, order=True)
class QueryPosition:
    """A row of the sequence and a query head."""

    row: int
    head: int


class ChecksumSink:
    """Keeps a checksum of all results, and the output and lse at chosen positions.

    The checksum of a shard is the SHA-256 of its bytes; that of a run is the SHA-256 of the shards' checksums in order.
    A run that was killed and resumed has the same checksum as one that was not.

    >>> sink = ChecksumSink([QueryPosition(row=2, head=1)])
    >>> sink.write("out", 0, torch.ones(1, 4, 2, 8)); sink.write("lse", 0, torch.zeros(1, 2, 4))
    >>> record = sink.finish()
    >>> sink.read("out", range(2, 3), range(1, 2)).shape
    torch.Size([1, 1, 1, 8])
    """

    def __init__(self, keep: Iterable[QueryPosition] = ()) -> None:
        self._positions = sorted(set(keep))
        self._kept: dict[tuple[str, QueryPosition], list[Any]] = {}
        self._shards: dict[int, str] = {}
        self._start_shard()

    def _start_shard(self) -> None:
        self._sha256 = hashlib.sha256()
        self._spans: dict[tuple[int, int], None] = {}  # of the shard, each once
        self._new: list[tuple[str, QueryPosition]] = []

    def write(self, name: str, start: int, rows: Tensor) -> None:
        self._sha256.update(rows.contiguous().view(torch.uint8).numpy().data)
        stop = start + rows.shape[seq_dim(name)]
        self._spans[start, stop] = None
        for position in self._positions_between(start, stop):
            row = position.row - start
            found = rows[:, position.head, row] if name == "lse" else rows[:, row, position.head]
            self._kept[name, position] = found.tolist()
            self._new.append((name, position))

    def finish(self) -> dict[str, Any]:
        kept = [[name, position.row, position.head, self._kept[name, position]] for name, position in self._new]
        record = {"spans": [*map(list, self._spans)], "sha256": self._sha256.hexdigest(), "kept": kept}
        self._add_shard(record)
        self._start_shard()
        return record

    def _add_shard(self, record: dict[str, Any]) -> None:
        if record["spans"]:
            self._shards[record["spans"][0][0]] = record["sha256"]

    def resume(self, records: Sequence[dict[str, Any]]) -> None:
        for record in records:
            self._add_shard(record)
            self._kept |= {(name, QueryPosition(row, head)): values for name, row, head, values in record["kept"]}
            kept = {QueryPosition(row, head) for _, row, head, _ in record["kept"]}
            for position in (x for start, stop in record["spans"] for x in self._positions_between(start, stop)):
                if position not in kept:
                    raise ValueError(
                        f"row {position.row}, head {position.head} was not kept by the run that is resumed: "
                        "keep the same positions, or start another run"
                    )

    def _positions_between(self, start: int, stop: int) -> list[QueryPosition]:
        first, last = (bisect_left(self._positions, QueryPosition(row, 0)) for row in (start, stop))
        return self._positions[first:last]

    @property
    def checksum(self) -> str:
        """Of all shards that are finished so far."""
        return hashlib.sha256("".join(self._shards[start] for start in sorted(self._shards)).encode()).hexdigest()

    def read(self, name: str, rows: range, heads: range) -> Tensor:
        """The values at one kept position, as a source returns them: (batch, 1, 1, head_dim); lse (batch, 1, 1)."""
        position = QueryPosition(rows.start, heads.start)
        if len(rows) != 1 or len(heads) != 1 or (name, position) not in self._kept:
            raise ValueError(f"{name} at rows {rows}, heads {heads} was not kept: pass it to ChecksumSink(keep=...)")
        kept = torch.tensor(self._kept[name, position], dtype=torch.float64)
        return kept[:, None, None]
