"""Orders of rows: curves through grids, point clouds and folded segments, as permutations and their inverses."""

from ringspan.order.base import Order
from ringspan.order.orders import (
    FoldedOrder,
    GridOrder,
    Hilbert,
    Morton,
    PointOrder,
    RowMajor,
    Snake,
    parse_order,
    reorder_op,
)
from ringspan.order.passes import Arrangement, Pass, check_causality, check_fits, passes, shares_pairs

__all__ = [
    "Arrangement",
    "FoldedOrder",
    "GridOrder",
    "Hilbert",
    "Morton",
    "Order",
    "Pass",
    "PointOrder",
    "RowMajor",
    "Snake",
    "check_causality",
    "check_fits",
    "parse_order",
    "passes",
    "reorder_op",
    "shares_pairs",
]
