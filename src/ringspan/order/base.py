"""The base class of orders: a permutation of rows, its inverse, and methods that apply both to tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import lru_cache

import torch
from torch import Tensor

from ringspan.geometry import as_int


class Order(ABC):
    """An order of rows. Immutable and hashable; two orders with the same parameters are equal.

    ``permutation[i]`` is the row at place i of the order, ``inverse[row]`` is the place of a row. Both are int64 CPU
    tensors, cached and shared: do not write to them. An order repeats after ``period`` rows.
    """

    @property
    @abstractmethod
    def text(self) -> str:
        """The order as one line that `parse_order` reads back."""

    @property
    @abstractmethod
    def period(self) -> int:
        """The number of rows after which the order repeats."""

    @abstractmethod
    def visit(self, device: torch.device | str | None = None) -> Tensor:
        """The rows of one period in this order, as a new tensor."""

    @abstractmethod
    def check_length(self, length: int) -> None:
        """Raise unless a sequence of this many rows can be ordered."""

    @property
    def permutation(self) -> Tensor:
        """The row at each place of one period."""
        return rows_and_places(self, self.period)[0]

    @property
    def inverse(self) -> Tensor:
        """The place of each row of one period."""
        return rows_and_places(self, self.period)[1]

    def apply(self, x: Tensor, dim: int = 1) -> Tensor:
        """``x`` with its rows (dimension ``dim``) in this order. Differentiable.

        >>> import ringspan as rs
        >>> rs.Hilbert((2, 2)).apply(torch.tensor([[1, 2, 3, 4]])).tolist()
        [[1, 2, 4, 3]]
        """
        return self._reorder(x, dim, back=False)

    def undo(self, x: Tensor, dim: int = 1) -> Tensor:
        """The inverse of `apply`. Differentiable."""
        return self._reorder(x, dim, back=True)

    def _reorder(self, x: Tensor, dim: int, *, back: bool) -> Tensor:
        if not isinstance(x, Tensor):
            raise TypeError(f"x is a {type(x).__name__}: must be a torch.Tensor")
        dim = as_int("dim", dim)
        if not -x.dim() <= dim < x.dim():
            raise ValueError(f"dim={dim}: x has shape {tuple(x.shape)}; pass the dimension of the rows")
        self.check_length(x.shape[dim])
        reordered: Tensor = torch.ops.ringspan.reorder(x, self.text, dim % x.dim(), back)
        return reordered


@lru_cache(maxsize=32)
def rows_and_places(order: Order, length: int, device: torch.device | str | None = None) -> tuple[Tensor, Tensor]:
    """The permutation of ``length`` rows and its inverse: whole periods, then the rows of a partial last one."""
    order.check_length(length)
    with torch.inference_mode(False):  # the result is cached, so it must not depend on the first caller's mode
        one = order.visit(device or "cpu")
        whole, rest = divmod(length, order.period)
        starts = torch.arange(whole, device=one.device) * order.period
        rows = torch.cat([(starts[:, None] + one).flatten(), one[one < rest] + whole * order.period])
        return rows, places_of(rows)


def places_of(rows: Tensor) -> Tensor:
    """The inverse of a permutation.

    >>> places_of(torch.tensor([2, 0, 1])).tolist()
    [1, 2, 0]
    """
    places = torch.empty_like(rows)
    places[rows] = torch.arange(len(rows), device=rows.device)
    return places


def select_rows(x: Tensor, dim: int, rows: Tensor) -> Tensor:
    """Select rows of ``x`` along ``dim``.

    If each row is a single number (lse), indexing is used: `index_select` takes five times as long.
    """
    return x[..., rows] if dim == x.dim() - 1 else x.index_select(dim, rows)
