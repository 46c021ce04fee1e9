"""Parcels that know nodes: each enters a node once, whoever else is there; and anybody can pack a parcel."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ringspan as rs
from ringspan.geometry import Documents
from ringspan.layout import Layout
from ringspan.planning import ByNode, RingPlan, TensorSizes, packing_from_sequence, plan_rank
from ringspan.planning.cost import traffic
from tests.exactness import assert_equals_oracle, inputs
from tests.strategies import lengths, patterns, tile_costs

LONG = rs.Dilated((64, 256, 1024), (1, 2, 8))


def ring(routing: object, layout: str = "zigzag", size: int = 16, causal: bool = True) -> RingPlan:
    where = Layout(layout, 1024, size)  # type: ignore[arg-type]
    return RingPlan(LONG, Documents((1024,)), where, causal, routing, TensorSizes(heads=2, kv_heads=2, head_dim=8))  # type: ignore[arg-type]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("per_node", [1, 3, 4])
def test_a_parcel_enters_each_node_once(layout: str, causal: bool, per_node: int) -> None:
    plan = ring(ByNode(per_node), layout, causal=causal)
    entries: Counter[tuple[object, int]] = Counter()
    receivers: set[tuple[object, int]] = set()
    for rank in range(16):
        for hop in plan.rank(rank).hops:
            for message in hop.receives:
                here = rank // per_node
                if here != message.parcel.owner // per_node:
                    receivers.add((message.parcel, here))
                if message.peer // per_node != here:
                    entries[message.parcel, here] += 1
    assert entries == Counter(receivers)
    assert receivers or per_node == 16


@pytest.mark.parametrize("causal", [False, True])
def test_bytes_across_nodes_fall(causal: bool) -> None:
    across = {
        str(routing): traffic(ring(routing, causal=causal), 4).across for routing in ("direct", "relay", ByNode(4))
    }
    assert across["relay by nodes of 4"] < across["relay"] < across["direct"]
    everything = {str(routing): traffic(ring(routing, causal=causal), 4) for routing in ("direct", "relay", ByNode(4))}
    assert len({found.inside + found.across for found in everything.values()}) == 1, "the same bytes, other ways"
    backward = {routing: traffic(ring(routing, causal=causal), 4, backward=True) for routing in ("direct", ByNode(4))}
    assert backward[ByNode(4)].parcels_across == across["relay by nodes of 4"]
    assert 0 < backward[ByNode(4)].gradients_across < 0.7 * backward["direct"].gradients_across


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("per_node", [1, 3, 4])
def test_a_gradient_leaves_each_node_once(layout: str, causal: bool, per_node: int) -> None:
    plan = ring(ByNode(per_node), layout, causal=causal)
    exits: Counter[tuple[object, int]] = Counter()
    receivers: set[tuple[object, int]] = set()
    for rank in range(16):
        for hop in plan.rank(rank).hops:
            for message in hop.gradients_out:
                here = rank // per_node
                if here != message.parcel.owner // per_node:
                    receivers.add((message.parcel, here))
                if message.peer // per_node != here:
                    exits[message.parcel, here] += 1
    assert exits == Counter(receivers)


def test_nodes_make_no_difference_to_results() -> None:
    tensors = inputs(2, 101, 2, 2, 8)
    sim = rs.SimulatedRing(6, routing=ByNode(2))
    assert_equals_oracle(*tensors, ring=sim, pattern=rs.Dilated((16, 101), (1, 3)), causal=True)
    assert sum(counters.bytes_sent for counters in sim.counters) > 0


def test_bad_routings_are_refused() -> None:
    with pytest.raises(ValueError, match="ranks_per_node=0: a node has at least 1 rank"):
        ByNode(0)
    with pytest.raises(ValueError, match="routing='thrown'"):
        rs.SimulatedRing(2, routing="thrown")  # type: ignore[arg-type]


@given(st.data())
def test_any_rank_can_pack_any_parcel(data: st.DataObject) -> None:
    sizes = data.draw(lengths())
    pattern, kv_heads = data.draw(patterns()), data.draw(st.integers(1, 4))
    causal, costs = data.draw(st.booleans()), data.draw(tile_costs())
    layout = Layout(data.draw(st.sampled_from(["contiguous", "zigzag"])), sum(sizes), data.draw(st.integers(1, 6)))
    for rank in range(layout.ring_size):
        held = [row for span in layout.spans(rank) for row in range(span.start, span.stop)]
        for packing in plan_rank(pattern, Documents(sizes), layout, rank, kv_heads, causal, costs=costs).packings:
            found = packing_from_sequence(packing.parcel, pattern, Documents(sizes), layout, kv_heads, causal, costs)
            assert packed(found.combs, list(range(sum(sizes)))) == packed(packing.combs, held)


def packed(combs: object, rows: list[int]) -> dict[tuple[int, int], int]:
    return {
        (mine.head_range[i], place): rows[row]
        for mine, there in combs  # type: ignore[attr-defined]
        for i in range(mine.heads)
        for row, place in zip(mine.lane(i), there.lane(i), strict=True)
    }
