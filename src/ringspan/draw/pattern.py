"""Who sees what: for each KV head, queries against keys, straight from the dense definition."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ringspan.draw.titles import fitted, pattern_title
from ringspan.geometry import Pattern
from ringspan.oracle import multiplicity

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# One hue, darker where a key counts more often: it survives colour blindness and print.
_COLOURS = ("#F5F5F5", "#A6CEE3", "#3787C0", "#084594", "#000000")
_PANEL, _LEGEND, _NARROWEST = 3.1, 1.7, 6.5  # inches
_MOST_DRAWN_CELLS = 48  # a side: beyond that a vector picture is slow to show, and the grid becomes an image in it


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
            linewidth=min(0.7, 16 / n) if n <= _MOST_DRAWN_CELLS else 0,
        )
        mesh.set_rasterized(n > _MOST_DRAWN_CELLS)
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
