"""Rings by name. Operators take no objects, so `ringspan::attention` is told the name of its ring."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from ringspan.ring.errors import RingError

if TYPE_CHECKING:
    from ringspan.ring.players import Players

_rings: WeakValueDictionary[str, Players] = WeakValueDictionary()
_numbers = itertools.count()


def enter(ring: Players) -> str:
    """Give a ring a name. The entry lives as long as the ring."""
    name = f"{type(ring).__name__} {next(_numbers)}"
    _rings[name] = ring
    return name


def find(name: str) -> Players:
    ring = _rings.get(name)
    if ring is None:
        raise RingError(f"ring {name!r} is gone: keep a reference to it as long as compiled code uses it")
    return ring
