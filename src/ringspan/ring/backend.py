"""What a call needs of a ring, real or simulated, and the registry by which operators find rings."""

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
    """The ranks of a call that live in this process: one of a real ring, or all of a simulated one."""

    routing: Routing

    def agree(self, rows: int, metadata: Metadata, seq_len: int | None, like: Tensor) -> Layout:
        """The layout of the whole sequence, of which the call holds ``rows`` rows here.

        Unless ``seq_len`` states the length, ranks all-gather the metadata of the call; if they disagree, all raise.
        """

    def shard(
        self, layout: Layout, tensors: Sequence[tuple[Tensor | None, int]]
    ) -> list[tuple[int, Transport, list[Any]]]:
        """For each rank in this process: its number, its transport, and its rows of the tensors."""

    def unshard(self, layout: Layout, parts: list[Tensor], dim: int) -> Tensor:
        """The inverse of `shard`, for one tensor."""


# Operators take no objects, so `ringspan::attention` gets the name of its ring. An entry lives as long as its ring.
_rings: WeakValueDictionary[str, Backend] = WeakValueDictionary()
_numbers = itertools.count()


def register_ring(ring: Backend) -> str:
    """Give a ring a name."""
    name = f"{type(ring).__name__} {next(_numbers)}"
    _rings[name] = ring
    return name


def find_ring(name: str) -> Backend:
    """The ring of this name; an error if it was garbage-collected."""
    ring = _rings.get(name)
    if ring is None:
        raise RingError(f"ring {name!r} no longer exists: keep a reference to it as long as compiled code uses it")
    return ring
