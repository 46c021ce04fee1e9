"""The grid of tiles of a slide: cells of coordinates, checks of coordinates, and the position embedding of cells."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_COORDINATES = (torch.int32, torch.int64, torch.float32, torch.float64)  # others round large coordinates


@dataclass(frozen=True)
class TileGrid:
    """A square grid of ``side`` x ``side`` cells, each as wide as a tile, in the unit of the coordinates.

    Tiles may begin anywhere in a cell: slides are cropped to the tissue, so coordinates are rarely multiples of
    ``tile_size``. Cells without tiles between all tiles are accepted too: they are usual for coordinates of a higher
    resolution than that of the tiles.
    """

    side: int
    tile_size: int
    allow_shared_cells: bool = False

    def __post_init__(self) -> None:
        for name in ("side", "tile_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1")

    def cells(self, coords: Tensor) -> Tensor:
        """The cell (x, y) of each tile, int64, from coordinates (slides, tiles, 2). Raises if one is not in the grid.

        >>> TileGrid(1000, 256).cells(torch.tensor([[[1581, 25327], [1581, 25583]]])).tolist()
        [[[6, 98], [6, 99]]]
        """
        if coords.dtype not in _COORDINATES:
            raise ValueError(
                f"coords is {coords.dtype}, which may round coordinates: pass them as int32, int64, float32 or float64"
            )
        check_finite("coords", coords)
        cells = coords.div(self.tile_size, rounding_mode="floor").long()
        outside = ((cells < 0) | (cells >= self.side)).any(-1)
        if outside.any():
            slide, tile = _first(outside)
            raise ValueError(
                f"coords[{slide}, {tile}]={coords[slide, tile].tolist()}: outside the grid of {self.side} x "
                f"{self.side} tiles of {self.tile_size}. If coordinates are negative, subtract the slide's origin; "
                "otherwise pass the tile_size of their level, or a larger slide_ngrids, which changes no weight"
            )
        return cells

    def check_shared(self, cells: Tensor, coords: Tensor, slides: Tensor) -> None:
        """Raise if two tiles are in one cell of a slide. ``slides`` has the number of each tile's slide."""
        if self.allow_shared_cells:
            return
        numbers = ((slides * self.side + cells[..., 0]) * self.side + cells[..., 1]).flatten()
        ordered, order = numbers.sort(stable=True)
        shared = (ordered[1:] == ordered[:-1]).nonzero()
        if not len(shared):
            return
        one, other = (divmod(int(order[int(shared[0]) + i]), coords.shape[1]) for i in (0, 1))
        if torch.equal(coords[one], coords[other]):
            cause = "it is the same tile twice; leave one out"
        else:
            cause = (
                "tile_size must not exceed the distance between tiles. Pass coordinates in pixels of the level at "
                f"which a tile is {self.tile_size} wide, not numbers of rows and columns or fractions of the slide"
            )
        raise ValueError(
            f"coords[{one[0]}, {one[1]}]={coords[one].tolist()} and coords[{other[0]}, {other[1]}]="
            f"{coords[other].tolist()} are in one cell of {self.tile_size} x {self.tile_size}: {cause}. If tiles "
            "overlap, pass allow_shared_cells=True"
        )


def check_finite(name: str, values: Tensor) -> None:
    """Raise if a tile of (slides, tiles, n) has a NaN or an infinity."""
    if not values.numel():
        return
    # Both propagate NaN, and no tensor of the size of the values is allocated.
    finite = values.amax(-1).isfinite() & values.amin(-1).isfinite()
    if not finite.all():
        slide, tile = _first(~finite)
        raise ValueError(f"{name}[{slide}, {tile}] is not finite: compute the tile again, or leave it out")


def position_embedding(cells: Tensor, embed_dim: int) -> Tensor:
    """Sines and cosines of grid cells (.., 2), in float32, (.., embed_dim): the second axis, then the first.

    Equal to the rows of the official table of all cells, which is computed in fp64 and rounded. Only a table of one
    axis is computed here.
    """
    quarter = embed_dim // 4
    rates = 1.0 / 10000.0 ** (torch.arange(quarter, dtype=torch.float64) / quarter)
    angles = torch.arange(int(cells.max()) + 1 if cells.numel() else 0, dtype=torch.float64)[:, None] * rates
    table = torch.cat([angles.sin(), angles.cos()], 1).float().to(cells.device)
    return torch.cat([table[cells[..., 1]], table[cells[..., 0]]], -1)


def _first(wrong: Tensor) -> tuple[int, int]:
    slide, tile = wrong.nonzero()[0].tolist()
    return slide, tile
