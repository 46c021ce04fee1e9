"""Who sees what in a long sequence: the plane of queries against keys in cells, each with the share of pairs seen.

Counted from segments, so that a billion tokens cost no more than a thousand.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from ringspan.draw.titles import fitted, pattern_title
from ringspan.geometry import Branch, Pattern, Piece, pieces

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

CELLS = 128  # a side
_WIDTH, _HEIGHT = 7.4, 6.4  # inches


def draw_density(pattern: Pattern, n: int, kv_heads: int = 1, *, causal: bool = False) -> Figure:
    """Queries (down) against keys (across) in at most 128 x 128 cells, coloured by the share of pairs that are seen.

    A pair that is seen through two branches counts twice. All KV heads together.

    >>> from ringspan import Dilated
    >>> draw_density(Dilated.spanning(2**20), 2**20, causal=True).savefig("/dev/null", format="png")
    """
    import numpy as np  # noqa: PLC0415
    from matplotlib import colormaps  # noqa: PLC0415
    from matplotlib.colors import ListedColormap, LogNorm  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415

    borders = cell_borders(n)
    shares = pairs_by_cell(pattern, n, kv_heads, causal=causal) / kv_heads
    sizes = [stop - start for start, stop in pairwise(borders)]
    for i, rows in enumerate(sizes):
        shares[i] /= [rows * keys for keys in sizes]
    figure = Figure(figsize=(_WIDTH, _HEIGHT), layout="constrained")
    axis = figure.subplots()
    seen = shares[shares > 0]
    shares[shares == 0] = float("nan")
    # The lightest shade of what is seen must differ from white.
    colours = ListedColormap(colormaps["Blues"](np.linspace(0.15, 1, 256))).with_extremes(bad="white")
    norm = LogNorm(min(seen.min(), 0.5 * seen.max()), seen.max())
    mesh = axis.pcolormesh(borders, borders, shares, cmap=colours, norm=norm, rasterized=True)
    figure.colorbar(mesh, ax=axis, label="share of the pairs of a cell that are seen (log scale; white: none)")
    axis.set_aspect("equal")
    axis.invert_yaxis()
    axis.set(xlabel="key t", ylabel="query p")
    ticks = [n * i // 4 for i in range(5)]
    axis.set_xticks(ticks, [f"{tick:,}" for tick in ticks], fontsize=8)
    axis.set_yticks(ticks, [f"{tick:,}" for tick in ticks], fontsize=8)
    heads = "all KV heads" if kv_heads > 1 else "one KV head"
    cells = len(borders) - 1
    note = f"{cells} x {cells} cells of about {n // cells:,} x {n // cells:,} tokens each; {heads}"
    axis.set_title(fitted(pattern_title(pattern, n, causal), note, inches=_WIDTH - 1), fontsize=10, loc="left")
    return figure


def cell_borders(n: int) -> list[int]:
    """Where cells begin and end."""
    cells = min(n, CELLS)
    return [n * i // cells for i in range(cells + 1)]


def pairs_by_cell(pattern: Pattern, n: int, kv_heads: int = 1, *, causal: bool = False) -> NDArray[np.float64]:
    """(cells, cells): how many (query, key) pairs are seen in each cell, over all KV heads, with multiplicity.

    >>> from ringspan import Full
    >>> pairs_by_cell(Full(), 1000, causal=True).sum()
    np.float64(500500.0)
    """
    import numpy as np  # noqa: PLC0415

    borders = cell_borders(n)
    cells = list(pairwise(borders))
    counts = np.zeros((len(cells), len(cells)))
    for branch in pattern.branches(n):
        offsets = pattern.offsets(branch.rate, kv_heads)
        for i, (start, stop) in enumerate(cells):
            for piece in pieces(start, stop, branch):
                rows = _selected(piece, branch, offsets)
                counts[i, i] += piece.segments * sum(m * (m + 1) // 2 if causal else m * m for m in rows)
        tails = [_shared(cell, branch, offsets) for cell in cells]
        for i, (start, _) in enumerate(cells):
            for j in range(i):  # two cells share at most the segment that holds the first row of the later one
                if _segment(start, branch) != _segment(cells[j][1] - 1, branch):
                    continue
                pairs = sum(a * b for a, b in zip(tails[i][0], tails[j][1], strict=True))
                counts[i, j] += pairs
                if not causal:
                    counts[j, i] += pairs
    return counts


def _segment(row: int, branch: Branch) -> int:
    return (row + branch.shift) // branch.segment_length


def _selected(piece: Piece, branch: Branch, offsets: tuple[int, ...]) -> list[int]:
    """How many rows of a stretch each KV head selects."""
    return [lane.rows for lane in piece.lanes(branch.rate, offsets)]


def _shared(cell: tuple[int, int], branch: Branch, offsets: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """Selected rows of a cell, for each KV head: in the segment of its first row, and in that of its last row."""
    found = list(pieces(*cell, branch))
    return _selected(found[0], branch, offsets), _selected(found[-1], branch, offsets)
