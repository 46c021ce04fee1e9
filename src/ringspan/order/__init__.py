"""Orders of rows: curves through grids, point clouds and folded segments, as permutations and their inverses."""

from ringspan.order.base import Order
from ringspan.order.grid import FoldedOrder, GridOrder, Hilbert, Morton, RowMajor, Snake
from ringspan.order.passes import Arrangement, Pass, check_fits, passes
from ringspan.order.points import PointOrder
from ringspan.order.reorder import parse_order, reorder_op

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
    "check_fits",
    "parse_order",
    "passes",
    "reorder_op",
]
