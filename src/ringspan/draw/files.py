"""All pictures of a plan as files: who sees what, who computes what, and the schedule, as PNG and SVG."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ringspan.draw.pattern import draw_pattern
from ringspan.draw.scale import scaled_down
from ringspan.draw.schedule import draw_schedule
from ringspan.draw.work import draw_work
from ringspan.geometry import Full
from ringspan.layout import LayoutName
from ringspan.planning import RingPlan

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_HEADS = 3
_DOTS_PER_INCH = 150


def draw_plans(plans: Mapping[LayoutName, RingPlan], folder: Path) -> list[Path]:
    """Draw plans that differ in their layout only; where the pictures are.

    Long rings are scaled down for the two pictures that show every pair, and their titles say so; schedules are drawn
    at the real length.
    """
    folder.mkdir(parents=True, exist_ok=True)
    small, note = scaled_down(next(iter(plans.values())))
    rates = (1,) if isinstance(small.pattern, Full) else small.pattern.dilation_rates
    heads = min(small.sizes.kv_heads, max(rates), _MOST_HEADS)  # heads beyond the largest rate look like earlier ones
    see = "; ".join(filter(None, ("darker: a key counts more often", note)))
    figure = draw_pattern(small.pattern, small.layout.rows, heads, causal=small.causal, note=see)
    paths = save_figure(figure, folder / "who_sees_what")
    for name, plan in plans.items():
        small, note = scaled_down(plan)
        paths += save_figure(draw_work(small, note=note), folder / f"who_computes_what_{name}")
        paths += save_figure(draw_schedule(plan), folder / f"schedule_{name}")
    return paths


def save_figure(figure: Figure, path: Path) -> list[Path]:
    """Write a figure as PNG and as SVG; where they are."""
    paths = [path.with_suffix(".png"), path.with_suffix(".svg")]
    for file in paths:
        figure.savefig(file, dpi=_DOTS_PER_INCH)
    return paths
