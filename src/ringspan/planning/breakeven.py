"""Which layout is faster, and from which length on a ring is faster than one device, by the time model of `timing`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from ringspan.geometry import Documents, Pattern
from ringspan.layout import AnyLayout, Layout
from ringspan.planning.cost import RingPlan
from ringspan.planning.timing import DeviceRates, RankTime, rank_times, ring_time

LONGEST = 2**30
FEWEST_ROWS = 64  # per rank; shorter sequences are not considered
_STEP, _BY_FAR = 1.05, 1.5  # see `break_even`
SAME = 1 + 1e-9  # a smaller ratio of two times is rounding
WORTH_IT = 1.02  # a layout that is faster by less is not worth it if it is less simple


@dataclass(frozen=True, slots=True)
class LayoutAdvice:
    """The layout with the shorter modelled time, and the time of the ring under each layout.

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


def advise_layout(
    plans: Mapping[AnyLayout, RingPlan], rates: DeviceRates, devices_per_node: int | None = None
) -> LayoutAdvice:
    """Compare plans that differ only in layout by the time of the ring, in order of simplicity.

    The first one wins that is less than 2 % slower than the fastest.
    """
    times = {name: ring_time(plan, rates, devices_per_node) for name, plan in plans.items()}
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
    Otherwise ``length`` is the longest. ``alone`` and ``ring`` are the times of one device and of the ring at that
    length.
    """

    pays: bool
    length: int
    shortest: int
    longest: int
    alone: RankTime
    ring: RankTime

    @property
    def reason(self) -> str:
        """Why the ring is not faster; empty if it is."""
        if self.pays:
            return ""
        times = self.ring
        if times.work >= self.alone.work:
            return "its busiest rank does all the work of one device"
        if times.waiting >= times.latency:
            return f"it waits {times.waiting:.2g} s for parcels and slower ranks, and computes for {times.work:.2g} s"
        return f"its hops add {times.latency:.2g} s of latency to {times.work:.2g} s of work on its busiest rank"


def break_even(
    plan: RingPlan,
    rates: DeviceRates,
    longest: int = LONGEST,
    pattern_at: Callable[[int], Pattern] | None = None,
    devices_per_node: int | None = None,
) -> BreakEven:
    """The length from which on the plan's ring is faster than one device; everything else is taken from the plan.

    For a pattern that depends on the length, give ``pattern_at``, such as `Dilated.spanning`.

    >>> from ringspan.geometry import Full
    >>> from ringspan.planning import TensorSizes
    >>> ring = RingPlan(Full(), Documents((4096,)), Layout("zigzag", 4096, 4), True, "relay", TensorSizes())
    >>> break_even(ring, DeviceRates(flops=1e14, bandwidth=25e9, latency=20e-6)).length
    11083
    """
    if len(plan.documents.lengths) != 1:
        raise ValueError(f"{len(plan.documents.lengths)} documents: the model takes one; plan a single document")

    def at(length: int) -> RingPlan:
        return plan_at(plan, length, None if pattern_at is None else pattern_at(length))

    return search_break_even(
        lambda length: ring_time(at(length), rates, devices_per_node),
        lambda length: time_alone(at(length), rates),
        shortest=FEWEST_ROWS * plan.layout.ring_size + 1,
        longest=longest,
    )


def search_break_even(
    ring: Callable[[int], RankTime], alone: Callable[[int], RankTime], shortest: int, longest: int = LONGEST
) -> BreakEven:
    """The length from which on a ring is faster than one device, by the time of each at a length.

    Searches downwards from the longest length, halving it while the ring is more than 1.5 times as fast, then in steps
    of 5 %, until the ring is no longer faster. All lengths are odd, so that borders between ranks cut segments, as they
    do at most lengths. At a power of two, a ring may have nothing to send, and the result would be too optimistic.
    """
    longest = max(_odd(longest), shortest)

    def faster(length: int) -> float:
        return ratio(alone(length), ring(length))

    def found(pays: bool, length: int) -> BreakEven:
        return BreakEven(pays, length, shortest, longest, alone(length), ring(length))

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


def plan_at(plan: RingPlan, length: int, pattern: Pattern | None = None) -> RingPlan:
    """The plan for another length of its one document, and for another pattern, if given."""
    layout = replace(plan.layout, rows=length)
    return replace(plan, pattern=pattern or plan.pattern, documents=Documents((length,)), layout=layout)


def speedup(plan: RingPlan, rates: DeviceRates, devices_per_node: int | None = None) -> float:
    """The time of one device over that of the ring, at the plan's own length."""
    return ratio(time_alone(plan, rates), ring_time(plan, rates, devices_per_node))


def ratio(alone: RankTime, ring: RankTime) -> float:
    """How many times as fast a ring is as one device."""
    return alone.total / ring.total if ring.total else 1.0


def time_alone(plan: RingPlan, rates: DeviceRates, weights: int = 0) -> RankTime:
    """The time of one device that holds the whole sequence of all batch elements of the plan."""
    return rank_times(replace(plan, layout=Layout("contiguous", plan.layout.rows, 1)), rates, weights=weights)[0]


def _odd(length: int) -> int:
    """The largest odd number up to ``length``."""
    return length - 1 + length % 2
