"""A picture of a trace file: time across, ranks down."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WAIT, _OTHER, _OUTER = "#D62728", "#9E9E9E", "#F0F0F0"
_SENDS, _RECEIVES = "#BC8A3C", "#3C8A5A"
_MOST_ARROWS = 150
# Of a rank's band, from its top: phases, what it computes, what it receives and what it sends.
_PHASE, _COMPUTE, _RECEIVED, _SENT = (0.04, 0.12), (0.18, 0.40), (0.62, 0.12), (0.78, 0.12)

Event = Mapping[str, Any]


def draw_trace(file: str | Path, *, start: float | None = None, stop: float | None = None) -> Figure:
    """Draw what each rank did: tiles by hop, waits, what it received and sent, and an arrow for each message.

    ``start`` and ``stop``, in milliseconds of the trace, cut a part out. Many arrows are left out.

    >>> draw_trace("step.json", stop=2.0).savefig("step.png")  # doctest: +SKIP
    """
    from matplotlib.figure import Figure  # noqa: PLC0415
    from matplotlib.patches import Patch  # noqa: PLC0415

    events = json.loads(Path(file).read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    if not spans:
        raise ValueError(f"{file}: no spans to draw; record a call of rs.attention over the ring")
    begin = min(event["ts"] for event in spans) / 1000 if start is None else start
    end = max(event["ts"] + event["dur"] for event in spans) / 1000 if stop is None else stop
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    lines = {rank: line for line, rank in enumerate(sorted(names))}
    shown = [event for event in spans if event["ts"] / 1000 < end and (event["ts"] + event["dur"]) / 1000 > begin]
    hops = max((event["args"]["hop"] for event in shown if _is_tile(event)), default=0)
    figure = Figure(figsize=(12.0, 0.9 * len(lines) + 1.4), layout="constrained")
    axis = figure.subplots()
    _draw_bars(axis, shown, lines, hops, begin)
    _draw_arrows(axis, events, lines, begin, end)
    axis.set(xlim=(0, end - begin), ylim=(len(lines), 0), xlabel="milliseconds")
    axis.set_yticks([line + 0.5 for line in lines.values()], [names[rank] for rank in lines])
    axis.tick_params(axis="y", length=0)
    axis.spines[["top", "right", "left"]].set_visible(False)
    colours = {f"tiles, hop {hop}": _tile_colour(hop, hops) for hop in range(hops + 1)} if hops < 5 else {}
    colours = colours or {"tiles, hop 0": _tile_colour(0, hops), f"tiles, hop {hops}": _tile_colour(hops, hops)}
    colours |= {"waiting": _WAIT, "other work": _OTHER, "receiving": _RECEIVES, "sending": _SENDS}
    patches = [Patch(color=colour, label=label) for label, colour in colours.items()]
    figure.legend(handles=patches, loc="outside upper center", ncols=len(patches), frameon=False, fontsize=8)
    return figure


def _draw_bars(axis: Axes, spans: Sequence[Event], lines: Mapping[int, int], hops: int, begin: float) -> None:
    bars: dict[tuple[int, tuple[float, float], Any], list[tuple[float, float]]] = defaultdict(list)
    for event in spans:
        place, colour = _bar(event, hops)
        bars[lines[event["pid"]], place, colour].append((event["ts"] / 1000 - begin, event["dur"] / 1000))
    for (line, (top, height), colour), times in bars.items():
        layer = 1 if colour == _OUTER else 2
        axis.broken_barh(times, (line + top, height), facecolors=colour, linewidth=0, zorder=layer)
    for event in spans:
        if event["cat"] == "phases":
            middle = event["ts"] / 1000 - begin + event["dur"] / 2000
            y = lines[event["pid"]] + sum(_PHASE) / 2 + 0.02
            axis.text(middle, y, event["name"], ha="center", va="center", fontsize=6, clip_on=True, zorder=4)


def _bar(event: Event, hops: int) -> tuple[tuple[float, float], Any]:
    """The place of a span in its rank's band, and its colour."""
    if event["cat"] != "compute":
        places = {"phases": (_PHASE, "#D8DEE9"), "receives": (_RECEIVED, _RECEIVES), "sends": (_SENT, _SENDS)}
        return places[event["cat"]]
    if _is_tile(event):
        return _COMPUTE, _tile_colour(event["args"]["hop"], hops)
    if event["name"].startswith("wait"):
        return _COMPUTE, _WAIT
    return _COMPUTE, _OUTER if event["name"] in ("forward", "backward") else _OTHER


def _is_tile(event: Event) -> bool:
    return bool(event["cat"] == "compute" and event["name"].startswith("tile"))


def _tile_colour(hop: int, hops: int) -> Any:
    from matplotlib import colormaps  # noqa: PLC0415

    return colormaps["Blues"](0.9 - 0.55 * hop / max(1, hops))


def _draw_arrows(axis: Axes, events: Sequence[Event], lines: Mapping[int, int], begin: float, end: float) -> None:
    sent = {event["id"]: event for event in events if event["ph"] == "s"}
    pairs = [(sent[event["id"]], event) for event in events if event["ph"] == "f" and event["id"] in sent]
    pairs = [(a, b) for a, b in pairs if begin <= a["ts"] / 1000 and b["ts"] / 1000 <= end]
    if len(pairs) > _MOST_ARROWS:
        return
    for out, into in pairs:
        axis.annotate(
            "",
            (into["ts"] / 1000 - begin, lines[into["pid"]] + sum(_RECEIVED) - _RECEIVED[1] / 2),
            (out["ts"] / 1000 - begin, lines[out["pid"]] + sum(_SENT) - _SENT[1] / 2),
            arrowprops={"arrowstyle": "->", "color": "#555555", "linewidth": 0.6, "shrinkA": 0, "shrinkB": 0},
            zorder=3,
        )
