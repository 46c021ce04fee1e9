"""The trace of a plan: when each rank computes, sends and waits in the time model. Nothing is measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ringspan.planning import RingPlan
from ringspan.planning.timing import DeviceRates, timeline
from ringspan.runtime.trace_file import TraceLane, TraceSpan


def modelled_lanes(
    plan: RingPlan, ranks: Sequence[int], rates: DeviceRates, devices_per_node: int | None = None
) -> Iterator[TraceLane]:
    """What some ranks do when, in the model: forward, and then backward."""
    spans: dict[int, list[TraceSpan]] = {rank: [] for rank in ranks}
    for span in timeline(plan, ranks, rates, devices_per_node):
        start, end = round(span.start * 1e9), round(span.end * 1e9)
        if span.kind == "transfer":
            for rank, track, peer in ((span.rank, "sends", span.peer), (span.peer, "receives", span.rank)):
                if rank in spans:
                    details = {"peer": peer, "bytes": span.amount}
                    spans[rank].append(TraceSpan(track, span.name, start, end, details))  # type: ignore[arg-type]
        elif span.kind == "work":
            spans[span.rank].append(TraceSpan("compute", span.name, start, end, {"pairs": span.amount}))
        else:
            spans[span.rank].append(TraceSpan("compute", f"wait: {span.name}", start, end))
    for rank, found in spans.items():
        yield TraceLane(rank, plan.layout.ring_size, f"rank {rank} (predicted)", found)
