"""How shards get their rows: a pipeline that overlaps I/O with compute, a transport that reads parcels, and the spool.

Where a rank of a ring receives a parcel from a peer, a shard reads it from the source, in another thread. The spool
holds gradients of parcels on disk, from the shard that used a parcel until its owner is computed. Each shard has its
own file, rewritten when the shard is computed again. Nothing is accumulated there, so an interrupted run leaves no
partial sums.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor

from ringspan.planning import Message, Packing, Parcel, RankPlan
from ringspan.ring.transport import Counters, Messages
from ringspan.runtime.files import sync
from ringspan.schedule import parcel_rows
from ringspan.streaming.mapped_files import allocate
from ringspan.streaming.sources import Source, read_rows, reuse_row_buffers
from ringspan.views import comb_view

Rows = TypeVar("Rows")
Results = TypeVar("Results")
Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")


def without_gradients(do: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Wrap a function for another thread: without autograd, and with the inference mode of this thread.

    Both modes are per thread. A new thread would record a graph, and could not write to its caller's inference tensors.
    """
    is_inference = torch.is_inference_mode_enabled()

    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        with torch.inference_mode(is_inference), torch.no_grad():
            return do(*args, **kwargs)

    return run


def run_pipeline(
    items: Sequence[int],
    read: Callable[[int], Rows],
    compute: Callable[[int, Rows], Results],
    write: Callable[[int, Results], None],
) -> None:
    """Read, compute and write each item, in order. Meanwhile the next item is read and the previous one written.

    At most one item is ahead and one behind, so memory is bounded by three. The first error stops the pipeline and is
    raised here.
    """
    read, write = without_gradients(read), without_gradients(write)
    with (
        reuse_row_buffers(),
        ThreadPoolExecutor(1, "read ahead") as reader,
        ThreadPoolExecutor(1, "write behind") as writer,
    ):
        ahead = reader.submit(read, items[0]) if items else None
        behind: Future[None] | None = None
        for i, item in enumerate(items):
            assert ahead is not None
            rows = ahead.result()
            ahead = reader.submit(read, items[i + 1]) if i + 1 < len(items) else None
            results = compute(item, rows)
            del rows
            if behind is not None:
                behind.result()
            behind = writer.submit(write, item, results)
            del results
        if behind is not None:
            behind.result()


class GradientStore(Protocol):
    """Keeps gradients of parcels until the shard that owns the parcel is computed."""

    def put(self, parcel: Parcel, gradient: Tensor) -> None:
        """Store the gradient of a parcel that this shard received."""

    def take(self, message: Message, into: Tensor) -> None:
        """Read the gradient of a parcel of this shard, from the shard that used it."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """The messages of one `send_receive`: parcels, which are only received here, or gradients of parcels."""

    sends: tuple[Message, ...] = ()
    receives: tuple[Message, ...] = ()
    of_gradients: bool = False


def without_sends(plan: RankPlan) -> RankPlan:
    """The plan of a shard: it sends no parcels, since each shard reads what it needs from the source."""
    return replace(plan, hops=tuple(replace(hop, sends=()) for hop in plan.hops))


def forward_transfers(plan: RankPlan) -> Iterator[Transfer]:
    """The transfers of a forward run, in order: the parcels of each hop, then an empty one."""
    for hop in plan.hops[1:]:
        yield Transfer(receives=hop.receives)
    yield Transfer()


def backward_transfers(plan: RankPlan) -> Iterator[Transfer]:
    """The transfers of a backward run: the parcels of each hop, then the gradients of the previous hop."""
    for parcels, hop in zip(forward_transfers(plan), plan.hops, strict=True):
        yield parcels
        yield Transfer(hop.gradients_out, hop.gradients_in, of_gradients=True)


class SourceTransport:
    """One shard's access to the rows of all other shards."""

    def __init__(
        self,
        source: Source,
        packing_of: Callable[[Parcel], Packing],
        transfers: Iterator[Transfer],
        reader: Executor,
        counters: Counters,
        gradients: GradientStore | None = None,
    ) -> None:
        self._source, self._packing_of, self._reader = source, packing_of, reader
        self._transfers = deque(transfers)
        self.counters, self._gradients = counters, gradients

    def send_receive(self, sends: Messages, receives: Messages, label: str) -> ReadingWork:
        transfer = self._transfers.popleft()
        self.counters.count(sends, receives)
        _check_sizes(label, transfer.sends, sends)
        _check_sizes(label, transfer.receives, receives)
        if not (sends or receives):
            return ReadingWork(())
        return ReadingWork([self._reader.submit(without_gradients(self._move), transfer, sends, receives)])

    def _move(self, transfer: Transfer, sends: Messages, receives: Messages) -> None:
        if not transfer.of_gradients:
            for message, (_, buffer) in zip(transfer.receives, receives, strict=True):
                self._read_parcel(message.parcel, buffer)
            return
        if self._gradients is None:
            raise RuntimeError("the plan sends gradients of parcels, but the transport has no store for them")
        for message, (_, buffer) in zip(transfer.sends, sends, strict=True):
            self._gradients.put(message.parcel, buffer)
        for message, (_, buffer) in zip(transfer.receives, receives, strict=True):
            self._gradients.take(message, buffer)

    def _read_parcel(self, parcel: Parcel, buffer: Tensor) -> None:
        for rows, places in self._packing_of(parcel).combs:
            for name, x in zip(("k", "v"), parcel_rows(buffer, 1), strict=True):
                lanes = comb_view(x, places)  # (batch, 1, heads, 1, rows, head_dim)
                for i in range(rows.heads):
                    start = rows.start + i * rows.head_step
                    progression = range(start, start + (rows.rows - 1) * rows.step + 1, rows.step)
                    head = rows.head_range[i]
                    read = read_rows(self._source, name, progression, range(head, head + 1))
                    lanes[:, 0, i, 0].copy_(read[:, :, 0])


@dataclass(frozen=True)
class ReadingWork:
    """Parcels or gradients that another thread is transferring."""

    futures: Sequence[Future[None]]

    def wait(self) -> None:
        for future in self.futures:
            future.result()


def _check_sizes(label: str, planned: Sequence[Message], posted: Messages) -> None:
    """Raise if a run sends or receives other messages than planned: its buffers would get the wrong rows."""
    wanted, found = [m.parcel.rows for m in planned], [buffer.shape[2] for _, buffer in posted]
    if wanted != found:
        raise RuntimeError(f"{label}: the plan has messages of {wanted} rows, but {found} were posted")


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
    return " ".join(map(str, (parcel.branch, parcel.start, *parcel.strand)))
