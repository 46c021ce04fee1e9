"""From which length on a ring pays, and which layout: held to the time model at single lengths."""

from dataclasses import replace

import pytest

import ringspan as rs
from ringspan.planning import RingPlan
from ringspan.planning.breakeven import break_even, speedup
from ringspan.planning.timing import DeviceRates, ring_time

FULL = rs.Full()
PAIRS_ONLY = rs.TileCosts(row=0, call=0, diagonal=0, narrow=1)
CLUSTER = DeviceRates(flops=1e14, bandwidth=25e9, latency=20e-6, costs=PAIRS_ONLY)


def ring(pattern: rs.Pattern = FULL, n: int = 4096, size: int = 4, **options: object) -> RingPlan:
    return rs.plan(pattern, n, ring_size=size, optimize=PAIRS_ONLY, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("pattern", [rs.Full(), rs.Dilated((2048, 8192, 32768), (1, 4, 16))])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("size", [2, 4, 7])
def test_the_ring_is_faster_from_there_on_and_not_just_below(pattern: rs.Pattern, layout: str, size: int) -> None:
    plan = ring(pattern, size=size, layout=layout, causal=True)
    found = break_even(plan, CLUSTER, longest=2**22)
    assert found.pays
    assert found.shortest < found.length < found.longest

    def at(length: int) -> float:
        return speedup(ring(pattern, length, size, layout=layout, causal=True), CLUSTER)

    assert at(found.length) > 1
    assert min(at(int(found.length / 1.05) - i) for i in range(2)) <= 1, "one of these was looked at"
    # Between the lengths of the search, borders may cut segments less favourably.
    assert all(at(int(found.length * factor)) > 0.9 for factor in (1.01, 1.1, 1.23, 1.4, 1.6, 1.9, 2.3, 3.1, 5.3))


def test_a_better_wire_never_pays_later() -> None:
    plan = ring(causal=True)
    lengths = [break_even(plan, replace(CLUSTER, bandwidth=b)).length for b in (1e9, 1e10, 1e11, 1e12)]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] > lengths[-1]


def test_a_hopeless_wire_says_why() -> None:
    """Few rows of a segment are selected, and two segments are cut: next to no work, and yet something travels."""
    pattern = rs.Dilated((2**16,), (64,))
    found = break_even(ring(pattern, size=3, layout="contiguous"), DeviceRates(1e15, 1e6, 1e-6), longest=2**20)
    assert not found.pays
    assert found.length == 2**20 - 1
    assert "waits" in found.reason
    assert "for parcels" in found.reason
    late = break_even(ring(pattern, size=3, layout="contiguous"), DeviceRates(1e15, 1e15, 10.0), longest=2**20)
    assert not late.pays
    assert "of latency" in late.reason


def test_a_ring_of_one_never_pays() -> None:
    found = break_even(ring(size=1), CLUSTER, longest=2**16)
    assert not found.pays
    assert "all the work of one device" in found.reason


def test_the_advised_layout_is_the_faster_one() -> None:
    """By the model, at the given rates: a slow wire favours the layout that sends less, a fast one the balanced one."""
    pattern = rs.Dilated((2048, 8192, 32768), (1, 4, 16))
    found = {}
    for bandwidth in (25e9, 1e13):
        rates = replace(CLUSTER, bandwidth=bandwidth, latency=0.0)
        advice = rs.best_layout(pattern, 32768, 4, causal=True, rates=rates)
        plans = {name: ring(pattern, 32768, layout=name, causal=True) for name in advice.times}
        assert advice.times == {name: ring_time(plan, rates) for name, plan in plans.items()}
        assert advice.times[advice.layout].total == min(time.total for time in advice.times.values())
        found[bandwidth] = advice.layout
    assert found == {25e9: "contiguous", 1e13: "zigzag"}


def test_a_pattern_may_depend_on_the_length() -> None:
    plan = ring(rs.Dilated.spanning(2**16), 2**16, layout="contiguous", causal=True)
    found = break_even(plan, CLUSTER, 2**20, rs.Dilated.spanning)
    there = ring(rs.Dilated.spanning(found.length), found.length, layout="contiguous", causal=True)
    assert found.pays
    assert found.ring == ring_time(there, CLUSTER)


def test_packed_documents_are_refused() -> None:
    with pytest.raises(ValueError, match="2 documents"):
        break_even(rs.plan(rs.Full(), 8, ring_size=2, lengths=(4, 4)), CLUSTER)
