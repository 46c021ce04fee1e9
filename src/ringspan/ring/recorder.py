"""The recorder of one traced rank: tiles, waits and transfers are appended as tuples and formatted when the trace ends.

A rank that is not traced has no recorder (`Counters.recorder` is None), and pays one check for each hop.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ringspan.planning import Tile
from ringspan.runtime.trace_file import NO_DETAILS, Details, TraceLane, TraceSpan, Track

if TYPE_CHECKING:
    from ringspan.ring.transport import Counters, Messages, PendingWork, Transport

_HOP = " of hop "  # in the labels of transfers of parcels and of their gradients


class Recorder:
    """What one rank does. ``now`` is its clock, in nanoseconds."""

    def __init__(self, now: Callable[[], int] = time.perf_counter_ns) -> None:
        self.now = now
        self._pass, self._pass_start = "", 0
        self._phase, self._phase_start = ("", NO_DETAILS), 0
        self._tiles: list[tuple[int, int, str, int, Tile]] = []  # start, end, pass, hop, tile
        self._spans: list[tuple[Track, str, int, int, Details]] = []
        # Posted, wait, end, label, and for each message: whether it is sent, its peer, its bytes and rows.
        self._transfers: list[tuple[int, int, int, str, list[tuple[bool, int, int, int]]]] = []
        self._held: list[tuple[int, int]] = []

    def phase(self, name: str, details: Details) -> None:
        """Begin a phase of the program; it ends where the next one begins, or with the trace. "" only ends one."""
        now = self.now()
        if self._phase[0]:
            self._spans.append(("phases", self._phase[0], self._phase_start, now, self._phase[1]))
        self._phase, self._phase_start = (name, details), now

    def begin_pass(self, name: str) -> None:
        self._pass, self._pass_start = name, self.now()

    def end_pass(self) -> None:
        self._spans.append(("compute", self._pass, self._pass_start, self.now(), NO_DETAILS))

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Record the block on the track "compute"."""
        start = self.now()
        try:
            yield
        finally:
            self._spans.append(("compute", name, start, self.now(), NO_DETAILS))

    def timed(self, tiles: Iterable[Tile], hop: int) -> Iterator[Tile]:
        """The tiles; a loop over them computes each before it takes the next one."""
        for tile in tiles:
            start = self.now()
            yield tile
            self._tiles.append((start, self.now(), self._pass, hop, tile))

    def hold(self, parcel_bytes: int) -> None:
        """Record how many bytes of parcel buffers the rank holds from now on."""
        self._held.append((self.now(), parcel_bytes))

    def add_transfer(
        self, posted: int, waited: int, end: int, label: str, messages: list[tuple[bool, int, int, int]]
    ) -> None:
        self._transfers.append((posted, waited, end, label, messages))

    def lane(self, rank: int, ranks: int, name: str, peer: Callable[[int], int] = int) -> TraceLane:
        """Everything recorded. ``peer`` is the number that a rank of the ring has among the lanes."""
        self.phase("", NO_DETAILS)
        spans = [TraceSpan(*each) for each in self._spans]
        spans += [_tile_span(*each) for each in self._tiles]
        for posted, waited, end, label, messages in self._transfers:
            what, _, hop = label.partition(_HOP)
            place: Details = {"hop": int(hop)} if hop else {}
            for is_sent, other, size, rows in messages:
                details = {"peer": peer(other), "bytes": size, **({"rows": rows, **place} if hop else {})}
                spans.append(TraceSpan("sends" if is_sent else "receives", label, posted, end, details))
            peers = ", ".join(str(peer(other)) for other in dict.fromkeys(other for _, other, _, _ in messages))
            if messages:
                spans.append(TraceSpan("compute", f"wait: {what}", waited, end, {**place, "peers": peers}))
        return TraceLane(rank, ranks, name, spans, self._held)


def _tile_span(start: int, end: int, pass_name: str, hop: int, tile: Tile) -> TraceSpan:
    queries, keys = tile.queries, tile.keys
    details: dict[str, str | int | float] = {
        "pass": pass_name,
        "hop": hop,
        "pairs": tile.pairs,
        "query rows": queries.heads * queries.segments * queries.rows,
        "key rows": keys.heads * keys.segments * keys.rows,
        "mask": tile.mask,
        "multiplicity": tile.multiplicity,
    }
    if tile.parcel is not None:
        details["owner of the keys"] = tile.parcel.owner
    return TraceSpan("compute", f"tile of hop {hop}", start, end, details)


def recorded(recorder: Recorder | None, name: str) -> AbstractContextManager[None]:
    """Record the block, if the rank is traced."""
    return nullcontext() if recorder is None else recorder.span(name)


def traced(transport: Transport) -> Transport:
    """The transport, recorded if its rank is traced."""
    recorder = transport.counters.recorder
    return transport if recorder is None else TracedTransport(transport, recorder)


@dataclass(frozen=True)
class TracedTransport:
    """A transport that records its transfers."""

    transport: Transport
    recorder: Recorder

    @property
    def counters(self) -> Counters:
        return self.transport.counters

    def send_receive(self, sends: Messages, receives: Messages, label: str) -> TracedWork:
        posted = self.recorder.now()
        pending = self.transport.send_receive(sends, receives, label)
        messages = [
            (is_sent, peer, buffer.nbytes, buffer.shape[-2])  # of a parcel, (2, batch, rows, dim)
            for is_sent, each in ((True, sends), (False, receives))
            for peer, buffer in each
        ]
        return TracedWork(pending, self.recorder, posted, label, messages)


@dataclass(frozen=True)
class TracedWork:
    """Pending messages that are recorded when the rank has waited for them."""

    pending: PendingWork
    recorder: Recorder
    posted: int
    label: str
    messages: list[tuple[bool, int, int, int]]

    def wait(self) -> None:
        waited = self.recorder.now()
        self.pending.wait()
        self.recorder.add_transfer(self.posted, waited, self.recorder.now(), self.label, self.messages)
