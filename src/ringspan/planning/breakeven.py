"""A time model from a plan and three rates: which layout is faster, and from which length on a ring is faster.

One device takes its FLOPs divided by its FLOP rate. A rank takes, for each step, the longer of its compute time and the
transfer time of the parcels sent meanwhile, plus a latency for each step that transfers anything. Head ranks exchange
heads before and after each pass, while nothing is computed. docs/planning.md derives it. Nothing is measured here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ringspan.geometry import Documents, Pattern
from ringspan.layout import AnyLayout, Layout
from ringspan.planning.cost import RingPlan
from ringspan.planning.nesting import CPU_COSTS, GPU_COSTS, TileCosts
from ringspan.planning.rank import Hop
from ringspan.planning.tiles import Message

FORWARD_FLOPS = 4  # per (query, key) pair and element of a head: two products, each a multiply and an add
BACKWARD_FLOPS = 10  # five products
LONGEST = 2**30
_FEWEST_ROWS = 64  # per rank; shorter sequences are not considered
_STEP, _BY_FAR = 1.05, 1.5  # see `break_even`
_WHOLE_RING, _SAMPLED_RANKS = 8, 4  # in a ring of more than 8, only 4 ranks are modelled: both ends and two between
SAME = 1 + 1e-9  # a smaller ratio of two times is rounding
WORTH_IT = 1.02  # a layout that is faster by less is not worth it if it is less simple


@dataclass(frozen=True, slots=True)
class DeviceRates:
    """FLOP/s of a device in attention, bytes/s that it sends while it receives as many, and the latency of a hop in
    seconds. ``costs`` prices what its tiles take beyond their FLOPs.
    """

    flops: float
    bandwidth: float
    latency: float
    costs: TileCosts = CPU_COSTS

    def __post_init__(self) -> None:
        for name in ("flops", "bandwidth"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)}: must be positive and finite")
        if not 0 <= self.latency < math.inf:
            raise ValueError(f"latency={self.latency}: must be at least 0 seconds and finite")


ASSUMED_RATES = DeviceRates(1e14, bandwidth=25e9, latency=20e-6, costs=GPU_COSTS)  # a GPU and a 200 Gbit/s link


@dataclass(frozen=True, slots=True)
class RankTime:
    """Seconds that one rank spends in a forward and a backward pass: computing, waiting for parcels, in latency."""

    work: float
    waiting: float  # for parcels whose transfer takes longer than the work that overlaps it
    latency: float

    @property
    def total(self) -> float:
        return self.work + self.waiting + self.latency


@dataclass(frozen=True, slots=True)
class LayoutAdvice:
    """The layout with the shorter modelled time, and the time of the slowest rank under each layout.

    ``head_ranks`` is the number of head ranks of the plans.
    """

    layout: AnyLayout
    times: Mapping[AnyLayout, RankTime]
    head_ranks: int = 1

    @property
    def reason(self) -> str:
        own = self.times[self.layout]
        others = {name: time for name, time in self.times.items() if name != self.layout}
        if all(time.total <= own.total * SAME for time in others.values()):
            every = "both" if len(self.times) == 2 else "all"
            return f"{every} layouts take {short_time(own.total)} in the model, and this one is simpler"
        is_fastest = all(own.total <= time.total * SAME for time in others.values())
        why = "faster in the model" if is_fastest else f"simpler, and less than {WORTH_IT - 1:.0%} slower in the model"
        return f"{why}, {_spent(own)}" + "".join(f"; {name}: {_spent(time)}" for name, time in others.items())

    def __str__(self) -> str:
        heads = f", {self.head_ranks} head ranks" if self.head_ranks > 1 else ""
        return f"{self.layout}{heads}: {self.reason}"


def advise_layout(plans: Mapping[AnyLayout, RingPlan], rates: DeviceRates) -> LayoutAdvice:
    """Compare plans that differ only in layout by the time of their slowest rank, in order of simplicity.

    The first one wins that is less than 2 % slower than the fastest.
    """
    times = {name: slowest_rank_time(plan, rates) for name, plan in plans.items()}
    least = min(time.total for time in times.values())
    found = next(name for name, time in times.items() if time.total <= least * WORTH_IT)
    return LayoutAdvice(found, times, plans[found].head_ranks)


def _spent(time: RankTime) -> str:
    return f"{short_time(time.total)} (waiting {short_time(time.waiting)}, latency {short_time(time.latency)})"


def short_time(seconds: float) -> str:
    """A time with three significant digits.

    >>> short_time(1.5), short_time(0.00123), short_time(2e-6)
    ('1.5 s', '1.23 ms', '0.002 ms')
    """
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


@dataclass(frozen=True, slots=True)
class BreakEven:
    """The length from which on a ring is faster than one device, searched from ``shortest`` to ``longest`` tokens.

    If ``pays``, the ring is faster from ``length`` on, at all lengths of the search, and not faster at a length 5 %
    shorter (unless ``length`` is the shortest). Between them, borders between ranks may cut segments less favourably.
    Otherwise ``length`` is the longest. ``alone`` and ``slowest`` are the times of one device and of the ring's slowest
    rank at that length.
    """

    pays: bool
    length: int
    shortest: int
    longest: int
    alone: RankTime
    slowest: RankTime

    @property
    def reason(self) -> str:
        """Why the ring is not faster; empty if it is."""
        if self.pays:
            return ""
        times = self.slowest
        if times.work >= self.alone.work:
            return "its busiest rank does all the work of one device"
        if times.waiting >= times.latency:
            return f"its slowest rank waits {times.waiting:.2g} s for parcels and computes for {times.work:.2g} s"
        return f"its hops add {times.latency:.2g} s of latency to {times.work:.2g} s of work on its slowest rank"


def break_even(
    plan: RingPlan,
    rates: DeviceRates,
    longest: int = LONGEST,
    pattern_at: Callable[[int], Pattern] | None = None,
    batch_alone: int | None = None,
) -> BreakEven:
    """The length from which on the plan's ring is faster than one device; everything else is taken from the plan.

    For a pattern that depends on the length, give ``pattern_at``, such as `Dilated.spanning`. The one device computes
    ``batch_alone`` batch elements, by default all of the plan's; fewer if the ring's other devices could take the rest.

    Searches downwards from the longest length, halving it while the ring is more than 1.5 times as fast, then in steps
    of 5 %, until the ring is no longer faster. All lengths are odd, so that borders between ranks cut segments, as they
    do at most lengths. At a power of two, a ring may have nothing to send, and the result would be too optimistic.

    >>> from ringspan.geometry import Full
    >>> from ringspan.planning import TensorSizes
    >>> ring = RingPlan(Full(), Documents((4096,)), Layout("zigzag", 4096, 4), True, "relay", TensorSizes())
    >>> break_even(ring, DeviceRates(flops=1e14, bandwidth=25e9, latency=20e-6)).length
    10555
    """
    if len(plan.documents.lengths) != 1:
        raise ValueError(f"{len(plan.documents.lengths)} documents: the model takes one; plan a single document")
    shortest = _FEWEST_ROWS * plan.layout.ring_size + 1
    longest = max(_odd(longest), shortest)

    def at(length: int) -> RingPlan:
        pattern = plan.pattern if pattern_at is None else pattern_at(length)
        layout = replace(plan.layout, rows=length)
        return replace(plan, pattern=pattern, documents=Documents((length,)), layout=layout)

    def faster(length: int) -> float:
        return speedup(at(length), rates, batch_alone)

    def found(pays: bool, length: int) -> BreakEven:
        there = at(length)
        alone, slowest = time_alone(there, rates, batch_alone), slowest_rank_time(there, rates)
        return BreakEven(pays, length, shortest, longest, alone, slowest)

    if faster(longest) <= 1:
        return found(False, longest)
    length = longest
    while length > shortest:
        half = max(shortest, _odd(length // 2))
        if faster(half) >= _BY_FAR:
            length = half
            continue
        while length > half:
            shorter = max(half, _odd(int(length / _STEP)))
            if faster(shorter) <= 1:
                return found(True, length)
            length = shorter
    return found(True, shortest)


def speedup(plan: RingPlan, rates: DeviceRates, batch_alone: int | None = None) -> float:
    """The time of one device over that of the ring, at the plan's own length."""
    ring = slowest_rank_time(plan, rates).total
    return time_alone(plan, rates, batch_alone).total / ring if ring else 1.0


def time_alone(plan: RingPlan, rates: DeviceRates, batch: int | None = None) -> RankTime:
    """The time of one device that holds the whole sequence of ``batch`` elements, by default all of the plan's."""
    sizes = plan.sizes if batch is None else replace(plan.sizes, batch=batch)
    return rank_time(replace(plan, layout=Layout("contiguous", plan.layout.rows, 1), sizes=sizes), 0, rates)


def slowest_rank_time(plan: RingPlan, rates: DeviceRates) -> RankTime:
    """The time of the slowest of the ranks that are modelled."""
    return max((rank_time(plan, rank, rates) for rank in modelled_ranks(plan)), key=lambda time: time.total)


def modelled_ranks(plan: RingPlan) -> Sequence[int]:
    """All ranks of a small ring.

    In a ring of more than 8, only both ends and two ranks between are modelled; with packed documents, whose ranks
    differ more, up to 64 ranks.
    """
    size = plan.layout.ring_size
    sample = [round(i * (size - 1) / (_SAMPLED_RANKS - 1)) for i in range(_SAMPLED_RANKS)]
    return range(size) if size <= _WHOLE_RING else sample if len(plan.documents.lengths) == 1 else plan.sample


def rank_time(plan: RingPlan, rank: int, rates: DeviceRates) -> RankTime:
    """The time of one rank that waits only for transfers, not for slower ranks."""
    steps = [(flops / rates.flops, sent / rates.bandwidth) for flops, sent in rank_steps(plan, rank, rates.costs)]
    return RankTime(
        work=sum(work for work, _ in steps),
        waiting=sum(max(0.0, transfer - work) for work, transfer in steps),
        latency=sum(rates.latency for _, transfer in steps if transfer),
    )


def rank_steps(plan: RingPlan, rank: int, costs: TileCosts) -> Iterator[tuple[float, int]]:
    """(FLOPs, bytes transferred meanwhile) of each step, forward and then backward.

    While a hop is computed, the parcels of the next hop arrive. In backward, the gradients of the previous hop are sent
    too, so backward ends with a step without work. Bytes are those of the busier direction. The exchanges of head ranks
    are steps without work, listed first.
    """
    sizes, hops, nothing = plan.sizes, plan.rank(rank).hops, Hop()
    copies = sizes.batch * plan.queries_per_kv_head
    yield from ((0, max(e.sent, e.received)) for way in (False, True) for e in plan.exchanges(rank, backward=way))
    for hop, following in zip(hops, (*hops[1:], nothing), strict=True):
        rows = max(_rows(following.sends), _rows(following.receives))
        yield FORWARD_FLOPS * sizes.head_dim * _price(hop, costs, copies), rows * sizes.parcel_row_bytes
    backward = zip((nothing, *hops), (*hops, nothing), (*hops[1:], nothing, nothing), strict=True)
    for before, hop, following in backward:
        outgoing = _rows(following.sends) * sizes.parcel_row_bytes
        outgoing += _rows(before.gradients_out) * sizes.gradient_row_bytes
        incoming = _rows(following.receives) * sizes.parcel_row_bytes
        incoming += _rows(before.gradients_in) * sizes.gradient_row_bytes
        yield BACKWARD_FLOPS * sizes.head_dim * _price(hop, costs, copies), max(outgoing, incoming)


def _rows(messages: Sequence[Message]) -> int:
    return sum(message.parcel.rows for message in messages)


def _price(hop: Hop, costs: TileCosts, copies: int) -> float:
    """The work of a hop in pairs: those of its tiles, and what tiles cost besides."""
    return sum(
        costs.price(q.rows, tile.keys.rows, tile.mask, copies * q.segments * q.heads)
        for tile, q in ((tile, tile.queries) for tile in hop.tiles)
    )


def _odd(length: int) -> int:
    """The largest odd number up to ``length``."""
    return length - 1 + length % 2
