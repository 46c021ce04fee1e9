"""Who takes part in a call: one rank of a real ring, every rank of a simulated one, or the only rank there is."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Sequence
from typing import Any, Protocol, TypeVar
from weakref import WeakValueDictionary

from torch import Tensor

from ringspan.layout import Layout
from ringspan.planning import Passing
from ringspan.ring.transport import Flight, Mail, RingError

Result = TypeVar("Result")
Note = Callable[[], dict[str, Any]]


class Players(Protocol):
    """What the operator needs of a ring."""

    passing: Passing

    def agree(self, rows: int, note: Note, seq_len: int | None, like: Tensor) -> Layout:
        """The layout of the whole sequence, of which a call holds ``rows`` rows here.

        Unless ``seq_len`` states it, ranks exchange notes about the call; if they disagree, all raise.
        """

    def deal(self, layout: Layout, tensors: Sequence[tuple[Tensor | None, int]]) -> list[tuple[int, Mail, list[Any]]]:
        """For each rank played here: its number, its mail, and its rows of the tensors (each with its row dim)."""

    def run(self, walks: list[Generator[Flight, None, Result]]) -> list[Result]:
        """Drive one walk for each rank played here."""

    def collect(self, layout: Layout, parts: list[Tensor], dim: int) -> Tensor:
        """The inverse of `deal`, for one tensor."""


def drive(walk: Generator[Flight, None, Result]) -> Result:
    """Drive one walk to its end, waiting for each of its flights; what it returns."""
    while True:
        try:
            flight = next(walk)
        except StopIteration as end:
            result: Result = end.value
            return result
        flight.wait()


_rings: WeakValueDictionary[str, Players] = WeakValueDictionary()
_numbers = itertools.count()


def register_ring(ring: Players) -> str:
    """Give a ring a name. The entry lives as long as the ring."""
    name = f"{type(ring).__name__} {next(_numbers)}"
    _rings[name] = ring
    return name


def find_ring(name: str) -> Players:
    ring = _rings.get(name)
    if ring is None:
        raise RingError(f"ring {name!r} is gone: keep a reference to it as long as compiled code uses it")
    return ring
