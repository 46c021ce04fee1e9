"""Reordering as a registered operator: torch.compile takes it whole, and its gradient is the reordering back.

(A gather's own gradient adds rows up one by one, because it cannot know that no row comes twice.)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ringspan.order.protocol import rows_and_places, take_rows
from ringspan.order.text import parse_order


@torch.library.custom_op("ringspan::reorder", mutates_args=())
def reorder_op(x: Tensor, order: str, dim: int, back: bool) -> Tensor:
    """``x`` with its rows in an order, or back from it."""
    rows, places = rows_and_places(parse_order(order), x.shape[dim], x.device)
    return take_rows(x, dim, places if back else rows)


@reorder_op.register_fake
def _reorder_fake(x: Tensor, order: str, dim: int, back: bool) -> Tensor:
    return x.new_empty(x.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.order_text, ctx.dim, ctx.back = inputs
    ctx.order = parse_order(ctx.order_text)  # an order that nobody else keeps lives until backward is done


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return reorder_op(grad, ctx.order_text, ctx.dim, not ctx.back), None, None, None


reorder_op.register_autograd(_backward, setup_context=_keep)
