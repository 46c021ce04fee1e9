"""Reading, computing and writing at the same time: while an item is computed, the next is read and the last is written.

At most one item is ahead and one behind, so that memory is bounded by three.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor

from ringspan.planning import Message, Packing, Parcel, RankPlan
from ringspan.ring.transport import Counters, Messages
from ringspan.schedule import parcel_rows
from ringspan.streaming.sources import Source, keep_rows_memory, read_rows
from ringspan.views import comb_view

Rows = TypeVar("Rows")
Results = TypeVar("Results")
Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")


def without_gradients(do: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """The same function for another thread: no graph is recorded there, and inference mode is as it is here.

    Both modes belong to a thread. A new one records, and may not write to the inference tensors of its caller.
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
    """Read, compute and write each item, in order. The first error ends everything, and is raised here."""
    read, write = without_gradients(read), without_gradients(write)
    with (
        keep_rows_memory(),
        ThreadPoolExecutor(1, "read ahead") as reader,
        ThreadPoolExecutor(1, "write behind") as writer,
    ):
        ahead = reader.submit(read, items[0]) if items else None
        behind: Future[None] | None = None
        for place, item in enumerate(items):
            assert ahead is not None
            rows = ahead.result()
            ahead = reader.submit(read, items[place + 1]) if place + 1 < len(items) else None
            results = compute(item, rows)
            del rows
            if behind is not None:
                behind.result()
            behind = writer.submit(write, item, results)
            del results
        if behind is not None:
            behind.result()


class Gradients(Protocol):
    """Where gradients of parcels wait until their owner is walked."""

    def put(self, parcel: Parcel, gradient: Tensor) -> None:
        """The gradient of a parcel that this shard received."""

    def take(self, message: Message, into: Tensor) -> None:
        """The gradient of an own parcel, from the shard that used it."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """What a walk sends and awaits at once: parcels, which are only awaited here, or gradients of parcels."""

    sends: tuple[Message, ...] = ()
    receives: tuple[Message, ...] = ()
    of_gradients: bool = False


def without_sends(plan: RankPlan) -> RankPlan:
    """A shard's plan: nobody awaits its parcels, since each reads what it needs from the source."""
    return replace(plan, hops=tuple(replace(hop, sends=()) for hop in plan.hops))


def forward_transfers(plan: RankPlan) -> Iterator[Transfer]:
    """The transfers of a forward run, in order: each hop's parcels, and an empty one at the end."""
    for hop in plan.hops[1:]:
        yield Transfer(receives=hop.receives)
    yield Transfer()


def backward_transfers(plan: RankPlan) -> Iterator[Transfer]:
    """The transfers of a backward run: the parcels of each hop, then the gradients of the one before."""
    for parcels, hop in zip(forward_transfers(plan), plan.hops, strict=True):
        yield parcels
        yield Transfer(hop.gradients_out, hop.gradients_in, of_gradients=True)


class SourceTransport:
    """One shard's access to the rows of all others."""

    def __init__(
        self,
        source: Source,
        packing_of: Callable[[Parcel], Packing],
        posts: Iterator[Transfer],
        reader: Executor,
        counters: Counters,
        gradients: Gradients | None = None,
    ) -> None:
        self._source, self._packing_of, self._posts, self._reader = source, packing_of, deque(posts), reader
        self.counters, self._gradients = counters, gradients

    def send_receive(self, sends: Messages, receives: Messages, label: str) -> ReadingWork:
        post = self._posts.popleft()
        self.counters.count(sends, receives)
        _check_sizes(label, post.sends, sends)
        _check_sizes(label, post.receives, receives)
        if not (sends or receives):
            return ReadingWork(())
        return ReadingWork([self._reader.submit(without_gradients(self._move), post, sends, receives)])

    def _move(self, post: Transfer, sends: Messages, receives: Messages) -> None:
        if not post.of_gradients:
            for message, (_, buffer) in zip(post.receives, receives, strict=True):
                self._read_parcel(message.parcel, buffer)
            return
        if self._gradients is None:
            raise RuntimeError("gradients of parcels are posted, but there is nowhere to keep them")
        for message, (_, buffer) in zip(post.sends, sends, strict=True):
            self._gradients.put(message.parcel, buffer)
        for message, (_, buffer) in zip(post.receives, receives, strict=True):
            self._gradients.take(message, buffer)

    def _read_parcel(self, parcel: Parcel, buffer: Tensor) -> None:
        for rows, places in self._packing_of(parcel).combs:
            for name, x in zip(("k", "v"), parcel_rows(buffer, 1), strict=True):
                lanes = comb_view(x, places)  # (batch, 1, heads, 1, rows, dim)
                for i in range(rows.heads):
                    start = rows.start + i * rows.head_step
                    progression = range(start, start + (rows.rows - 1) * rows.step + 1, rows.step)
                    head = rows.head + i
                    read = read_rows(self._source, name, progression, range(head, head + 1))
                    lanes[:, 0, i, 0].copy_(read[:, :, 0])


@dataclass(frozen=True)
class ReadingWork:
    """Parcels that a thread is reading."""

    readings: Sequence[Future[None]]

    def wait(self) -> None:
        for reading in self.readings:
            reading.result()


def _check_sizes(label: str, planned: Sequence[Message], posted: Messages) -> None:
    """A run that posts other messages than its plan would be filled with the wrong rows: an error instead."""
    wanted, found = [m.parcel.rows for m in planned], [buffer.shape[2] for _, buffer in posted]
    if wanted != found:
        raise RuntimeError(f"{label}: the plan has messages of {wanted} rows, but {found} were posted")
