"""Orders from their text: operators take plain values, so `ringspan::attention` is told an order by its text."""

from __future__ import annotations

from functools import lru_cache
from typing import cast

from ringspan.order.curves import CurveName
from ringspan.order.folded import FoldedOrder
from ringspan.order.grid import GRID_ORDERS
from ringspan.order.points import find_points
from ringspan.order.protocol import Order


def parse_order(text: str) -> Order:
    """The order that ``text`` came from.

    >>> parse_order("hilbert grid 4x4")
    Hilbert(shape=(4, 4))
    """
    # Orders of points live as long as somebody keeps them, so they are not kept here.
    return find_points(text) if text.split()[1] == "points" else _parse_plain(text)


@lru_cache(maxsize=256)
def _parse_plain(text: str) -> Order:
    curve, kind, numbers = text.split()
    if kind == "folded":
        return FoldedOrder(cast(CurveName, curve), int(numbers))
    return GRID_ORDERS[curve](tuple(int(side) for side in numbers.split("x")))
