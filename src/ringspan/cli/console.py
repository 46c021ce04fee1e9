"""The consoles that commands print to."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def make_console(*, stderr: bool = False, quiet: bool = False) -> Console:
    """A console that prints text as it is.

    Paths, error messages and pip commands contain brackets, which rich would otherwise take for markup and remove.
    """
    from rich.console import Console  # noqa: PLC0415

    return Console(stderr=stderr, quiet=quiet, markup=False, highlight=False)
