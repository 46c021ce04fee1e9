"""Bands: the (query, key) pairs of a sliding window, as triangles and rectangles that a kernel computes without a mask.

Block by block along the diagonal, a window is an upper triangle (its left edge), a rectangle, and a lower triangle (its
right edge). Equal blocks form one part, so the number of parts does not depend on the length of the sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from ringspan.geometry.pattern import WindowBranch

Mask = Literal["full", "causal", "anticausal"]
"""What a block of query rows sees: all its keys; in row i the keys 0 .. i; or in row i the keys from i on."""

# Kernels skip the masked half of a triangle only in large steps, so small triangles cost as much as squares. Blocks of
# half the window then leave half of the pairs to rectangles. Tiny blocks would cost more calls than they save pairs.
_WHOLE_BLOCKS_BELOW, _WHOLE_BLOCKS_FROM = 32, 768


@dataclass(frozen=True, slots=True)
class BandPart:
    """``segments`` equal blocks, ``stride`` rows apart: ``query_rows`` x ``key_rows``, both ``step`` rows apart.

    ``query`` and ``key`` are the first rows of the first block. ``first`` tells that no part before this one has any of
    its query rows.
    """

    query: int
    key: int
    query_rows: int
    key_rows: int
    mask: Mask
    first: bool = False
    segments: int = 1
    stride: int = 0
    step: int = 1


def band(queries: tuple[int, int], keys: tuple[int, int], window: WindowBranch) -> Iterator[BandPart]:
    """The pairs of a window among the query rows ``start .. stop - 1`` and key rows ``start .. stop - 1``.

    Rows are positions in the document. Rows of different residues modulo the rate never see each other: each residue is
    a window of its own, and residues whose parts are equal are computed together.

    >>> for part in band((0, 10), (0, 10), WindowBranch(left=3, right=0)):
    ...     print(part.query, part.key, part.query_rows, part.key_rows, part.mask, part.segments, part.stride)
    0 0 3 3 causal 1 0
    3 3 3 3 causal 2 3
    3 0 3 3 anticausal 2 3
    9 9 1 1 full 1 0
    9 6 1 1 full 1 0
    9 7 1 2 full 1 0
    """
    rate = window.rate
    left, right = window.left // rate, window.right // rate
    borders = sorted({0, rate, *(row % rate for row in (*queries, *keys))})
    for residue, next_residue in pairwise(borders):
        residues = next_residue - residue
        first_q, stop_q, first_k, stop_k = (-(-(row - residue) // rate) for row in (*queries, *keys))
        for part in _undilated(first_q, stop_q, first_k, stop_k, left, right):
            spread = replace(
                part,
                query=part.query * rate + residue,
                key=part.key * rate + residue,
                stride=part.stride * rate,
                step=rate,
            )
            # A comb has one dimension for blocks and residues: the longer one is folded into it.
            if part.segments <= residues:
                folded = (residues, 1) if residues > 1 else (1, 0)
                shifts = [i * spread.stride for i in range(part.segments)]
            else:
                folded = (part.segments, spread.stride)
                shifts = list(range(residues))
            for shift in shifts:
                yield replace(
                    spread, query=spread.query + shift, key=spread.key + shift, segments=folded[0], stride=folded[1]
                )


def _undilated(first_q: int, stop_q: int, first_k: int, stop_k: int, left: int, right: int) -> Iterator[BandPart]:
    """The same for a rate of 1. Rows fall into up to three zones, by which edges of their window are among the keys."""
    first_q, stop_q = max(first_q, first_k - right), min(stop_q, stop_k + left)  # rows that see any key
    left_inside, right_outside = first_k + left, stop_k - right  # the rows from which on this holds

    start, stop = first_q, min(stop_q, left_inside, right_outside)
    if start < stop:  # keys first_k .. row + right
        yield from _triangle(start, start + right, stop - start, "causal")
        yield from _rectangle(start, first_k, stop - start, start + right - first_k)
    start, stop = max(first_q, right_outside), min(stop_q, left_inside)
    if start < stop:  # all keys
        yield from _rectangle(start, first_k, stop - start, stop_k - first_k, first=True)
    start, stop = max(first_q, left_inside), min(stop_q, right_outside)
    if start < stop:  # keys row - left .. row + right
        yield from _blocks(start, stop, left, right)
    start, stop = max(first_q, left_inside, right_outside), stop_q
    if start < stop:  # keys row - left .. stop_k - 1
        yield from _triangle(start, start - left, stop - start, "anticausal")
        yield from _rectangle(start, stop - left, stop - start, stop_k - (stop - left))


def _blocks(start: int, stop: int, left: int, right: int) -> Iterator[BandPart]:
    """Rows whose whole window is among the keys."""
    width = left + right  # keys besides the row's own
    rows = width if width < _WHOLE_BLOCKS_BELOW or width >= _WHOLE_BLOCKS_FROM else -(-width // 2)
    rows = max(1, rows)
    whole, rest = divmod(stop - start, rows)
    for begin, blocks, size in ((start, whole, rows), (start + whole * rows, min(rest, 1), rest)):
        if not blocks:
            continue
        stride = size if blocks > 1 else 0
        for part in _triangle(begin, begin + right, size, "causal"):
            yield replace(part, segments=blocks, stride=stride)
        if not width:
            continue
        for part in _triangle(begin, begin - left, size, "anticausal", first=False):
            yield replace(part, segments=blocks, stride=stride)
        # The keys of neighbouring rectangles overlap, and gradients of keys are added in place: no part may hold both.
        turns = min(blocks, -(-(width - size) // size))
        for turn in range(turns):
            segments = -(-(blocks - turn) // turns)
            for part in _rectangle(begin + turn * size, begin + turn * size - left + size, size, width - size):
                yield replace(part, segments=segments, stride=turns * size if segments > 1 else 0)


def _triangle(query: int, key: int, rows: int, mask: Mask, first: bool = True) -> Iterator[BandPart]:
    yield BandPart(query, key, rows, rows, mask if rows > 1 else "full", first)


def _rectangle(query: int, key: int, query_rows: int, key_rows: int, first: bool = False) -> Iterator[BandPart]:
    if key_rows > 0:
        yield BandPart(query, key, query_rows, key_rows, "full", first)
