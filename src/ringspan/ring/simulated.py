"""A simulated ring: the same plans and the same schedule, with every rank in this process. Takes whole tensors."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from ringspan.geometry import as_int
from ringspan.layout import AnyLayout, Layout, check_layout_name
from ringspan.planning import Routing, check_routing
from ringspan.planning.heads import check_head_ranks, ring_routing, with_head_ranks
from ringspan.ring.backend import Lengths, Metadata, as_lengths, join_rows, register_ring, take_rows
from ringspan.ring.recorder import traced
from ringspan.ring.trace import Trace, trace_virtual_ranks
from ringspan.ring.transport import Counters, Messages, RingError, Transport


class SimulatedRing:
    """A ring of virtual ranks in one process, for tests and inspection.

    Args:
        size: the number of virtual ranks.
        layout, routing: as for `Ring`.
        head_ranks: how many consecutive ranks hold each shard together and exchange heads, like the second dimension
            of the mesh of a `Ring`; it must divide ``size``.

    After a call, ``counters[rank]`` holds what each virtual rank sent and received, and its peak of live bytes.

    >>> import torch, ringspan as rs
    >>> sim = rs.SimulatedRing(3)
    >>> q, k, v = torch.randn(3, 1, 100, 2, 8, dtype=torch.float64).unbind()
    >>> pattern = rs.Dilated((16, 100), (1, 3))
    >>> out = rs.attention(q, k, v, pattern=pattern, ring=sim)
    >>> torch.allclose(out, rs.attention(q, k, v, pattern=pattern), rtol=0, atol=1e-12)
    True
    """

    def __init__(
        self, size: int, layout: AnyLayout = "zigzag", routing: Routing = "relay", head_ranks: int = 1
    ) -> None:
        check_layout_name(layout)
        check_routing(routing)
        size = as_int("size", size)
        if size < 1:
            raise ValueError(f"size={size}: a ring has at least 1 rank")
        check_head_ranks(size, head_ranks)
        ring_routing(routing, head_ranks)
        self.size, self.layout, self.routing, self.head_ranks = size, layout, routing, head_ranks
        self.counters = [Counters() for _ in range(size)]
        self.name = register_ring(self)

    def __repr__(self) -> str:
        heads = f", head_ranks={self.head_ranks}" if self.head_ranks > 1 else ""
        return f"SimulatedRing({self.size}, layout={self.layout!r}, routing={self.routing!r}{heads})"

    def __reduce__(self) -> tuple[type[SimulatedRing], tuple[int, AnyLayout, Routing, int]]:
        # It gets another name where it is unpickled.
        return SimulatedRing, (self.size, self.layout, self.routing, self.head_ranks)

    def __deepcopy__(self, memo: dict[int, Any]) -> SimulatedRing:
        return self  # a handle: copies of a module share its ring

    def reset_counters(self) -> None:
        """Set all counters to zero."""
        self.counters = [Counters(recorder=each.recorder) for each in self.counters]

    @contextmanager
    def trace(self, path: str | Path) -> Iterator[Trace]:
        """Record what each virtual rank does inside the block, and write it to ``path``, for ui.perfetto.dev.

        Virtual ranks share a process and take turns, so they never compute at the same time.
        """
        with trace_virtual_ranks(self, Path(path)) as trace:
            yield trace

    def agree(
        self,
        rows: int,
        metadata: Metadata,
        seq_len: int | None,
        like: Tensor,
        lengths: Lengths | None = None,
    ) -> Layout:
        if seq_len is not None and seq_len != rows:
            raise RingError(
                f"seq_len={seq_len}, but the tensors have {rows} rows: a simulated ring takes whole tensors"
            )
        shards = Layout(self.layout, rows, self.size // self.head_ranks, as_lengths(lengths))
        return with_head_ranks(shards, self.head_ranks)

    def shard(
        self, layout: Layout, tensors: Sequence[tuple[Tensor | None, int | None]]
    ) -> list[tuple[int, Transport, list[Any]]]:
        inbox: Inbox = defaultdict(deque)
        return [
            (
                rank,
                traced(SimulatedTransport(rank, self.counters[rank], inbox)),
                [take_rows(x, layout, rank, dim) for x, dim in tensors],
            )
            for rank in range(self.size)
        ]

    def unshard(self, layout: Layout, parts: list[Tensor], dim: int) -> Tensor:
        return join_rows(parts, layout, dim)


Inbox = defaultdict[tuple[int, int], deque[Tensor]]  # by (sender, receiver): first in, first out


class SimulatedTransport:
    """Messages between virtual ranks: copied into an inbox when sent, and out of it when the receiver waits."""

    def __init__(self, rank: int, counters: Counters, inbox: Inbox) -> None:
        self.rank, self.counters, self.inbox = rank, counters, inbox

    def send_receive(self, sends: Messages, receives: Messages, label: str) -> SimulatedWork:
        self.counters.count(sends, receives)
        for peer, buffer in sends:
            # A copy, because the sender may reuse its buffer after its own wait.
            self.inbox[self.rank, peer].append(buffer.clone())
        return SimulatedWork(self, receives, label)


class SimulatedWork:
    """A hop's messages of a virtual rank."""

    def __init__(self, transport: SimulatedTransport, receives: Messages, label: str) -> None:
        self.transport, self.receives, self.label = transport, receives, label

    def wait(self) -> None:
        for peer, buffer in self.receives:
            messages = self.transport.inbox[peer, self.transport.rank]
            if not messages:
                raise RingError(f"rank {self.transport.rank}: {self.label}: rank {peer} sent nothing")
            buffer.copy_(messages.popleft())


ALONE = SimulatedRing(1, "contiguous")
"""Runs calls without a ring: one rank, no parcels, no copies."""
