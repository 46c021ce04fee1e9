"""The interface of a ring, real or simulated, to a call of attention, and the registry of rings for operators."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Protocol
from weakref import WeakValueDictionary

from torch import Tensor

from ringspan.layout import Layout
from ringspan.planning import Routing
from ringspan.ring.transport import RingError, Transport

Metadata = Callable[[], dict[str, Any]]


class Backend(Protocol):
    """The ranks of a call in this process: one of a real ring, or all of a simulated ring."""

    routing: Routing

    def agree(self, rows: int, metadata: Metadata, seq_len: int | None, like: Tensor) -> Layout:
        """The layout of the whole sequence, of which this process holds ``rows`` rows.

        Without ``seq_len``, the ranks all-gather the metadata of the call, and all of them raise if they disagree.
        """

    def shard(
        self, layout: Layout, tensors: Sequence[tuple[Tensor | None, int]]
    ) -> list[tuple[int, Transport, list[Any]]]:
        """For each rank in this process: (rank, transport, its rows of the tensors)."""

    def unshard(self, layout: Layout, parts: list[Tensor], dim: int) -> Tensor:
        """The inverse of `shard`, for one tensor."""


# Operators take no objects, so `ringspan::attention` takes the name of a ring. An entry lives as long as its ring.
_rings: WeakValueDictionary[str, Backend] = WeakValueDictionary()
_numbers = itertools.count()


def register_ring(ring: Backend) -> str:
    """Register a ring; returns its name."""
    name = f"{type(ring).__name__} {next(_numbers)}"
    _rings[name] = ring
    return name


def find_ring(name: str) -> Backend:
    """The ring with this name; raises if it was garbage-collected."""
    ring = _rings.get(name)
    if ring is None:
        raise RingError(f"ring {name!r} no longer exists: keep a reference to it as long as compiled code uses it")
    return ring
