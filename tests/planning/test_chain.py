"""Chains: whatever their levels share, regions and classes hold every pair, as often as the levels see it."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ringspan as rs
from ringspan.geometry import Lane, SegmentBranch
from ringspan.planning.chain import Chain, Region, Sharing, triangle
from ringspan.planning.nesting import CPU_COSTS, GPU_COSTS, costs_for, find_chains, parse_costs
from tests.strategies import examples


@st.composite
def chains(draw: st.DrawFn) -> Chain:
    """Two to four levels that nest, and any way to share their pairs."""
    length, rate = draw(st.sampled_from([4, 8, 12])), 1
    shift = draw(st.integers(0, 50))
    lengths, rates = [length], [rate]
    for _ in range(draw(st.integers(1, 3))):
        lengths.append(lengths[-1] * draw(st.sampled_from([1, 2, 3])))
        rates.append(draw(st.sampled_from([r for r in (1, 2, 3, 4, 6, 12) if r % rates[-1] == 0 and length % r == 0])))
    levels = tuple(
        SegmentBranch(w, r, shift % w, tuple(head % r for head in range(3)))
        for w, r in zip(lengths, rates, strict=True)
    )
    sharing = [Sharing(0)]
    for level in range(1, len(levels)):
        since = draw(st.integers(0, level + 1))
        sharing.append(Sharing(since, since > 0 and since == sharing[-1].since and draw(st.booleans())))
    return Chain(tuple(range(len(levels))), levels, (0, 2), tuple(sharing))


def pairs_of(chain: Chain, region: Region, causal: bool) -> Counter[tuple[int, int, int]]:
    found: Counter[tuple[int, int, int]] = Counter()
    for product in chain.products(region, causal):
        queries, keys = chain.lanes(product.queries, *region.queries), chain.lanes(product.keys, *region.keys)
        if product.mask == "causal":
            queries, keys = triangle(queries, keys)
        for head, (q, k) in enumerate(zip(queries, keys, strict=True)):
            for i in range(q.rows):
                for j in range(min(i + 1, k.rows) if product.mask == "causal" else k.rows):
                    for s in range(region.segments):
                        moved = s * region.stride
                        place = (head, q.start + i * q.step + moved, k.start + j * k.step + moved)
                        found[place] += product.multiplicity
    return found


@examples(300)
@given(chains(), st.integers(0, 40), st.integers(1, 50), st.booleans())
def test_regions_hold_every_pair_as_often_as_levels_see_it(chain: Chain, first: int, rows: int, causal: bool) -> None:
    stop = first + rows
    found = sum((pairs_of(chain, region, causal) for region in chain.own_regions(first, stop, causal)), Counter())
    wanted = Counter(
        (head, p, t)
        for head in chain.heads
        for p in range(first, stop)
        for t in range(first, p + 1 if causal else stop)
        for level in chain.levels
        if level.sees(p, t, head)
    )
    assert found == wanted


@examples(300)
@given(chains(), st.integers(0, 40), st.integers(1, 30), st.integers(0, 20), st.integers(1, 30), st.booleans())
def test_regions_of_two_ranges_do_too(
    chain: Chain, first: int, rows: int, gap: int, others: int, queries_first: bool
) -> None:
    ranges = [(first, first + rows), (first + rows + gap, first + rows + gap + others)]
    queries, keys = ranges if queries_first else reversed(ranges)
    found = sum((pairs_of(chain, region, False) for region in chain.cross_regions(queries, keys)), Counter())
    wanted = Counter(
        (head, p, t)
        for head in chain.heads
        for p in range(*queries)
        for t in range(*keys)
        for level in chain.levels
        if level.sees(p, t, head)
    )
    assert found == wanted


@pytest.mark.parametrize(
    ("lengths", "rates", "numbers"),
    [
        ((2048, 4096, 8192), (1, 2, 4), [(0, 1, 2)]),  # LongNet's own
        ((8192, 2048, 4096), (4, 1, 2), [(1, 2, 0)]),  # in any order
        ((2048, 4096, 8192), (1, 2, 3), [(0, 1), (2,)]),  # 3 is no multiple of 2
        ((2048, 5000), (1, 2), [(0,), (1,)]),  # segments that cut one another
        ((2000, 4000), (1, 3), [(0,), (1,)]),  # rows that differ from segment to segment
        ((512, 2**14), (1, 2), [(0,), (1,)]),  # too few pairs in common
    ],
)
def test_branches_that_nest_are_one_chain(lengths: tuple[int], rates: tuple[int], numbers: list[tuple[int]]) -> None:
    branches = rs.Dilated(lengths, rates).branches(2**15, 2)
    found = find_chains(branches, 2**15, 2**15, False, rs.TileCosts(0, 0, 0))
    assert [chain.numbers for chain in found if isinstance(chain, Chain)] == numbers


def test_no_pair_of_a_nested_pattern_is_computed_twice() -> None:
    pattern = rs.Dilated((2048, 4096, 8192, 16384, 32768), (1, 2, 4, 8, 16))
    n, w = 2**17, 2048
    for ring_size in (1, 4, 8):
        plan = rs.plan(pattern, n, ring_size=ring_size, layout="contiguous", optimize=rs.TileCosts(0, 0, 0, 1))
        seen = sum(plan.work_seen(rank) for rank in range(ring_size))
        computed = sum(plan.work(rank) for rank in range(ring_size))
        assert seen == 8 * sum(n * w // 2**i for i in range(5))
        assert computed == 8 * (
            n * w + sum(n * w // 2**i // 2 for i in range(1, 5))
        )  # only what is not in smaller ones
        assert plan.share_computed == computed / seen < 0.76


def test_short_documents_stay_few_tiles() -> None:
    """Splitting 64 rows would cost more than it saves."""
    pattern = rs.Dilated((16, 32, 64), (1, 2, 4))
    assert len(rs.plan(pattern, 64, heads=1).rank(0).tiles) <= 3


def test_costs_are_chosen_by_device_or_given() -> None:
    assert costs_for("auto", "cpu") == CPU_COSTS == parse_costs(CPU_COSTS.text)
    assert costs_for("auto", "cuda") == GPU_COSTS
    assert costs_for("none", "cpu") is None
    assert costs_for(given := rs.TileCosts(1, 2, 3), "cpu") is given
    with pytest.raises(ValueError, match="optimize='most'"):
        costs_for("most", "cpu")
    with pytest.raises(ValueError, match="row=-1"):
        rs.TileCosts(row=-1)


def test_a_triangle_has_equal_counts() -> None:
    assert triangle([Lane(3, 4, 2)], [Lane(2, 5, 2)]) == ([Lane(3, 4, 2)], [Lane(2, 4, 2)])
