"""Which rows are kept, in integers, against the definition of what sees what."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

import ringspan as rs
from ringspan.decoding.retention import UNBOUNDED, BranchRetention, RankShare, branch_retentions
from ringspan.geometry import Lane
from ringspan.layout import Layout
from tests.strategies import dilated, held_heads


def rows_of(lane: Lane) -> list[int]:
    return [lane.start + j * lane.step for j in range(lane.rows)]


def visible_later(kept: BranchRetention, head: int, stop: int) -> list[int]:
    """By the definition: the rows before ``stop`` that lie in the segment of the last of them, and are selected."""
    branch, offset = kept.branch, kept.offsets[head]
    last = (stop - 1 + branch.shift) // branch.segment_length
    return [t for t in range(stop) if branch.sees(t, t, offset) and (t + branch.shift) // branch.segment_length == last]


@given(st.data())
def test_a_block_keeps_what_later_tokens_see_and_each_rank_its_share(data: st.DataObject) -> None:
    kv_heads = data.draw(st.integers(1, 4))
    pattern = data.draw(held_heads(data.draw(dilated()), kv_heads))
    start, rows, size = data.draw(st.integers(0, 60)), data.draw(st.integers(1, 60)), data.draw(st.integers(1, 3))
    for kept in branch_retentions(pattern, kv_heads):
        found: list[list[int]] = [[] for _ in range(kv_heads)]
        for rank in range(size):
            same_segment, lanes = kept.rows_to_keep(start, rows, RankShare(rank, size))
            for head, lane in enumerate(lanes):
                found[head] += rows_of(lane)
                places = [kept.slot(kept.phase(start + row)) for row in rows_of(lane)]
                assert all(RankShare(rank, size).takes(place) for place in places)
        for head in range(kv_heads):
            wanted = visible_later(kept, head, start + rows)
            if not same_segment:
                assert all(t >= start for t in wanted)
            assert sorted(found[head]) == [t - start for t in wanted if t >= start]
            assert kept.bound is not None
            assert len(wanted) <= kept.bound


@given(st.data())
def test_a_block_asks_what_is_kept_where_its_segment_was_begun(data: st.DataObject) -> None:
    kv_heads = data.draw(st.integers(1, 4))
    pattern = data.draw(dilated())
    start, rows = data.draw(st.integers(1, 60)), data.draw(st.integers(1, 60))
    for kept in branch_retentions(pattern, kv_heads):
        lanes = kept.rows_in_open_segment(start, rows)
        for head, offset in enumerate(kept.offsets):
            wanted = [
                p - start
                for p in range(start, start + rows)
                if kept.branch.sees(p, p, offset) and any(kept.branch.sees(p, t, offset) for t in range(start))
            ]
            nothing = lanes is None or not visible_later(kept, head, start)
            assert ([] if nothing else rows_of(lanes[head])) == wanted  # type: ignore[index]


@given(st.data())
def test_ranks_hold_the_kept_rows_of_a_prompt_between_them(data: st.DataObject) -> None:
    kv_heads, before, rows, after = (
        data.draw(st.integers(low, high)) for low, high in ((1, 3), (0, 20), (1, 60), (0, 9))
    )
    name = data.draw(st.sampled_from(["contiguous", "zigzag"]))
    layout = Layout(name, before + rows + after, data.draw(st.integers(1, 5)))
    for kept in branch_retentions(data.draw(dilated()), kv_heads):
        found: list[list[int]] = [[] for _ in range(kv_heads)]
        for rank, lanes in kept.rows_to_keep_by_rank(before, rows, layout):
            places = [row for span in layout.spans(rank) for row in range(span.start, span.stop)]
            for head, lane in enumerate(lanes):
                found[head] += [places[local] - before for local in rows_of(lane)]
        assert found == [visible_later(kept, head, rows) for head in range(kv_heads)]


def test_full_keeps_everything_and_has_no_bound() -> None:
    (kept,) = branch_retentions(rs.Full(), 2)
    assert kept.branch.segment_length == UNBOUNDED
    assert kept.bound is None
    assert kept.rows_to_keep(10**12, 5, RankShare())[1] == [Lane(0, 5, 1)] * 2
