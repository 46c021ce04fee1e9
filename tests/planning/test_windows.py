"""Windows on rings: ranks exchange the halo and nothing else, and plans do not grow with the sequence."""

import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ringspan as rs
from ringspan.geometry import Documents
from ringspan.layout import Layout, LayoutName
from ringspan.planning import RankPlan, plan_rank
from tests.exactness import inputs
from tests.strategies import examples, lengths, routings

ROW = 2 * 2 * 16 * 4  # bytes of one row of K and V: 2 KV heads of 16, float32


def ring(pattern: rs.Pattern, n: int, size: int, layout: LayoutName = "contiguous", causal: bool = True) -> rs.RingPlan:
    return rs.plan(pattern, n, ring_size=size, layout=layout, causal=causal, heads=4, kv_heads=2, head_dim=16)


def received(plan: RankPlan) -> list[int]:
    """The rows of the sequence in the parcels that a rank receives; every parcel holds all heads."""
    parcels = [message.parcel for hop in plan.hops for message in hop.receives]
    return [row for p in parcels for row in range(p.start, p.start + p.rows // plan.kv_heads)]


@pytest.mark.parametrize(
    ("left", "right", "dilation"), [(100, 0, 1), (100, 28, 1), (0, 60, 1), (96, 32, 8), (999, 0, 1)]
)
def test_the_halo_crosses_each_border_and_nothing_else(left: int, right: int, dilation: int) -> None:
    """Four shards of 1,000 rows: left + right rows cross each of the three borders, also if the window is dilated."""
    plan = ring(rs.Window(left, right, dilation), 4000, 4, causal=False)
    for rank in range(4):
        before, after = (left if rank else 0), (right if rank < 3 else 0)
        assert plan.bytes_received(rank) == (before + after) * ROW
        start, stop = 1000 * rank, 1000 * (rank + 1)
        assert sorted(received(plan.rank(rank))) == [*range(start - before, start), *range(stop, stop + after)]
    assert sum(plan.bytes_sent(rank) for rank in range(4)) == 3 * (left + right) * ROW


def test_under_causality_nothing_comes_from_the_right() -> None:
    causal, left_only = (ring(rs.Window(100, right, 1), 4000, 4) for right in (28, 0))
    assert [causal.bytes_sent(rank) for rank in range(4)] == [100 * ROW] * 3 + [0]
    assert [causal.rank(rank).tiles for rank in range(4)] == [left_only.rank(rank).tiles for rank in range(4)]


def test_steps_of_a_dilated_window_do_not_pay_for_a_remainder() -> None:
    assert ring(rs.Window(103, dilation=8), 4000, 4).bytes_sent(0) == 96 * ROW


@pytest.mark.parametrize("left", [1000, 1001, 2500, 3999, 10**6])
def test_a_window_longer_than_a_shard_reaches_several_ranks(left: int) -> None:
    plan = ring(rs.Window(left), 4000, 4)
    for rank in range(4):
        assert plan.bytes_received(rank) == min(left, 1000 * rank) * ROW
        assert sorted(received(plan.rank(rank))) == list(range(max(0, 1000 * rank - left), 1000 * rank))
    whole = ring(rs.Full(), 4000, 4)
    if left >= 3999:
        assert [plan.bytes_sent(rank) for rank in range(4)] == [whole.bytes_sent(rank) for rank in range(4)]


def test_zigzag_has_more_borders() -> None:
    """Six spans have five borders; the third is between the two spans of rank 2, so four borders are between ranks."""
    plan = ring(rs.Window(100), 6000, 3, "zigzag")
    assert sum(plan.bytes_sent(rank) for rank in range(3)) == 4 * 100 * ROW


@examples(200)
@given(st.data())
def test_a_rank_receives_exactly_the_rows_that_its_queries_see(data: st.DataObject) -> None:
    sizes = data.draw(lengths())
    n, size = sum(sizes), data.draw(st.integers(1, 6))
    left, right = data.draw(st.sampled_from([0, 1, 3, 8, 50])), data.draw(st.sampled_from([0, 2, 9]))
    layout = Layout(data.draw(st.sampled_from(["contiguous", "zigzag"])), n, size)
    causal, pattern, documents = data.draw(st.booleans()), rs.Window(left, right), Documents(sizes)
    routing = data.draw(routings())
    spans = list(documents.spans())
    for rank in range(size):
        own = [row for span in layout.spans(rank) for row in range(span.start, span.stop)]
        seen = {
            key
            for row in own
            for start, stop in spans
            if start <= row < stop
            for key in range(start, stop)
            if pattern.sees(row - start, key - start, causal=causal)
        }
        assert sorted(received(plan_rank(pattern, documents, layout, rank, 2, causal, routing))) == sorted(
            seen - set(own)
        )


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize(
    "pattern", [rs.Window(4095), rs.Window(8192, 8192, 64), rs.Window(511) + rs.Dilated((4096,), (4,))]
)
def test_a_rank_of_4096_over_a_billion_rows_is_planned_at_once(pattern: rs.Pattern, layout: LayoutName) -> None:
    n, size = 2**30, 4096
    for causal in (True, False):
        plan = rs.plan(pattern, n, ring_size=size, layout=layout, causal=causal)
        for rank in (0, 17, size // 2, size - 1):
            start = time.process_time()
            own = plan.rank(rank)
            assert time.process_time() - start < 1
            assert len(own.tiles) < 1000
            assert len(own.hops) <= 5
            assert sum(len(hop.receives) for hop in own.hops) <= 8
        assert pattern.text in str(plan)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize(
    "pattern", [rs.Window(0), rs.Window(1), rs.Window(700, 33), rs.Window(1023), rs.Window(4096, 64, 64)]
)
def test_tiles_do_not_multiply_with_length(pattern: rs.Pattern, size: int, causal: bool) -> None:
    for layout in ("contiguous", "zigzag"):
        plans = [rs.plan(pattern, n, ring_size=size, layout=layout, causal=causal) for n in (2**21, 2**25, 2**30)]  # type: ignore[arg-type]
        counts = [max(len(plan.rank(rank).tiles) for rank in range(size)) for plan in plans]
        assert max(counts) - min(counts) <= 6, "a remainder after the last whole block has tiles of its own"


def test_pairs_are_exact_in_the_large() -> None:
    n, left = 2**30, 2**20
    assert rs.plan(rs.Window(left), n, causal=True, heads=1).work(0) == n * (left + 1) - left * (left + 1) // 2


@pytest.mark.parametrize("routing", ["relay", "direct", rs.ByNode(2)], ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "pattern", [rs.Window(40, 9), rs.Window(130), rs.Window(60, 30, 6), rs.Window(20) + rs.Dilated((64, 301), (1, 4))]
)
def test_counters_and_memory_equal_the_plan(
    pattern: rs.Pattern, causal: bool, layout: LayoutName, routing: rs.Routing
) -> None:
    q, k, v = inputs(2, 301, 2, 2, 4)
    sim = rs.SimulatedRing(5, layout, routing)
    sizes = dict(batch=2, heads=4, kv_heads=2, head_dim=4, dtype=torch.float64)
    plan = rs.plan(pattern, 301, ring_size=5, layout=layout, routing=routing, causal=causal, **sizes)  # type: ignore[arg-type]
    out = rs.attention(q, k, v, pattern=pattern, causal=causal, ring=sim)
    for backward in (False, True):
        if backward:
            sim.reset_counters()
            out.sum().backward()
        for rank, counters in enumerate(sim.counters):
            assert counters.bytes_sent == plan.bytes_sent(rank, backward=backward)
            assert counters.bytes_received == plan.bytes_received(rank, backward=backward)
            predicted = plan.memory(rank, backward=backward).parcels
            assert (0.8 if backward else 1.0) * predicted <= counters.peak_parcel_bytes <= 1.05 * predicted
            assert counters.live_parcel_bytes == 0


@pytest.mark.parametrize("left", [63, 1023, 2**15])
@pytest.mark.parametrize("causal", [False, True])
def test_contiguous_is_the_best_layout_of_a_window(left: int, causal: bool) -> None:
    """Windows balance themselves, and zigzag only adds borders."""
    advice = rs.best_layout(rs.Window(left, left), 2**18, 8, causal=causal)
    assert advice.layout == "contiguous"
    assert rs.plan(rs.Window(left), 2**18, ring_size=8, layout="contiguous", causal=True).imbalance < 1.1
    far = rs.Window(left) + rs.Full()
    assert rs.best_layout(far, 2**18, 8, causal=True).layout == "zigzag", "full attention is the larger part"


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_a_window_that_covers_its_document_is_planned_as_full_attention(layout: LayoutName, causal: bool) -> None:
    window, documents = rs.Window(39, 0 if causal else 39), Documents((40, 1, 0, 25, 40))
    for size in (1, 3):
        split = Layout(layout, documents.rows, size)
        for rank in range(size):
            plans = [plan_rank(pattern, documents, split, rank, 2, causal) for pattern in (window, rs.Full())]
            assert plans[0] == plans[1]
