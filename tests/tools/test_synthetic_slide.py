"""Synthetic slides: as many tiles as asked for, each once, in row order, the same for the same seed."""

import pytest
import torch

from ringspan.tools.synthetic_slide import tissue


@pytest.mark.parametrize("pieces", [1, 3])
@pytest.mark.parametrize("tiles", [1, 2, 7, 256, 5000])
def test_tiles_are_as_many_as_asked_for_and_sorted(tiles: int, pieces: int) -> None:
    cells = tissue(tiles, pieces, seed=1)
    assert cells.shape == (tiles, 2)
    assert cells.min() >= 0
    assert torch.equal(cells, cells.unique(dim=0))  # sorted by x, then by y


def test_the_seed_determines_the_slide() -> None:
    assert torch.equal(tissue(500, 2, seed=3), tissue(500, 2, seed=3))
    assert not torch.equal(tissue(500, 2, seed=3), tissue(500, 2, seed=4))


def test_tissue_has_holes() -> None:
    """Going down a column, tissue often ends and starts again."""
    cells = tissue(5000, 2, seed=0)
    same_column = cells[1:, 0] == cells[:-1, 0]
    assert int((same_column & (cells[1:, 1] - cells[:-1, 1] > 1)).sum()) > 20
