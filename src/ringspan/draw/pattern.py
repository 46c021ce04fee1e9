"""Which query sees which key: pair by pair for short sequences, as a density for long ones. Also picture titles."""

from __future__ import annotations

import re
import textwrap
from itertools import pairwise
from typing import TYPE_CHECKING

from ringspan.geometry import Dilated, Full, Pattern
from ringspan.geometry.density import pairs_in_cells
from ringspan.oracle import multiplicity

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

_LETTERS_PER_INCH = 10.5  # of a title
# One hue, darker where a key counts more often: readable for colour-blind people and in print.
_COLOURS = ("#F5F5F5", "#A6CEE3", "#3787C0", "#084594", "#000000")
_PANEL, _LEGEND, _NARROWEST = 3.1, 1.7, 6.5  # inches
_MOST_VECTOR_CELLS = 48  # a side; a larger grid is an image inside the vector picture, which stays fast to display
DENSITY_CELLS = 128  # a side
_DENSITY_WIDTH, _DENSITY_HEIGHT = 7.4, 6.4  # inches


def pattern_title(pattern: Pattern, n: int, causal: bool) -> str:
    """Pattern, causality and sequence length.

    >>> from ringspan.geometry import Window
    >>> pattern_title(Dilated((8, 16), (1, 2), shift=4), 32, causal=True)
    'Segment x rate: 8x1, 16x2 shift 4, causal, n = 32'
    >>> pattern_title(Window(511) + Dilated((4096, 65536), (4, 64)), 65536, causal=False)
    'Window 511 + segment x rate: 4096x4, 65536x64, n = 65,536'
    """
    name = " + ".join(_term_title(term) for term in pattern.parts)
    return f"{name[0].upper()}{name[1:]}{', causal' if causal else ''}, n = {n:,}"


def _term_title(term: Pattern) -> str:
    if isinstance(term, Full):
        return "full attention"
    return f"segment x rate: {wrappable(term)}" if isinstance(term, Dilated) else term.text


def wrappable(pattern: Pattern) -> str:
    """The text of a pattern with spaces between its branches, where a title may be wrapped."""
    return pattern.text.replace(",", ", ")


def fitted(*lines: str, inches: float) -> str:
    """Wrap lines to the width of the picture, but not inside "4 x 1" or "n = 16"; drop empty lines.

    >>> print(fitted("Segment x rate: 8x1, 16x2, causal, n = 16", "", "contiguous", inches=3))
    Segment x rate: 8x1, 16x2,
    causal, n = 16
    contiguous
    """
    letters = max(24, int(inches * _LETTERS_PER_INCH))
    whole = [
        re.sub(r"(\w) ([x=]) (\d)", "\\1\N{NO-BREAK SPACE}\\2\N{NO-BREAK SPACE}\\3", line) for line in lines if line
    ]
    return "\n".join(textwrap.fill(line, letters) for line in whole).replace("\N{NO-BREAK SPACE}", " ")


def draw_pattern(pattern: Pattern, n: int, kv_heads: int = 1, *, causal: bool = False, note: str = "") -> Figure:
    """For each KV head, a grid of queries (down) against keys (across), coloured by how often a key counts.

    >>> from ringspan import Dilated
    >>> draw_pattern(Dilated((4, 8), (1, 2)), n=16, kv_heads=2).savefig("/dev/null", format="png")
    """
    from matplotlib.colors import BoundaryNorm, ListedColormap  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415
    from matplotlib.patches import Patch  # noqa: PLC0415

    count = multiplicity(pattern, n, kv_heads, causal=causal)
    most = min(int(count.max()), len(_COLOURS) - 1)
    colours = _COLOURS[: most + 1]
    width = max(_PANEL * kv_heads + _LEGEND, _NARROWEST)
    title = fitted(pattern_title(pattern, n, causal), note, inches=width - _LEGEND)
    figure = Figure(figsize=(width, _PANEL + 0.5 + 0.2 * title.count("\n")), layout="constrained")
    axes = figure.subplots(1, kv_heads, squeeze=False)[0]
    for head, axis in enumerate(axes):
        grid = count[head].clamp(max=most).numpy()
        norm = BoundaryNorm([i - 0.5 for i in range(most + 2)], most + 1)
        mesh = axis.pcolormesh(
            grid,
            cmap=ListedColormap(colours),
            norm=norm,
            edgecolors="white",
            linewidth=min(0.7, 16 / n) if n <= _MOST_VECTOR_CELLS else 0,
        )
        mesh.set_rasterized(n > _MOST_VECTOR_CELLS)
        axis.set_aspect("equal")
        axis.invert_yaxis()
        axis.set_title(f"KV head {head}", fontsize=10)
        axis.set_xlabel("key t")
        axis.tick_params(length=0)
        axis.set_xticks(_ticks(n), [str(i) for i in _places(n)], fontsize=8)
        axis.set_yticks(_ticks(n), [str(i) for i in _places(n)], fontsize=8)
        axis.spines[:].set_visible(False)
    axes[0].set_ylabel("query p")
    names = ["not seen", "counts once", "counts twice", *(f"counts {m} times" for m in range(3, most + 1))]
    figure.legend(
        handles=[Patch(facecolor=c, edgecolor="#BBBBBB", label=name) for c, name in zip(colours, names, strict=False)],
        loc="outside right upper",
        frameon=False,
        fontsize=9,
    )
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    return figure


def _places(n: int) -> range:
    return range(0, n, max(1, n // 8))


def _ticks(n: int) -> list[float]:
    return [i + 0.5 for i in _places(n)]


def draw_density(pattern: Pattern, n: int, kv_heads: int = 1, *, causal: bool = False) -> Figure:
    """Queries (down) against keys (across) in at most 128 x 128 cells, coloured by the fraction of pairs that are seen.

    A pair seen through two branches counts twice. The fraction is taken over all KV heads.

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
    figure = Figure(figsize=(_DENSITY_WIDTH, _DENSITY_HEIGHT), layout="constrained")
    axis = figure.subplots()
    seen = shares[shares > 0]
    shares[shares == 0] = float("nan")
    # The lightest shade must differ from white, which means "none".
    colours = ListedColormap(colormaps["Blues"](np.linspace(0.15, 1, 256))).with_extremes(bad="white")
    norm = LogNorm(min(seen.min(), 0.5 * seen.max()), seen.max())
    mesh = axis.pcolormesh(borders, borders, shares, cmap=colours, norm=norm, rasterized=True)
    figure.colorbar(mesh, ax=axis, label="fraction of pairs in a cell that are seen (log scale; white: none)")
    axis.set_aspect("equal")
    axis.invert_yaxis()
    axis.set(xlabel="key t", ylabel="query p")
    ticks = [n * i // 4 for i in range(5)]
    axis.set_xticks(ticks, [f"{tick:,}" for tick in ticks], fontsize=8)
    axis.set_yticks(ticks, [f"{tick:,}" for tick in ticks], fontsize=8)
    heads = "all KV heads" if kv_heads > 1 else "one KV head"
    cells = len(borders) - 1
    note = f"{cells} x {cells} cells of about {n // cells:,} x {n // cells:,} tokens each; {heads}"
    axis.set_title(fitted(pattern_title(pattern, n, causal), note, inches=_DENSITY_WIDTH - 1), fontsize=10, loc="left")
    return figure


def cell_borders(n: int) -> list[int]:
    """The row where each cell starts, and the number of rows."""
    cells = min(n, DENSITY_CELLS)
    return [n * i // cells for i in range(cells + 1)]


def pairs_by_cell(pattern: Pattern, n: int, kv_heads: int = 1, *, causal: bool = False) -> NDArray[np.float64]:
    """(cells, cells): the number of (query, key) pairs seen in each cell, over all KV heads, with multiplicity.

    >>> from ringspan import Full
    >>> pairs_by_cell(Full(), 1000, causal=True).sum()
    np.float64(500500.0)
    """
    import numpy as np  # noqa: PLC0415

    cells = list(pairwise(cell_borders(n)))
    branches = pattern.branches(n, kv_heads)
    counts = [pairs_in_cells(branch, cells, cells, range(kv_heads), causal=causal) for branch in branches]
    return np.array(counts, dtype=np.float64).sum(axis=0)
