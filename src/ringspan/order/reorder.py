"""The operator `ringspan::reorder`, and `parse_order`: operators take plain values, so orders are passed as text."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor

from ringspan.order.base import Order, rows_and_places, select_rows
from ringspan.order.curves import CurveName
from ringspan.order.grid import GRID_ORDERS, FoldedOrder
from ringspan.order.points import find_points


def parse_order(text: str) -> Order:
    """The order with this text.

    >>> parse_order("hilbert grid 4x4")
    Hilbert(shape=(4, 4))
    """
    # Orders of points are not cached here: they exist only while the caller keeps a reference.
    return find_points(text) if text.split()[1] == "points" else _parse_plain(text)


@lru_cache(maxsize=256)
def _parse_plain(text: str) -> Order:
    curve, kind, numbers = text.split()
    if kind == "folded":
        return FoldedOrder(cast(CurveName, curve), int(numbers))
    return GRID_ORDERS[curve](tuple(int(side) for side in numbers.split("x")))


@torch.library.custom_op("ringspan::reorder", mutates_args=())
def reorder_op(x: Tensor, order: str, dim: int, back: bool) -> Tensor:
    """Permute the rows of ``x`` by an order, or undo it."""
    rows, places = rows_and_places(parse_order(order), x.shape[dim], x.device)
    return select_rows(x, dim, places if back else rows)


@reorder_op.register_fake
def _reorder_fake(x: Tensor, order: str, dim: int, back: bool) -> Tensor:
    return x.new_empty(x.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.order_text, ctx.dim, ctx.back = inputs
    ctx.order = parse_order(ctx.order_text)  # keeps the order alive until backward


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return reorder_op(grad, ctx.order_text, ctx.dim, not ctx.back), None, None, None


reorder_op.register_autograd(_backward, setup_context=_keep)
