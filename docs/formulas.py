"""Renders formulas as SVG with matplotlib's mathtext, so that the site needs neither a network nor LaTeX."""

from __future__ import annotations

import re
from html import escape
from typing import Any

from matplotlib.font_manager import FontProperties
from matplotlib.path import Path
from matplotlib.textpath import TextPath

SIZE = 12  # of the font, in the units of the paths
FONT = FontProperties(size=SIZE, math_fontfamily="cm")
LETTERS = {Path.MOVETO: "M", Path.LINETO: "L", Path.CURVE3: "Q", Path.CURVE4: "C", Path.CLOSEPOLY: "Z"}


def visit_inline(translator: Any, node: Any) -> None:
    translator.body.append(render_formula(node.astext()))
    node.clear()  # its text is not written again


def visit_block(translator: Any, node: Any) -> None:
    """A formula on its own; the lines of an `aligned` environment are rows."""
    text = re.sub(r"\\(begin|end)\{aligned\}|&", "", node.astext())
    lines = [line for line in text.split(r"\\") if line.strip()]
    translator.body += ['<div class="formula">', *(f"<div>{render_formula(line)}</div>" for line in lines), "</div>"]
    node.clear()  # its text is not written again


def render_formula(formula: str) -> str:
    """An SVG in the colour and size of the text around it, labelled with its source. Raises on what mathtext lacks."""
    source = " ".join(formula.split())
    path = TextPath((0, 0), f"${source}$", prop=FONT)
    box = path.get_extents()
    left, bottom, width, height = box.x0 - 0.5, box.y0 - 0.5, box.width + 1, box.height + 1
    style = f"width: {width / SIZE:.3f}em; height: {height / SIZE:.3f}em; vertical-align: {bottom / SIZE:.3f}em"
    return (
        f'<svg role="img" aria-label="{escape(source)}" style="{style}"'
        f' viewBox="{left:.2f} {-bottom - height:.2f} {width:.2f} {height:.2f}">'
        f'<path fill="currentColor" d="{_path_data(path)}"/></svg>'
    )


def _path_data(path: Path) -> str:
    """The path as SVG writes it; SVG counts y downwards."""
    data = []
    for points, code in path.iter_segments(simplify=False):
        numbers = () if code == Path.CLOSEPOLY else points * ([1, -1] * (len(points) // 2))
        data.append(LETTERS[code] + " ".join(f"{x:.2f}" for x in numbers))
    return "".join(data)


def setup(app: Any) -> None:
    app.add_html_math_renderer("mathtext", (visit_inline, None), (visit_block, None))
