"""Flags made from the fields of settings: name, type, help and topic stand there, and nowhere else. Knows no torch."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Annotated, Any, get_type_hints

import typer

from ringspan.cli.options import read_count, read_counts
from ringspan.train.settings import choices_of


def flags_of(shown: Any, source: str, topic: str = "") -> list[inspect.Parameter]:
    """A flag for each described field of a dataclass; not given, it is None, and the preset's value holds.

    Help shows the values of ``shown``, which are those of the preset ``source``.
    """
    settings = type(shown)
    hints = get_type_hints(settings)
    return [
        inspect.Parameter(
            entry.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[
                _kind(settings, entry.name, hints[entry.name]),
                typer.Option(
                    help=entry.metadata["help"],
                    rich_help_panel=entry.metadata["topic"] or topic,
                    show_default=f"{source}: {_text(getattr(shown, entry.name))}",
                    **_reading(entry.name, hints[entry.name]),
                ),
            ],
        )
        for entry in dataclasses.fields(settings)
        if "help" in entry.metadata
    ]


def with_flags(command: Callable[..., None], flags: list[inspect.Parameter]) -> Callable[..., None]:
    """A command whose ``**given`` is spelled out as flags."""
    own = inspect.signature(command, eval_str=True)
    kept = [p for p in own.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    kept = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in kept]
    command.__signature__ = own.replace(parameters=[*kept, *flags])  # type: ignore[attr-defined]
    return command


def _kind(settings: type, name: str, kind: Any) -> Any:
    """The type of a flag: one of those that the command line reads by itself, or text."""
    return kind if kind in (int, float, bool) or choices_of(settings, name) else str


def _reading(name: str, kind: Any) -> dict[str, Any]:
    """How a flag's text becomes a value, where its type does not say."""
    if kind is int and name == "tokens":
        return {"parser": read_count, "metavar": "COUNT"}
    if kind == tuple[int, ...]:
        return {"parser": _read_tuple, "metavar": "COUNTS"}
    return {}


def _text(value: Any) -> str:
    """A value as its flag takes it."""
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or "none"
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def _read_tuple(text: str) -> tuple[int, ...]:
    return () if text == "none" else tuple(read_counts(text))
