"""The time model, held to what can be worked out by hand and to how it must behave."""

from dataclasses import replace
from typing import Any

import pytest

import ringspan as rs
from ringspan.planning import RingPlan, plan_rank
from ringspan.planning.breakeven import speedup, time_alone
from ringspan.planning.timing import DeviceRates, RankTime, modelled_ranks, rank_times, ring_time

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
    found = rank_times(plan, slow)[0]
    flight = 20 * work
    assert found.work == pytest.approx(2 * (4 + 10) * work)
    assert found.waiting == pytest.approx((flight - 4 * work) + (flight - 10 * work) + flight)
    assert found.latency == pytest.approx(3 * 0.5)
    assert found.total == found.work + found.waiting + found.latency


def test_what_flies_while_work_is_done_costs_nothing() -> None:
    plan = ring(n=1024, size=2, layout="contiguous", heads=1, head_dim=64)
    fast = DeviceRates(flops=1e9, bandwidth=1e15, latency=0, costs=PAIRS_ONLY)
    assert rank_times(plan, fast)[0].total == pytest.approx(time_alone(plan, fast).total / 2, rel=1e-3)
    assert speedup(plan, fast) == pytest.approx(2, rel=1e-3)


HEAD: dict[str, Any] = {"heads": 1, "head_dim": 64, "layout": "contiguous"}
WORK = 64 * 256**2 / 1e9  # seconds of a product of two shards of a ring of four, n = 1024, at 1e9 FLOP/s
PARCEL = 2 * 256 * 64 * 4


def test_a_rank_waits_for_slower_ranks() -> None:
    """Causal and contiguous: the last rank does the most, and the first waits for the gradients that it returns."""
    plan = ring(n=1024, size=2, causal=True, **HEAD)
    free = DeviceRates(flops=1e9, bandwidth=1e15, latency=0, costs=PAIRS_ONLY)
    first, last = rank_times(plan, free).values()
    square = 64 * 512**2 / 1e9
    triangle = 64 * 512 * 513 / 2 / 1e9
    assert first.work == pytest.approx(14 * triangle)
    assert last.work == pytest.approx(14 * (triangle + square))
    assert last.waiting == pytest.approx(0, abs=1e-6)
    assert first.total == pytest.approx(last.total)
    whole = ring_time(plan, free)
    assert (whole.work, whole.total) == (last.work, pytest.approx(last.total))
    assert whole.waiting == pytest.approx(0, abs=1e-6), "for transfers: the work is that of the busiest rank"


def test_ranks_of_a_node_share_its_link() -> None:
    """Not causal, direct, two nodes of two, and a link between them so slow that nothing else counts.

    Every rank sends its parcel to the two ranks of the other node: at hop 1 one of each node, at hop 2 both, at hop 3
    the other one. So four parcels leave a node in each pass, and as many gradients in backward.
    """
    rates = DeviceRates(flops=1e18, bandwidth=1e18, latency=0, costs=PAIRS_ONLY, node_bandwidth=PARCEL)
    direct = ring(n=1024, size=4, routing="direct", **HEAD)
    assert ring_time(direct, rates, 2).total == pytest.approx(4 + 4 + 4, rel=1e-6)
    alone = DeviceRates(flops=1e18, bandwidth=PARCEL, latency=0, costs=PAIRS_ONLY)
    assert ring_time(direct, alone, 2).total == pytest.approx(3 * 3, rel=1e-6), "links of their own"
    assert ring_time(direct, rates, 4).total == pytest.approx(0, abs=1e-6), "one node"


def test_a_parcel_enters_a_node_once_by_node() -> None:
    rates = DeviceRates(flops=1e18, bandwidth=1e18, latency=0, costs=PAIRS_ONLY, node_bandwidth=PARCEL)
    seconds = {
        str(routing): ring_time(ring(n=1024, size=4, routing=routing, **HEAD), rates, 2).total
        for routing in ("direct", "relay", rs.ByNode(2))
    }
    assert seconds["relay by nodes of 2"] < seconds["relay"] < seconds["direct"]


def test_latency_between_nodes_counts_only_there() -> None:
    plan = ring(n=1024, size=4, **HEAD)
    rates = DeviceRates(1e18, 1e18, latency=0, costs=PAIRS_ONLY, node_bandwidth=1e18, node_latency=1.0)
    inside, across = ring_time(plan, rates, 4), ring_time(plan, rates, 2)
    assert inside.total == pytest.approx(0, abs=1e-6)
    assert across.latency + across.waiting == pytest.approx(across.total)
    assert across.total >= 3


def test_ranks_that_share_a_core_divide_it_while_both_compute() -> None:
    """Causal and contiguous over free links: the first rank of four computes 1 of 16 parts, the last one 7."""
    plan = ring(n=1024, size=4, causal=True, **HEAD)
    free = DeviceRates(flops=1e9, bandwidth=1e15, latency=0, costs=PAIRS_ONLY)
    own = ring_time(plan, free).total
    shared = rank_times(plan, replace(free, devices_per_core=2))
    assert own == pytest.approx(14 * 3.5 * WORK, rel=1e-2)
    assert max(time.total for time in shared.values()) == pytest.approx(14 * (2.5 + 3.5) * WORK, rel=1e-2)
    assert sum(time.work for time in shared.values()) < 2 * 14 * 8 * WORK, "a rank alone has the core for itself"
    alone = ring_time(ring(n=1024, size=1, causal=True, **HEAD), replace(free, devices_per_core=4))
    assert alone.total == pytest.approx(14 * 8 * WORK, rel=1e-2)


def test_copying_takes_compute_that_overlaps_a_transfer() -> None:
    plan = ring(n=1024, size=2, heads=1, head_dim=64, layout="contiguous")
    rates = DeviceRates(flops=1e9, bandwidth=1e15, latency=0, costs=PAIRS_ONLY)
    parcel = 2 * 512 * 64 * 4
    extra = rank_times(plan, replace(rates, copying=1e-9))[0].work - rank_times(plan, rates)[0].work
    assert extra == pytest.approx(1e-9 * 2 * 2 * parcel), "a parcel each way, twice; gradients at the end"


def test_head_ranks_copy_what_they_exchange() -> None:
    plan = ring(n=1024, size=2, head_ranks=2, heads=2)
    rates = DeviceRates(flops=1e9, bandwidth=1e15, latency=0, costs=PAIRS_ONLY)
    extra = rank_times(plan, replace(rates, copying=1e-9))[0].work - rank_times(plan, rates)[0].work
    exchanges = [*plan.exchanges(0), *plan.exchanges(0, backward=True)]
    assert extra == pytest.approx(1e-9 * sum(one.sent + one.received for one in exchanges))
    assert extra > 0


def test_weights_count_for_the_rows_of_a_rank() -> None:
    plan = ring(n=1000, size=4, batch=3)
    more = ring_time(plan, CLUSTER, weights=10**6).work - ring_time(plan, CLUSTER).work
    assert more == pytest.approx(6 * 10**6 * 3 * 250 / 1e14)


@pytest.mark.parametrize("routing", ["relay", "direct", rs.ByNode(2)])
@pytest.mark.parametrize("head_ranks", [1, 2])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_every_rank_ends_and_is_never_faster_than_its_parts(routing: rs.Routing, head_ranks: int, layout: str) -> None:
    pattern = rs.Window(300) + rs.Dilated((512, 4096), (1, 4))
    plan = ring(pattern, 4099, 8, routing=routing, head_ranks=head_ranks, layout=layout, causal=True)
    rates = DeviceRates(1e11, bandwidth=1e9, latency=1e-4, node_bandwidth=3e8, node_latency=1e-3)
    times = rank_times(plan, rates, 2)
    assert set(times) == set(range(8))
    for rank, time in times.items():
        sent = plan.bytes_sent(rank) + plan.bytes_sent(rank, backward=True)
        assert time.total >= max(time.work, sent / 1e9)
        assert min(time.work, time.waiting, time.latency) >= 0
    slower = rank_times(plan, replace(rates, node_bandwidth=1e8), 2)
    assert max(t.total for t in slower.values()) >= max(t.total for t in times.values())


def test_whole_nodes_of_a_large_ring_are_modelled() -> None:
    plan = ring(rs.Dilated((2**14, 2**17), (1, 8)), n=10**6, size=64)
    assert list(modelled_ranks(plan)) == [0, 21, 42, 63]
    assert list(modelled_ranks(plan, 4)) == [*range(4), *range(20, 24), *range(40, 44), *range(60, 64)]
    assert list(modelled_ranks(plan, 16)) == [*range(16), *range(48, 64)]
    large = ring(rs.Dilated((2**14, 2**17), (1, 8)), n=10**6, size=256)
    assert list(modelled_ranks(large)) == [0, 255]
    assert list(modelled_ranks(large, 4)) == [*range(252, 256)]


def test_a_large_ring_is_modelled_by_a_few_ranks() -> None:
    plan = ring(rs.Dilated((2**14, 2**17), (1, 8)), n=10**9, size=10_000)
    plan_rank.cache_clear()
    ring_time(plan, CLUSTER)
    assert plan_rank.cache_info().misses <= 4


@pytest.mark.parametrize(
    ("rates", "words"),
    [
        ((0.0, 1.0, 1.0), "flops=0.0"),
        ((1.0, float("inf"), 1.0), "bandwidth=inf"),
        ((1.0, 1.0, -1.0), "latency=-1.0"),
        ((1.0, 1.0, 1.0, rs.TileCosts(), None, None, 0.0, 0), "devices_per_core=0"),
    ],
)
def test_bad_rates(rates: tuple[Any, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        DeviceRates(*rates)
