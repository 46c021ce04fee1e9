"""A field of settings with its meaning beside it, so that help texts are made and not written twice."""

from __future__ import annotations

from dataclasses import field
from typing import Any


def described(default: Any, meaning: str, topic: str = "") -> Any:
    """A dataclass field with a default, what it means, and the topic under which help lists it."""
    return field(default=default, metadata={"help": meaning, "topic": topic})
