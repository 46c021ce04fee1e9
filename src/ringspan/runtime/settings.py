"""Settings as dataclasses, and the errors that users see: invalid values, runs that cannot start, missing packages.

Each field carries its help text; wrong types and unknown names are errors.
"""

from __future__ import annotations

import dataclasses
import json
import math
import reprlib
from typing import Any, Literal, get_args, get_origin, get_type_hints

_LARGEST = 2**53  # every JSON parser reads integers up to this exactly


class RunError(RuntimeError):
    """A run cannot start or continue. The message tells the user what is wrong and what to do."""


def setting(default: Any, help: str, topic: str = "") -> Any:
    """A dataclass field with a default, its help text, and the topic that lists it in ``--help``."""
    return dataclasses.field(default=default, metadata={"help": help, "topic": topic})


def check_types(settings: Any) -> None:
    """Raise ValueError if the value of a dataclass field does not have the type of the field.

    >>> @dataclasses.dataclass
    ... class Settings:
    ...     tokens: int
    >>> check_types(Settings("many"))
    Traceback (most recent call last):
    ValueError: tokens='many': must be a whole number
    """
    for name, kind in get_type_hints(type(settings)).items():
        value = getattr(settings, name)
        rule = _broken_rule(value, kind)
        if rule:
            raise ValueError(f"{name}={reprlib.repr(value)}: must be {rule}")


def _broken_rule(value: Any, kind: Any) -> str:
    """The rule that a value breaks, or an empty string."""
    if get_origin(kind) is Literal:
        return "" if value in get_args(kind) else f"one of {', '.join(map(str, get_args(kind)))}"
    if get_origin(kind) is tuple:
        item = get_args(kind)[0]
        fine = isinstance(value, tuple) and not any(_broken_rule(each, item) for each in value)
        return "" if fine else "a list of " + ("whole numbers" if item is int else "strings")
    if kind is bool:
        return "" if isinstance(value, bool) else "true or false"
    if kind is int:
        whole = isinstance(value, int) and not isinstance(value, bool)
        return "a whole number" if not whole else "" if abs(value) <= _LARGEST else "at most 2**53"
    if kind is float:
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return "" if number and math.isfinite(value) else "a finite number"
    return "" if isinstance(value, kind) else "a string" if kind is str else f"a {kind.__name__}"


def settings_from_json(settings: type, text: str) -> dict[str, Any]:
    """The fields of a dataclass from a JSON object; a key that is not a field is an error."""
    try:
        values = json.loads(text)
    except RecursionError:
        raise ValueError("the JSON is nested too deeply for settings") from None
    if not isinstance(values, dict):
        raise ValueError(f"a {type(values).__name__}: settings must be a JSON object, as written by a run")
    known = {entry.name for entry in dataclasses.fields(settings)}
    unknown = sorted(set(values) - known)
    if unknown:
        raise ValueError(f"unknown settings {', '.join(unknown)}: the known ones are {', '.join(sorted(known))}")
    return values


def install_command(extra: str) -> str:
    """The command that installs an extra of pyproject.toml; run it in a clone of ringspan.

    >>> install_command("cli")
    "pip install -c constraints.txt -e '.[cli]'"
    """
    return f"pip install -c constraints.txt -e '.[{extra}]'"


def missing_package(what: str, package: str | None, extra: str) -> str:
    """The error message for a feature whose package is not installed.

    >>> missing_package("--draw", "matplotlib", "plot")
    "--draw needs matplotlib: in your clone of ringspan, run pip install -c constraints.txt -e '.[plot]'"
    """
    return f"{what} needs {package}: in your clone of ringspan, run {install_command(extra)}"
