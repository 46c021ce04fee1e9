"""Trace files in Chrome's JSON format, which Perfetto reads: a process per rank, tracks of spans, arrows for messages.

Times are integers in nanoseconds until they are written. Imports no torch.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from ringspan.runtime.files import atomic_path

Track = Literal["phases", "compute", "sends", "receives"]
TRACKS: tuple[Track, ...] = ("phases", "compute", "sends", "receives")
Details = Mapping[str, str | int | float]
NO_DETAILS: Details = {}
_MOST_ROWS = 10_000  # of a track: transfers that overlap are written side by side


@dataclass(frozen=True, slots=True)
class TraceSpan:
    """What a rank does from ``start`` to ``end``. ``details`` of sends and receives hold ``peer`` and ``bytes``.

    Spans of the tracks "phases" and "compute" nest: each lies inside another one or outside of it.
    """

    track: Track
    name: str
    start: int
    end: int
    details: Details = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TraceLane:
    """All that one of ``ranks`` ranks did. ``name`` is shown, such as "rank 3 (host-b)", and ``note`` next to it.

    ``held_bytes`` are the bytes of parcel buffers, from each time on.
    """

    rank: int
    ranks: int
    name: str
    spans: Sequence[TraceSpan]
    held_bytes: Sequence[tuple[int, int]] = ()
    note: str = ""

    def at(self, time: Callable[[int], int]) -> TraceLane:
        """The lane with all its times mapped by ``time``, which must not fall."""
        spans = [replace(span, start=time(span.start), end=time(span.end)) for span in self.spans]
        return replace(self, spans=spans, held_bytes=[(time(when), held) for when, held in self.held_bytes])


def write_trace(path: Path, parts: Iterable[str], about: Mapping[str, Any]) -> None:
    """Write a trace from the texts of its lanes (`lane_text`), one after the other. ``about`` describes the run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(path) as temporary, temporary.open("w") as file:
        file.write('{"displayTimeUnit": "ms", "otherData": ' + json.dumps(about) + ',\n"traceEvents": [\n')
        for number, part in enumerate(parts):
            file.write(",\n" * (number > 0) + part)
        file.write("\n]}\n")


def lane_text(lane: TraceLane) -> str:
    """The events of a lane as JSON, a line each, separated by commas."""
    return ",\n".join(json.dumps(event) for event in lane_events(lane))


def lane_events(lane: TraceLane) -> Iterator[dict[str, Any]]:
    """The events of a lane: names of its process and tracks, spans, arrows, and counters."""

    def event(kind: str, name: str, time: int, track: int = 0, **more: Any) -> dict[str, Any]:
        return {"name": name, "ph": kind, "ts": time / 1000, "pid": lane.rank, "tid": track, **more}

    yield event("M", "process_name", 0, args={"name": lane.name})
    yield event("M", "process_sort_index", 0, args={"sort_index": lane.rank})
    if lane.note:
        yield event("M", "process_labels", 0, args={"labels": lane.note})
    messages: Counter[tuple[int, int]] = Counter()  # so far, by sender and receiver
    for number, track in enumerate(TRACKS):
        rows = _rows([span for span in lane.spans if span.track == track])
        for row in range(len(rows)):
            thread = number * _MOST_ROWS + row
            yield event("M", "thread_name", 0, thread, args={"name": track + f" {row + 1}" * (row > 0)})
            yield event("M", "thread_sort_index", 0, thread, args={"sort_index": thread})
        for span, row in _in_order(rows):
            thread = number * _MOST_ROWS + row
            duration = (span.end - span.start) / 1000
            yield event("X", span.name, span.start, thread, dur=duration, cat=track, args=dict(span.details))
            if track in ("sends", "receives"):
                pair = _sender_and_receiver(lane.rank, span)
                arrow = {"id": (messages[pair] * lane.ranks + pair[0]) * lane.ranks + pair[1], "cat": "message"}
                messages[pair] += 1
                if track == "sends":
                    yield event("s", "message", span.start, thread, **arrow)
                else:  # it ends inside the span, so just before its end
                    yield event("f", "message", max(span.start, span.end - 1), thread, bp="e", **arrow)
    for when, flying in _in_flight(lane.spans).items():
        yield event("C", "bytes in flight", when, args=flying)
    for when, held in lane.held_bytes:
        yield event("C", "bytes of parcel buffers", when, args={"held": held})


def _rows(spans: Sequence[TraceSpan]) -> list[list[TraceSpan]]:
    """The spans of a track in rows: a span that overlaps an earlier one, and is not inside it, gets a row below."""
    rows: list[list[TraceSpan]] = []
    open_until: list[list[int]] = []  # ends of the spans that are open, outermost first, by row
    for span in sorted(spans, key=lambda span: (span.start, -span.end if _nests(span) else 0)):
        for ends in open_until:
            while ends and ends[-1] <= span.start:
                ends.pop()
        fitting = (row for row, ends in enumerate(open_until) if not ends or (_nests(span) and span.end <= ends[-1]))
        row = next(fitting, len(rows))
        if row == len(rows):
            rows.append([])
            open_until.append([])
        rows[row].append(span)
        open_until[row].append(span.end)
    return rows


def _nests(span: TraceSpan) -> bool:
    return span.track in ("phases", "compute")


def _in_order(rows: Sequence[Sequence[TraceSpan]]) -> list[tuple[TraceSpan, int]]:
    """Each span with the number of its row, by start. Spans that start together stay in the order of rows, which is the
    order in which they were recorded.
    """
    found = [(span, row) for row, spans in enumerate(rows) for span in spans]
    return sorted(found, key=lambda each: each[0].start)


def _sender_and_receiver(rank: int, span: TraceSpan) -> tuple[int, int]:
    peer = int(span.details["peer"])
    return (rank, peer) if span.track == "sends" else (peer, rank)


def _in_flight(spans: Sequence[TraceSpan]) -> dict[int, dict[str, int]]:
    """The bytes that a rank is sending and receiving, from each time on."""
    changes: dict[int, Counter[str]] = defaultdict(Counter)
    for span in spans:
        if span.track in ("sends", "receives"):
            changes[span.start][span.track] += int(span.details["bytes"])
            changes[span.end][span.track] -= int(span.details["bytes"])
    flying, found = Counter(sends=0, receives=0), {}
    for when in sorted(changes):
        for track, change in changes[when].items():
            flying[track] += change
        found[when] = dict(flying)
    return found
