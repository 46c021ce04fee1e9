"""A simulated ring: the same plans and the same walks, with every rank in this process.

Whole tensors in, whole tensors out.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Generator, Sequence
from typing import Any

from torch import Tensor

from ringspan.layout import Layout, LayoutName, check_layout_name
from ringspan.planning import Passing, check_passing
from ringspan.ring.backend import Note, Result, register_ring
from ringspan.ring.sharding import join_rows, take_rows
from ringspan.ring.transport import Counters, Flight, Letters, Mail, RingError


class SimulatedRing:
    """A ring of virtual ranks in one process, for tests, for planning and for looking at.

    Args:
        size: how many virtual ranks.
        layout, passing: as for `Ring`.

    After a call, ``counters[rank]`` says what each virtual rank sent and received, and the peak of its live bytes.

    >>> import torch, ringspan as rs
    >>> sim = rs.SimulatedRing(3)
    >>> q, k, v = torch.randn(3, 1, 100, 2, 8, dtype=torch.float64).unbind()
    >>> pattern = rs.Dilated((16, 100), (1, 3))
    >>> out = rs.attention(q, k, v, pattern=pattern, ring=sim)
    >>> torch.allclose(out, rs.attention(q, k, v, pattern=pattern), rtol=0, atol=1e-12)
    True
    """

    def __init__(self, size: int, layout: LayoutName = "zigzag", passing: Passing = "relay") -> None:
        check_layout_name(layout)
        check_passing(passing)
        if size < 1:
            raise ValueError(f"size={size}: a ring has at least 1 rank")
        self.size, self.layout, self.passing = size, layout, passing
        self.reset_counters()
        self.name = register_ring(self)

    def __repr__(self) -> str:
        return f"SimulatedRing({self.size}, layout={self.layout!r}, passing={self.passing!r})"

    def __reduce__(self) -> tuple[type[SimulatedRing], tuple[int, LayoutName, Passing]]:
        return SimulatedRing, (self.size, self.layout, self.passing)  # by another name, where it is unpickled

    def __deepcopy__(self, memo: dict[int, Any]) -> SimulatedRing:
        return self  # a handle: copies of a module share its ring

    def reset_counters(self) -> None:
        """Start counting anew."""
        self.counters = [Counters() for _ in range(self.size)]

    def agree(self, rows: int, note: Note, seq_len: int | None, like: Tensor) -> Layout:
        if seq_len is not None and seq_len != rows:
            raise RingError(
                f"seq_len={seq_len}, but the tensors have {rows} rows: a simulated ring takes whole tensors"
            )
        return Layout(self.layout, rows, self.size)

    def deal(self, layout: Layout, tensors: Sequence[tuple[Tensor | None, int]]) -> list[tuple[int, Mail, list[Any]]]:
        office = _PostOffice()
        return [
            (
                rank,
                _SimulatedMail(rank, self.counters[rank], office),
                [take_rows(x, layout, rank, d) for x, d in tensors],
            )
            for rank in range(self.size)
        ]

    def run(self, walks: list[Generator[Flight, None, Result]]) -> list[Result]:
        """Let each walk go on as far as it can, in turn, until all are done."""
        results: dict[int, Result] = {}
        waiting: dict[int, Flight] = {}
        while len(results) < len(walks):
            moved = False
            for rank, walk in enumerate(walks):
                if rank in results or (rank in waiting and not waiting[rank].is_over()):  # type: ignore[attr-defined]
                    continue
                moved = True
                try:
                    waiting[rank] = next(walk)
                except StopIteration as end:
                    results[rank] = end.value
            if not moved:
                raise RingError("the simulated ring is stuck: a parcel is awaited that nobody sends")
        return [results[rank] for rank in range(len(walks))]

    def collect(self, layout: Layout, parts: list[Tensor], dim: int) -> Tensor:
        return join_rows(parts, layout, dim)


class _PostOffice:
    """Letters on their way, first in, first out between each pair of ranks."""

    def __init__(self) -> None:
        self.sent: defaultdict[tuple[int, int], deque[Tensor]] = defaultdict(deque)


class _SimulatedMail:
    def __init__(self, rank: int, counters: Counters, office: _PostOffice) -> None:
        self.rank, self.counters, self.office = rank, counters, office

    def post(self, sends: Letters, receives: Letters, label: str) -> _SimulatedFlight:
        self.counters.count(sends, receives)
        for peer, buffer in sends:
            # A copy, since the sender may reuse its buffer as soon as its own flight is over.
            self.office.sent[self.rank, peer].append(buffer.clone())
        return _SimulatedFlight(self, receives)


class _SimulatedFlight:
    def __init__(self, mail: _SimulatedMail, receives: Letters) -> None:
        self.mail, self.awaited = mail, deque(receives)

    def is_over(self) -> bool:
        """Take what has arrived; whether nothing is awaited any more."""
        while self.awaited:
            peer, buffer = self.awaited[0]
            letters = self.mail.office.sent[peer, self.mail.rank]
            if not letters:
                return False
            buffer.copy_(letters.popleft())
            self.awaited.popleft()
        return True

    def wait(self) -> None:
        if not self.is_over():
            raise RingError("a simulated flight cannot be waited for: let the other ranks go on")


ALONE = SimulatedRing(1, "contiguous")
"""What runs a call without a ring: one rank, no parcels, no copies."""
