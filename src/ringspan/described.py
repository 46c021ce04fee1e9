"""Settings as dataclasses: a field has its meaning beside it, and a file with a key that nobody knows is refused."""

from __future__ import annotations

import json
from dataclasses import field, fields
from typing import Any


def described(default: Any, meaning: str, topic: str = "") -> Any:
    """A dataclass field with a default, what it means, and the topic under which help lists it."""
    return field(default=default, metadata={"help": meaning, "topic": topic})


def known_values(settings: type, text: str) -> dict[str, Any]:
    """The values of a dataclass's fields in a JSON object; a key that is no field is an error, not a silence."""
    known = {entry.name for entry in fields(settings)}
    values = json.loads(text)
    if not isinstance(values, dict):
        raise ValueError(f"a {type(values).__name__}: must be an object of settings, such as a run writes")
    unknown = sorted(set(values) - known)
    if unknown:
        raise ValueError(f"unknown settings {', '.join(unknown)}: known are {', '.join(sorted(known))}")
    return values
