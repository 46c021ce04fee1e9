"""Parcels: the K/V rows of one piece of a shared segment, already dilated, as they travel.

In a parcel the rows of each KV head lie one after the other, head after head: so the rows of any run of
heads with equal counts are a comb of the parcel, just as they are one of the tensor they came from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from ringspan.geometry import Comb, Lane, group_heads


@dataclass(frozen=True, slots=True, order=True)
class Parcel:
    """Identified by where its rows begin, so that all ranks know it by the same name.

    ``rows`` counts (row, head) pairs: what travels is that many rows of K and as many of V.
    """

    branch: int
    start: int
    owner: int
    rows: int


@dataclass(frozen=True, slots=True)
class Packing:
    """How an own parcel is filled: from which rows of the rank to which of the parcel, comb by comb.

    The parcel's gradient takes the same way back, and is added.
    """

    parcel: Parcel
    combs: tuple[tuple[Comb, Comb], ...]


@dataclass(frozen=True, slots=True)
class Message:
    """A parcel that goes to, or comes from, ``peer``."""

    parcel: Parcel
    peer: int


def parcel_lanes(lanes: Sequence[Lane]) -> list[Lane]:
    """Where the rows of each head lie in the parcel that carries these lanes."""
    ends = list(accumulate(lane.rows for lane in lanes))
    return [Lane(end - lane.rows, lane.rows, 1) for lane, end in zip(lanes, ends, strict=True)]


def packing(parcel: Parcel, lanes: Sequence[Lane]) -> Packing:
    """How the parcel is filled from the rank's own rows ``lanes``."""
    return Packing(parcel, tuple((own, there) for own, there in group_heads(lanes, parcel_lanes(lanes))))
