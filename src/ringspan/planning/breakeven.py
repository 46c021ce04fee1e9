"""A model of time, from a plan and three rates: which layout is faster, and from what length on a ring pays.

docs/planning.md writes it out.
One device takes its FLOPs over its rate. A rank takes, step by step, the longer of its work and of the parcels that
are in flight meanwhile, plus a latency for each step with something in flight. Knows no device and measures nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ringspan.geometry import Documents, Pattern
from ringspan.layout import Layout, LayoutName
from ringspan.planning.cost import RingPlan
from ringspan.planning.parcels import Message
from ringspan.planning.rank import Hop

FORWARD_FLOPS = 4  # a (query, key) pair, for each number of a head: two products, each a multiplication and an addition
BACKWARD_FLOPS = 10  # five products
LONGEST = 2**30
_FEWEST_ROWS = 64  # of a rank: shorter sequences are not looked at
_STEP, _BY_FAR = 1.05, 1.5  # see `break_even`
_WHOLE_RING, _SAMPLED_RANKS = 8, 4  # a ring of more than 8 is looked at by 4 ranks: both ends, and two between
_SAME = 1 + 1e-9  # times that differ by less differ by rounding


@dataclass(frozen=True, slots=True)
class DeviceRates:
    """How fast a device computes attention (FLOP/s), how fast it sends, and at the same time receives (bytes/s), and
    what a hop costs, however small (seconds)."""

    flops: float
    bandwidth: float
    latency: float

    def __post_init__(self) -> None:
        for name in ("flops", "bandwidth"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)}: a rate is more than 0, and finite")
        if not 0 <= self.latency < math.inf:
            raise ValueError(f"latency={self.latency}: must be at least 0 seconds, and finite")


ASSUMED_RATES = DeviceRates(flops=1e14, bandwidth=25e9, latency=20e-6)  # a GPU and a 200 Gbit/s link


@dataclass(frozen=True, slots=True)
class RankTime:
    """Seconds of one rank for a forward and a backward pass, by what they are spent on."""

    work: float
    waiting: float  # for parcels that take longer than the work meanwhile
    latency: float

    @property
    def total(self) -> float:
        return self.work + self.waiting + self.latency


@dataclass(frozen=True, slots=True)
class LayoutAdvice:
    """The layout with the shorter modelled time, and the times of the slowest rank under each layout."""

    layout: LayoutName
    times: Mapping[LayoutName, RankTime]

    @property
    def reason(self) -> str:
        own = self.times[self.layout]
        others = {name: time for name, time in self.times.items() if name != self.layout}
        if all(time.total <= own.total * _SAME for time in others.values()):
            return f"both layouts take {_short(own.total)} by the model, and this one is simpler"
        slower = "".join(f"; {name}: {_spent(time)}" for name, time in others.items())
        return f"faster by the model, {_spent(own)}{slower}"

    def __str__(self) -> str:
        return f"{self.layout}: {self.reason}"


def advise_layout(plans: Mapping[LayoutName, RingPlan], rates: DeviceRates) -> LayoutAdvice:
    """Compare plans that differ in their layout by the modelled time of their slowest rank; the first wins a tie."""
    times = {name: slowest_rank_time(plan, rates) for name, plan in plans.items()}
    least = min(time.total for time in times.values())
    return LayoutAdvice(next(name for name, time in times.items() if time.total <= least * _SAME), times)


def _spent(time: RankTime) -> str:
    return f"{_short(time.total)} (waiting {_short(time.waiting)}, latency {_short(time.latency)})"


def _short(seconds: float) -> str:
    """A time with three digits.

    >>> _short(1.5), _short(0.00123), _short(2e-6)
    ('1.5 s', '1.23 ms', '0.002 ms')
    """
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


@dataclass(frozen=True, slots=True)
class BreakEven:
    """From which length on a ring is faster than one device, looking from ``shortest`` to ``longest`` tokens.

    If ``pays``, it is so from ``length`` on, and not 5 % below (unless that is the shortest). If not, ``length`` is
    the longest. ``alone`` and ``slowest`` are the times of one device and of the ring's slowest rank at that length.
    """

    pays: bool
    length: int
    shortest: int
    longest: int
    alone: RankTime
    slowest: RankTime

    @property
    def reason(self) -> str:
        """What the slowest rank spends its time on, if the ring does not pay."""
        if self.pays:
            return ""
        times = self.slowest
        if times.work >= self.alone.work:
            return "its busiest rank has all the work of one device"
        if times.waiting >= times.latency:
            return f"its slowest rank waits {times.waiting:.2g} s for parcels, and works {times.work:.2g} s"
        return f"the latency of its hops is {times.latency:.2g} s, and the work of its slowest rank {times.work:.2g} s"


def break_even(
    plan: RingPlan, rates: DeviceRates, longest: int = LONGEST, pattern_at: Callable[[int], Pattern] | None = None
) -> BreakEven:
    """The length from which on the plan's ring is faster than one device; everything but the length is the plan's.

    A pattern that depends on the length is given as ``pattern_at``, such as `Dilated.spanning`.

    Walks down from the longest: by halves while the ring is faster by far, by 5 % where it is not, to the first length
    at which it is not faster at all. All lengths are odd: then borders between ranks cut segments, as they do at most
    lengths, while powers of two may spare a ring all travel and promise too much.

    >>> from ringspan.geometry import Full
    >>> from ringspan.planning import TensorSizes
    >>> ring = RingPlan(Full(), Documents((4096,)), Layout("zigzag", 4096, 4), True, "relay", TensorSizes())
    >>> break_even(ring, DeviceRates(flops=1e14, bandwidth=25e9, latency=20e-6)).length
    11083
    """
    if len(plan.documents.lengths) != 1:
        raise ValueError(f"{len(plan.documents.lengths)} documents: the model asks for the length of one; plan one")
    shortest = _FEWEST_ROWS * plan.layout.ring_size + 1
    longest = max(_odd(longest), shortest)

    def at(length: int) -> RingPlan:
        pattern = plan.pattern if pattern_at is None else pattern_at(length)
        layout = Layout(plan.layout.name, length, plan.layout.ring_size)
        return replace(plan, pattern=pattern, documents=Documents((length,)), layout=layout)

    def faster(length: int) -> float:
        return speedup(at(length), rates)

    def found(pays: bool, length: int) -> BreakEven:
        there = at(length)
        return BreakEven(pays, length, shortest, longest, time_alone(there, rates), slowest_rank_time(there, rates))

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


def speedup(plan: RingPlan, rates: DeviceRates) -> float:
    """How much faster than one device the ring is at the plan's own length."""
    ring = slowest_rank_time(plan, rates).total
    return time_alone(plan, rates).total / ring if ring else 1.0


def time_alone(plan: RingPlan, rates: DeviceRates) -> RankTime:
    """One device that holds the whole sequence."""
    return rank_time(replace(plan, layout=Layout("contiguous", plan.layout.rows, 1)), 0, rates)


def slowest_rank_time(plan: RingPlan, rates: DeviceRates) -> RankTime:
    """The slowest rank of the ring; of a ring of more than 8, both ends and two ranks between are looked at."""
    size = plan.layout.ring_size
    sample = [round(i * (size - 1) / (_SAMPLED_RANKS - 1)) for i in range(_SAMPLED_RANKS)]
    ranks = range(size) if size <= _WHOLE_RING else sample
    return max((rank_time(plan, rank, rates) for rank in ranks), key=lambda time: time.total)


def rank_time(plan: RingPlan, rank: int, rates: DeviceRates) -> RankTime:
    """One rank, as if nobody kept it waiting but the wire."""
    steps = [(flops / rates.flops, sent / rates.bandwidth) for flops, sent in _steps(plan, rank)]
    return RankTime(
        work=sum(work for work, _ in steps),
        waiting=sum(max(0.0, flight - work) for work, flight in steps),
        latency=sum(rates.latency for _, flight in steps if flight),
    )


def _steps(plan: RingPlan, rank: int) -> Iterator[tuple[int, int]]:
    """(FLOPs, bytes in flight meanwhile) of each step, forward and then backward.

    While a hop is computed, the parcels of the next arrive; in backward the gradients of the hop before go on as
    well, so that backward ends with a step without work. Bytes are those of the busier direction.
    """
    sizes, hops, nothing = plan.sizes, plan.rank(rank).hops, Hop()
    pair = sizes.batch * (sizes.heads // sizes.kv_heads) * sizes.head_dim
    for hop, following in zip(hops, (*hops[1:], nothing), strict=True):
        rows = max(_rows(following.sends), _rows(following.receives))
        yield FORWARD_FLOPS * pair * _pairs(hop), rows * sizes.parcel_row_bytes
    backward = zip((nothing, *hops), (*hops, nothing), (*hops[1:], nothing, nothing), strict=True)
    for before, hop, following in backward:
        going = _rows(following.sends) * sizes.parcel_row_bytes
        going += _rows(before.gradients_out) * sizes.gradient_row_bytes
        coming = _rows(following.receives) * sizes.parcel_row_bytes
        coming += _rows(before.gradients_in) * sizes.gradient_row_bytes
        yield BACKWARD_FLOPS * pair * _pairs(hop), max(going, coming)


def _rows(messages: Sequence[Message]) -> int:
    return sum(message.parcel.rows for message in messages)


def _pairs(hop: Hop) -> int:
    return sum(tile.pairs for tile in hop.tiles)


def _odd(length: int) -> int:
    """The largest odd number that is not above it."""
    return length - 1 + length % 2
