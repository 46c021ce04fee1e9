"""Attention weights on a slide, or on any set of square tiles: each tile at its coordinates, coloured by its weight."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ringspan.draw.pattern import fitted

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.collections import PolyCollection
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure

_WIDTH, _PANEL, _COLUMNS = 6.4, 2.6, 4  # inches of one picture, of each of several, and how many are side by side
_BAR, _TITLE = 1.1, 0.6  # inches
_DECADES = 4  # of a log scale; smaller weights have its lightest colour
_NO_WEIGHT = "#D9D9D9"
_MOST_VECTOR_TILES = 2304  # more tiles are an image inside the vector picture, which stays fast to display


def draw_heat_map(
    coordinates: Any, weights: Any, tile_size: float, *, per_head: bool = False, log: bool = False, title: str = ""
) -> Figure:
    """Tiles as squares, coloured by the weight with which a query sees them. Tiles without weight are grey.

    Args:
        coordinates: (tiles, 2), a tensor or an array: x and y of the upper left corner of each tile, in pixels of the
            slide or any other unit. y points down.
        weights: (tiles,), or (heads, tiles), such as ``rs.attention_weights(...)[0, :, 0, 1:]``, the weights of all
            tiles without those of a CLS token.
        tile_size: the side of a tile, in the unit of the coordinates.
        per_head: one picture for each head, all with the same colours. By default, the mean over heads.
        log: colours on a log scale, over four orders of magnitude at most.

    >>> import torch
    >>> xy = 256 * torch.cartesian_prod(torch.arange(4), torch.arange(3))
    >>> draw_heat_map(xy, torch.rand(2, 12), 256, per_head=True).savefig("/dev/null", format="png")
    """
    from matplotlib.figure import Figure  # noqa: PLC0415
    from matplotlib.patches import Patch  # noqa: PLC0415

    corners, by_head = _checked(coordinates, weights, tile_size)
    panels = by_head if per_head else by_head.mean(0, keepdim=True)
    columns = min(len(panels), _COLUMNS)
    rows = math.ceil(len(panels) / columns)
    (left, top), (right, bottom) = (corners.amin(0) - tile_size).tolist(), (corners.amax(0) + 2 * tile_size).tolist()
    side = _WIDTH if len(panels) == 1 else _PANEL
    width, height = right - left, bottom - top  # with a margin of one tile
    # Very long slides are not drawn in full width.
    panel = side * min(1.0, 1.5 * width / height), side * min(1.5, height / width)
    inches = columns * panel[0] + _BAR
    figure = Figure(figsize=(inches, rows * (panel[1] + 0.3) + _TITLE), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    norm = _norm(panels, log)
    for i, (axis, shown) in enumerate(zip(axes.flat, panels, strict=False)):
        tiles = _draw_tiles(axis, corners, shown, tile_size, norm)
        axis.set(xlim=(left, right), ylim=(bottom, top), aspect="equal", xticks=[], yticks=[])
        axis.spines[:].set_color("#BBBBBB")
        if per_head:
            axis.set_title(f"head {i}", fontsize=10)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    extend = "min" if log and bool(((panels > 0) & (panels < (norm.vmin or 0.0))).any()) else "neither"
    mean = f", mean over {len(by_head)} heads" if len(by_head) > len(panels) else ""
    figure.colorbar(tiles, ax=axes, label=f"attention weight{mean}", extend=extend, shrink=0.9)
    if not panels.all():
        figure.legend(
            handles=[Patch(facecolor=_NO_WEIGHT, label="no weight")],
            loc="outside lower left",
            frameon=False,
            fontsize=9,
        )
    if title:
        figure.suptitle(fitted(title, inches=inches), x=0.01, ha="left", fontsize=11)
    return figure


def _checked(coordinates: Any, weights: Any, tile_size: float) -> tuple[Tensor, Tensor]:
    """Corners (tiles, 2) and weights (heads, tiles) on the CPU in fp64."""
    corners, found = (torch.as_tensor(x).detach().cpu().double() for x in (coordinates, weights))
    if corners.dim() != 2 or corners.shape[1] != 2 or not len(corners):
        raise ValueError(f"coordinates have shape {tuple(corners.shape)}: must be (tiles, 2), x and y of each tile")
    if found.dim() not in (1, 2) or not len(found) or found.shape[-1] != len(corners):
        raise ValueError(
            f"weights have shape {tuple(found.shape)}, but there are {len(corners)} tiles: must be (tiles,) or (heads, "
            "tiles); leave out the weights of other tokens"
        )
    if not corners.isfinite().all() or not (found.isfinite() & (found >= 0)).all():
        raise ValueError("coordinates must be finite, and weights finite and at least 0")
    if not 0 < tile_size < math.inf:
        raise ValueError(f"tile_size={tile_size}: must be positive, in the unit of the coordinates")
    return corners, found if found.dim() == 2 else found[None]


def _norm(panels: Tensor, log: bool) -> Normalize:
    from matplotlib.colors import LogNorm, Normalize  # noqa: PLC0415

    most = float(panels.max()) or 1.0
    if not log:
        return Normalize(0.0, most)
    seen = panels[panels > 0]
    least = float(seen.min()) if len(seen) else most
    return LogNorm(max(min(least, most / 10), most * 10.0**-_DECADES), most)


def _draw_tiles(axis: Axes, corners: Tensor, weights: Tensor, tile_size: float, norm: Normalize) -> PolyCollection:
    import numpy as np  # noqa: PLC0415
    from matplotlib import colormaps  # noqa: PLC0415
    from matplotlib.collections import PolyCollection  # noqa: PLC0415
    from matplotlib.colors import ListedColormap  # noqa: PLC0415

    square = tile_size * torch.tensor([[0.0, 0.0], [1.0, 0.0], [1.0, 1.0], [0.0, 1.0]], dtype=torch.float64)
    by_weight = weights.argsort(stable=True)  # where tiles overlap, the largest weight is on top
    tiles = PolyCollection(
        list((corners[by_weight, None] + square).numpy()),
        array=np.ma.masked_equal(weights[by_weight].numpy(), 0),
        # Darker for more: readable for colour-blind people and in print. The lightest colour must differ from white.
        cmap=ListedColormap(colormaps["YlOrRd"](np.linspace(0.1, 1, 256))).with_extremes(bad=_NO_WEIGHT),
        norm=norm,
        linewidth=0,
        antialiased=False,  # no seams between tiles
        rasterized=len(corners) > _MOST_VECTOR_TILES,
    )
    axis.add_collection(tiles)
    return tiles
