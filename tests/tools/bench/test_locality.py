"""The counts of the study of orders against brute force, and its pictures."""

import itertools

import pytest
import torch

import ringspan as rs
from ringspan.draw import draw_orders
from ringspan.order.orders import ranks_of_cells
from ringspan.tools.bench.hilbert import rows_received, share_of_neighbours_seen, shortest_segment

ORDERS = [rs.RowMajor, rs.Snake, rs.Morton, rs.Hilbert]


def near_pairs(shape: tuple[int, ...], radius: float) -> list[tuple[int, int]]:
    """Row-major indices of all pairs of cells at most ``radius`` apart, both ways."""
    cells = list(itertools.product(*map(range, shape)))
    return [
        (i, j)
        for (i, a), (j, b) in itertools.permutations(enumerate(cells), 2)
        if sum((x - y) ** 2 for x, y in zip(a, b, strict=True)) <= radius**2
    ]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("shape", "radius"), [((6, 7), 2), ((5, 4), 1.5), ((3, 4, 3), 1)])
def test_share_of_neighbours_equals_brute_force(order: type[rs.Hilbert], shape: tuple[int, ...], radius: float) -> None:
    found, pairs = order(shape), near_pairs(shape, radius)
    place = found.inverse.tolist()
    wanted = sum(place[i] // 9 == place[j] // 9 for i, j in pairs) / len(pairs)
    assert share_of_neighbours_seen(found, 9, radius) == pytest.approx(wanted, abs=1e-15)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("ring_size", [2, 3, 5])
def test_received_rows_are_those_near_a_rank(order: type[rs.Hilbert], ring_size: int) -> None:
    shape, radius = (6, 7), 2
    ranks = ranks_of_cells(order(shape), ring_size).flatten().tolist()
    wanted = {(ranks[i], j) for i, j in near_pairs(shape, radius) if ranks[i] != ranks[j]}
    found = rows_received(order(shape), ring_size, radius)
    assert found == [sum(rank == r for rank, _ in wanted) for r in range(ring_size)]


def test_the_shortest_segment_is_the_first_that_reaches_the_share() -> None:
    order = rs.Hilbert((16, 16))
    length = shortest_segment(order, 0.7, 2)
    assert share_of_neighbours_seen(order, length, 2) >= 0.7
    assert shortest_segment(order, 1.0, 2) == 256
    assert shortest_segment(rs.RowMajor((16, 16)), 0.7, 2) > 1.5 * length


def test_a_rank_holds_a_compact_region() -> None:
    """Sixteen ranks of 64 x 64 cells: strips of 4 x 64 in row-major order, squares of 16 x 16 along the curve."""
    for rank in range(16):
        cells = (ranks_of_cells(rs.Hilbert((64, 64)), 16) == rank).nonzero()
        assert (cells.amax(0) - cells.amin(0)).tolist() == [15, 15]
    assert torch.equal(ranks_of_cells(rs.RowMajor((64, 64)), 16), (torch.arange(64) // 4)[:, None].expand(64, 64))


def test_orders_are_drawn_or_refused(tmp_path) -> None:  # type: ignore[no-untyped-def]
    figure = draw_orders([order((8, 12)) for order in ORDERS], segment_length=16, ring_size=3)
    figure.savefig(tmp_path / "orders.png")
    assert [axis.get_title().split(",")[0] for axis in figure.axes[:4]] == ["RowMajor", "Snake", "Morton", "Hilbert"]
    with pytest.raises(ValueError, match="two-dimensional grid"):
        draw_orders([rs.Hilbert((4, 4)), rs.Snake((4, 5))], 4, 2)
    with pytest.raises(ValueError, match="10000 cells"):
        draw_orders([rs.Hilbert((100, 100))], 4, 2)
