"""Which past rows a later token can still see, for each branch, and in which slots a cache keeps them. Integers only.

A causal token sees the selected rows of its own segment up to itself. A branch (w, r) of segments therefore keeps the
rows of the current segment only, at most ceil(w / r) per KV head, and drops them when the next segment begins. A window
keeps the last left + 1 rows in a ring buffer: each new row overwrites the one that no later token sees. The order of
the slots does not matter, because a softmax is a sum.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import gcd

from ringspan.geometry import Comb, Lane, Pattern, SegmentBranch, SegmentRun, WindowBranch, band, group_heads
from ringspan.layout import Layout
from ringspan.planning import Tile

UNBOUNDED = 2**62  # length of the single segment of `Full`

Copies = list[tuple[Comb, ...]]  # pairs: rows of a tensor, and the slots that they go to


@dataclass(frozen=True)
class RankShare:
    """The rows of a cache that one rank keeps: every ``size``-th new row of a head. By default, all rows."""

    rank: int = 0
    size: int = 1

    def takes(self, number: int) -> bool:
        """Whether this rank keeps the row with this number."""
        return number % self.size == self.rank

    def of(self, lane: Lane, number: int) -> Lane:
        """The rows of a lane that this rank keeps. The first row of the lane has this number.

        >>> RankShare(rank=1, size=2).of(Lane(start=0, rows=5, step=4), number=0)
        Lane(start=4, rows=2, step=8)
        """
        skipped = (self.rank - number) % self.size
        rows = max(0, -(-(lane.rows - skipped) // self.size))
        return Lane(lane.start + skipped * lane.step, rows, lane.step * self.size)

    def before(self, number: int) -> int:
        """How many of the rows 0 .. number - 1 this rank keeps.

        >>> [RankShare(rank=1, size=2).before(number) for number in range(5)]
        [0, 0, 1, 1, 2]
        """
        return -(-(number - self.rank) // self.size)


@dataclass(frozen=True)
class NewToken:
    """What a new token does in one branch: ``heads`` store it in ``slot`` (None: not on this rank) and see ``seen``.

    ``seen`` holds at most two slices of slots, with the token's own slot if it has one.
    """

    heads: slice
    slot: int | None
    seen: tuple[slice, ...]


@dataclass(frozen=True)
class PromptRows:
    """Rows of a prompt, from ``position`` on, that one rank of a ring holds: for each KV head, a lane of its rows."""

    rank: int
    position: int
    lanes: list[Lane]


class Retention(ABC):
    """What one branch of a pattern keeps on one rank: of `SegmentRetention` and `WindowRetention`.

    ``filled`` in these methods is the number of rows of the current segment that each KV head holds on this rank.
    Segments read and update it. Windows do not: which rows they hold follows from the position.
    """

    share: RankShare

    @property
    @abstractmethod
    def bound(self) -> int | None:
        """The most rows that a KV head ever needs, over all ranks. None if it grows with the text."""

    @property
    @abstractmethod
    def capacity(self) -> int | None:
        """The most slots that a KV head ever needs on this rank. None if it grows with the text."""

    @property
    @abstractmethod
    def moves_prompts(self) -> bool:
        """Whether a row of a prompt must be on the rank that its position determines; if not, it stays where it is."""

    @abstractmethod
    def rows_held(self, position: int, filled: list[int]) -> list[int]:
        """The rows that each KV head holds on this rank before the token at ``position``."""

    @abstractmethod
    def add_token(self, position: int, filled: list[int]) -> NewToken | None:
        """Where the token at ``position`` is stored, and what it sees. None if no KV head selects it."""

    @abstractmethod
    def tiles_over_cache(self, position: int, rows: int, filled: list[int]) -> Iterator[Tile]:
        """Tiles of a block of ``rows`` new rows, which starts at ``position``, against the slots that they see.

        Query rows count from the first row of the block.
        """

    @abstractmethod
    def add_block(self, position: int, rows: int, filled: list[int]) -> Copies:
        """The rows of the block that later tokens see, and the slots that they go to."""

    @abstractmethod
    def prompt_rows(self, first: int, rows: int, layout: Layout) -> Iterator[PromptRows]:
        """The same for a prompt in rows ``first .. first + rows - 1`` of a sequence that is split over a ring: who
        holds the rows that later tokens see, in sequence order.
        """

    @abstractmethod
    def add_prompt_rows(self, position: int, lanes: list[Lane], filled: list[int]) -> Copies:
        """The rows among these `PromptRows` that this rank keeps, and the slots that they go to."""


@dataclass(frozen=True)
class SegmentRetention(Retention):
    """What a branch of segments keeps: the selected rows of the current segment, in slots 0, 1, ..

    >>> kept = SegmentRetention(SegmentBranch(8, 2, offsets=(0, 1, 0, 1)))
    >>> kept.bound, kept.phase(13), kept.heads_at(5)
    (4, 5, slice(1, 4, 2))
    """

    branch: SegmentBranch
    share: RankShare = RankShare()

    @property
    def bound(self) -> int | None:
        w, r = self.branch.segment_length, self.branch.rate
        return None if w == UNBOUNDED else -(-w // r)

    @property
    def capacity(self) -> int | None:
        return self.bound  # all rows of a prompt may be on this rank

    @property
    def moves_prompts(self) -> bool:
        return False

    def rows_held(self, position: int, filled: list[int]) -> list[int]:
        return filled

    def phase(self, position: int) -> int:
        """The index of a position inside its segment. 0 starts a segment, and the rows of the last one are dropped."""
        return (position + self.branch.shift) % self.branch.segment_length

    def number(self, phase: int) -> int:
        """The index of the row at this phase among the selected rows of its segment and head."""
        return phase // self.branch.rate

    def heads_at(self, phase: int) -> slice | None:
        """The KV heads that select the row at this phase: only they keep it, and only their queries see keys."""
        return self._heads_by_offset.get(phase % self.branch.rate)

    @cached_property
    def _heads_by_offset(self) -> dict[int, slice]:
        heads: dict[int, list[int]] = {}
        for head, offset in enumerate(self.branch.offsets):
            heads.setdefault(offset, []).append(head)
        # Heads with one offset are adjacent (blocked) or a rate apart (interleaved): a single slice in both cases.
        return {
            offset: slice(held[0], held[-1] + 1, held[1] - held[0] if len(held) > 1 else 1)
            for offset, held in heads.items()
        }

    def add_token(self, position: int, filled: list[int]) -> NewToken | None:
        phase = self.phase(position)
        if phase == 0:
            filled[:] = [0] * len(filled)  # a new segment begins: no later token sees the old one
        heads = self.heads_at(phase)
        if heads is None:
            return None
        rows, slot = filled[heads.start], None
        if self.share.takes(self.number(phase)):
            slot, rows = rows, rows + 1
            for head in range(heads.start, heads.stop, heads.step):
                filled[head] = rows
        return NewToken(heads, slot, (slice(0, rows),) if rows else ())

    def tiles_over_cache(self, position: int, rows: int, filled: list[int]) -> Iterator[Tile]:
        """One tile for each group of heads: the rows of the block in the segment that was open before it."""
        phase = self.phase(position)
        if phase == 0:
            return
        begun = SegmentRun(position, min(rows, self.branch.segment_length - phase), 1, phase)
        slots = [Lane(0, held, 1) for held in filled]
        for queries, keys in group_heads(begun.lanes(self.branch, origin=position), slots):
            yield Tile(queries, keys, "full")

    def add_block(self, position: int, rows: int, filled: list[int]) -> Copies:
        last = self._last_piece(position, position + rows)
        if last.phase == 0:
            filled[:] = [0] * len(filled)  # a new segment began: no later token sees the old one
        lanes = []
        for lane, offset in zip(last.lanes(self.branch, origin=position), self.branch.offsets, strict=True):
            # A lane starts at the first position from the phase on that a head with its offset selects.
            first = last.phase + (offset - last.phase) % self.branch.rate
            lanes.append(self.share.of(lane, self.number(first)))
        return self.add_prompt_rows(position, lanes, filled)

    def prompt_rows(self, first: int, rows: int, layout: Layout) -> Iterator[PromptRows]:
        last = self._last_piece(0, rows)
        for rank, start, stop, local in _rows_by_rank(first + last.start, first + rows, layout):
            position = start - first
            piece = SegmentRun(position, stop - start, 1, self.phase(position))
            yield PromptRows(rank, position, piece.lanes(self.branch, origin=position - local))

    def add_prompt_rows(self, position: int, lanes: list[Lane], filled: list[int]) -> Copies:
        slots = [Lane(held, lane.rows, 1) for held, lane in zip(filled, lanes, strict=True)]
        filled[:] = [slot.start + slot.rows for slot in slots]
        return list(group_heads(lanes, slots))

    def _last_piece(self, start: int, stop: int) -> SegmentRun:
        """The rows of ``start .. stop - 1`` in the same segment as the last of them."""
        first = max(start, stop - 1 - self.phase(stop - 1))
        return SegmentRun(first, stop - first, 1, self.phase(first))


@dataclass(frozen=True)
class WindowRetention(Retention):
    """What a window keeps: the last left + 1 rows, in a ring buffer.

    Rank i of k holds the rows at positions i, i + k, i + 2k, .., numbered 0, 1, 2, ..; row u is in slot u modulo the
    capacity. On one device that is the position modulo left + 1.

    >>> kept = WindowRetention(WindowBranch(left=4, right=0, rate=2), kv_heads=1)
    >>> kept.bound, kept.add_token(6, [0])  # positions 6 4 2 are in slots 1 4 2
    (5, NewToken(heads=slice(None, None, None), slot=1, seen=(slice(2, 5, 2), slice(1, 2, 2))))
    """

    window: WindowBranch  # without rows ahead
    kv_heads: int
    share: RankShare = RankShare()

    @property
    def bound(self) -> int:
        return self.window.left + 1

    @property
    def capacity(self) -> int:
        return -(-self.bound // self.share.size)

    @property
    def moves_prompts(self) -> bool:
        return True

    def rows_held(self, position: int, filled: list[int]) -> list[int]:
        first, stop = self._held(position - self.bound, position)
        return [stop - first] * self.kv_heads

    def add_token(self, position: int, filled: list[int]) -> NewToken | None:
        number, residue = divmod(position, self.share.size)
        slot = number % self.capacity if residue == self.share.rank else None
        first, stop = self._held(position - self.window.left, position + 1)
        step = self._step(residue)
        if step is None:
            return NewToken(slice(None), slot, ())
        shift, rate = step
        if rate == 1 and stop - first == self.capacity:
            return NewToken(slice(None), slot, (slice(0, self.capacity),))
        seen = []
        for start, end in self._unwrapped(first, stop):
            nearest = start + (number - shift - start) % rate
            if nearest < end:
                seen.append(slice(nearest % self.capacity, (end - 1) % self.capacity + 1, rate))
        return NewToken(slice(None), slot, tuple(seen))

    def tiles_over_cache(self, position: int, rows: int, filled: list[int]) -> Iterator[Tile]:
        """The pairs of a window, for the block's queries of each residue modulo the number of ranks."""
        size = self.share.size
        held = self._held(position - self.window.left, position)
        for residue in {(position + row) % size for row in range(min(rows, size))}:
            step = self._step(residue)
            if step is None:
                continue
            # In numbers of rows on this rank. There is no right edge: all cached rows are before the block.
            shift, rate = step
            left = (self.window.left - residue + self.share.rank) // size - shift
            if left < 0:
                continue
            window = WindowBranch(left // rate * rate, UNBOUNDED, rate)
            queries = (-(-(position - residue) // size) - shift, -(-(position + rows - residue) // size) - shift)
            for start, end in self._unwrapped(*held):
                for part in band(queries, (start, end), window):
                    row = (part.query + shift) * size + residue - position
                    slot = part.key - start + start % self.capacity
                    yield Tile(
                        self._comb(row, part.segments, part.stride * size, part.query_rows, part.step * size),
                        self._comb(slot, part.segments, part.stride, part.key_rows, part.step),
                        part.mask,
                    )

    def add_block(self, position: int, rows: int, filled: list[int]) -> Copies:
        kept = min(rows, self.bound)
        lane = Lane(rows - kept, kept, 1)
        return self.add_prompt_rows(position + lane.start, [lane] * self.kv_heads, filled)

    def prompt_rows(self, first: int, rows: int, layout: Layout) -> Iterator[PromptRows]:
        last = first + rows - min(rows, self.bound)
        for rank, start, stop, local in _rows_by_rank(last, first + rows, layout):
            yield PromptRows(rank, start - first, [Lane(local, stop - start, 1)] * self.kv_heads)

    def add_prompt_rows(self, position: int, lanes: list[Lane], filled: list[int]) -> Copies:
        mine = [self.share.of(lane, position) for lane in lanes]
        first = self.share.before(position)
        copies: Copies = []
        for start, end in self._unwrapped(first, first + mine[0].rows):
            rows = [Lane(lane.start + (start - first) * lane.step, end - start, lane.step) for lane in mine]
            copies += group_heads(rows, [Lane(start % self.capacity, end - start, 1)] * self.kv_heads)
        return copies

    def _held(self, start: int, stop: int) -> tuple[int, int]:
        """The rows at positions ``start .. stop - 1`` that this rank holds: the first number, and the end."""
        return self.share.before(max(0, start)), self.share.before(stop)

    def _unwrapped(self, first: int, stop: int) -> Iterator[tuple[int, int]]:
        """Split rows ``first .. stop - 1``, at most the capacity, where the ring buffer starts over at slot 0."""
        border = (stop - 1) // self.capacity * self.capacity
        for start, end in ((first, min(stop, border)), (max(first, border), stop)):
            if start < end:
                yield start, end

    def _step(self, residue: int) -> tuple[int, int] | None:
        """(shift, rate): queries at positions size * w + residue see the rows w - shift, w - shift - rate, ..

        These are numbers of rows on this rank. None if the dilation never reaches a row of this rank.
        """
        apart, common = residue - self.share.rank, gcd(self.share.size, self.window.rate)
        if apart % common:
            return None
        # Row u is at distance size * (w - u) + apart, which must be a multiple of the dilation.
        rate = self.window.rate // common
        return -apart // common * pow(self.share.size // common, -1, rate) % rate, rate

    def _comb(self, start: int, segments: int, stride: int, rows: int, step: int) -> Comb:
        return Comb(0, self.kv_heads, 0, start, segments, stride, rows, step)


def _rows_by_rank(start: int, stop: int, layout: Layout) -> Iterator[tuple[int, int, int, int]]:
    """Split rows ``start .. stop - 1`` of a sequence: rank, start, stop, and the rank's local row at the start."""
    for part in layout.rank_spans(start, stop):
        local = layout.local_row(part.rank, part.start)
        assert local is not None
        yield part.rank, part.start, part.stop, local


def branch_retentions(pattern: Pattern, kv_heads: int, share: RankShare = RankShare()) -> tuple[Retention, ...]:
    """What each branch of a pattern keeps on a rank, for a text of any length."""
    return tuple(
        SegmentRetention(branch, share)
        if isinstance(branch, SegmentBranch)
        else WindowRetention(branch.up_to_own_row(), kv_heads, share)
        for branch in pattern.branches(UNBOUNDED, kv_heads)
    )
