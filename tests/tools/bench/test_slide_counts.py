"""The counts of `python -m benchmarks slides` are those of the pattern's own definition, pair by pair."""

import math

import pytest

import ringspan as rs
from benchmarks import slide_counts
from ringspan.layout import Layout
from ringspan.tools.synthetic_slide import tissue

SMALL = rs.Dilated((16, 64), (1, 4), head_offsets="blocked", shift=5)


@pytest.mark.parametrize("order", slide_counts.ORDERS)
def test_counts_follow_from_sees(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slide_counts, "PATTERN", SMALL)
    cells = tissue(60, 1, seed=0)
    found = slide_counts.count_neighbours(cells, order)
    rows = slide_counts.positions_of(order, cells).tolist()
    assert sorted(rows) == list(range(1, 61))
    pairs, any_head, heads = ([0] * len(slide_counts.RADII) for _ in range(3))
    needed = {size: set() for size in slide_counts.RING_SIZES}
    for i, a in enumerate(cells.tolist()):
        for j, b in enumerate(cells.tolist()[:i]):
            seeing = sum(SMALL.sees(rows[i], rows[j], head=head, kv_heads=16) > 0 for head in range(16))
            for k, radius in enumerate(slide_counts.RADII):
                if math.dist(a, b) <= radius:
                    pairs[k], any_head[k], heads[k] = pairs[k] + 1, any_head[k] + (seeing > 0), heads[k] + seeing
            for size, rows_of_ranks in needed.items():
                one, other = (rank_of(rows[tile], size) for tile in (i, j))
                if one != other and math.dist(a, b) <= slide_counts.SHARED_RADIUS:
                    rows_of_ranks |= {(one, j), (other, i)}
    assert found["pairs"] == pairs
    assert found["any_head"] == [x / y for x, y in zip(any_head, pairs, strict=True)]
    assert found["mean_head"] == [x / y / 16 for x, y in zip(heads, pairs, strict=True)]
    assert 0 < found["mean_head"][-1] < found["any_head"][-1] < 1
    assert found["rows_needed"] == {size: len(of_ranks) for size, of_ranks in needed.items()}


def rank_of(row: int, ring_size: int) -> int:
    layout = Layout("contiguous", 61, ring_size)
    return next(rank for rank in range(ring_size) if any(s.start <= row < s.stop for s in layout.spans(rank)))


def test_row_order_sorts_by_x_then_by_y() -> None:
    cells = tissue(200, 2, seed=0)
    rows = slide_counts.positions_of("row order", cells)
    assert rows.tolist() == [1 + sorted(cells.tolist()).index(cell) for cell in cells.tolist()]
