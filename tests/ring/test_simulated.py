"""Simulated rings against the dense oracle, and against no ring at all."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import ringspan as rs
from ringspan import execute, planning
from ringspan.oracle import dense_attention
from ringspan.ring.backend import find_ring
from tests.exactness import assert_equals_oracle, inputs
from tests.strategies import examples, held_heads, lengths, patterns, routings, scales, sinks, softcaps, tile_costs

pytestmark = pytest.mark.filterwarnings("ignore:.*selects row")


@examples(250)
@given(st.data())
def test_equals_the_oracle(data: st.DataObject) -> None:
    sizes = data.draw(lengths(longest=60))
    kv_heads, group, batch = data.draw(st.tuples(st.integers(1, 4), st.integers(1, 2), st.integers(1, 2)))
    pattern = data.draw(patterns().flatmap(lambda p: held_heads(p, kv_heads)))
    ring = rs.SimulatedRing(
        data.draw(st.integers(2, 8)),
        data.draw(st.sampled_from(["contiguous", "zigzag"])),
        data.draw(routings()),
    )
    q, k, v = inputs(batch, sum(sizes), kv_heads, group, 4)
    options = dict(pattern=pattern, causal=data.draw(st.booleans()), lengths=sizes, scale=data.draw(scales()))
    options |= dict(softcap=data.draw(softcaps()), sinks=data.draw(sinks(q)))
    assert_equals_oracle(q, k, v, ring=ring, optimize=data.draw(tile_costs()) or "none", **options)


def error(k: int, dtype: torch.dtype, tensors: list[Tensor], right: list[Tensor], pattern: rs.Pattern) -> list[float]:
    low = [x.detach().to(dtype).requires_grad_() for x in tensors]
    out = rs.attention(*low, pattern=pattern, causal=True, ring=rs.SimulatedRing(k))
    found = [out, *torch.autograd.grad(out.float().square().sum(), low)]
    return [((x.double() - y).norm() / y.norm()).item() for x, y in zip(found, right, strict=True)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pattern", [rs.Full(), rs.Dilated((32, 512), (1, 4))], ids=["full", "dilated"])
def test_the_error_does_not_grow_with_the_ring(pattern: rs.Pattern, dtype: torch.dtype) -> None:
    tensors = [x.detach().to(dtype).double().requires_grad_() for x in inputs(1, 512, 2, 1, 32)]
    out, _ = dense_attention(*tensors, pattern=pattern, causal=True)
    right = [out, *torch.autograd.grad(out.square().sum(), tensors)]
    alone = error(1, dtype, tensors, right, pattern)
    for k in range(2, 9):
        for one, many in zip(alone, error(k, dtype, tensors, right, pattern), strict=True):
            assert many <= 1.25 * one


@pytest.mark.parametrize("routing", ["relay", "direct", rs.ByNode(2)], ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("causal", [False, True])
def test_counters_equal_the_plan(layout: str, routing: str, causal: bool) -> None:
    pattern = rs.Dilated((16, 64, 200), (1, 2, 3), shift=5)
    q, k, v = inputs(2, 301, 2, 2, 4)
    sim = rs.SimulatedRing(5, layout, routing)  # type: ignore[arg-type]
    plan = rs.plan(
        pattern,
        301,
        ring_size=5,
        layout=layout,
        routing=routing,
        causal=causal,
        batch=2,
        heads=4,
        kv_heads=2,
        head_dim=4,
        dtype=torch.float64,
    )  # type: ignore[call-overload]
    out = rs.attention(q, k, v, pattern=pattern, causal=causal, ring=sim)
    assert [c.bytes_sent for c in sim.counters] == [plan.bytes_sent(r) for r in range(5)]
    assert [c.bytes_received for c in sim.counters] == [plan.bytes_received(r) for r in range(5)]
    for rank, counters in enumerate(sim.counters):
        assert plan.memory(rank).parcels <= counters.peak_parcel_bytes <= 1.05 * plan.memory(rank).parcels
        assert counters.live_parcel_bytes == 0
    sim.reset_counters()
    out.sum().backward()
    assert [c.bytes_sent for c in sim.counters] == [plan.bytes_sent(r, backward=True) for r in range(5)]
    assert [c.bytes_received for c in sim.counters] == [plan.bytes_received(r, backward=True) for r in range(5)]
    for rank, counters in enumerate(sim.counters):
        predicted = plan.memory(rank, backward=True).parcels
        assert 0.8 * predicted <= counters.peak_parcel_bytes <= 1.05 * predicted
        assert counters.live_parcel_bytes == 0


@pytest.mark.parametrize("routing", ["relay", "direct", rs.ByNode(2)], ids=str)
def test_the_plan_counts_parcels_that_wait_to_be_forwarded(routing: rs.Routing) -> None:
    """In a zigzag ring of 8, some ranks receive a parcel at hop 1 and forward it at hop 6."""
    pattern = rs.Dilated((20, 200), (1, 4))
    sim = rs.SimulatedRing(8, "zigzag", routing)
    plan = rs.plan(pattern, 290, ring_size=8, routing=routing, causal=True, heads=4, head_dim=8)
    tensors = [torch.randn(1, 290, 4, 8, requires_grad=True) for _ in range(3)]
    out = rs.attention(*tensors, pattern=pattern, causal=True, ring=sim)
    for backward in (False, True):
        if backward:
            sim.reset_counters()
            out.sum().backward()
        for rank, counters in enumerate(sim.counters):
            predicted = plan.memory(rank, backward=backward).parcels
            assert predicted <= counters.peak_parcel_bytes <= 1.05 * predicted


def test_tensors_are_not_live_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def plan_rank(*arguments: Any) -> Any:
        if arguments[3] == 2:
            raise RuntimeError("no plan")
        return planning.plan_rank(*arguments)

    monkeypatch.setattr(execute, "plan_rank", plan_rank)
    sim = rs.SimulatedRing(4)
    with pytest.raises(RuntimeError, match="no plan"):
        rs.attention(*inputs(1, 64, 2, 1, 8), pattern=rs.Full(), ring=sim)
    assert [counters.live_bytes for counters in sim.counters] == [0, 0, 0, 0]


def test_live_bytes_of_a_virtual_rank_fall_with_the_ring() -> None:
    q, k, v = inputs(1, 4096, 2, 1, 32)
    peaks = []
    for size in (1, 2, 4, 8):
        sim = rs.SimulatedRing(size)
        rs.attention(q, k, v, pattern=rs.Full(), causal=True, ring=sim).sum().backward()
        peaks.append(max(counters.peak_bytes for counters in sim.counters))
        assert all(counters.live_bytes == 0 for counters in sim.counters)
    rows = 4096 * 2 * (8 * 32 + 1) * 8  # q, k, v, out, its gradient, dq, dk, dv and lse
    assert rows < peaks[0] < rows + 16 * 2**20 + 2**20
    assert all(later < 0.75 * earlier for earlier, later in pairwise(peaks))


def test_changing_a_token_changes_what_may_see_it_and_nothing_else() -> None:
    pattern, n = rs.Dilated((16, 64), (1, 4)), 128
    q, k, v = (x.detach() for x in inputs(1, n, 4, 1, 8))
    ring = rs.SimulatedRing(4, "contiguous")
    before = rs.attention(q, k, v, pattern=pattern, causal=True, ring=ring)
    t = 36  # on rank 1; head 0 selects it in the branch (64, 4), whose segment reaches into ranks 0 and 1
    k[:, t] += 1
    v[:, t] += 1
    after = rs.attention(q, k, v, pattern=pattern, causal=True, ring=ring)
    changed = (before != after).any(-1)[0]
    for p in range(n):
        for head in range(4):
            assert bool(changed[p, head]) == bool(pattern.sees(p, t, head=head, kv_heads=4, causal=True))


def test_only_q_needs_gradients_then_none_travel() -> None:
    q, k, v = inputs(1, 50, 2, 1, 4)
    sim = rs.SimulatedRing(3)
    out = rs.attention(q, k.detach(), v.detach(), pattern=rs.Full(), ring=sim)
    sent = [c.bytes_sent for c in sim.counters]
    out.sum().backward()
    assert [c.bytes_sent for c in sim.counters] == [2 * b for b in sent]


def test_refusals() -> None:
    with pytest.raises(ValueError, match="size=0: a ring has at least 1 rank"):
        rs.SimulatedRing(0)
    with pytest.raises(ValueError, match="routing='thrown'"):
        rs.SimulatedRing(2, routing="thrown")  # type: ignore[arg-type]
    q, k, v = inputs(1, 8, 1, 1, 4)
    with pytest.raises(rs.RingError, match="seq_len=9, but the tensors have 8 rows"):
        rs.attention(q, k, v, pattern=rs.Full(), ring=rs.SimulatedRing(2), seq_len=9)


def test_a_ring_that_nobody_keeps_lives_until_backward() -> None:
    q, k, v = inputs(1, 8, 1, 1, 4)
    rs.attention(q, k, v, pattern=rs.Full(), ring=rs.SimulatedRing(2)).sum().backward()
    assert q.grad is not None


def test_a_ring_that_is_gone_is_named() -> None:
    with pytest.raises(rs.RingError, match="ring 'Ring 77777' no longer exists"):
        find_ring("Ring 77777")
