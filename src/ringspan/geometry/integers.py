"""What counts as an integer at the door: ints and what stands in for them (NumPy's), but not bools."""

from __future__ import annotations

import operator
from typing import Any


def as_int(name: str, value: Any) -> int:
    """The value as a plain int; a TypeError that names it if it is none."""
    if not isinstance(value, bool):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise TypeError(f"{name}={value!r}: must be an int")
