"""Which rows are kept, in which slots, and what new rows see of them, in integers, against the definition."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ringspan as rs
from ringspan.decoding.retention import (
    UNBOUNDED,
    Copies,
    RankShare,
    Retention,
    SegmentRetention,
    WindowRetention,
    branch_retentions,
)
from ringspan.geometry import Branch, Comb, Lane, SegmentBranch
from ringspan.layout import Layout
from ringspan.planning import Tile
from tests.strategies import held_heads, patterns


def rows_of(lane: Lane) -> list[int]:
    return [lane.start + j * lane.step for j in range(lane.rows)]


def visible(branch: Branch, p: int, head: int) -> list[int]:
    """By the definition: the rows that the token at ``p`` sees."""
    return [t for t in range(p + 1) if branch.sees(p, t, head)]


class Slots:
    """The slots of one branch on one rank, filled with the positions of rows as `ringspan.decoding.cache` does."""

    def __init__(self, retention: Retention, branch: Branch, kv_heads: int) -> None:
        self.retention, self.branch = retention, branch
        self.position, self.filled = 0, [0] * kv_heads
        self.rows: list[dict[int, int]] = [{} for _ in range(kv_heads)]  # slot -> position, by head

    def store(self, copies: Copies, position: int) -> None:
        """Store the rows of a tensor whose row 0 is at ``position``."""
        for rows, slots in copies:
            for i in range(rows.heads):
                for row, slot in zip(rows.lane(i), slots.lane(i), strict=True):
                    self.rows[rows.head_range[i]][slot] = position + row
        self.check()

    def add_token(self) -> list[list[int]]:
        """Store the next token. The positions that it sees, by head."""
        token = self.retention.add_token(self.position, self.filled)
        seen: list[list[int]] = [[] for _ in self.rows]
        if token is not None:
            assert len(token.seen) <= 2
            for head in range(len(self.rows))[token.heads]:
                if token.slot is not None:
                    self.rows[head][token.slot] = self.position
                for slots in token.seen:
                    seen[head] += [self.rows[head][slot] for slot in range(slots.stop)[slots]]
        self.position += 1
        self.check()
        return seen

    def add_block(self, rows: int) -> list[tuple[int, int, int]]:
        """Store a block. The pairs (head, query, key) that it sees of the rows before it."""
        pairs = []
        for tile in self.retention.tiles_over_cache(self.position, rows, self.filled):
            pairs += [(head, self.position + row, self.rows[head][slot]) for head, row, slot in pairs_of(tile)]
        self.store(self.retention.add_block(self.position, rows, self.filled), self.position)
        self.position += rows
        return pairs

    def check(self) -> None:
        """No slot is beyond the capacity."""
        if self.retention.capacity is not None:
            assert all(slot < self.retention.capacity for held in self.rows for slot in held)


def pairs_of(tile: Tile) -> Iterable[tuple[int, int, int]]:
    queries, keys = tile.queries, tile.keys
    for i in range(queries.heads):
        rows, slots = (_by_segment(comb, i) for comb in (queries, keys))
        for block, keys_of_block in zip(rows, slots, strict=True):
            for a, row in enumerate(block):
                for b, slot in enumerate(keys_of_block):
                    if tile.mask == "full" or (b <= a if tile.mask == "causal" else b >= a):
                        yield queries.head_range[i], row, slot


def _by_segment(comb: Comb, head: int) -> list[tuple[int, ...]]:
    lane = comb.lane(head)
    return [lane[s * comb.rows : (s + 1) * comb.rows] for s in range(comb.segments)]


@given(st.data())
def test_tokens_and_blocks_see_what_the_definition_says(data: st.DataObject) -> None:
    """Every pair exactly once, on one of the ranks; the ranks hold at most the bound between them."""
    kv_heads, size = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5))
    pattern = data.draw(held_heads(data.draw(patterns()), kv_heads))
    branches = pattern.branches(UNBOUNDED, kv_heads)
    blocks = data.draw(st.lists(st.sampled_from([1, 1, 1, 2, 3, 8, 25]), min_size=1, max_size=12))
    shares = [branch_retentions(pattern, kv_heads, RankShare(rank, size)) for rank in range(size)]
    for number, branch in enumerate(branches):
        ranks = [Slots(retentions[number], branch, kv_heads) for retentions in shares]
        for rows in blocks:
            start = ranks[0].position
            if rows == 1:
                found = [rank.add_token() for rank in ranks]
                for head in range(kv_heads):
                    assert sorted(chain(*(seen[head] for seen in found))) == visible(branch, start, head)
            else:
                pairs = chain(*[rank.add_block(rows) for rank in ranks])
                wanted = [
                    (head, p, t)
                    for head in range(kv_heads)
                    for p in range(start, start + rows)
                    for t in visible(branch, p, head)
                    if t < start
                ]
                assert sorted(pairs) == sorted(wanted)
            for head in range(kv_heads):
                held = sum(rank.retention.rows_held(rank.position, rank.filled)[head] for rank in ranks)
                assert held == rows_kept(branch, start + rows, head)
                bound = ranks[0].retention.bound
                assert bound is None or held <= bound


def rows_kept(branch: Branch, position: int, head: int) -> int:
    """What a branch keeps after the token before ``position``: the selected rows of its segment, or of its window."""
    if isinstance(branch, SegmentBranch):
        segments = [(t + branch.shift) // branch.segment_length for t in range(position)]
        return sum(segments[t] == segments[-1] and branch.sees(t, t, head) for t in range(position))
    return min(position, branch.left + 1)


@given(st.data())
def test_ranks_hold_the_kept_rows_of_a_prompt_between_them(data: st.DataObject) -> None:
    """Gathered or sharded, steps after the prompt see what the definition says."""
    kv_heads, before, rows, after = (
        data.draw(st.integers(low, high)) for low, high in ((1, 3), (0, 20), (1, 60), (0, 9))
    )
    name, size = data.draw(st.sampled_from(["contiguous", "zigzag"])), data.draw(st.integers(1, 5))
    layout = Layout(name, before + rows + after, size)
    pattern, sharded = data.draw(patterns()), data.draw(st.booleans())
    shares = [RankShare(rank, size) for rank in range(size)] if sharded else [RankShare()]
    kept = [branch_retentions(pattern, kv_heads, share) for share in shares]
    for number, branch in enumerate(pattern.branches(UNBOUNDED, kv_heads)):
        ranks = [Slots(retentions[number], branch, kv_heads) for retentions in kept]
        for part in ranks[0].retention.prompt_rows(before, rows, layout):
            places = [row - before for span in layout.spans(part.rank) for row in range(span.start, span.stop)]
            first = min((places[lane.start] for lane in part.lanes if lane.rows), default=part.position)
            assert part.position <= first
            for i, rank in enumerate(ranks):
                if sharded and i != part.rank and not rank.retention.moves_prompts:
                    continue
                for copied, slots in rank.retention.add_prompt_rows(part.position, part.lanes, rank.filled):
                    for h in range(copied.heads):
                        positions = [places[local] for local in copied.lane(h)]
                        rank.rows[copied.head_range[h]].update(zip(slots.lane(h), positions, strict=True))
                rank.check()
        for rank in ranks:
            rank.position = rows
        for p in range(rows, rows + 12):
            found = [rank.add_token() for rank in ranks]
            for head in range(kv_heads):
                assert sorted(chain(*(seen[head] for seen in found))) == visible(branch, p, head)


@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize("left", [0, 1, 7, 8, 23])
def test_ranks_share_a_window_evenly(left: int, size: int) -> None:
    shares = [branch_retentions(rs.Window(left), 1, RankShare(rank, size))[0] for rank in range(size)]
    assert {kept.capacity for kept in shares} == {-(-(left + 1) // size)}
    for position in (0, 1, left, left + 1, 100, 101):
        held = [kept.rows_held(position, [0])[0] for kept in shares]
        assert sum(held) == min(position, left + 1)
        assert max(held) - min(held) <= 1


def test_a_full_window_is_one_run_of_slots() -> None:
    (kept,) = branch_retentions(rs.Window(511), 2)
    for position in (511, 512, 700, 10**15):
        token = kept.add_token(position, [0, 0])
        assert token is not None
        assert (token.slot, token.seen) == (position % 512, (slice(0, 512),))


def test_bounds() -> None:
    def bounds(pattern: rs.Pattern) -> list[int | None]:
        return [kept.bound for kept in branch_retentions(pattern, 2)]

    assert bounds(rs.Window(0)) == bounds(rs.Window(6, dilation=7)) == [1]
    assert bounds(rs.Window(511, right=511)) == [512]
    assert bounds(rs.Window(512, dilation=3)) == [511]  # 510 rows back is the farthest
    assert bounds(rs.Window(9) + rs.Dilated((8, 32), (1, 5)) + rs.Full()) == [10, 8, 7, None]


def test_full_keeps_everything_and_has_no_bound() -> None:
    (kept,) = branch_retentions(rs.Full(), 2)
    assert isinstance(kept, SegmentRetention)
    assert kept.branch.segment_length == UNBOUNDED
    assert kept.bound is None
    (copy,) = kept.add_block(10**12, 5, [0, 0])
    assert [comb.lane(1) for comb in copy] == [(0, 1, 2, 3, 4)] * 2


def test_a_window_ignores_rows_ahead() -> None:
    assert branch_retentions(rs.Window(5, right=9, dilation=2), 3) == branch_retentions(rs.Window(4, dilation=2), 3)
    (kept,) = branch_retentions(rs.Window(0, right=4, dilation=2), 1)
    assert isinstance(kept, WindowRetention)
    assert (kept.bound, kept.window.right, kept.window.rate) == (1, 0, 1)
