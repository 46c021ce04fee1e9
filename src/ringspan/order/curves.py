"""The curves of `ringspan.geometry.curves` as tensors: all cells of a box in curve order, and sort keys of given cells.

The Hilbert curve is followed for many boxes at a time, by torch operations on all boxes of equal sides.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import NamedTuple

import torch
from torch import Tensor

from ringspan.geometry.curves import KEYS, CurveName, box_slots, cut_box, row_major_steps


class Boxes(NamedTuple):
    """Boxes with the same sides. ``position`` is the number of cells on the curve before each box.

    The caller defines ``tags`` and ``marks`` (one per side).
    """

    position: Tensor
    tags: Tensor
    marks: list[Tensor]

    def where(self, mask: Tensor) -> Boxes:
        """The boxes selected by the mask."""
        numbers = mask.nonzero().squeeze(1)
        return Boxes(self.position[numbers], self.tags[numbers], [mark[numbers] for mark in self.marks])


BoxesBySides = dict[tuple[int, ...], Boxes]


def hilbert_curve(shape: Sequence[int], device: torch.device | str | None = None) -> Tensor:
    """The row-major indices of a box's cells, in the order in which the curve visits them.

    >>> hilbert_curve((2, 4)).tolist()
    [0, 4, 5, 1, 2, 6, 7, 3]
    """
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    slots, steps = box_slots(shape), row_major_steps(shape)
    if not slots:
        return zero
    whole = Boxes(zero, zero, [zero + steps[axis] for axis in slots])
    return follow({tuple(shape[axis] for axis in slots): whole}, math.prod(shape))


def follow(boxes: BoxesBySides, cells: int) -> Tensor:
    """The ``cells`` cells of all boxes, at their positions on the curve.

    The tag of a box is the cell where the curve enters it; its marks are the index steps along its sides. No box is a
    single cell.
    """
    curve = torch.empty(cells, dtype=torch.int64, device=next(iter(boxes.values())).tags.device)
    waiting = _Waiting(boxes)
    while waiting:
        sides, group = waiting.take_largest()
        for cut in cut_box(sides):
            entered = group.tags
            for slot, entry in zip(cut.slots, cut.entries, strict=True):
                if entry:
                    entered = entered + group.marks[slot] * entry
            position = group.position + cut.position
            if cut.volume == 1:
                curve[position] = entered
                continue
            steps = [
                group.marks[slot] if sign > 0 else -group.marks[slot]
                for slot, sign in zip(cut.slots, cut.signs, strict=True)
            ]
            waiting.add(cut.sizes, Boxes(position, entered, steps))
    return curve


def hilbert_positions(cells: Tensor, shape: Sequence[int]) -> Tensor:
    """The positions of the given cells, (cells, dimensions), on the curve through a box, without computing the rest.

    >>> hilbert_positions(torch.tensor([[0, 1], [1, 3]]), (2, 4)).tolist()
    [3, 6]
    """
    slots = box_slots(shape)
    positions = torch.zeros(len(cells), dtype=torch.int64, device=cells.device)
    numbers = torch.arange(len(cells), device=cells.device)
    whole = Boxes(positions, numbers, [cells[:, axis].long() for axis in slots])
    waiting = _Waiting({tuple(shape[axis] for axis in slots): whole} if slots else {})
    while waiting:
        sides, group = waiting.take_largest()
        for cut in cut_box(sides):
            places = [
                (group.marks[slot] - entry) * sign
                for slot, entry, sign in zip(cut.slots, cut.entries, cut.signs, strict=True)
            ]
            inside = torch.ones_like(group.tags, dtype=torch.bool)
            for place, size in zip(places, cut.sizes, strict=True):
                inside &= (place >= 0) & (place < size)
            part = Boxes(group.position + cut.position, group.tags, places).where(inside)
            if cut.volume == 1:
                positions[part.tags] = part.position
            elif len(part.tags):
                waiting.add(cut.sizes, part)
    return positions


class _Waiting:
    """Boxes that are still to be cut. The largest are taken first, so boxes of equal sides are cut once, together."""

    def __init__(self, boxes: BoxesBySides) -> None:
        self.groups: dict[tuple[int, ...], list[Boxes]] = {}
        self.largest: list[tuple[int, tuple[int, ...]]] = []  # a heap of (-volume, sides)
        for sides, group in boxes.items():
            self.add(sides, group)

    def __bool__(self) -> bool:
        return bool(self.groups)

    def add(self, sides: tuple[int, ...], boxes: Boxes) -> None:
        if sides not in self.groups:
            heappush(self.largest, (-math.prod(sides), sides))
        self.groups.setdefault(sides, []).append(boxes)

    def take_largest(self) -> tuple[tuple[int, ...], Boxes]:
        """Boxes of equal sides, joined. Their order does not matter, because each has its position."""
        _, sides = heappop(self.largest)
        columns = zip(*((group.position, group.tags, *group.marks) for group in self.groups.pop(sides)), strict=True)
        position, tags, *marks = (torch.cat(column) for column in columns)
        return sides, Boxes(position, tags, marks)


def visit(curve: CurveName, shape: Sequence[int], device: torch.device | str | None = None) -> Tensor:
    """The row-major indices of a box's cells in the order of the curve, int64.

    >>> visit("snake", (2, 3)).tolist()
    [0, 1, 2, 5, 4, 3]
    """
    if curve == "hilbert":
        return hilbert_curve(shape, device)  # the same result as sorting by keys, but much faster
    return sort_keys(curve, all_cells(shape, device), shape).argsort()


def sort_keys(curve: CurveName, cells: Tensor, shape: Sequence[int]) -> Tensor:
    """Sort keys of the given cells, (cells, dimensions). Sorting by them puts the cells in curve order.

    >>> sort_keys("morton", torch.tensor([[0, 1], [1, 0]]), (2, 4)).tolist()
    [1, 2]
    """
    if curve == "hilbert":
        return hilbert_positions(cells, shape)
    keys: Tensor = KEYS[curve](cells.long().unbind(1), shape)
    return keys


def all_cells(shape: Sequence[int], device: torch.device | str | None = None) -> Tensor:
    """The coordinates of a box's cells in row-major order, (cells, dimensions).

    >>> all_cells((2, 2)).tolist()
    [[0, 0], [0, 1], [1, 0], [1, 1]]
    """
    sides = [torch.arange(side, device=device) for side in shape]
    return torch.stack(torch.meshgrid(*sides, indexing="ij"), dim=-1).flatten(0, -2)
