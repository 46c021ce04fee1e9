"""How the values of `ringspan bench`'s options are read. Knows no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from ringspan.cli.options import read_count
from ringspan.layout import check_layout_name

if TYPE_CHECKING:
    from ringspan.layout import LayoutName


def read_lengths(text: str) -> list[int]:
    """Lengths with commas between them; FIRST..LAST doubles.

    >>> read_lengths("4k..16k"), read_lengths("1000,2k")
    ([4096, 8192, 16384], [1000, 2048])
    """
    lengths: set[int] = set()
    for word in text.split(","):
        first, dots, last = word.partition("..")
        n = read_count(first)
        end = read_count(last) if dots else n
        if n > end:
            raise typer.BadParameter(f"{word!r}: the first length must not be longer than the last")
        while n <= end:
            lengths.add(n)
            n *= 2
    return sorted(lengths)


def read_bytes(text: str) -> int:
    """Bytes, with or without a unit; all units are powers of two.

    >>> read_bytes("8GiB"), read_bytes("512M"), read_bytes("1.5 gib")
    (8589934592, 536870912, 1610612736)
    """
    try:
        return read_count(text.lower().replace(" ", "").removesuffix("b").removesuffix("i"))
    except typer.BadParameter:
        raise typer.BadParameter(f"{text!r}: must be a number of bytes, such as 8GiB or 512MiB") from None


def read_layout(text: str) -> LayoutName | None:
    """The name of a layout, or None for ``best``: the better one for each case."""
    if text == "best":
        return None
    try:
        check_layout_name(text)
    except ValueError as error:
        raise typer.BadParameter(f"{error}, or 'best'") from error
    return text  # type: ignore[return-value]
