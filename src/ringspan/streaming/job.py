"""How many shards: the fewest that keep a run within its budget of memory, and enough of them to overlap.

A shard is a virtual rank of a contiguous ring. While it is walked, the rows of the next are read and the results of the
one before are written, so that three shards' worth is held.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ringspan import kernels
from ringspan.engine import WORKSPACE_BYTES
from ringspan.geometry import Dilated, Full, Pattern, as_int
from ringspan.kernels import Kernel, accumulation_dtype
from ringspan.planning import Packing, Parcel, RingPlan, packing_from_sequence
from ringspan.planning.api import plan as price_plan
from ringspan.ring.transport import Counters
from ringspan.runtime.files import Journal, read_journal
from ringspan.streaming.sources import (
    INPUTS,
    ROWS_IN_ALL,
    ROWS_OF_A_SHARD,
    Fingerprint,
    Sink,
    Source,
    checksum,
    read_rows,
    sampled_rows,
    seq_dim,
)

ENOUGH_TO_OVERLAP = 16  # so that the first read and the last write, with nothing beside them, cost little
# What allocators keep of freed buffers (glibc: those below 32 MiB), files while they are copied, threads.
OVERHEAD_BYTES = 48 * 2**20
SMALLEST_FOR_OVERLAP = 2**17  # rows: below that, what each hop costs outweighs what overlapping saves


def fewest_shards(plan_with: Callable[[int], RingPlan], workspace: int, budget_bytes: int, *, backward: bool) -> int:
    """The fewest shards, a power of two, that fit the budget; ``plan_with(shards)`` is the plan of a ring of so many.

    Powers of two, since the segments of most patterns are: then borders between shards cut fewer of them.
    """
    rows = plan_with(1).layout.rows
    shards = 1
    while shards < ENOUGH_TO_OVERLAP and rows // (2 * shards) >= SMALLEST_FOR_OVERLAP:
        shards *= 2
    while (needed := held_bytes(plan_with(shards), workspace, backward=backward)) > budget_bytes:
        if 2 * shards > rows:
            raise ValueError(
                f"budget_bytes={budget_bytes:,}: even {shards:,} shards of a row or two need {needed:,} bytes; "
                "give at least that, or stream fewer heads or sequences at a time"
            )
        shards *= 2
    return shards


def held_bytes(plan: RingPlan, workspace: int, *, backward: bool = False) -> int:
    """What a run holds at its peak: the walk of a shard, the rows of the next one, the results of the one before.

    Results count twice: as they are, and in the pages of the file that they are written to.
    """
    sizes = plan.sizes
    last = plan.layout.ring_size - 1
    ranks = sorted({0, last // 2, last})  # shards differ by a row, and by how many borders cut them
    walked = max(plan.memory(rank, backward=backward).total for rank in ranks)
    query = sizes.batch * sizes.heads * sizes.head_dim * sizes.number_bytes
    keys_and_values = 2 * sizes.batch * sizes.kv_heads * sizes.head_dim * sizes.number_bytes
    lse = sizes.batch * sizes.heads * sizes.wide_bytes
    if backward:
        row = (3 * query + keys_and_values + lse) + 2 * (query + keys_and_values)
    else:
        row = (query + keys_and_values) + 2 * (query + lse)
    rows = -(-plan.layout.rows // plan.layout.ring_size)
    return walked + row * (rows if last else 0) + workspace + OVERHEAD_BYTES


_BEGINNING = b'{"run": '  # of a progress file, also if its first line is torn


class Progress:
    """What a run has finished; without a path, nothing is remembered beyond this process.

    Raises if the file belongs to another run: ``settings`` are compared with those that it was begun with, and then its
    inputs, by the fingerprint that is taken of them.
    """

    def __init__(
        self, path: Path | None, settings: dict[str, Any], take_fingerprint: Callable[[], Fingerprint]
    ) -> None:
        self._journal: Journal | None = None
        self.inputs: Fingerprint = {}  # empty without a path
        self.finished: dict[str, dict[str, Any]] = {}
        self.seconds, self.parcel_bytes = 0.0, 0  # of all finished steps, in this process and before
        if path is None:
            return
        lines = read_journal(path)
        if not lines:
            if path.exists() and not _BEGINNING.startswith(path.read_bytes()[: len(_BEGINNING)]):
                raise ValueError(_foreign(path))
            self._journal = Journal(path)
            self.inputs = take_fingerprint()
            self._append({"run": settings, "inputs": self.inputs})
            return
        _check_same_run(path, _begun_with(path, lines), settings)
        try:
            self.finished = {line["finished"]: line["note"] for line in lines[1:]}
            self.seconds = sum(line["seconds"] for line in lines[1:])
            self.parcel_bytes = sum(line["parcel_bytes"] for line in lines[1:])
            known = dict(lines[0]["inputs"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(_foreign(path)) from error
        self.inputs = take_fingerprint()
        differing = [name for name, sums in self.inputs.items() if sums != known.get(name)]
        if differing:
            raise ValueError(
                f"{path} belongs to a run with other inputs: {', '.join(differing)} differ; "
                f"resume with the same inputs, or delete {path} to start over"
            )
        self._journal = Journal(path)

    def finish(self, step: str, note: dict[str, Any], seconds: float, parcel_bytes: int) -> None:
        """A step is done for good; ``note`` is what the sink wants to know of it when the run goes on."""
        self.finished[step] = note
        self.seconds += seconds
        self.parcel_bytes += parcel_bytes
        self._append({"finished": step, "seconds": seconds, "parcel_bytes": parcel_bytes, "note": note})

    def _append(self, line: dict[str, Any]) -> None:
        if self._journal is not None:
            self._journal.append(line)


def shards_begun_with(path: Path | None) -> int | None:
    """Into how many shards the run in this file is cut, or None if there is none."""
    lines = read_journal(path) if path is not None else []
    return int(_begun_with(path, lines)["shards"]) if path is not None and lines else None


def _begun_with(path: Path, lines: list[dict[str, Any]]) -> dict[str, Any]:
    """The settings of the run in a file."""
    run = lines[0].get("run") if isinstance(lines[0], dict) else None
    if not isinstance(run, dict) or not isinstance(run.get("shards"), int):
        raise ValueError(_foreign(path))
    return run


def _foreign(path: Path) -> str:
    return f"{path} is not the progress of a run: give another file"


def _check_same_run(path: Path, begun: dict[str, Any], settings: dict[str, Any]) -> None:
    for name in {**begun, **settings}:
        if begun.get(name) != settings.get(name):
            raise ValueError(
                f"{path} belongs to a run with {name}={begun.get(name)!r}, but this one has {settings.get(name)!r}: "
                "go on with the same, or give another file"
            )


@dataclass(frozen=True, slots=True)
class ShardDone:
    """What a run says after each shard: which one, how many are finished, and how long this one took."""

    shard: int
    finished: int
    shards: int
    rows: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Streamed:
    """What a run did: its shards, how many of them an earlier run had finished, and what all of them cost.

    ``parcel_bytes`` were read for shards that do not own them, in backward with the gradients that came home;
    ``peak_bytes`` is the most that a walk held in this process, beside the rows that were read ahead and the results
    that were being written.
    """

    shards: int
    resumed: int
    seconds: float
    parcel_bytes: int
    peak_bytes: int


@dataclass(frozen=True)
class Job:
    """What is to be computed, over which shards, by which kernel, where; ``names`` are the tensors that are read."""

    source: Source
    names: tuple[str, ...]
    plan: RingPlan
    scale: float
    kernel: Kernel
    device: torch.device
    counters: Counters

    def span(self, shard: int) -> range:
        """The rows of a shard; none if there are more shards than rows."""
        spans = self.plan.layout.spans(shard)
        return range(spans[0].start, spans[0].stop) if spans else range(0)

    def read(self, shard: int, known: Fingerprint) -> list[Tensor]:
        """The rows of a shard, which must have the known fingerprint; an empty one is not compared."""
        found = [self._read(name, self.span(shard)) for name in self.names]
        if known:
            places = [row - self.span(shard).start for row in self._sampled(shard)]
            for name, x in zip(self.names, found, strict=True):
                sample = checksum([x.select(seq_dim(name), place) for place in places])
                if sample != known[name][shard]:
                    raise ValueError(
                        f"rows {self.span(shard).start} to {self.span(shard).stop - 1} of {name} have changed since "
                        "the run began: restore them and resume, or delete the progress file to start over"
                    )
        return [x.to(self.device) for x in found]

    def fingerprint(self) -> Fingerprint:
        """Checksums of sampled rows of every shard."""

        def of_shard(name: str, shard: int) -> int:
            return checksum([self._read(name, range(row, row + 1)) for row in self._sampled(shard)])

        return {name: [of_shard(name, shard) for shard in range(self.plan.layout.ring_size)] for name in self.names}

    def _read(self, name: str, rows: range) -> Tensor:
        return read_rows(self.source, name, rows, range(self.source.shape.heads_of(name)))

    def _sampled(self, shard: int) -> list[int]:
        return sampled_rows(self.span(shard), max(ROWS_OF_A_SHARD, ROWS_IN_ALL // self.plan.layout.ring_size))

    def packing_of(self, parcel: Parcel) -> Packing:
        plan = self.plan
        return packing_from_sequence(parcel, plan.pattern, plan.documents, plan.layout, plan.sizes.kv_heads)

    def settings(self, call: str, sink: Sink) -> dict[str, Any]:
        """What a run that goes on must have in common with the one that was interrupted."""
        return {
            "call": call,
            "seq_len": self.plan.layout.rows,
            "pattern": self.plan.pattern.text,
            "causal": self.plan.causal,
            "lengths": list(self.plan.documents.lengths),
            "shards": self.plan.layout.ring_size,
            "rows": str(self.source.shape),
            "sink": type(sink).__name__,
            "scale": self.scale,
            "kernel": self.kernel.name,
        }


class ShardNotes:
    """Notes each finished shard, with the time since the one before, and tells whoever wants to know."""

    def __init__(self, job: Job, finished: Progress, count: int, on_shard: Callable[[ShardDone], None] | None) -> None:
        self.job, self.finished, self.count, self.on_shard = job, finished, count, on_shard
        self.resumed = len(finished.finished)
        self._last = time.perf_counter()
        self._parcel_bytes: dict[int, int] = {}  # of shards that are computed and not yet written

    @contextmanager
    def counting_parcels(self, shard: int) -> Iterator[None]:
        """While this lasts, a shard is computed."""
        before = self.job.counters.bytes_received
        yield
        self._parcel_bytes[shard] = self.job.counters.bytes_received - before

    def done(self, step: str, shard: int, kept: dict[str, Any]) -> None:
        """A step of the run is over and its results last; ``kept`` is what the sink wants to know when it goes on."""
        spent, self._last = time.perf_counter() - self._last, time.perf_counter()
        self.finished.finish(step, kept, spent, self._parcel_bytes.pop(shard))
        if self.on_shard is not None:
            rows = len(self.job.span(shard))
            self.on_shard(ShardDone(shard, len(self.finished.finished), self.count, rows, spent))

    def streamed(self) -> Streamed:
        """What the whole run did."""
        done = self.finished
        return Streamed(self.count, self.resumed, done.seconds, done.parcel_bytes, self.job.counters.peak_bytes)


def make_job(
    source: Source,
    seq_len: int,
    pattern: Pattern,
    *,
    causal: bool,
    scale: float | None,
    lengths: Sequence[int] | None,
    budget_bytes: int,
    shards: int | None,
    progress: Path | None,
    device: torch.device | str,
    kernel: str | None,
    backward: bool,
) -> Job:
    """Check everything, and cut the sequence into shards that fit the budget."""
    seq_len, shape, device = as_int("seq_len", seq_len), source.shape, torch.device(device)
    if seq_len < 1:
        raise ValueError(f"seq_len={seq_len}: a sequence has at least 1 row")
    if torch.is_autocast_enabled(device.type):
        raise ValueError("torch.autocast is on: streaming takes rows in the dtype of their source; leave it before")
    chosen = kernels.choose(device, shape.dtype).kernel if kernel is None else kernels.get(kernel)
    refusal = chosen.contract.refusal(device.type, shape.dtype, shape.head_dim)
    if refusal:
        raise ValueError(f"kernel {chosen.name!r}: {refusal}, or name another kernel, such as kernel='reference'")
    factor = shape.head_dim**-0.5 if scale is None else scale
    wide = accumulation_dtype(shape.dtype)
    if isinstance(factor, bool) or not isinstance(factor, (int, float)):
        raise TypeError(f"scale={scale!r}: must be a number")
    if not abs(factor) <= torch.finfo(wide).max:  # NaN too
        raise ValueError(f"scale={scale}: must be finite in {wide}, the dtype of the scores")
    if shards is not None and not 1 <= as_int("shards", shards) <= seq_len:
        raise ValueError(f"shards={shards}: must lie in 1 .. {seq_len}, so that each has rows")
    plan_with = _planner(shape_of=source, seq_len=seq_len, pattern=pattern, causal=causal, lengths=lengths)
    begun = shards_begun_with(progress)
    way_out = "leave shards out, or give more"
    if shards is None:
        way_out = f"the run in {progress} was begun with so many: give more, or delete it to start over"
        shards = begun or fewest_shards(plan_with, WORKSPACE_BYTES, budget_bytes, backward=backward)
    needed = held_bytes(plan_with(shards), WORKSPACE_BYTES, backward=backward)
    if needed > budget_bytes:
        raise ValueError(
            f"shards={shards}: a run would hold {needed:,} bytes, more than budget_bytes={budget_bytes:,}; {way_out}"
        )
    names = ("grad_out", *INPUTS, "out", "lse") if backward else INPUTS
    return Job(source, names, plan_with(shards), float(factor), chosen, device, Counters())


def _planner(
    shape_of: Source, seq_len: int, pattern: Pattern, causal: bool, lengths: Sequence[int] | None
) -> Callable[[int], RingPlan]:
    shape = shape_of.shape
    if not isinstance(pattern, (Full, Dilated)):
        raise TypeError(f"pattern={pattern!r}: must be Dilated(segment_lengths, dilation_rates) or Full()")
    pattern.check_heads(shape.kv_heads)
    lengths = None if lengths is None else tuple(lengths)

    def plan_with(shards: int) -> RingPlan:
        return price_plan(
            pattern,
            seq_len,
            ring_size=shards,
            layout="contiguous",
            causal=causal,
            routing="direct",
            lengths=lengths,
            batch=shape.batch,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            dtype=shape.dtype,
        )

    return plan_with
