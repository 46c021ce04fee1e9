"""Packed documents: several sequences, end to end, in one row dimension. Also checks of integers."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any


def as_int(name: str, value: Any) -> int:
    """The value as a plain int; raises a TypeError that names the argument if it is not an integer."""
    if not isinstance(value, bool):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise TypeError(f"{name}={value!r}: must be an int")


def as_positions(name: str, values: Any) -> tuple[int, ...]:
    """Positions in a sequence as plain ints, from ints or a tensor."""
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise TypeError(f"{name}={values!r}: must be positions in the sequence, such as (0, 17)")
    return tuple(as_int(f"{name}[{i}]", value) for i, value in enumerate(values))


@dataclass(frozen=True, slots=True)
class Documents:
    """The lengths of the packed documents, in order. A document may be empty.

    >>> list(Documents((3, 0, 2)).spans())
    [(0, 3), (3, 3), (3, 5)]
    """

    lengths: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "lengths", tuple(as_int(f"lengths[{i}]", x) for i, x in enumerate(self.lengths)))
        for i, length in enumerate(self.lengths):
            if length < 0:
                raise ValueError(f"lengths[{i}]={length}: a document has at least 0 rows")

    @property
    def rows(self) -> int:
        return sum(self.lengths)

    def spans(self) -> Iterator[tuple[int, int]]:
        """(start, stop) of each document."""
        start = 0
        for length in self.lengths:
            yield start, start + length
            start += length

    def check_rows(self, rows: int) -> None:
        """Raise unless the lengths add up to ``rows``."""
        if self.rows != rows:
            raise ValueError(
                f"lengths add up to {self.rows}, but the sequence has {rows} rows: "
                "every row belongs to exactly one document; make padding a document of its own"
            )
