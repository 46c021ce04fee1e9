"""What every trace file must satisfy, and its spans by rank."""

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ringspan as rs

Event = dict[str, Any]


@dataclass(frozen=True)
class ReadTrace:
    """The events of a trace file."""

    events: list[Event]

    @property
    def names(self) -> dict[int, str]:
        return self._metadata("process_name", "name")

    @property
    def notes(self) -> dict[int, str]:
        return self._metadata("process_labels", "labels")

    def _metadata(self, name: str, key: str) -> dict[int, str]:
        return {e["pid"]: e["args"][key] for e in self.events if e["name"] == name}

    def spans(self, rank: int, track: str = "compute", name: str = "") -> list[Event]:
        """The spans of a track whose names begin with ``name``."""
        wanted = {"ph": "X", "pid": rank, "cat": track}
        return [e for e in self.events if wanted.items() <= e.items() and e["name"].startswith(name)]

    @property
    def arrows(self) -> list[tuple[Event, Event]]:
        """(send, receive) for each message between two ranks of the trace, as the ends of its arrow."""
        ends = {kind: {e["id"]: e for e in self.events if e["ph"] == kind} for kind in "sf"}
        return [(sent, ends["f"][number]) for number, sent in ends["s"].items() if number in ends["f"]]

    def messages(self) -> list[tuple[Event, Event]]:
        """(send, receive) for each arrow, as spans."""
        return [(self._around(sent), self._around(received)) for sent, received in self.arrows]

    def _around(self, end: Event) -> Event:
        """The span that an arrow begins in, the start of a send, or ends in, just before the end of a receive."""
        track, when = ("sends", _begin) if end["ph"] == "s" else ("receives", lambda e: max(_begin(e), _end(e) - 1))
        (found,) = (
            e for e in self.spans(end["pid"], track) if e["tid"] == end["tid"] and when(e) == _nanoseconds(end["ts"])
        )
        return found


def read_trace(path: Path, *, whole: bool = True) -> ReadTrace:
    """Read a trace and check its form; if it has the ``whole`` ring, also that each message was sent and received."""
    found = ReadTrace(json.loads(path.read_text())["traceEvents"])
    for event in found.events:
        assert {"name", "ph", "ts", "pid", "tid"} <= event.keys(), event
        assert event["ts"] >= 0
        assert event["ph"] in "MXCsf"
    ranks = {event["pid"] for event in found.events}
    assert found.names.keys() == ranks
    threads = {(e["pid"], e["tid"]) for e in found.events if e["name"] == "thread_name"}
    for track in {(e["pid"], e["tid"]) for e in found.events if e["ph"] == "X"}:
        assert track in threads
        _check_nesting([e for e in found.events if e["ph"] == "X" and (e["pid"], e["tid"]) == track])
    kinds = Counter(e["ph"] for e in found.events if e["ph"] in "sf")
    identities = Counter((e["ph"], e["id"]) for e in found.events if e["ph"] in "sf")
    assert not identities or max(identities.values()) == 1
    if whole:
        assert kinds["s"] == kinds["f"] == len(found.arrows)
        for sent, received in found.messages():
            assert (sent["pid"], sent["args"]["peer"]) == (received["args"]["peer"], received["pid"])
            assert sent["name"] == received["name"]
            assert sent["args"]["bytes"] == received["args"]["bytes"]
            assert sent["args"].get("rows") == received["args"].get("rows")
    return found


def check_against_plan(found: ReadTrace, plan: rs.RingPlan, rank: int, *, backward: bool = True) -> None:
    """A forward pass and, with ``backward``, a backward pass: tiles by hop, and messages with their sizes and peers."""
    own, sizes = plan.rank(rank), plan.sizes
    passes = ["forward", "backward"] if backward else ["forward"]
    computed = Counter(
        (e["args"]["pass"], e["args"]["hop"], e["args"]["pairs"], e["args"].get("owner of the keys"))
        for e in found.spans(rank, "compute", "tile ")
    )
    assert computed == Counter(
        (name, number, tile.pairs, tile.parcel.owner if tile.parcel else None)
        for name in passes
        for number, hop in enumerate(own.hops)
        for tile in hop.tiles
    )
    for track, way, back in (("sends", "sends", "gradients_out"), ("receives", "receives", "gradients_in")):
        wanted = [
            (f"parcels of hop {number}", number, m.peer, m.parcel.rows, m.parcel.rows * sizes.parcel_row_bytes)
            for number, hop in enumerate(own.hops)
            for m in getattr(hop, way)
        ] * len(passes)
        wanted += [
            (f"gradients of hop {number}", number, m.peer, m.parcel.rows, m.parcel.rows * sizes.gradient_row_bytes)
            for number, hop in enumerate(own.hops)
            for m in getattr(hop, back)
            if backward
        ]
        spans = found.spans(rank, track)
        assert Counter((e["name"], *(e["args"][x] for x in ("hop", "peer", "rows", "bytes"))) for e in spans) == (
            Counter(wanted)
        )


def _check_nesting(spans: list[Event]) -> None:
    """Each span lies inside the one that was open when it began, or begins after that has ended."""
    ends: list[int] = []
    for event in sorted(spans, key=lambda e: (_begin(e), -_end(e))):
        while ends and ends[-1] <= _begin(event):
            ends.pop()
        assert not ends or _end(event) <= ends[-1], event
        ends.append(_end(event))


def _begin(event: Event) -> int:
    return _nanoseconds(event["ts"])


def _end(event: Event) -> int:
    return _nanoseconds(event["ts"]) + _nanoseconds(event["dur"])


def _nanoseconds(microseconds: float) -> int:
    return round(1000 * microseconds)
