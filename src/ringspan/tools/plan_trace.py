"""The trace of a plan: when each rank would compute, send and wait according to the time model, which measures nothing.

`modelled_steps` is the only function that knows the model (`ringspan.planning.breakeven`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ringspan.planning import Hop, Message, RingPlan
from ringspan.planning.breakeven import DeviceRates, rank_steps
from ringspan.planning.heads import refuse_head_ranks
from ringspan.runtime.trace_file import NO_DETAILS, Details, TraceLane, TraceSpan


@dataclass(frozen=True, slots=True)
class PlannedTransfer:
    """Messages that a rank posts together: their label, bytes for each row, and what it sends and receives."""

    label: str
    hop: int
    row_bytes: int
    sends: Sequence[Message]
    receives: Sequence[Message]


@dataclass(frozen=True, slots=True)
class ModelledStep:
    """A step of a rank: it computes a hop while it transfers, and waits until the transfers have ended.

    Seconds of each, from the beginning of the step.
    """

    name: str  # of the pass
    hop: int
    working: float
    transferring: float
    waiting: float
    pairs: int
    transfers: tuple[PlannedTransfer, ...]


def modelled_steps(plan: RingPlan, rank: int, rates: DeviceRates) -> Iterator[ModelledStep]:
    """The steps of a rank, forward and then backward."""
    refuse_head_ranks("the trace of a plan", plan.head_ranks)
    hops, sizes = plan.rank(rank).hops, plan.sizes
    steps = [("forward", number) for number in range(len(hops))]
    steps += [("backward", number) for number in range(len(hops) + 1)]
    for (name, number), (flops, sent) in zip(steps, rank_steps(plan, rank, rates.costs), strict=True):
        hop, following = plan.rank(rank).hop(number), plan.rank(rank).hop(number + 1)
        before = hops[number - 1] if name == "backward" and number else Hop()
        what = f"parcels of hop {number + 1}", number + 1, sizes.parcel_row_bytes, following.sends, following.receives
        back = (
            *(f"gradients of hop {number - 1}", number - 1, sizes.gradient_row_bytes),
            *(before.gradients_out, before.gradients_in),
        )
        transfers = tuple(PlannedTransfer(*each) for each in (back, what) if each[3] or each[4])
        working, transferring = flops / rates.flops, sent / rates.bandwidth + (rates.latency if sent else 0.0)
        waiting = max(0.0, sent / rates.bandwidth - working) + (rates.latency if sent else 0.0)
        pairs = sum(tile.pairs for tile in hop.tiles)
        yield ModelledStep(name, number, working, transferring, waiting, pairs, transfers)


def modelled_lane(plan: RingPlan, rank: int, rates: DeviceRates) -> TraceLane:
    """What a rank does when, in the model."""
    spans: list[TraceSpan] = []
    begun: dict[str, int] = {}
    now = 0
    for step in modelled_steps(plan, rank, rates):
        begun.setdefault(step.name, now)
        working, transferring, waiting = (
            round(seconds * 1e9) for seconds in (step.working, step.transferring, step.waiting)
        )
        if working:
            details: Details = {"pass": step.name, "hop": step.hop, "pairs": step.pairs}
            spans.append(TraceSpan("compute", f"tiles of hop {step.hop}", now, now + working, details))
        if waiting:
            labels = ", ".join(transfer.label for transfer in step.transfers)
            spans.append(TraceSpan("compute", "wait", now + working, now + working + waiting, {"for": labels}))
        for transfer in step.transfers:
            spans += _messages(transfer, now, now + transferring)
        now += working + waiting
    ends = [*list(begun.values())[1:], now]
    spans += [
        TraceSpan("compute", name, start, end, NO_DETAILS)
        for (name, start), end in zip(begun.items(), ends, strict=True)
    ]
    return TraceLane(rank, plan.layout.ring_size, f"rank {rank} (predicted)", spans)


def _messages(transfer: PlannedTransfer, start: int, end: int) -> Iterator[TraceSpan]:
    for message in transfer.sends:
        yield TraceSpan("sends", transfer.label, start, end, _details(transfer, message))
    for message in transfer.receives:
        yield TraceSpan("receives", transfer.label, start, end, _details(transfer, message))


def _details(transfer: PlannedTransfer, message: Message) -> Details:
    rows = message.parcel.rows
    return {"peer": message.peer, "bytes": rows * transfer.row_bytes, "rows": rows, "hop": transfer.hop}
