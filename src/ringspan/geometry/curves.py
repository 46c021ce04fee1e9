"""Curves through the cells of any box, in any number of dimensions: Hilbert, row-major, snake and Morton.

The Hilbert curve enters a box at one corner and leaves it at the other end of one side, the box's *course*. The box is
cut into parts with the same property, each of which ends next to the cell where the next one starts; parts are cut
again until they are single cells. docs/hilbert.md explains when consecutive cells are adjacent. The other curves are
sort keys. `ringspan.order` follows the same cuts for many boxes at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import product
from typing import Any, Literal, NamedTuple

from ringspan.geometry.documents import as_int

CurveName = Literal["hilbert", "row_major", "snake", "morton"]
FIRST, SECOND, WHOLE = range(3)
_MOST_SIDES = 12  # a box with this many sides is cut into 2 ** 11 parts at a time


def grid_shape(shape: Any) -> tuple[int, ...]:
    """The sides of a grid as plain ints. Raises unless there is at least one, and each is at least 1."""
    if isinstance(shape, str) or not isinstance(shape, Iterable):
        raise TypeError(f"shape={shape!r}: must be a sequence of ints, one per side of the grid")
    sides = tuple(as_int(f"shape[{i}]", side) for i, side in enumerate(shape))
    if not sides:
        raise ValueError("shape=(): a grid has at least one side; for a sequence of n rows use (n,)")
    for i, side in enumerate(sides):
        if side < 1:
            raise ValueError(f"shape[{i}]={side}: a side of a grid has at least 1 cell")
    return sides


def cells_in_order(curve: CurveName, shape: Sequence[int]) -> list[int]:
    """The row-major indices of a box's cells in the order of the curve.

    >>> cells_in_order("hilbert", (2, 4)), cells_in_order("snake", (2, 3))
    ([0, 4, 5, 1, 2, 6, 7, 3], [0, 1, 2, 5, 4, 3])
    """
    if curve == "hilbert":
        slots = box_slots(shape)
        sizes, steps = (tuple(of[axis] for axis in slots) for of in (shape, row_major_steps(shape)))
        return [*_visit(sizes, 0, steps)] if slots else [0]
    keys = [KEYS[curve](cell, shape) for cell in product(*map(range, shape))]
    return sorted(range(len(keys)), key=keys.__getitem__)


def row_major_key(cell: Sequence[Any], shape: Sequence[int]) -> Any:
    """Row by row, each row forwards. The coordinates of a cell, here and below, are ints or tensors of ints.

    >>> row_major_key((0, 2), (2, 3)), row_major_key((1, 0), (2, 3))
    (2, 3)
    """
    key = 0
    for place, side in zip(cell, shape, strict=True):
        key = key * side + place
    return key


def snake_key(cell: Sequence[Any], shape: Sequence[int]) -> Any:
    """Row by row, every other row backwards: consecutive cells are adjacent, but a segment is still a strip.

    >>> [snake_key(cell, (2, 3)) for cell in ((0, 2), (1, 2), (1, 0))]
    [2, 3, 5]
    """
    key = 0
    for place, side in zip(cell, shape, strict=True):
        key = key * side + place + key % 2 * (side - 1 - 2 * place)
    return key


def morton_key(cell: Sequence[Any], shape: Sequence[int]) -> Any:
    """Z-order: the bits of the coordinates interleaved, the most significant first; short sides have fewer bits.

    >>> [morton_key(cell, (2, 4)) for cell in ((0, 1), (1, 0), (0, 2))]
    [1, 2, 4]
    """
    lengths = [(side - 1).bit_length() for side in shape]
    key = cell[0] * 0
    for bit in reversed(range(max(lengths))):
        for place, length in zip(cell, lengths, strict=True):
            if bit < length:
                key = 2 * key + (place >> bit & 1)
    return key


KEYS: dict[CurveName, Callable[[Sequence[Any], Sequence[int]], Any]] = {
    "row_major": row_major_key,
    "snake": snake_key,
    "morton": morton_key,
}


class SideRange(NamedTuple):
    """The range of one side that a part covers (first half, second half, whole), and the end at which it starts."""

    half: int
    from_far_end: bool


class BoxPart(NamedTuple):
    """A part of a box: a range of each side that is cut, and the index of the side that is the part's course."""

    course: int
    ranges: tuple[SideRange, ...]


@lru_cache
def parts_of_box(sides: int) -> tuple[BoxPart, ...]:
    """The parts of a box of which ``sides`` sides are cut, in curve order; the last side is the box's course.

    Corners are visited in Gray code order: one side changes from each to the next. Between the first and the
    last, they form pairs with a common course, and each pair is one part.

    >>> [part.course for part in parts_of_box(2)]  # up, along, down: the shape of Hilbert's curve
    [0, 1, 0]
    """
    if sides == 1:
        return BoxPart(0, (SideRange(FIRST, False),)), BoxPart(0, (SideRange(SECOND, False),))
    parts = [BoxPart(0, (SideRange(FIRST, False),) * sides)]
    for i in range(1, 2**sides - 1, 2):
        corner, course = i ^ i >> 1, (~i & i + 1).bit_length() - 1
        seconds = [bool(corner >> side & 1) for side in range(sides)]
        ranges = [SideRange(SECOND if second else FIRST, second) for second in seconds]
        ranges[0] = SideRange(ranges[0].half, not seconds[0])  # entered from the part before, across side 0
        ranges[course] = SideRange(WHOLE, seconds[course])
        parts.append(BoxPart(course, tuple(ranges)))
    between = (SideRange(FIRST, False),) * (sides - 2)
    parts.append(BoxPart(0, (SideRange(FIRST, True), *between, SideRange(SECOND, True))))
    return tuple(parts)


class Cut(NamedTuple):
    """One part of a box. Slot 0 is its course; the other slots are its other sides.

    For each slot of the part: the ``slots`` of the whole box that it comes from, its ``sizes``, the coordinate
    (``entries``) where the curve enters and the direction (``signs``). ``position`` counts the cells on the curve
    before the part, ``volume`` those in it.
    """

    slots: tuple[int, ...]
    sizes: tuple[int, ...]
    entries: tuple[int, ...]
    signs: tuple[int, ...]
    position: int
    volume: int


@lru_cache(maxsize=256)
def cut_box(sizes: tuple[int, ...]) -> tuple[Cut, ...]:
    """Cut a box of several cells along its course, slot 0, and along the sides that are nearly as long as its longest.

    >>> [(cut.sizes, cut.position) for cut in cut_box((4, 4))]
    [((2, 2), 0), ((4, 2), 4), ((2, 2), 12)]
    """
    order = list(range(len(sizes)))
    if sizes[0] == 1:  # can occur in boxes with odd sides: the longest side is the course instead
        for slot in range(1, len(sizes)):
            if sizes[order[slot]] > sizes[order[0]]:
                order[0], order[slot] = order[slot], order[0]
    whole, longest = [sizes[slot] for slot in order], max(sizes)
    sides = [*(slot for slot in range(1, len(sizes)) if 3 * whole[slot] >= 2 * longest), 0]
    cuts, position = [], 0
    for part in parts_of_box(len(sides)):
        lengths, entries, signs = list(whole), [0] * len(sizes), [1] * len(sizes)
        for slot, side_range in zip(sides, part.ranges, strict=True):
            half = _first_half(whole[slot])
            lengths[slot] = (half, whole[slot] - half, whole[slot])[side_range.half]
            if side_range.from_far_end:
                entries[slot], signs[slot] = (half if side_range.half == FIRST else whole[slot]) - 1, -1
            elif side_range.half == SECOND:
                entries[slot] = half
        first = sides[part.course]
        order_of_part, lengths, entries, signs = ([*x[first:], *x[:first]] for x in (order, lengths, entries, signs))
        volume = math.prod(lengths)
        cuts.append(Cut(tuple(order_of_part), tuple(lengths), tuple(entries), tuple(signs), position, volume))
        position += volume
    return tuple(cuts)


def _first_half(size: int) -> int:
    """About half of a side, rounded to an even number, so that even sides have even halves until they are 2."""
    half = size // 2
    return half + (half & 1) * (size > 2)


def _visit(sizes: tuple[int, ...], cell: int, steps: tuple[int, ...]) -> Iterator[int]:
    """The cells of a box that is entered at ``cell``; ``steps`` are the index steps along its slots."""
    for cut in cut_box(sizes):
        entered = cell + sum(steps[slot] * entry for slot, entry in zip(cut.slots, cut.entries, strict=True))
        if cut.volume == 1:
            yield entered
        else:
            directed = tuple(steps[slot] * sign for slot, sign in zip(cut.slots, cut.signs, strict=True))
            yield from _visit(cut.sizes, entered, directed)


def row_major_steps(shape: Sequence[int]) -> list[int]:
    """The distance of the row-major indices of two cells that are adjacent along each axis."""
    return [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]


def box_slots(shape: Sequence[int]) -> list[int]:
    """The axes of the box that are longer than one cell, the course first: a long side, and an even one if possible.

    No path of adjacent cells between the two ends of an odd side visits an even number of cells.
    """
    longest = max(shape)
    even = [axis for axis, side in enumerate(shape) if side % 2 == 0 and 3 * side >= 2 * longest]
    course = max(even or range(len(shape)), key=lambda axis: shape[axis])
    axes = [*range(course, len(shape)), *range(course)]
    slots = [axis for axis in axes if shape[axis] > 1]
    if len(slots) > _MOST_SIDES:
        raise ValueError(
            f"{len(slots)} sides with more than one cell: a Hilbert curve supports up to {_MOST_SIDES}; use fewer "
            "dimensions, or Morton, which supports any number"
        )
    return slots
