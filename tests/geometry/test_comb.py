import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringspan.geometry import Comb, Documents, Lane, SegmentBranch, group_heads, segment_runs


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3)), min_size=1, max_size=12), st.integers(1, 3))
def test_grouping_keeps_every_row_of_every_head(heads: list[tuple[int, int]], segments: int) -> None:
    lanes = [Lane(start, rows, 2) for start, rows in heads]
    other = [Lane(7 - start % 7, rows, 1) for start, rows in heads]
    found = {}
    for comb, twin in group_heads(lanes, other, segments=segments, stride=50):
        assert comb.head_range == twin.head_range
        for i in range(comb.heads):
            assert comb.head_range[i] not in found
            found[comb.head_range[i]] = comb.lane(i)
    for head, lane in enumerate(lanes):
        rows = tuple(lane.start + 50 * s + 2 * j for s in range(segments) for j in range(lane.rows))
        assert found.get(head, ()) == rows


@given(st.integers(0, 60), st.integers(0, 60), st.integers(1, 20), st.integers(0, 25), st.integers(1, 5))
def test_pieces_cover_a_stretch_and_lanes_select_its_rows(
    start: int, rows: int, width: int, shift: int, rate: int
) -> None:
    branch = SegmentBranch(width, rate, shift % width, tuple(range(rate)))
    found = list(segment_runs(start, start + rows, branch))
    assert len(found) <= 3
    covered = []
    for piece in found:
        assert piece.phase == (piece.start + shift) % width
        assert piece.segments == 1 or (piece.rows, piece.phase) == (width, 0)
        covered += range(piece.start, piece.start + piece.rows * piece.segments)
        for offset, lane in enumerate(piece.lanes(branch)):
            inside = range(piece.start, piece.start + piece.rows)
            selected = [p for p in inside if (p + shift) % width % rate == offset]
            assert [lane.start + i * lane.step for i in range(lane.rows)] == selected
    assert covered == list(range(start, start + rows))


def test_combs_are_validated() -> None:
    good = dict(head=0, heads=1, head_step=0, start=0, segments=1, stride=0, rows=1, step=1)
    assert Comb(**good).size == 1
    for name, value in (("rows", 0), ("heads", 0), ("start", -1), ("head_step", -1)):
        with pytest.raises(ValueError, match=f"{name}={value}"):
            Comb(**{**good, name: value})


def test_documents_are_validated() -> None:
    with pytest.raises(ValueError, match=r"lengths\[1\]=-2"):
        Documents((1, -2))
    with pytest.raises(TypeError, match=r"lengths\[0\]='a'"):
        Documents(("a",))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="add up to 3, but the sequence has 4 rows"):
        Documents((1, 2)).check_rows(4)
