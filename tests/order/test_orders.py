"""Orders as users hold them: permutations, inverses, gradients; grids, folded segments and points."""

import copy
import gc
import math
import pickle
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ringspan as rs
from ringspan.order import parse_order
from ringspan.order.curves import all_cells
from ringspan.order.orders import near_square

GRIDS = [rs.Hilbert, rs.RowMajor, rs.Snake, rs.Morton]
points = torch.rand(50, 3, generator=torch.Generator().manual_seed(0))
ORDERS = [
    order for grid in GRIDS for order in (grid((5, 10)), grid.folded(10), grid.folded(7), grid.from_points(points))
]


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: order.text[:20])
def test_undo_is_the_inverse_of_apply_and_both_are_differentiable(order: rs.Order) -> None:
    x = torch.randn(2, 50, 3, dtype=torch.float64, requires_grad=True)
    assert torch.equal(order.undo(order.apply(x)), x)
    assert torch.equal(order.apply(order.undo(x)), x)
    assert torch.equal(order.apply(x.transpose(0, 1), dim=0), order.apply(x).transpose(0, 1))
    assert torch.equal(order.apply(x.transpose(1, 2), dim=-1), order.apply(x).transpose(1, 2))
    assert torch.equal(order.permutation[order.inverse], torch.arange(order.period))
    weights = torch.randn_like(x)
    (found,) = torch.autograd.grad((order.apply(x) * weights).sum(), x)
    assert torch.equal(found, order.undo(weights))
    torch.autograd.gradgradcheck(
        lambda y: order.undo(y, dim=0) ** 2, torch.randn(50, 1, dtype=torch.float64, requires_grad=True)
    )


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: order.text[:20])
def test_orders_are_hashable_cached_and_known_by_their_text(order: rs.Order) -> None:
    assert parse_order(order.text) == order
    assert hash(parse_order(order.text)) == hash(order)
    assert order.permutation is order.permutation
    assert torch.equal(order.visit("cpu"), order.permutation)


def test_orders_that_order_alike_are_equal() -> None:
    assert rs.Hilbert((4, 4)) == rs.Hilbert([4, 4])  # type: ignore[arg-type]
    assert rs.Hilbert((4, 4)) != rs.Morton((4, 4))
    assert rs.Hilbert.from_points(points) == rs.Hilbert.from_points(2 * points)
    assert len({rs.Hilbert.folded(8), rs.Hilbert.folded(8), rs.Snake.folded(8)}) == 2


def test_compiles_whole() -> None:
    order = rs.Hilbert((3, 5))
    x = torch.randn(2, 15, 4, dtype=torch.float64, requires_grad=True)
    compiled = torch.compile(lambda y: order.undo(order.apply(y).sin()), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), x.sin(), rtol=0, atol=0)
    torch.testing.assert_close(*torch.autograd.grad(compiled(x).sum(), x), x.cos(), rtol=0, atol=1e-15)


def test_coordinates_and_the_longest_step() -> None:
    order = rs.Hilbert((4, 6))
    assert torch.equal(order.apply(all_cells((4, 6)), dim=0), order.coordinates)
    assert order.longest_step == 1
    assert rs.RowMajor((4, 6)).longest_step == 6
    assert rs.Hilbert((1, 1)).longest_step == 0


@given(st.integers(1, 300))
def test_folded_segments_stay_where_they_are(segment_length: int) -> None:
    rows = rs.Hilbert.folded(segment_length).apply(torch.arange(700), dim=0)
    for start in range(0, 700, segment_length):
        part = rows[start : start + segment_length]
        assert torch.equal(part.sort().values, torch.arange(start, min(700, start + segment_length)))


def test_folds_are_near_squares() -> None:
    for cells in range(1, 2000):
        height, width = near_square(cells)
        assert height * width - cells < width
        assert height <= width <= 2 * height or cells < 3


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("shape", [(8, 8), (5, 7), (3, 4, 5)])
def test_points_on_a_grid_are_the_grid(grid: type[rs.Hilbert], shape: tuple[int, ...]) -> None:
    order = grid(shape)
    assert torch.equal(grid.from_points(all_cells(shape) - 3).permutation, order.permutation)
    shuffled = torch.randperm(math.prod(shape))
    found = grid.from_points(all_cells(shape)[shuffled]).apply(shuffled, dim=0)
    assert torch.equal(found, order.permutation)


def test_scattered_points_follow_the_curve() -> None:
    scattered = torch.rand(20_000, 2, dtype=torch.float64)
    along = rs.Hilbert.from_points(scattered).apply(scattered, dim=0)
    by_rows = rs.RowMajor.from_points(scattered).apply(scattered, dim=0)
    step, row_step = ((x[1:] - x[:-1]).norm(dim=-1) for x in (along, by_rows))
    # 20,000 points a unit of area lie about 0.007 apart; by rows, the next one is anywhere along the row.
    assert step.mean() < 0.01
    assert row_step.mean() > 0.3


def test_points_that_coincide_keep_their_order() -> None:
    same = torch.zeros(5, 2)
    assert rs.Hilbert.from_points(same).permutation.tolist() == [0, 1, 2, 3, 4]
    line = torch.stack([torch.zeros(6), torch.tensor([5.0, 3.0, 3.0, 1.0, 1.0, 0.0])], dim=1)
    assert rs.Hilbert.from_points(line).permutation.tolist() in ([5, 3, 4, 1, 2, 0], [0, 1, 2, 3, 4, 5])


def test_far_points_are_scaled() -> None:
    far = torch.tensor([[0, 0, 0], [2**40, 2**40, 2**40], [2**39, 2**39, 2**39]])
    assert rs.Hilbert.from_points(far).permutation.tolist()[0] == 0


@pytest.mark.parametrize("grid", GRIDS)
@given(st.data())
def test_points_on_a_line_are_sorted(grid: type[rs.Hilbert], data: st.DataObject) -> None:
    """Any finite numbers of any dtype: extremes, subnormals, negative zeros, clusters beside outliers."""
    bits = 8 * data.draw(st.sampled_from([1, 2, 4, 8]))
    numbers = {
        "float16": st.floats(width=16, allow_nan=False, allow_infinity=False),
        "float32": st.floats(width=32, allow_nan=False, allow_infinity=False),
        "float64": st.floats(allow_nan=False, allow_infinity=False),
        f"int{bits}": st.integers(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1),
        f"uint{bits}": st.integers(0, 2**bits - 1),
        "bool": st.booleans(),
    }
    dtype = data.draw(st.sampled_from(sorted(numbers)))
    values = data.draw(st.lists(numbers[dtype], min_size=1, max_size=30))
    line = torch.tensor(values, dtype=getattr(torch, dtype))
    wanted = sorted(range(len(values)), key=line.tolist().__getitem__)  # stable
    assert grid.from_points(line[:, None]).permutation.tolist() == wanted
    beside = torch.stack([line, line[:1].expand(len(values))], dim=1)  # a second dimension in which all are equal
    assert grid.from_points(beside).permutation.tolist() == wanted


def test_extreme_points() -> None:
    for values in ([-1.7e308, 1.7e308, 0.0], [1e19, -1e19, 0.0], [1.0, 1e-9, 0.0, 5e-10], [5e-324, 0.0, 1e-323]):
        line = torch.tensor(values, dtype=torch.float64)[:, None]
        assert rs.Hilbert.from_points(line).apply(line, dim=0).flatten().tolist() == sorted(values)
    square = torch.tensor([[0, 0], [0, 1], [1, 0], [1, 1]], dtype=torch.float64)
    for scale in (1.0, 5e-324, 1e-310, 1e300):  # the same points, whatever the unit
        assert rs.Hilbert.from_points(square * scale) == rs.Hilbert.from_points(square)
    assert rs.Hilbert.from_points((square * 2 - 1) * 1.7e308) == rs.Hilbert.from_points(square)


@pytest.mark.parametrize("factor", [2.0**100, 1e300, 2.0**-500])
def test_huge_and_tiny_coordinates_are_ordered_as_others(factor: float) -> None:
    scattered = torch.rand(50, 2, dtype=torch.float64)
    assert rs.Hilbert.from_points(factor * scattered) == rs.Hilbert.from_points(scattered)
    ends = torch.tensor([[1.7e308, 0.0], [-1.7e308, 0.0], [0.0, 0.0]], dtype=torch.float64)
    assert rs.RowMajor.from_points(ends).permutation.tolist() == [1, 2, 0]
    assert rs.RowMajor.from_points(torch.tensor([[2**63 - 1], [-(2**63)], [0]])).permutation.tolist() == [1, 2, 0]


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda order: pickle.loads(pickle.dumps(order))])
def test_a_copy_of_an_order_of_points_outlives_the_original(copied) -> None:  # type: ignore[no-untyped-def]
    rows = torch.arange(20)[None]
    original = rs.Hilbert.from_points(torch.rand(20, 2))
    wanted, order = original.rows, copied(original)
    del original
    gc.collect()
    assert torch.equal(order.apply(rows)[0], wanted)


def test_an_order_of_points_is_known_in_the_process_that_unpickles_it() -> None:
    order = rs.Hilbert.from_points(torch.rand(20, 2))
    script = "import pickle, sys, torch; print(pickle.load(sys.stdin.buffer).apply(torch.arange(20), dim=0).tolist())"
    done = subprocess.run([sys.executable, "-c", script], input=pickle.dumps(order), capture_output=True, check=True)
    assert done.stdout.decode().strip() == str(order.permutation.tolist())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rs.Hilbert((4, 4)).apply(torch.ones(1, 15)), "15 rows, but Hilbert.* has 16 cells"),
        (lambda: rs.Hilbert((4, 4)).apply(torch.ones(1, 16), dim=2), "dim=2: x has shape"),
        (lambda: rs.Hilbert.folded(0), "segment_length=0: a segment has at least 1 row"),
        (lambda: rs.Hilbert.from_points(torch.ones(3)), r"coordinates are \(3,\): must be a tensor"),
        (lambda: rs.Hilbert.from_points(torch.ones(0, 2)), r"coordinates are \(0, 2\): must be a tensor"),
        (lambda: rs.Hilbert.from_points(torch.tensor([[math.nan, 0.0]])), "coordinates hold NaN or infinity"),
        (lambda: rs.Hilbert.from_points(torch.tensor([[0.0], [-math.inf]])), r"infinity: point 1 is \[-inf\]"),
        (lambda: rs.Hilbert.from_points(torch.tensor([[1j]])), "coordinates are torch.complex64: must be real"),
        (lambda: rs.Hilbert.from_points(points).apply(torch.ones(1, 7)), "50 points"),
        (lambda: parse_order("hilbert points 0123"), "order 'hilbert points 0123'"),
    ],
)
def test_what_cannot_be_ordered_is_named(call, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("x", "dim", "message"),
    [([1, 2, 3, 4], 0, "x is a list: must be a torch.Tensor"), (torch.ones(1, 4), 1.0, "dim=1.0: must be an int")],
)
def test_what_is_no_tensor_or_no_dimension_is_named(x: object, dim: object, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        rs.Hilbert((2, 2)).apply(x, dim=dim)  # type: ignore[arg-type]


def test_a_curve_in_too_many_dimensions_is_refused() -> None:
    with pytest.raises(ValueError, match="30 sides with more than one cell"):
        rs.Hilbert.from_points(torch.rand(100, 30))
    assert rs.Morton.from_points(torch.rand(100, 30)).permutation.unique().numel() == 100


def test_whole_numbers_are_cells_whatever_their_dtype() -> None:
    tiles = torch.randint(100, (50, 2))
    assert rs.Hilbert.from_points(tiles) == rs.Hilbert.from_points(tiles.double())


def test_what_is_kept_does_not_depend_on_who_asked_first() -> None:
    with torch.inference_mode(), torch.device("meta"):
        order = rs.Hilbert((6, 10))
        assert order.permutation.device.type == order.coordinates.device.type == "cpu"
    assert not order.permutation.is_inference()
