"""Saves the pictures of a plan as PNG and SVG: its pattern, the work of each rank, and the schedule."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ringspan.draw.pattern import draw_density, draw_pattern
from ringspan.draw.schedule import draw_schedule
from ringspan.draw.work import MOST_ROWS, draw_work, scaled_down
from ringspan.geometry import Full
from ringspan.layout import LayoutName
from ringspan.planning import RingPlan

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_HEADS = 3
_DOTS_PER_INCH = 150


def draw_plans(plans: Mapping[LayoutName, RingPlan], folder: Path) -> list[Path]:
    """Draw plans that differ only in layout. Returns the paths of the pictures.

    The pattern and the schedules are drawn at the real length. The work of each rank is drawn pair by pair: a long
    sequence or a large ring is scaled down, and the title says so.
    """
    folder.mkdir(parents=True, exist_ok=True)
    plan = next(iter(plans.values()))
    paths = save_figure(_draw_seen(plan), folder / "who_sees_what")
    for name, plan in plans.items():
        small, note = scaled_down(plan)
        paths += save_figure(draw_work(small, note=note), folder / f"who_computes_what_{name}")
        paths += save_figure(draw_schedule(plan), folder / f"schedule_{name}")
    return paths


def _draw_seen(plan: RingPlan) -> Figure:
    rows, heads = plan.layout.rows, plan.sizes.kv_heads
    if rows > MOST_ROWS:
        return draw_density(plan.pattern, rows, heads, causal=plan.causal)
    rates = (1,) if isinstance(plan.pattern, Full) else plan.pattern.dilation_rates
    shown = min(heads, max(rates), _MOST_HEADS)  # heads beyond the largest rate repeat earlier ones
    return draw_pattern(plan.pattern, rows, shown, causal=plan.causal, note="darker: a key counts more often")


def save_figure(figure: Figure, path: Path) -> list[Path]:
    """Write a figure as PNG and SVG. Returns both paths."""
    paths = [path.with_suffix(".png"), path.with_suffix(".svg")]
    for file in paths:
        figure.savefig(file, dpi=_DOTS_PER_INCH)
    return paths
