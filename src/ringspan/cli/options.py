"""Options that several commands share, and how their values are read. Knows no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, TypeVar

import typer

from ringspan.geometry import Dilated, Full, Pattern, unselected_warning

if TYPE_CHECKING:
    from rich.console import Console

Value = TypeVar("Value")
SPANNING: Final = "spanning"
PATTERN_HELP = "spanning (2048x1,8192x4,.. up to --tokens), full, or SEGMENTxRATE pairs."
DTYPES = ("float32", "bfloat16", "float16", "float64")


def read_pattern(text: str) -> Pattern:
    """``full``, or segment lengths and rates such as ``2048x1,8192x4``.

    >>> read_pattern("2048x1,8k x4").segment_lengths
    (2048, 8192)
    """
    if text.strip().lower() == "full":
        return Full()
    words = text.replace(" x", "x").replace(",", " ").split()
    pairs = [word.partition("x") for word in words]
    if not pairs or any(not rate for _, _, rate in pairs):
        raise typer.BadParameter(f"{text!r}: say full, or SEGMENTxRATE pairs such as 2048x1,8192x4")
    try:
        return Dilated(tuple(read_count(w) for w, _, _ in pairs), tuple(read_count(r) for _, _, r in pairs))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def read_pattern_at(tokens: int) -> Callable[[str], Pattern]:
    """A reader of patterns that also knows ``spanning``: segments that grow by 4 up to the length.

    >>> read_pattern_at(32768)("spanning").segment_lengths
    (2048, 8192, 32768)
    """
    return lambda text: Dilated.spanning(tokens) if text.strip().lower() == SPANNING else read_pattern(text)


def read_count(text: str) -> int:
    """A whole number, also as 32k (x 1024), 4M, 1G or 1e9.

    >>> read_count("32k"), read_count("1e9"), read_count("131_072")
    (32768, 1000000000, 131072)
    """
    units = {"k": 2**10, "m": 2**20, "g": 2**30}
    digits, unit = (text[:-1], units[text[-1].lower()]) if text[-1:].lower() in units else (text, 1)
    try:
        value = float(digits) * unit
        whole = int(value)
    except (OverflowError, ValueError):
        raise typer.BadParameter(f"{text!r}: must be a whole number, such as 131072, 128k or 1e9") from None
    if value != whole or whole < 1:
        raise typer.BadParameter(f"{text!r}: must be a whole number of at least 1")
    return whole


def read_counts(text: str) -> list[int]:
    """Whole numbers with commas between them.

    >>> read_counts("1,2,4k")
    [1, 2, 4096]
    """
    return [read_count(word) for word in text.split(",")]


def read_dtype(text: str) -> str:
    """The name of a dtype of torch."""
    if text not in DTYPES:
        raise typer.BadParameter(f"{text!r}: must be {', '.join(DTYPES[:-1])} or {DTYPES[-1]}")
    return text


def read_as(option: str, reader: Callable[[str], Value], text: str) -> Value:
    """A value by its reader; what is wrong with it is said together with the name of its option."""
    try:
        return reader(text)
    except typer.BadParameter as error:
        raise typer.BadParameter(error.message, param_hint=option) from error


def warn_of_unselected(console: Console, pattern: Pattern, tokens: int, kv_heads: int) -> str:
    """Print what `rs.attention` would warn of, and return it."""
    warning = unselected_warning(pattern, tokens, kv_heads)
    if warning:
        console.print(f"Warning: {warning}", style="yellow", highlight=False, soft_wrap=True)
    return warning


@contextmanager
def writing_to(option: str, place: Path) -> Iterator[None]:
    """Say in one line, with the name of its option, that a place cannot be written."""
    try:
        yield
    except OSError as error:
        why = error.strerror or type(error).__name__
        raise typer.BadParameter(f"{place}: must be a folder that can be written ({why})", param_hint=option) from error


AsJson = Annotated[bool, typer.Option("--json", help="Machine-readable result on stdout, and nothing else there.")]
Heads = Annotated[int, typer.Option(help="Query heads.", min=1)]
Dim = Annotated[int, typer.Option(help="Numbers in a head.", min=1)]
