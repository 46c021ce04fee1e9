"""Who takes part in a call: one rank of a real ring, every rank of a simulated one, or the only rank there is."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any, Protocol, TypeVar

from torch import Tensor

from ringspan.layout import Layout
from ringspan.planning import Passing
from ringspan.ring.mail import Flight, Mail

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
