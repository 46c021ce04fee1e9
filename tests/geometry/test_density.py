"""Pairs in cells equal a count pair by pair."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringspan.geometry import SegmentBranch, WindowBranch
from ringspan.geometry.density import pairs_in_cells


@st.composite
def branches(draw: st.DrawFn) -> SegmentBranch | WindowBranch:
    rate = draw(st.integers(1, 5))
    if draw(st.booleans()):
        left, right = (rate * draw(st.integers(0, 6)) for _ in range(2))
        return WindowBranch(left, right, rate if left or right else 1)
    length = draw(st.integers(1, 20))
    offsets = tuple(head % rate for head in range(2))
    return SegmentBranch(length, rate, draw(st.integers(0, length - 1)), offsets)


@given(branch=branches(), cuts=st.lists(st.integers(0, 40), min_size=2, max_size=8, unique=True), causal=st.booleans())
@pytest.mark.parametrize("heads", [(0,), (0, 1)])
def test_cells_hold_what_is_seen_pair_by_pair(
    heads: tuple[int, ...], branch: SegmentBranch | WindowBranch, cuts: list[int], causal: bool
) -> None:
    cells = list(pairwise(sorted(cuts)))
    queries, keys = cells[: len(cells) // 2 + 1], cells[len(cells) // 3 :]
    for rows, line in zip(queries, pairs_in_cells(branch, queries, keys, heads, causal=causal), strict=True):
        for columns, count in zip(keys, line, strict=True):
            assert count == sum(
                branch.sees(p, t, head) and not (causal and t > p)
                for head in heads
                for p in range(*rows)
                for t in range(*columns)
            )
