"""Orders of a grid side by side: the curve, one segment of it, and the region of each rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ringspan.draw.pattern import fitted
from ringspan.order import GridOrder
from ringspan.order.orders import ranks_of_cells

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PANEL = 2.6  # inches
_EMPTY, _SEGMENT, _QUERY = "#F5F5F5", "#3787C0", "#08306B"
_LIGHTEST = 0.85  # of viridis, whose lightness rises steadily: for colour-blind eyes, and for print in grey
_MOST_CELLS_OF_A_LINE = 64 * 64


def draw_orders(orders: Sequence[GridOrder], segment_length: int, ring_size: int) -> Figure:
    """One column per order of a two-dimensional grid: its curve, its middle segment, and the regions of ranks.

    >>> import ringspan as rs
    >>> draw_orders([rs.RowMajor((8, 8)), rs.Hilbert((8, 8))], 8, 4).savefig("/dev/null", format="png")
    """
    from matplotlib.figure import Figure  # noqa: PLC0415

    shapes = {order.shape for order in orders}
    if len(shapes) != 1 or len(orders[0].shape) != 2:
        raise ValueError(f"grids of shapes {sorted(shapes)}: all orders must be of one two-dimensional grid")
    if orders[0].period > _MOST_CELLS_OF_A_LINE:
        raise ValueError(f"{orders[0].period} cells: at most {_MOST_CELLS_OF_A_LINE} can be drawn; use a smaller grid")
    height, width = orders[0].shape
    inches = _PANEL * len(orders)
    title = fitted(
        f"{height} x {width} cells: the curve, one segment of {segment_length}, the regions of {ring_size} ranks",
        inches=inches,
    )
    figure = Figure(figsize=(inches, 3 * _PANEL * height / width + 0.8), layout="constrained")
    panels = figure.subplots(3, len(orders), squeeze=False)
    for column, order in enumerate(orders):
        panels[0, column].set_title(f"{type(order).__name__}, longest step {order.longest_step}", fontsize=10)
        _draw_line(panels[0, column], order)
        _draw_segment(panels[1, column], order, segment_length)
        _draw_regions(panels[2, column], order, ring_size)
    for axis in panels.flat:
        axis.set(xlim=(0, width), ylim=(height, 0), aspect="equal", xticks=[], yticks=[])
        axis.spines[:].set_color("#BBBBBB")
    for axis, name in zip(panels[:, 0], ("the curve", "one segment", "ranks"), strict=True):
        axis.set_ylabel(name)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    return figure


def _draw_line(axis: Axes, order: GridOrder) -> None:
    cells = order.coordinates.numpy() + 0.5
    axis.plot(cells[:, 1], cells[:, 0], color=_SEGMENT, linewidth=max(0.5, min(1.5, 40 / order.shape[1])))
    axis.plot(cells[0, 1], cells[0, 0], "o", color=_QUERY, markersize=4)


def _draw_segment(axis: Axes, order: GridOrder, segment_length: int) -> None:
    from matplotlib.colors import ListedColormap  # noqa: PLC0415

    segments = (order.inverse // segment_length).view(order.shape)
    middle = segments[order.shape[0] // 2, order.shape[1] // 2]
    axis.pcolormesh(
        (segments == middle).numpy(), cmap=ListedColormap([_EMPTY, _SEGMENT]), vmin=0, vmax=1, rasterized=True
    )


def _draw_regions(axis: Axes, order: GridOrder, ring_size: int) -> None:
    from matplotlib import colormaps  # noqa: PLC0415

    most = max(1, ring_size - 1) / _LIGHTEST
    axis.pcolormesh(
        ranks_of_cells(order, ring_size).numpy(), cmap=colormaps["viridis"], vmin=0, vmax=most, rasterized=True
    )
