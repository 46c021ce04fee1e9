"""Reach against the plans themselves: a branch crosses ranks exactly if its rows are sent."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ringspan as rs
from ringspan.geometry import WindowBranch
from ringspan.layout import LayoutName
from tests.strategies import windows


@st.composite
def rings(draw: st.DrawFn) -> tuple[rs.Pattern, tuple[int, ...], int, LayoutName, int, bool]:
    whole = st.integers(1, 60)
    branches = draw(st.lists(st.tuples(whole, st.integers(1, 20)), min_size=1, max_size=3))
    lengths, rates = zip(*branches, strict=True)
    offsets = draw(st.sampled_from(["interleaved", "blocked"]))
    dilated = rs.Dilated(lengths, rates, offsets, draw(st.integers(0, 70)))
    window = draw(windows())
    pattern = draw(st.sampled_from([rs.Full(), dilated, window, window + dilated]))
    documents = tuple(draw(st.lists(st.integers(0, 60), min_size=1, max_size=3)))
    layout = draw(st.sampled_from(["contiguous", "zigzag"]))
    return pattern, documents, draw(st.integers(1, 7)), layout, draw(st.integers(1, 4)), draw(st.booleans())


@given(rings())
def test_a_branch_crosses_ranks_exactly_if_it_sends(
    ring: tuple[rs.Pattern, tuple[int, ...], int, LayoutName, int, bool],
) -> None:
    pattern, lengths, size, layout, kv_heads, causal = ring
    rows = sum(lengths)
    options = dict(lengths=lengths, heads=kv_heads, kv_heads=kv_heads, optimize="none")  # each branch sends for itself
    plan = rs.plan(pattern, rows, ring_size=size, layout=layout, causal=causal, **options)  # type: ignore[arg-type]
    sent = {m.parcel.branch for rank in range(size) for hop in plan.rank(rank).hops for m in hop.sends}
    branches = [
        branch.up_to_own_row() if causal and isinstance(branch, WindowBranch) else branch
        for branch in pattern.branches(max(lengths))
    ]
    reaches = [min(branch.reach, max(lengths)) for branch in branches]
    assert plan.reach.crossing == tuple(reaches[branch] for branch in sorted(sent))
    assert plan.reach.longest == max(reaches)


@pytest.mark.parametrize("n", [1, 2047, 2048, 2049, 5000, 32768, 2**20, 10**9])
def test_the_spanning_pattern_reaches_every_length(n: int) -> None:
    pattern = rs.Dilated.spanning(n)
    assert pattern.segment_lengths[-1] == n
    assert pattern.segment_lengths[0] == min(n, 2048)
    assert pattern.dilation_rates[0] == 1
    for shorter, longer in zip(pattern.segment_lengths, pattern.segment_lengths[1:], strict=False):
        assert 4 * shorter == longer or (longer == n and longer >= shorter)
    for length, rate in zip(pattern.segment_lengths, pattern.dilation_rates, strict=True):
        assert min(length, 2048) <= -(-length // rate) < 4096


def test_ten_thousand_ranks_are_looked_through_in_a_moment() -> None:
    n = 10**9
    plan = rs.plan(rs.Dilated((2000, 100_000), (1, 50)), n, ring_size=10_000, layout="contiguous", causal=True)
    assert not plan.reach.crossing
    assert "No branch crosses ranks" in str(plan.reach)
