"""Routing: who sends a parcel to whom, and what the plan of a rank asks of rows that several ranks exchange."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

from ringspan.geometry import as_int
from ringspan.planning.tiles import Packing, Parcel

P = TypeVar("P", bound=Hashable)


@dataclass(frozen=True, slots=True)
class ByNode:
    """Relay routing in which a parcel enters each node only once: inside its own node, the owner sends it directly.

    Ranks ``0 .. ranks_per_node - 1`` are on the first node, and so on. A route visits the ranks of every other node
    consecutively, so they relay the parcel to one another. Only the return into the owner's own node is avoided.
    """

    ranks_per_node: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranks_per_node", as_int("ranks_per_node", self.ranks_per_node))
        if self.ranks_per_node < 1:
            raise ValueError(f"ranks_per_node={self.ranks_per_node}: a node has at least 1 rank")

    def __str__(self) -> str:
        return f"relay by nodes of {self.ranks_per_node}"


Routing = Literal["relay", "direct"] | ByNode


def check_routing(routing: object) -> None:
    """Raise unless ``routing`` is valid."""
    if routing not in ("relay", "direct") and not isinstance(routing, ByNode):
        raise ValueError(f"routing={routing!r}: must be 'relay', 'direct' or ByNode(ranks_per_node)")


def node_of(rank: int, ranks_per_node: int) -> int:
    """The node of a rank."""
    return rank // ranks_per_node


def owner_sends(routing: Routing, owner: int, receiver: int) -> bool:
    """Whether a receiver gets the parcel from its owner, wherever it is on the route."""
    if isinstance(routing, ByNode):
        return node_of(owner, routing.ranks_per_node) == node_of(receiver, routing.ranks_per_node)
    return routing == "direct"


class Shared(Protocol[P]):
    """Rows that several ranks exchange, in parts: each is a parcel with its own route."""

    def own_parts(self, rank: int) -> Iterable[P]:
        """The parts that a rank owns and others need."""

    def needed_parts(self, rank: int) -> Iterable[P]:
        """The parts of other ranks that a rank needs."""

    def owner(self, part: P) -> int:
        """The rank that owns a part."""

    def parcel(self, part: P) -> Parcel:
        """The parcel that holds the rows of a part."""

    def packing(self, part: P, origin: int = 0) -> Packing:
        """How the owner packs a part; ``origin`` is the row of the sequence at its local row 0."""

    def distance(self, owner: int, rank: int) -> int:
        """The hop at which a rank receives the parts of an owner."""

    def receivers(self, part: P) -> Iterable[int]:
        """The ranks that need a part, in order of distance."""

    def previous_holder(self, rank: int, part: P) -> int:
        """The rank that holds the parcel before ``rank``: the previous receiver on the route, or the owner."""

    def next_receiver(self, rank: int, part: P) -> int | None:
        """The rank that receives the parcel after ``rank``, or None at the end of the route."""
