"""Pictures of patterns, work, schedules, orders and attention weights. Need matplotlib (the extra ``plot``)."""

from ringspan.draw.heat_map import draw_heat_map
from ringspan.draw.order import draw_orders
from ringspan.draw.pattern import draw_density, draw_pattern, pairs_by_cell
from ringspan.draw.plan import draw_plans, draw_schedule, save_figure
from ringspan.draw.trace import draw_trace
from ringspan.draw.work import draw_work, pairs_by_hop, scaled_down

__all__ = [
    "draw_density",
    "draw_heat_map",
    "draw_orders",
    "draw_pattern",
    "draw_plans",
    "draw_schedule",
    "draw_trace",
    "draw_work",
    "pairs_by_cell",
    "pairs_by_hop",
    "save_figure",
    "scaled_down",
]
