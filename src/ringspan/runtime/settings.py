"""Settings as dataclasses: each field carries its help text; wrong types and unknown names are errors."""

from __future__ import annotations

import dataclasses
import json
import math
import reprlib
from dataclasses import field
from typing import Any, Literal, get_args, get_origin, get_type_hints

_LARGEST = 2**53  # whole numbers up to here are the same in every JSON


class RunError(RuntimeError):
    """A run that cannot start, or must not go on. The message is for its user: what is wrong, and the way out."""


def described(default: Any, meaning: str, topic: str = "") -> Any:
    """A dataclass field with a default, what it means, and the topic under which help lists it."""
    return field(default=default, metadata={"help": meaning, "topic": topic})


def check_kinds(settings: Any) -> None:
    """Raise ValueError if a field of a dataclass holds something of another kind than its type says.

    >>> @dataclasses.dataclass
    ... class Settings:
    ...     tokens: int
    >>> check_kinds(Settings("many"))
    Traceback (most recent call last):
    ValueError: tokens='many': must be a whole number
    """
    for name, kind in get_type_hints(type(settings)).items():
        value = getattr(settings, name)
        rule = _broken_rule(value, kind)
        if rule:
            raise ValueError(f"{name}={reprlib.repr(value)}: must be {rule}")


def _broken_rule(value: Any, kind: Any) -> str:
    """What a value must be, if it is not; nothing if it is."""
    if get_origin(kind) is Literal:
        return "" if value in get_args(kind) else f"one of {', '.join(map(str, get_args(kind)))}"
    if get_origin(kind) is tuple:
        item = get_args(kind)[0]
        fine = isinstance(value, tuple) and not any(_broken_rule(each, item) for each in value)
        return "" if fine else "a list of " + ("whole numbers" if item is int else "texts")
    if kind is bool:
        return "" if isinstance(value, bool) else "true or false"
    if kind is int:
        whole = isinstance(value, int) and not isinstance(value, bool)
        return "a whole number" if not whole else "" if abs(value) <= _LARGEST else "at most 2**53"
    if kind is float:
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return "" if number and math.isfinite(value) else "a finite number"
    return "" if isinstance(value, kind) else "text" if kind is str else f"a {kind.__name__}"


def known_values(settings: type, text: str) -> dict[str, Any]:
    """The values of a dataclass's fields in a JSON object; a key that is no field is an error, not a silence."""
    try:
        values = json.loads(text)
    except RecursionError:
        raise ValueError("too deeply nested to be settings") from None
    if not isinstance(values, dict):
        raise ValueError(f"a {type(values).__name__}: must be an object of settings, such as a run writes")
    known = {entry.name for entry in dataclasses.fields(settings)}
    unknown = sorted(set(values) - known)
    if unknown:
        raise ValueError(f"unknown settings {', '.join(unknown)}: known are {', '.join(sorted(known))}")
    return values
