"""The exchange of a ring with head ranks: a rank's rows of all heads for all rows of a shard of its heads, and back.

An all-to-all among the head ranks of a shard, made of point-to-point messages, so that shards may be uneven, bytes are
counted like those of parcels, and a simulated ring runs the same code. `ringspan.planning.heads` says who has what.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ringspan.layout import Layout
from ringspan.planning.heads import HeadLayout, head_ranks_of, heads_of
from ringspan.ring.transport import Counters, Messages, PendingWork, Transport

Shards = list[tuple[int, Transport, list[Any]]]  # what `Backend.shard` returns


@dataclass(frozen=True)
class HeadTransport:
    """The transport among ranks that compute the same heads. Its ranks are the numbers of shards."""

    whole: Transport
    head_ranks: int
    part: int

    @property
    def counters(self) -> Counters:
        return self.whole.counters

    def send_receive(self, sends: Messages, receives: Messages, label: str) -> PendingWork:
        outgoing, incoming = (
            [(peer * self.head_ranks + self.part, buffer) for peer, buffer in messages]
            for messages in (sends, receives)
        )
        return self.whole.send_receive(outgoing, incoming, label)


@contextmanager
def split_heads(layout: Layout, shards: Shards, dims: Sequence[int | None]) -> Iterator[Shards]:
    """For each rank in this process: all rows of its shard, for its own heads. ``dims`` are the row dimensions.

    Heads are the dimension next to the rows. A tensor whose row dimension is None has heads only, and is on all ranks.
    Inside the block, both the rank's rows and the result count as live. Without head ranks, yields ``shards``.
    """
    if not isinstance(layout, HeadLayout):
        yield shards
        return
    with ExitStack() as held:
        found: Shards = []
        exchanges = []
        for rank, transport, tensors in shards:
            held.enter_context(transport.counters.holding(*tensors))
            exchange, own = _Exchange(layout, rank, transport), list[Any]()
            for x, dim in zip(tensors, dims, strict=True):
                own.append(x if x is None else exchange.own_heads(x, 0) if dim is None else exchange.to_heads(x, dim))
            exchanges.append(exchange)
            found.append((rank, HeadTransport(transport, layout.head_ranks, exchange.part), own))
        _run(exchanges, "exchange of rows for heads")
        yield found


def join_heads(
    layout: Layout, shards: Shards, parts: Sequence[Tensor], dim: int, heads: int, dtype: torch.dtype
) -> list[Tensor]:
    """The inverse of `split_heads`, for one tensor with so many heads: for each rank, its own rows of all heads.

    Replicated heads are summed, in the dtype of ``parts``. The result has ``dtype``.
    """
    copies = max(1, head_ranks_of(layout) // heads)
    if copies == 1:
        parts = [part.to(dtype) for part in parts]
    if not isinstance(layout, HeadLayout):
        return list(parts)
    found, exchanges = [], []
    for (rank, transport, _), part in zip(shards, parts, strict=True):
        assert isinstance(transport, HeadTransport)
        exchanges.append(_Exchange(layout, rank, transport.whole))
        found.append(exchanges[-1].to_rows(part, dim))
    _run(exchanges, "exchange of heads for rows")
    return found if copies == 1 else [x.unflatten(3 - dim, (heads, copies)).sum(4 - dim).to(dtype) for x in found]


def _run(exchanges: list[_Exchange], label: str) -> None:
    """Run the exchanges of all ranks in this process: all are posted before any waits."""
    with ExitStack() as held:
        for exchange in exchanges:
            held.enter_context(exchange.transport.counters.holding(*exchange.buffers))
        for finish in [exchange.start(label) for exchange in exchanges]:
            finish()


class _Exchange:
    """The messages of one rank to and from the other head ranks of its shard."""

    def __init__(self, layout: HeadLayout, rank: int, transport: Transport) -> None:
        shard, self.part = divmod(rank, layout.head_ranks)
        self.peers = range(shard * layout.head_ranks, (shard + 1) * layout.head_ranks)
        self.transport, self.rows = transport, [layout.rows_of(peer) for peer in self.peers]
        self.sends: list[tuple[int, Tensor]] = []
        self.receives: list[tuple[int, Tensor]] = []
        self.copies: list[tuple[Tensor, Tensor]] = []  # (place, buffer) of parts that cannot be received in place
        self.buffers: list[Tensor] = []  # all memory that the exchange allocates

    def own_heads(self, x: Tensor, dim: int, part: int | None = None) -> Tensor:
        """The heads of a head rank, by default of this one."""
        own = heads_of(self.part if part is None else part, x.shape[dim], len(self.peers))
        return x.narrow(dim, own.start, len(own))

    def to_heads(self, x: Tensor, dim: int) -> Tensor:
        """All rows of the shard for this rank's heads, from its own rows of all heads. Complete after the exchange."""
        parts = [self.own_heads(x, 3 - dim, part) for part in range(len(self.peers))]
        shape = list(parts[self.part].shape)
        shape[dim] = sum(self.rows)
        whole = x.new_empty(shape)
        return self._exchange(whole, parts, whole.split(self.rows, dim))

    def to_rows(self, x: Tensor, dim: int) -> Tensor:
        """This rank's rows of all heads, from all rows of the shard for its own. Complete after the exchange."""
        shape = list(x.shape)
        shape[dim] = self.rows[self.part]
        shape[3 - dim] *= len(self.peers)
        whole = x.new_empty(shape)
        return self._exchange(whole, x.split(self.rows, dim), whole.split(x.shape[3 - dim], 3 - dim))

    def _exchange(self, whole: Tensor, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> Tensor:
        """Send each peer its part, and receive ``incoming``, which are views of ``whole``."""
        self.buffers.append(whole)
        for part, (peer, x, place) in enumerate(zip(self.peers, outgoing, incoming, strict=True)):
            if part == self.part:
                place.copy_(x)
                continue
            if x.numel():
                self.sends.append((peer, x.contiguous()))
                self.buffers += [] if x.is_contiguous() else [self.sends[-1][1]]
            if place.numel():
                buffer = place
                if not place.is_contiguous():
                    buffer = place.new_empty(place.shape)
                    self.copies.append((place, buffer))
                    self.buffers.append(buffer)
                self.receives.append((peer, buffer))
        return whole

    def start(self, label: str) -> Callable[[], None]:
        """Start the transfers. Call the result to wait for them."""
        pending = self.transport.send_receive(self.sends, self.receives, label)

        def finish() -> None:
            pending.wait()
            for place, buffer in self.copies:
                place.copy_(buffer)

        return finish
