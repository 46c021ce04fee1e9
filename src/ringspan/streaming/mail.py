"""The mail of a shard: parcels are read from the source instead of coming from another rank, while the shard computes.

A walk posts in an order that its plan fixes, so the next post is known: which parcels it awaits and, in backward, which
gradients go and come. Those go to a `Spool`, and come from it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from ringspan.planning import Message, Packing, Parcel, RankPlan
from ringspan.ring.mail import Counters, Letters
from ringspan.streaming.pipeline import without_gradients
from ringspan.streaming.rows import Source, read_rows
from ringspan.travel import parcel_rows
from ringspan.views import comb_view


class Gradients(Protocol):
    """Where gradients of parcels wait until their owner is walked."""

    def put(self, parcel: Parcel, gradient: Tensor) -> None:
        """The gradient of a parcel that this shard received."""

    def take(self, message: Message, into: Tensor) -> None:
        """The gradient of an own parcel, from the shard that used it."""


@dataclass(frozen=True, slots=True)
class Post:
    """What a walk sends and awaits at once: parcels, which are only awaited here, or gradients of parcels."""

    sends: tuple[Message, ...] = ()
    receives: tuple[Message, ...] = ()
    of_gradients: bool = False


def without_sends(plan: RankPlan) -> RankPlan:
    """A shard's plan: nobody awaits its parcels, since each reads what it needs from the source."""
    return replace(plan, hops=tuple(replace(hop, sends=()) for hop in plan.hops))


def forward_posts(plan: RankPlan) -> Iterator[Post]:
    """The posts of `walk_forward`, in order: each hop's parcels, and an empty one at the end."""
    for hop in plan.hops[1:]:
        yield Post(receives=hop.receives)
    yield Post()


def backward_posts(plan: RankPlan) -> Iterator[Post]:
    """The posts of `walk_backward`: the parcels of each hop, then the gradients of the one before."""
    for parcels, hop in zip(forward_posts(plan), plan.hops, strict=True):
        yield parcels
        yield Post(hop.gradients_out, hop.gradients_in, of_gradients=True)


class SourceMail:
    """One shard's access to the rows of all others."""

    def __init__(
        self,
        source: Source,
        packing_of: Callable[[Parcel], Packing],
        posts: Iterator[Post],
        reader: Executor,
        counters: Counters,
        gradients: Gradients | None = None,
    ) -> None:
        self._source, self._packing_of, self._posts, self._reader = source, packing_of, deque(posts), reader
        self.counters, self._gradients = counters, gradients

    def post(self, sends: Letters, receives: Letters, label: str) -> ReadingFlight:
        post = self._posts.popleft()
        self.counters.count(sends, receives)
        _check_sizes(label, post.sends, sends)
        _check_sizes(label, post.receives, receives)
        if not (sends or receives):
            return ReadingFlight(())
        return ReadingFlight([self._reader.submit(without_gradients(self._move), post, sends, receives)])

    def _move(self, post: Post, sends: Letters, receives: Letters) -> None:
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
class ReadingFlight:
    """Parcels that a thread is reading."""

    readings: Sequence[Future[None]]

    def wait(self) -> None:
        for reading in self.readings:
            reading.result()


def _check_sizes(label: str, messages: Sequence[Message], letters: Letters) -> None:
    """A walk that posts something else than its plan says would be filled with the wrong rows: never in silence."""
    wanted, found = [m.parcel.rows for m in messages], [buffer.shape[2] for _, buffer in letters]
    if wanted != found:
        raise RuntimeError(f"{label}: the plan has letters of {wanted} rows, the walk posts {found}")
