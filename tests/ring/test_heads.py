"""Rings with head ranks, simulated: against the dense oracle, and counters against the plan."""

import pickle
from itertools import chain
from math import lcm
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ringspan as rs
from ringspan import planning
from ringspan.layout import Layout
from ringspan.planning.heads import HeadLayout, with_head_ranks
from tests.exactness import assert_equals_oracle, inputs
from tests.strategies import examples, held_heads, lengths, patterns, scales, sinks, softcaps

pytestmark = pytest.mark.filterwarnings("ignore:.*selects row")
LAYOUTS = ["contiguous", "zigzag", "balanced"]


@examples(250)
@given(st.data())
def test_equals_the_oracle(data: st.DataObject) -> None:
    """KV heads are divided by the head ranks, or replicated; query heads are always divided."""
    shards, head_ranks = data.draw(st.tuples(st.integers(1, 4), st.integers(2, 4)))
    sizes = data.draw(lengths(longest=60))
    divisors = [d for d in range(1, head_ranks + 1) if head_ranks % d == 0]
    kv_heads = data.draw(st.sampled_from([*divisors, 2 * head_ranks]))
    group = lcm(kv_heads, head_ranks) // kv_heads * data.draw(st.integers(1, 2))
    pattern = data.draw(patterns().flatmap(lambda p: held_heads(p, kv_heads)))
    nodes = [rs.ByNode(head_ranks), rs.ByNode(2 * head_ranks)]
    ring = rs.SimulatedRing(
        shards * head_ranks,
        data.draw(st.sampled_from(LAYOUTS)),
        data.draw(st.sampled_from(["relay", "direct", *nodes])),
        head_ranks,
    )
    q, k, v = inputs(data.draw(st.integers(1, 2)), sum(sizes), kv_heads, group, 4)
    options = dict(pattern=pattern, causal=data.draw(st.booleans()), lengths=sizes, scale=data.draw(scales()))
    options |= dict(softcap=data.draw(softcaps()), sinks=data.draw(sinks(q)))
    assert_equals_oracle(q, k, v, ring=ring, **options)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (8, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize(("shards", "head_ranks"), [(1, 4), (2, 4), (3, 2), (3, 4)])
def test_counters_equal_the_plan(shards: int, head_ranks: int, heads: int, kv_heads: int, dtype: torch.dtype) -> None:
    pattern, n, size = rs.Dilated((16, 64, 200), (1, 2, 3), shift=5), 301, shards * head_ranks
    tensors = inputs(2, n, kv_heads, heads // kv_heads, 8, dtype)
    sim = rs.SimulatedRing(size, head_ranks=head_ranks)
    shape: dict[str, Any] = dict(batch=2, heads=heads, kv_heads=kv_heads, head_dim=8, dtype=dtype)
    plan = rs.plan(pattern, n, ring_size=size, head_ranks=head_ranks, causal=True, **shape)
    out = rs.attention(*tensors, pattern=pattern, causal=True, ring=sim)
    for backward in (False, True):
        if backward:
            sim.reset_counters()
            out.sum().backward()
        for rank, counters in enumerate(sim.counters):
            assert counters.bytes_sent == plan.bytes_sent(rank, backward=backward)
            assert counters.bytes_received == plan.bytes_received(rank, backward=backward)
            assert counters.live_parcel_bytes == counters.live_bytes == 0
            memory = plan.memory(rank, backward=backward)
            assert 0.5 * memory.total <= counters.peak_bytes <= memory.total + 2**20
            assert counters.peak_parcel_bytes <= 1.05 * memory.parcels
    whole = rs.plan(pattern, n, causal=True, **shape)
    assert sum(plan.work(rank) for rank in range(size)) == whole.work(0)


def test_bytes_do_not_depend_on_what_the_loss_uses() -> None:
    """Otherwise ranks whose losses use different outputs would not agree on messages."""
    sent = []
    for use in (lambda out, lse: out.sum(), lambda out, lse: lse.sum(), lambda out, lse: out.sum() + lse.sum()):
        sim = rs.SimulatedRing(4, head_ranks=2)
        out, lse = rs.attention(*inputs(1, 30, 2, 1, 4), pattern=rs.Full(), ring=sim, return_lse=True)
        sim.reset_counters()
        use(out, lse).backward()
        sent.append([counters.bytes_sent for counters in sim.counters])
    assert sent[0] == sent[1] == sent[2]


@pytest.mark.parametrize("causal", [False, True])
def test_orders(causal: bool) -> None:
    """An order must not move rows across shards; it may move them across the head ranks of a shard."""
    ring = rs.SimulatedRing(6, "contiguous", head_ranks=3)
    q, k, v = inputs(1, 64, 3, 2, 4)
    options: dict[str, Any] = dict(pattern=rs.Dilated((8, 24, 64), (1, 2, 3)), causal=causal)
    assert_equals_oracle(q, k, v, ring=ring, order=rs.Hilbert.folded(32), **options)
    with pytest.raises(ValueError, match="moves rows across row 32, where rank 1 of 2 starts"):
        rs.attention(q, k, v, ring=ring, order=rs.Hilbert.folded(60), **options)


def test_replicated_kv_heads_are_summed_in_the_accumulation_dtype() -> None:
    tensors = inputs(1, 200, 1, 8, 8, torch.bfloat16)
    right = [x.detach().double().requires_grad_() for x in tensors]
    weights = torch.randn(1, 200, 8, 8, dtype=torch.bfloat16)
    (rs.attention(*right, pattern=rs.Full()) * weights).sum().backward()
    errors = []
    for ring in (None, rs.SimulatedRing(8, head_ranks=8)):
        own = [x.detach().requires_grad_() for x in tensors]
        (rs.attention(*own, pattern=rs.Full(), ring=ring) * weights).sum().backward()
        errors.append([(x.grad.double() - y.grad).norm() / y.grad.norm() for x, y in zip(own, right, strict=True)])  # type: ignore[union-attr]
    assert all(many <= 1.1 * alone for alone, many in zip(*errors, strict=True))


@given(
    st.integers(0, 50), st.integers(1, 4), st.integers(1, 4), st.sampled_from(LAYOUTS), st.integers(0, 50), st.data()
)
def test_layout(rows: int, shards: int, head_ranks: int, name: Any, start: int, data: st.DataObject) -> None:
    """Head ranks hold the stored rows of their shard, in order and in nearly equal parts."""
    plain = Layout(name, rows, shards)
    layout = with_head_ranks(plain, head_ranks)
    held = [[row for s in layout.spans(r) for row in range(s.start, s.stop)] for r in range(shards * head_ranks)]
    for rank, own in enumerate(held):
        assert layout.rows_of(rank) == len(own)
        assert [span.local for span in layout.spans(rank)] == [own.index(s.start) for s in layout.spans(rank)]
    for shard in range(shards):
        parts = held[shard * head_ranks : (shard + 1) * head_ranks]
        assert list(chain(*parts)) == [row for s in plain.spans(shard) for row in range(s.start, s.stop)]
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
    stop = data.draw(st.integers(start, max(start, rows)))
    found = [(row, part.rank) for part in layout.rank_spans(start, stop) for row in range(part.start, part.stop)]
    owner = {row: rank for rank, own in enumerate(held) for row in own}
    assert found == [(row, owner[row]) for row in range(start, min(stop, rows))]


def test_other_calls() -> None:
    sim = pickle.loads(pickle.dumps(rs.SimulatedRing(6, head_ranks=2)))
    assert repr(sim) == "SimulatedRing(6, layout='zigzag', routing='relay', head_ranks=2)"
    q, k, v = (x.detach() for x in inputs(1, 31, 1, 2, 4))
    weights = [rs.attention_weights(q[:, 5:7], k, pattern=rs.Full(), rows=(5, 6), ring=ring) for ring in (None, sim)]
    torch.testing.assert_close(*weights, rtol=0, atol=1e-12)
    assert rs.attention(q[:0], k[:0], v[:0], pattern=rs.Full(), ring=sim).shape == (0, 31, 2, 4)


def test_the_plan_says_what_pays() -> None:
    """Heads move less than a long ring of full attention, and more than local segments, which send nothing."""
    shape: dict[str, Any] = dict(heads=32, kv_heads=8, head_dim=128, dtype=torch.bfloat16)
    for pattern, less in ((rs.Full(), True), (rs.Dilated((1024,), (1,)), False)):
        plain, heads = (
            rs.plan(pattern, 2**16, ring_size=16, head_ranks=u, layout="contiguous", **shape) for u in (1, 8)
        )
        assert (heads.bytes_sent(3) < plain.bytes_sent(3)) == less
        assert heads.bytes_sent(3, backward=True) > 0
        advice = rs.best_layout(pattern, 2**14, 16, head_ranks=(1, 2, 4, 8), **shape)
        assert (advice.head_ranks > 1) == less
    assert "8 head ranks" in str(heads)
    assert "only heads are exchanged" in str(heads.reach)
    assert sum(e.sent for e in heads.exchanges(0)) == heads.bytes_sent(0)
    assert plain.exchanges(0) == ()


def test_across_nodes() -> None:
    """With the ranks of a node as head ranks, nodes exchange only parcels, each once."""
    plan = rs.plan(rs.Full(), 4096, ring_size=16, head_ranks=4, layout="contiguous", heads=8)
    moved = planning.cost.traffic(plan, 4)
    parcels = 3 * 4096 * plan.sizes.parcel_row_bytes * plan.sizes.kv_heads
    assert moved.across == parcels
    assert moved.inside == sum(e.sent for rank in range(16) for e in plan.exchanges(rank))
    with pytest.raises(ValueError, match=r"ByNode\(3\) with head_ranks=4"):
        planning.cost.traffic(plan, 3)


def test_refusals() -> None:
    for size, head_ranks in ((4, 3), (4, 0), (2, 4)):
        with pytest.raises(ValueError, match=f"head_ranks={head_ranks}, but the ring has {size} ranks"):
            rs.SimulatedRing(size, head_ranks=head_ranks)
        with pytest.raises(ValueError, match=f"head_ranks={head_ranks}"):
            rs.plan(rs.Full(), 64, ring_size=size, head_ranks=head_ranks)
    with pytest.raises(ValueError, match=r"ByNode\(3\) with head_ranks=2"):
        rs.SimulatedRing(4, routing=rs.ByNode(3), head_ranks=2)
    with pytest.raises(ValueError, match=r"head_ranks=\(\)"):
        rs.best_layout(rs.Full(), 64, 4, head_ranks=())
    for kv_heads, group, stem in ((3, 2, "6 query heads over 4"), (3, 4, "3 KV heads over 4"), (6, 2, "6 KV heads")):
        with pytest.raises(ValueError, match=stem):
            rs.attention(*inputs(1, 16, kv_heads, group, 4), pattern=rs.Full(), ring=rs.SimulatedRing(4, head_ranks=4))
        with pytest.raises(ValueError, match=stem):
            rs.plan(rs.Full(), 16, ring_size=4, head_ranks=4, heads=kv_heads * group, kv_heads=kv_heads)
    with pytest.raises(ValueError, match="draw_schedule over a ring with head_ranks=2"):
        rs.draw.draw_schedule(rs.plan(rs.Full(), 64, ring_size=4, head_ranks=2))
    with pytest.raises(ValueError, match="rank=4: must be in 0"):
        HeadLayout("zigzag", 16, 4, head_ranks=2).spans(4)
