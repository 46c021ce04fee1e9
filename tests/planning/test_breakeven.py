"""The model of time, held to what can be worked out by hand and to how it must behave."""

from dataclasses import replace

import pytest

import ringspan as rs
from ringspan.planning import RingPlan, plan_rank
from ringspan.planning.breakeven import (
    DeviceRates,
    RankTime,
    break_even,
    rank_time,
    slowest_rank_time,
    speedup,
    time_alone,
)

FULL = rs.Full()
PAIRS_ONLY = rs.TileCosts(row=0, call=0, diagonal=0, narrow=1)
CLUSTER = DeviceRates(flops=1e14, bandwidth=25e9, latency=20e-6, costs=PAIRS_ONLY)


def ring(pattern: rs.Pattern = FULL, n: int = 4096, size: int = 4, **options: object) -> RingPlan:
    return rs.plan(pattern, n, ring_size=size, optimize=PAIRS_ONLY, **options)  # type: ignore[arg-type]


def test_one_device_takes_its_flops_over_its_rate() -> None:
    plan = ring(n=1000, heads=6, kv_heads=2, head_dim=32, batch=3)
    assert time_alone(plan, CLUSTER) == RankTime(14 * 32 * 3 * 6 * 1000**2 / 1e14, 0, 0)


def test_two_ranks_by_hand() -> None:
    """Full, not causal, contiguous: each rank works on its own half, then on the other, whose 512 rows travel once.

    In backward the parcel travels again while the own half is computed, and its gradient goes home at the end.
    """
    plan = ring(n=1024, size=2, layout="contiguous", heads=1, head_dim=64)
    work, parcel = 64 * 512**2 / 1e9, 2 * 512 * 64 * 4
    slow = DeviceRates(
        flops=1e9, bandwidth=parcel / (5 * 4 * work), latency=0.5, costs=PAIRS_ONLY
    )  # a parcel takes five times a forward hop
    found = rank_time(plan, 0, slow)
    flight = 20 * work
    assert found.work == pytest.approx(2 * (4 + 10) * work)
    assert found.waiting == pytest.approx((flight - 4 * work) + (flight - 10 * work) + flight)
    assert found.latency == pytest.approx(3 * 0.5)
    assert found.total == found.work + found.waiting + found.latency


def test_what_flies_while_work_is_done_costs_nothing() -> None:
    plan = ring(n=1024, size=2, layout="contiguous", heads=1, head_dim=64)
    fast = DeviceRates(flops=1e9, bandwidth=1e15, latency=0, costs=PAIRS_ONLY)
    assert rank_time(plan, 0, fast).total == pytest.approx(time_alone(plan, fast).total / 2, rel=1e-3)
    assert speedup(plan, fast) == pytest.approx(2, rel=1e-3)


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


def test_a_large_ring_is_modelled_by_a_few_ranks() -> None:
    plan = ring(rs.Dilated((2**14, 2**17), (1, 8)), n=10**9, size=10_000)
    plan_rank.cache_clear()
    slowest_rank_time(plan, CLUSTER)
    assert plan_rank.cache_info().misses <= 4


@pytest.mark.parametrize(
    ("rates", "words"),
    [
        ((0.0, 1.0, 1.0), "flops=0.0"),
        ((1.0, float("inf"), 1.0), "bandwidth=inf"),
        ((1.0, 1.0, -1.0), "latency=-1.0"),
    ],
)
def test_bad_rates(rates: tuple[float, float, float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        DeviceRates(*rates)


def test_the_advised_layout_is_the_faster_one() -> None:
    """By the model, at the given rates: a slow wire favours the layout that sends less, a fast one the balanced one."""
    pattern = rs.Dilated((2048, 8192, 32768), (1, 4, 16))
    found = {}
    for bandwidth in (25e9, 1e13):
        rates = replace(CLUSTER, bandwidth=bandwidth, latency=0.0)
        advice = rs.best_layout(pattern, 32768, 4, causal=True, rates=rates)
        plans = {name: ring(pattern, 32768, layout=name, causal=True) for name in advice.times}
        assert advice.times == {name: slowest_rank_time(plan, rates) for name, plan in plans.items()}
        assert advice.times[advice.layout].total == min(time.total for time in advice.times.values())
        found[bandwidth] = advice.layout
    assert found == {25e9: "contiguous", 1e13: "zigzag"}


def test_a_pattern_may_depend_on_the_length() -> None:
    plan = ring(rs.Dilated.spanning(2**16), 2**16, layout="contiguous", causal=True)
    found = break_even(plan, CLUSTER, 2**20, rs.Dilated.spanning)
    there = ring(rs.Dilated.spanning(found.length), found.length, layout="contiguous", causal=True)
    assert found.pays
    assert found.slowest == slowest_rank_time(there, CLUSTER)


def test_packed_documents_are_refused() -> None:
    with pytest.raises(ValueError, match="2 documents"):
        break_even(rs.plan(rs.Full(), 8, ring_size=2, lengths=(4, 4)), CLUSTER)
