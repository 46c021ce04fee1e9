"""Curves through the cells of any box, in any number of dimensions: Hilbert, row-major, snake and Morton.

The Hilbert curve enters a box at one corner and leaves it at the other end of one side, the box's *course*. The box is
cut into parts with the same property, each of which ends next to the cell where the next one starts; parts are cut
again until they are single cells, by torch operations on many boxes. docs/hilbert.md explains when consecutive cells
are adjacent. The other curves are sort keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor

FIRST, SECOND, WHOLE = range(3)
_MOST_SIDES = 12  # a box with this many sides is cut into 2 ** 11 parts at a time


def row_major_keys(cells: Tensor, shape: Sequence[int]) -> Tensor:
    """Row by row, each row forwards.

    >>> row_major_keys(torch.tensor([[0, 2], [1, 0]]), (2, 3)).tolist()
    [2, 3]
    """
    key = torch.zeros(len(cells), dtype=torch.int64, device=cells.device)
    for axis, side in enumerate(shape):
        key = key * side + cells[:, axis]
    return key


def snake_keys(cells: Tensor, shape: Sequence[int]) -> Tensor:
    """Row by row, every other row backwards: consecutive cells are adjacent, but a segment is still a strip.

    >>> snake_keys(torch.tensor([[0, 2], [1, 2], [1, 0]]), (2, 3)).tolist()
    [2, 3, 5]
    """
    key = torch.zeros(len(cells), dtype=torch.int64, device=cells.device)
    for axis, side in enumerate(shape):
        place = cells[:, axis]
        key = key * side + torch.where(key % 2 == 0, place, side - 1 - place)
    return key


def morton_keys(cells: Tensor, shape: Sequence[int]) -> Tensor:
    """Z-order: the bits of the coordinates interleaved, the most significant first; short sides have fewer bits.

    >>> morton_keys(torch.tensor([[0, 1], [1, 0], [0, 2]]), (2, 4)).tolist()
    [1, 2, 4]
    """
    lengths = [(side - 1).bit_length() for side in shape]
    key = torch.zeros(len(cells), dtype=torch.int64, device=cells.device)
    for bit in reversed(range(max(lengths))):
        for axis, length in enumerate(lengths):
            if bit < length:
                key = key << 1 | cells[:, axis] >> bit & 1
    return key


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


class Boxes(NamedTuple):
    """Many boxes. Slot 0 of each is its course; the other slots are its other sides.

    ``sizes`` are the lengths of the sides; ``position`` is the number of cells on the curve before the box. The caller
    defines ``tags`` and ``marks`` (one per slot).
    """

    position: Tensor
    tags: Tensor
    sizes: list[Tensor]
    marks: list[Tensor]

    def where(self, mask: Tensor) -> Boxes:
        """The boxes selected by the mask."""
        numbers = mask.nonzero().squeeze(1)
        sizes, marks = ([x[numbers] for x in columns] for columns in (self.sizes, self.marks))
        return Boxes(self.position[numbers], self.tags[numbers], sizes, marks)


class Cut(NamedTuple):
    """One part of each of ``boxes``, by slot: its size, the coordinate where the curve enters, and its direction."""

    boxes: Boxes
    course: int
    sizes: list[Tensor]
    entries: list[Tensor | None]  # None: where the curve enters the box
    signs: list[int]
    position: Tensor
    volume: Tensor

    def become(self, tags: Tensor, marks: list[Tensor]) -> Boxes:
        """The parts as boxes, with their course in slot 0."""
        sizes, marks = ([*x[self.course :], *x[: self.course]] for x in (self.sizes, marks))
        return Boxes(self.position, tags, sizes, marks)


def hilbert_curve(shape: Sequence[int], device: torch.device | str | None = None) -> Tensor:
    """The row-major indices of a box's cells, in the order in which the curve visits them.

    >>> hilbert_curve((2, 4)).tolist()
    [0, 4, 5, 1, 2, 6, 7, 3]
    """
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    slots = _slots(shape)
    if not slots:
        return zero
    steps = [zero + math.prod(shape[axis + 1 :]) for axis in slots]
    return follow(Boxes(zero, zero, [zero + shape[axis] for axis in slots], steps), math.prod(shape))


def follow(boxes: Boxes, cells: int) -> Tensor:
    """The ``cells`` cells of all boxes, at their positions on the curve.

    The tag of a box is the cell where the curve enters it; its marks are the index steps along its sides. No box is a
    single cell.
    """
    curve = torch.empty(cells, dtype=torch.int64, device=boxes.tags.device)
    while len(boxes.tags):
        found = []
        for cut in _cuts(boxes):
            entered = cut.boxes.tags.clone()
            for step, entry in zip(cut.boxes.marks, cut.entries, strict=True):
                if entry is not None:
                    entered += step * entry
            steps = [step if sign > 0 else -step for step, sign in zip(cut.boxes.marks, cut.signs, strict=True)]
            parts, is_cell = cut.become(entered, steps), cut.volume == 1
            curve[parts.position[is_cell]] = entered[is_cell]
            found.append(parts.where(~is_cell))
        boxes = _join(found)
    return curve


def hilbert_positions(cells: Tensor, shape: Sequence[int]) -> Tensor:
    """The positions of the given cells, (cells, dimensions), on the curve through a box, without computing the rest.

    >>> hilbert_positions(torch.tensor([[0, 1], [1, 3]]), (2, 4)).tolist()
    [3, 6]
    """
    slots = _slots(shape)
    positions = torch.zeros(len(cells), dtype=torch.int64, device=cells.device)
    sizes = [torch.full_like(positions, shape[axis]) for axis in slots]
    numbers = torch.arange(len(cells), device=cells.device)
    boxes = Boxes(positions, numbers, sizes, [cells[:, axis].long() for axis in slots])
    while slots and len(boxes.tags):
        found = []
        for cut in _cuts(boxes):
            places = [
                (place if entry is None else place - entry) * sign
                for place, entry, sign in zip(cut.boxes.marks, cut.entries, cut.signs, strict=True)
            ]
            inside = torch.ones_like(cut.volume, dtype=torch.bool)
            for place, size in zip(places, cut.sizes, strict=True):
                inside &= (place >= 0) & (place < size)
            parts, is_cell = cut.become(cut.boxes.tags, places), cut.volume == 1
            positions[parts.tags[inside & is_cell]] = parts.position[inside & is_cell]
            found.append(parts.where(inside & ~is_cell))
        boxes = _join(found)
    return positions


def _slots(shape: Sequence[int]) -> list[int]:
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


def _cuts(boxes: Boxes) -> Iterator[Cut]:
    """Cut each box along its course and along the sides that are nearly as long as its longest."""
    boxes = _with_long_course(boxes)
    longest = boxes.sizes[0]
    for size in boxes.sizes[1:]:
        longest = torch.maximum(longest, size)
    pattern = torch.zeros_like(longest)  # which sides are cut, as bits
    for i, size in enumerate(boxes.sizes[1:]):
        pattern += (3 * size >= 2 * longest).long() << i
    patterns = pattern.unique().tolist()
    for bits in patterns:
        group = boxes if len(patterns) == 1 else boxes.where(pattern == bits)
        sides = [*(slot for slot in range(1, len(boxes.sizes)) if bits >> (slot - 1) & 1), 0]
        yield from _cut_alike(group, sides)


def _cut_alike(boxes: Boxes, sides: list[int]) -> Iterator[Cut]:
    """Cut boxes along the same sides; the last of them is the course."""
    halves = {slot: _first_half(boxes.sizes[slot]) for slot in sides}
    position = boxes.position
    for part in parts_of_box(len(sides)):
        sizes, signs = list(boxes.sizes), [1] * len(boxes.sizes)
        entries: list[Tensor | None] = [None] * len(boxes.sizes)
        for slot, side_range in zip(sides, part.ranges, strict=True):
            whole, half = boxes.sizes[slot], halves[slot]
            sizes[slot] = (half, whole - half, whole)[side_range.half]
            if side_range.from_far_end:
                entries[slot], signs[slot] = (half if side_range.half == FIRST else whole) - 1, -1
            elif side_range.half == SECOND:
                entries[slot] = half
        volume = sizes[0]
        for size in sizes[1:]:
            volume = volume * size
        yield Cut(boxes, sides[part.course], sizes, entries, signs, position, volume)
        position = position + volume


def _first_half(sizes: Tensor) -> Tensor:
    """About half of each side, rounded to an even number, so that even sides have even halves until they are 2."""
    half = sizes // 2
    return half + (half & 1) * (sizes > 2)


def _with_long_course(boxes: Boxes) -> Boxes:
    """Replace a course of one cell, which can occur in boxes with odd sides, by the longest side."""
    flat = boxes.sizes[0] == 1
    if len(boxes.sizes) == 1 or not flat.any():
        return boxes
    sizes, marks = list(boxes.sizes), list(boxes.marks)
    for slot in range(1, len(sizes)):
        swap = flat & (sizes[slot] > sizes[0])
        for columns in (sizes, marks):
            columns[0], columns[slot] = (
                torch.where(swap, columns[slot], columns[0]),
                torch.where(swap, columns[0], columns[slot]),
            )
    return Boxes(boxes.position, boxes.tags, sizes, marks)


def _join(boxes: list[Boxes]) -> Boxes:
    """Concatenate boxes. Their order does not matter, because each has its position."""
    columns = zip(*((x.position, x.tags, *x.sizes, *x.marks) for x in boxes), strict=True)
    position, tags, *others = (torch.cat(column) for column in columns)
    return Boxes(position, tags, others[: len(others) // 2], others[len(others) // 2 :])


CurveName = Literal["hilbert", "row_major", "snake", "morton"]

_KEYS: dict[CurveName, Callable[[Tensor, Sequence[int]], Tensor]] = {
    "hilbert": hilbert_positions,
    "row_major": row_major_keys,
    "snake": snake_keys,
    "morton": morton_keys,
}


def visit(curve: CurveName, shape: Sequence[int], device: torch.device | str | None = None) -> Tensor:
    """The row-major indices of a box's cells in the order of the curve, int64.

    >>> visit("snake", (2, 3)).tolist()
    [0, 1, 2, 5, 4, 3]
    """
    if curve == "hilbert":
        return hilbert_curve(shape, device)  # the same result as sorting by keys, but much faster
    return sort_keys(curve, all_cells(shape, device), shape).argsort()


def sort_keys(curve: CurveName, cells: Tensor, shape: Sequence[int]) -> Tensor:
    """Sort keys of the given cells, (cells, dimensions). Sorting by them puts the cells in curve order."""
    return _KEYS[curve](cells, shape)


def all_cells(shape: Sequence[int], device: torch.device | str | None = None) -> Tensor:
    """The coordinates of a box's cells in row-major order, (cells, dimensions).

    >>> all_cells((2, 2)).tolist()
    [[0, 0], [0, 1], [1, 0], [1, 1]]
    """
    sides = [torch.arange(side, device=device) for side in shape]
    return torch.stack(torch.meshgrid(*sides, indexing="ij"), dim=-1).flatten(0, -2)
