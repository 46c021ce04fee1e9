"""Parcels: the K/V rows of one part of a shared segment, already dilated, packed into one message.

A parcel stores the rows of KV head 0, then those of KV head 1, and so on. The rows of adjacent heads with equal counts
are therefore a comb of the parcel, as they are a comb of the tensor they come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from ringspan.geometry import Comb, Lane, group_heads


@dataclass(frozen=True, slots=True, order=True)
class Parcel:
    """Identified by its branch and first row, so that all ranks derive the same identity.

    ``rows`` counts (row, head) pairs: the parcel holds that many rows of K and as many of V.
    """

    branch: int
    start: int
    owner: int
    rows: int


@dataclass(frozen=True, slots=True)
class Packing:
    """How to fill a parcel: pairs of combs, (rows of the rank, rows of the parcel).

    The parcel's gradient is added to the rank's gradients through the same pairs.
    """

    parcel: Parcel
    combs: tuple[tuple[Comb, Comb], ...]


@dataclass(frozen=True, slots=True)
class Message:
    """A parcel sent to, or received from, ``peer``."""

    parcel: Parcel
    peer: int


def parcel_lanes(lanes: Sequence[Lane]) -> list[Lane]:
    """The rows of each head in the parcel that is packed from these lanes."""
    ends = list(accumulate(lane.rows for lane in lanes))
    return [Lane(end - lane.rows, lane.rows, 1) for lane, end in zip(lanes, ends, strict=True)]


def make_packing(parcel: Parcel, lanes: Sequence[Lane]) -> Packing:
    """How to fill the parcel from the rank's own rows ``lanes``."""
    return Packing(parcel, tuple((own, packed) for own, packed in group_heads(lanes, parcel_lanes(lanes))))
