"""Plans of rings: every pair is computed once by one rank, and what is awaited is sent, to those who need it only."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ringspan as rs
from ringspan.geometry import Documents
from ringspan.layout import Layout
from ringspan.oracle import multiplicity
from ringspan.planning import Hop, Parcel, RankPlan, plan_rank
from tests.strategies import examples, lengths, patterns, routings, tile_costs


@st.composite
def rings(draw: st.DrawFn) -> tuple[list[RankPlan], Layout, dict]:  # type: ignore[type-arg]
    """The plans of all ranks of a random ring, and what they must compute."""
    sizes = draw(lengths())
    layout = Layout(draw(st.sampled_from(["contiguous", "zigzag"])), sum(sizes), draw(st.integers(1, 6)))
    pattern, kv_heads, causal = draw(patterns()), draw(st.integers(1, 5)), draw(st.booleans())
    routing, costs = draw(routings()), draw(tile_costs())
    plans = [
        plan_rank(pattern, Documents(sizes), layout, rank, kv_heads, causal, routing, costs)
        for rank in range(layout.ring_size)
    ]
    count = multiplicity(pattern, sum(sizes), kv_heads, causal=causal, lengths=sizes)
    wanted = {tuple(index): count[tuple(index)].item() for index in count.nonzero().tolist()}
    return plans, layout, wanted


def rows_held(layout: Layout, rank: int) -> list[int]:
    return [row for span in layout.spans(rank) for row in range(span.start, span.stop)]


def parcel_contents(plans: list[RankPlan], layout: Layout) -> dict[Parcel, dict[tuple[int, int], int]]:
    """For each parcel, which row of the sequence lies at (head, place), as its owner packs it."""
    contents: dict[Parcel, dict[tuple[int, int], int]] = {}
    for plan in plans:
        held = rows_held(layout, plan.rank)
        for packing in plan.packings:
            places: dict[tuple[int, int], int] = {}
            for own, there in packing.combs:
                for i in range(own.heads):
                    for row, place in zip(own.lane(i), there.lane(i), strict=True):
                        places[own.head_range[i], place] = held[row]
            assert sorted(place for _, place in places) == list(range(packing.parcel.rows))
            contents[packing.parcel] = places
    return contents


@examples(300)
@given(rings())
def test_every_pair_is_computed_once_by_one_rank(ring: tuple) -> None:  # type: ignore[type-arg]
    plans, layout, wanted = ring
    contents = parcel_contents(plans, layout)
    pairs: Counter[tuple[int, int, int]] = Counter()
    for plan in plans:
        held = rows_held(layout, plan.rank)
        for tile in plan.tiles:
            for i in range(tile.queries.heads):
                head = tile.queries.head_range[i]
                queries = [held[row] for row in tile.queries.lane(i)]
                if tile.parcel is None:
                    keys = [held[row] for row in tile.keys.lane(i)]
                else:
                    keys = [contents[tile.parcel][head, place] for place in tile.keys.lane(i)]
                for s in range(tile.queries.segments):
                    for a in range(tile.queries.rows):
                        first = a if tile.mask == "anticausal" else 0
                        for b in range(first, a + 1 if tile.mask == "causal" else tile.keys.rows):
                            pairs[head, queries[s * tile.queries.rows + a], keys[s * tile.keys.rows + b]] += (
                                tile.multiplicity
                            )
    assert pairs == wanted
    assert sum(plan.pairs_seen for plan in plans) == sum(wanted.values())
    assert sum(plan.pairs for plan in plans) >= len(wanted)


@examples(300)
@given(rings())
def test_what_is_awaited_is_sent_and_only_where_it_is_needed(ring: tuple) -> None:  # type: ignore[type-arg]
    plans, layout, _ = ring
    sent: Counter[tuple] = Counter()  # type: ignore[type-arg]
    awaited: Counter[tuple] = Counter()  # type: ignore[type-arg]
    going_home: Counter[tuple] = Counter()  # type: ignore[type-arg]
    coming_home: Counter[tuple] = Counter()  # type: ignore[type-arg]
    for plan in plans:
        has = {packing.parcel: 0 for packing in plan.packings}
        assert plan.hops[0] == Hop(tiles=plan.hops[0].tiles), "nothing travels for hop 0"
        for number, hop in enumerate(plan.hops):
            for message in hop.sends:
                assert has[message.parcel] < number, "a parcel is passed on before it has arrived"
            used = {tile.parcel for tile in hop.tiles if tile.parcel is not None}
            assert used == {message.parcel for message in hop.receives}
            has |= {message.parcel: number for message in hop.receives}
            sent.update((plan.rank, m.peer, number, m.parcel) for m in hop.sends)
            awaited.update((m.peer, plan.rank, number, m.parcel) for m in hop.receives)
            going_home.update((plan.rank, m.peer, number, m.parcel) for m in hop.gradients_out)
            coming_home.update((m.peer, plan.rank, number, m.parcel) for m in hop.gradients_in)
            assert [m.parcel for m in hop.gradients_out] == [m.parcel for m in hop.receives]
            passed_on = [m.parcel for m in hop.gradients_in if m.parcel.owner != plan.rank]
            assert not any(parcel in has for parcel in passed_on), "a gradient comes after its parcel was used"
            for branch in {message.parcel.branch for message in hop.receives}:
                arriving = sum(m.parcel.rows for m in hop.receives if m.parcel.branch == branch)
                longest = max(layout.rows_of(rank) for rank in range(layout.ring_size))
                # A span can be cut at both ends: then rows of two segments arrive at once.
                assert arriving <= 2 * longest * plan.kv_heads, "more than two shards' worth arrives at one hop"
    assert sent == awaited
    assert going_home == coming_home
    assert set(sent.values()) <= {1}


@given(rings())
def test_messages_between_two_ranks_are_listed_in_one_order(ring: tuple) -> None:  # type: ignore[type-arg]
    plans, _, _ = ring
    for a in plans:
        for b in plans:
            for number in range(min(len(a.hops), len(b.hops))):
                sends = [m.parcel for m in a.hops[number].sends if m.peer == b.rank]
                receives = [m.parcel for m in b.hops[number].receives if m.peer == a.rank]
                assert sends == receives
                going = [m.parcel for m in a.hops[number].gradients_out if m.peer == b.rank]
                coming = [m.parcel for m in b.hops[number].gradients_in if m.peer == a.rank]
                assert going == coming


@given(rings())
def test_fresh_tiles_are_the_first_for_their_rows(ring: tuple) -> None:  # type: ignore[type-arg]
    plans, _, _ = ring
    for plan in plans:
        touched: set[tuple[int, int]] = set()
        started: set[tuple[int, int]] = set()
        for tile in plan.tiles:
            comb = tile.queries
            rows = {(head, row) for i, head in enumerate(comb.head_range) for row in comb.lane(i)}
            if tile.fresh:
                assert not rows & touched
                started |= rows
            touched |= rows
        assert plan.fresh_everywhere == (len(started) == plan.rows * plan.kv_heads)


def whole(pattern: rs.Pattern, n: int, kv_heads: int, causal: bool = True) -> RankPlan:
    return plan_rank(pattern, Documents((n,)), Layout("contiguous", n, 1), 0, kv_heads, causal)


@pytest.mark.parametrize("shift", [0, 1000])
@pytest.mark.parametrize("head_offsets", ["interleaved", "blocked"])
@pytest.mark.parametrize("kv_heads", [1, 8, 12])
def test_tiles_do_not_multiply_with_length(kv_heads: int, head_offsets: str, shift: int) -> None:
    widths, rates = (1024, 2048, 3000), (1, 2, 16)
    pattern = rs.Dilated(widths, rates, head_offsets=head_offsets, shift=shift)  # type: ignore[arg-type]
    counts = [len(whole(pattern, n, kv_heads).tiles) for n in (2**12, 2**20, 2**30)]
    head_groups = sum(2 * -(-kv_heads // rate) + min(rate, kv_heads) for rate in rates)
    assert max(counts) <= 3 * head_groups
    assert abs(counts[2] - counts[1]) <= 2 * head_groups


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_a_rank_of_a_large_ring_has_a_small_plan(layout: str) -> None:
    pattern = rs.Dilated((2**16, 2**20, 2**24), (1, 16, 256))
    n, size = 2**30, 4096
    counts = []
    for rank in (0, 17, size // 2, size - 1):
        plan = plan_rank(pattern, Documents((n,)), Layout(layout, n, size), rank, 8, True)  # type: ignore[arg-type]
        counts.append(len(plan.tiles))
    # A segment of 2**24 rows is shared by 64 ranks (128 parts in zigzag), once for each span and head group.
    assert max(counts) <= 2 * 2 * 128 * 4


def test_segments_that_fit_a_span_move_nothing() -> None:
    pattern = rs.Dilated((256, 1024), (1, 2))
    for rank in range(4):
        plan = plan_rank(pattern, Documents((4096,)), Layout("contiguous", 4096, 4), rank, 2, True)
        assert len(plan.hops) == 1
        assert not plan.packings


def test_equal_documents_are_one_tile() -> None:
    one = Layout("contiguous", 48_000, 1)
    plan = plan_rank(rs.Dilated((64,), (1,)), Documents((48,) * 1000), one, 0, 4, True)
    assert len(plan.tiles) == 1
    assert plan.tiles[0].queries.segments == 1000


def test_long_plans_are_exact_in_the_large() -> None:
    n, w, r = 2**30, 2**15, 2**4
    assert whole(rs.Dilated((w,), (r,)), n, 1, causal=False).pairs == n // w * (w // r) ** 2
