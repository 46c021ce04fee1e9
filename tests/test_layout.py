from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringspan.balance import Balanced
from ringspan.layout import Layout

layouts = st.builds(Layout, st.sampled_from(["contiguous", "zigzag"]), st.integers(0, 60), st.integers(1, 9))
balanced = st.builds(
    lambda lengths, size: Layout("balanced", sum(lengths), size, tuple(lengths)),
    st.lists(st.integers(0, 20), max_size=8),
    st.integers(1, 9),
)


@given(layouts | balanced)
def test_every_row_is_held_once(layout: Layout) -> None:
    held = []
    for rank in range(layout.ring_size):
        local = 0
        for span in layout.spans(rank):
            assert span.local == local
            assert span.start < span.stop
            local += span.stop - span.start
            held += range(span.start, span.stop)
        assert local == layout.rows_of(rank)
    assert sorted(held) == list(range(layout.rows))


@given(layouts)
def test_shards_are_nearly_equal(layout: Layout) -> None:
    rows = [layout.rows_of(rank) for rank in range(layout.ring_size)]
    assert max(rows) - min(rows) <= (1 if layout.name == "contiguous" else 2)


@given(layouts | balanced, st.integers(0, 60), st.integers(0, 60))
def test_parts_say_who_holds_what(layout: Layout, start: int, stop: int) -> None:
    stop = min(stop, layout.rows)
    found = [(row, part.rank) for part in layout.rank_spans(start, stop) for row in range(part.start, part.stop)]
    owner = {
        row: rank
        for rank in range(layout.ring_size)
        for span in layout.spans(rank)
        for row in range(span.start, span.stop)
    }
    assert found == [(row, owner[row]) for row in range(start, stop)]
    parts = list(layout.rank_spans(start, stop))
    assert all(a.rank != b.rank for a, b in pairwise(parts))
    for row, rank in owner.items():
        held = [layout.local_row(each, row) for each in range(layout.ring_size)]
        assert [i for i, local in enumerate(held) if local is not None] == [rank]


def test_equal_layouts_are_equal() -> None:
    assert Layout("zigzag", 10, 2, (4, 6)) == Layout("zigzag", 10, 2)
    assert Layout(Balanced(), 10, 2, (4, 0, 6)) == Layout("balanced", 10, 2, (4, 6))
    assert Layout("balanced", 10, 2, (0, 10)) == Layout("balanced", 10, 2)
    assert Layout("balanced", 80, 4).spans(1) == Layout("zigzag", 80, 4).spans(1)


def test_zigzag_gives_each_rank_an_early_and_a_late_part() -> None:
    spans = [[(s.start, s.stop) for s in Layout("zigzag", 80, 4).spans(rank)] for rank in range(4)]
    assert spans == [[(0, 10), (70, 80)], [(10, 20), (60, 70)], [(20, 30), (50, 60)], [(30, 50)]]


def test_a_rank_of_a_huge_ring_costs_nothing() -> None:
    layout = Layout("zigzag", 10**9, 10**6)
    assert layout.rows_of(123_456) == 1000
    assert len(list(layout.rank_spans(5 * 10**8, 5 * 10**8 + 10_000))) == 20


def test_refusals() -> None:
    with pytest.raises(ValueError, match="layout='spiral': must be 'contiguous' or 'zigzag'"):
        Layout("spiral", 4, 2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="ring_size=0: a ring has at least 1 rank"):
        Layout("zigzag", 4, 0)
    with pytest.raises(ValueError, match=r"rank=2"):
        Layout("zigzag", 4, 2).spans(2)
