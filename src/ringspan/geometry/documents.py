"""Packed documents: several sequences, end to end, in one row dimension. Also checks of integers."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
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


OFFSETS_EXAMPLE = "(0, n1, n1 + n2, ..)"


def lengths_of_documents(lengths: Any, cu_seqlens: Any, seq_len: int | None) -> tuple[int, ...] | None:
    """The lengths of packed documents, from ``lengths`` or from offsets, as ints or tensors; None if both are None.

    >>> lengths_of_documents(None, (0, 3, 3, 5), 5)
    (3, 0, 2)
    """
    if cu_seqlens is None:
        if lengths is not None and not isinstance(lengths, Iterable):
            raise TypeError(
                f"lengths={lengths!r}: must be a sequence of ints or an int64 tensor, one number per document"
            )
        return None if lengths is None else Documents(tuple(lengths)).lengths
    if lengths is not None:
        raise ValueError("both lengths and cu_seqlens are given: they state the same documents; leave one out")
    if not isinstance(cu_seqlens, Iterable):
        raise TypeError(f"cu_seqlens={cu_seqlens!r}: must be offsets {OFFSETS_EXAMPLE}, as ints or as a tensor")
    return lengths_of_offsets([as_int(f"cu_seqlens[{i}]", x) for i, x in enumerate(cu_seqlens)], seq_len)


def lengths_of_offsets(offsets: list[int], seq_len: int | None) -> tuple[int, ...]:
    """Differences of the offsets. Raises if they are not offsets of a sequence of this length, if it is known."""
    if not offsets or offsets[0] != 0:
        raise ValueError(f"cu_seqlens begins with {offsets[0] if offsets else 'nothing'}: must begin with 0")
    for i, (start, stop) in enumerate(pairwise(offsets)):
        if stop < start:
            raise ValueError(f"cu_seqlens[{i + 1}]={stop} after {start}: offsets must not decrease")
    if seq_len is not None and offsets[-1] != seq_len:
        raise ValueError(
            f"cu_seqlens ends with {offsets[-1]}, but the sequence has {seq_len} rows: must end with the sequence "
            "length; give padding a document of its own"
        )
    return tuple(stop - start for start, stop in pairwise(offsets))
