import time
from typing import Any
from unittest import mock

import pytest
import torch

import ringspan as rs
from ringspan.planning.shared_segments import SharedSegment

PATTERN = rs.Dilated((2048, 8192, 32768), (1, 4, 16))


@pytest.mark.parametrize("ring_size", [2, 3, 4, 8])
@pytest.mark.parametrize("pattern", [rs.Full(), rs.Dilated((2048, 32768), (1, 16)), rs.Dilated((65536,), (4,))])
def test_zigzag_balances_causal_work(pattern: rs.Pattern, ring_size: int) -> None:
    plan = rs.plan(pattern, 32768, ring_size=ring_size, layout="zigzag", causal=True)
    assert plan.imbalance <= 1.05


def test_full_contiguous_causal_is_not_balanced() -> None:
    assert rs.plan(rs.Full(), 4096, ring_size=4, layout="contiguous", causal=True).imbalance > 1.7


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_every_routing_sends_the_same_bytes(layout: str, causal: bool) -> None:
    plans = [
        rs.plan(PATTERN, 32768, ring_size=4, layout=layout, causal=causal, routing=routing)  # type: ignore[arg-type]
        for routing in ("relay", "direct", rs.ByNode(2))
    ]
    for backward in (False, True):
        totals = {sum(plan.bytes_sent(rank, backward=backward) for rank in range(4)) for plan in plans}
        assert len(totals) == 1


def test_bytes_follow_from_the_pattern() -> None:
    """w > L moves L/r rows per hop over w/L - 1 hops; w that fits a span moves nothing (8 heads of 64, fp32)."""
    plan = rs.plan(PATTERN, 32768, ring_size=4, layout="contiguous")
    row = 2 * 8 * 64 * 4
    assert plan.bytes_sent(0) == (8192 // 16) * 3 * row
    plain = rs.plan(rs.Full(), 32768, ring_size=4, layout="contiguous")
    assert plain.bytes_sent(0) == 8192 * 3 * row


def test_16_bit_parcels_and_32_bit_gradients() -> None:
    plans = [rs.plan(rs.Full(), 4096, ring_size=2, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)]
    assert plans[0].bytes_sent(0) == 2 * plans[1].bytes_sent(0)
    gradients = [plan.bytes_sent(0, backward=True) - plan.bytes_sent(0) for plan in plans]
    assert gradients[0] == gradients[1]


def test_a_table() -> None:
    text = str(rs.plan(PATTERN, 32768, ring_size=4, layout="contiguous", causal=True))
    lines = text.splitlines()
    assert "over 4 ranks, contiguous, relay, causal" in lines[0]
    assert lines[1].split() == [
        "rank",
        "rows",
        "tiles",
        "hops",
        "parcels",
        "in",
        "sent",
        "fwd",
        "sent",
        "bwd",
        "work",
        "parcels",
        "peak",
    ]
    assert len(lines) == 6
    assert len(str(rs.plan(PATTERN, 2**20, ring_size=1000)).splitlines()) < 20


def test_memory_falls_with_the_ring() -> None:
    totals = [rs.plan(rs.Full(), 16384, ring_size=k).memory(0, backward=True).total for k in (1, 2, 4, 8)]
    assert totals[3] < totals[2] < totals[1]
    assert totals[3] < 0.6 * totals[2]


def test_a_rank_of_ten_thousand_is_planned_in_milliseconds() -> None:
    pattern = rs.Dilated((2**14, 2**17, 2**20), (1, 8, 64))
    plan = rs.plan(pattern, 10**9, ring_size=10_000, causal=True)
    start = time.process_time()
    plan.rank(4711)
    assert time.process_time() - start < 2  # milliseconds; hours, if it grew with the length or the ring


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_planning_a_rank_costs_no_more_than_its_tiles(layout: str) -> None:
    """For a segment shared by the whole ring: a few checks per part, also for the first and last rank."""
    size = 1000
    ring = rs.plan(rs.Full(), 10**6, ring_size=size, layout=layout, causal=True, heads=1)  # type: ignore[arg-type]
    for rank in (0, size // 2, size - 1):
        original = SharedSegment.nearest
        with mock.patch.object(SharedSegment, "nearest", autospec=True, side_effect=original) as nearest:
            ring.rank(rank)
        assert nearest.call_count <= 24 * size


def test_best_layout_says_why() -> None:
    full = rs.best_layout(rs.Full(), 2**17, 4, causal=True)
    assert full.layout == "zigzag"
    assert str(full).startswith("zigzag: faster")
    assert rs.best_layout(rs.Dilated((512,), (1,)), 4096, 4, causal=True).layout == "contiguous"
    pairs_only = rs.DeviceRates(1e14, 25e9, 20e-6, rs.TileCosts(0, 0, 0, 1))
    assert "both layouts take" in str(rs.best_layout(rs.Dilated((64,), (1,)), 4096, 4, rates=pairs_only))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(ring_size=0), "ring_size=0: a ring has at least 1 rank"),
        (dict(layout="round"), "layout='round': must be"),
        (dict(lengths=(3,)), "lengths add up to 3"),
        (dict(heads=6, kv_heads=4), "the KV heads must divide"),
        (dict(batch=0), "batch=0: must be at least 1"),
        (dict(routing="Relay"), "routing='Relay'"),
    ],
)
def test_bad_input(change: dict, words: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(ValueError, match=words):
        rs.plan(rs.Full(), 4096, **change)


def test_causal_passes_of_an_order_share_no_pairs() -> None:
    """The rows of each branch have an order of their own: the plan counts branch by branch, as the call does."""
    options: dict[str, Any] = dict(ring_size=4, layout="contiguous", order=rs.Hilbert.folded(16))
    pattern, apart = rs.Dilated((64, 256), (1, 2)), rs.TileCosts(0, 0, 0)
    moved = rs.plan(rs.Dilated((60, 240), (1, 2)), 512, causal=True, optimize=apart, **options)
    assert moved.share_computed == 1
    assert rs.plan(pattern, 512, optimize=apart, **options).share_computed < 1, "not causal: one pass"
    with pytest.raises(ValueError, match="moves rows across row 100"):
        rs.plan(pattern, 400, causal=True, **options)
    with pytest.raises(ValueError, match="later rows before earlier ones"):
        rs.plan(pattern, 64, causal=True, order=rs.Hilbert((8, 8)))
