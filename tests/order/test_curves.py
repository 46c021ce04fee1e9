"""The curves: bijections through every box, in steps as short as promised."""

import itertools
import math
import random
from collections.abc import Iterator

import pytest
import torch

import ringspan as rs
from ringspan.geometry.curves import CurveName, box_slots, cells_in_order, row_major_steps
from ringspan.order.curves import Boxes, all_cells, follow, hilbert_curve, hilbert_positions, sort_keys, visit
from tests.counting import CountingMode

CURVES: list[CurveName] = ["hilbert", "row_major", "snake", "morton"]


def steps(shape: tuple[int, ...], curve: CurveName = "hilbert") -> torch.Tensor:
    """How far consecutive cells lie apart along each axis; on the way, checks that every cell comes once."""
    rows = visit(curve, shape)
    assert torch.equal(rows.sort().values, torch.arange(math.prod(shape))), shape
    return all_cells(shape)[rows].diff(dim=0).abs()


def steps_of_all(shapes: list[tuple[int, ...]]) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
    """The same for many boxes, whose curves are made together: one after the other they would take a minute."""
    boxes, starts, start = {}, [], 0
    for shape in shapes:
        slots, strides = (
            [*box_slots(shape), *(axis for axis, side in enumerate(shape) if side == 1)],
            row_major_steps(shape),
        )
        entered = torch.tensor([start])
        found = Boxes(entered, entered, [torch.tensor([strides[axis]]) for axis in slots])
        sides = tuple(shape[axis] for axis in slots)
        if sides in boxes:
            found = Boxes(
                *(torch.cat(pair) for pair in zip(boxes[sides][:2], found[:2], strict=True)),
                [torch.cat(pair) for pair in zip(boxes[sides].marks, found.marks, strict=True)],
            )
        boxes[sides] = found
        starts.append(start)
        start += math.prod(shape)
    curves = follow(boxes, start)
    for shape, first in zip(shapes, starts, strict=True):
        rows = curves[first : first + math.prod(shape)] - first
        assert torch.equal(rows.sort().values, torch.arange(math.prod(shape))), shape
        yield shape, all_cells(shape)[rows].diff(dim=0).abs()


def test_together_they_are_what_each_is_alone() -> None:
    shapes = [(5, 8), (1, 7), (6, 6), (9, 4)]
    for shape, found in steps_of_all(shapes):
        assert torch.equal(found, steps(shape))


def test_every_rectangle_up_to_40_by_40() -> None:
    for shape, found in steps_of_all(list(itertools.product(range(1, 41), repeat=2))[1:]):
        by_axes = found.sum(-1)
        short, long = sorted(shape)
        if long % 2 and short % 2 == 0 and 3 * short < 2 * long:
            # Between corners along an odd side there is no walk through an even number of cells: one step is diagonal.
            assert (by_axes > 1).sum() <= 1, shape
            assert (found <= 1).all(), shape
        else:
            assert (by_axes == 1).all(), shape


def test_every_box_up_to_12_by_12_by_12() -> None:
    longest = 0
    for shape, found in steps_of_all(list(itertools.product(range(1, 13), repeat=3))[1:]):
        by_axes = found.sum(-1)
        if all(side == 1 or side % 2 == 0 for side in shape):
            assert (by_axes == 1).all(), shape
        longest = max(longest, int(by_axes.max()))
    assert longest == 2, "docs/hilbert.md says 2"


@pytest.mark.parametrize("dimensions", [1, 2, 3, 4, 5])
def test_powers_of_two_in_any_number_of_dimensions(dimensions: int) -> None:
    generator = random.Random(dimensions)
    for _ in range(30):
        shape = tuple(2 ** generator.randint(0, 12 // dimensions) for _ in range(dimensions))
        assert (steps(shape).sum(-1) == 1).all(), shape


def test_random_larger_boxes() -> None:
    generator = random.Random(0)
    for _ in range(60):
        dimensions = generator.randint(1, 5)
        shape = tuple(generator.randint(1, round(30_000 ** (1 / dimensions))) for _ in range(dimensions))
        by_axes = steps(shape).sum(-1)
        if all(side == 1 or side % 2 == 0 for side in shape):
            assert (by_axes == 1).all(), shape
        assert len(by_axes) == 0 or by_axes.max() <= 2 * dimensions, shape


def test_squares_of_a_power_of_two_hold_squares() -> None:
    """What makes segments compact: each aligned quarter of the curve is a quarter of the square, all the way down."""
    cells = all_cells((64, 64))[hilbert_curve((64, 64))]
    for side in (2, 4, 8, 16, 32):
        corners = cells.unflatten(0, (-1, side * side)) // side
        assert (corners == corners[:, :1]).all()


def test_cubes_of_a_power_of_two_hold_cubes() -> None:
    cells = all_cells((16, 16, 16))[hilbert_curve((16, 16, 16))]
    for side in (2, 4, 8):
        corners = cells.unflatten(0, (-1, side**3)) // side
        assert (corners == corners[:, :1]).all()


@pytest.mark.parametrize("shape", [(7,), (1, 1), (5, 9), (16, 16), (30, 14), (3, 4, 7), (6, 6, 2, 4), (1, 13, 1, 5)])
def test_positions_of_cells_are_those_of_the_whole_curve(shape: tuple[int, ...]) -> None:
    assert torch.equal(hilbert_positions(all_cells(shape)[hilbert_curve(shape)], shape), torch.arange(math.prod(shape)))


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("shape", [(5, 8), (4, 4, 4), (9,), (1, 1), (30, 14), (3, 4, 7), (1, 13, 1, 5)])
def test_integers_and_tensors_follow_one_curve(curve: CurveName, shape: tuple[int, ...]) -> None:
    assert cells_in_order(curve, shape) == visit(curve, shape).tolist()


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("shape", [(5, 8), (4, 4, 4), (9,)])
def test_keys_sort_cells_along_the_curve(curve: CurveName, shape: tuple[int, ...]) -> None:
    assert torch.equal(sort_keys(curve, all_cells(shape), shape).argsort(), visit(curve, shape))


def test_the_others_are_what_they_are_called() -> None:
    assert visit("row_major", (3, 4)).tolist() == list(range(12))
    assert (steps((5, 4, 3), "snake").sum(-1) == 1).all()
    assert visit("morton", (4, 4)).tolist() == [0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15]


def test_operations_grow_with_the_depth_of_the_curve_and_not_with_its_cells() -> None:
    """So that a million cells take a fraction of a second (docs/hilbert.md)."""

    def operations(side: int) -> int:
        with CountingMode() as counted:
            hilbert_curve((side, side))
        return counted.total

    assert operations(1024) - operations(512) == operations(512) - operations(256)


@pytest.mark.parametrize(
    ("shape", "error", "message"),
    [
        ((), ValueError, "shape=.*: a grid has at least one side"),
        ((4, 0), ValueError, r"shape\[1\]=0: a side of a grid has at least 1 cell"),
        ((4, 2.5), TypeError, r"shape\[1\]=2.5: must be an int"),
        (16, TypeError, "shape=16: must be a sequence of ints"),
        ("44", TypeError, "shape='44': must be a sequence of ints"),
    ],
)
def test_bad_shapes_are_named(shape: object, error: type[Exception], message: str) -> None:
    for order in (rs.Hilbert, rs.RowMajor, rs.Snake, rs.Morton):
        with pytest.raises(error, match=message):
            order(shape)  # type: ignore[arg-type]
