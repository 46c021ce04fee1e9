"""How commands print: consoles that show text as it is, and errors as one sentence."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

from ringspan.runtime.extras import missing_package
from ringspan.runtime.settings import RunError

if TYPE_CHECKING:
    from rich.console import Console


def make_console(*, stderr: bool = False, quiet: bool = False) -> Console:
    """A console that prints text unchanged.

    Paths, error messages and pip commands contain brackets, which rich would otherwise parse as markup and remove.
    """
    from rich.console import Console  # noqa: PLC0415

    return Console(stderr=stderr, quiet=quiet, markup=False, highlight=False)


INTERRUPTED = 130  # exit status after Ctrl-C, by the convention of shells
_HEAD_START = 20.0  # seconds that another rank waits, so that rank 0 reports first
_UsageError: type[Exception] = typer.BadParameter.__bases__[
    0
]  # click's UsageError; newer versions of typer bundle click


@contextmanager
def reported() -> Iterator[None]:
    """Report interrupts and expected errors in the block as one sentence on stderr; bugs keep their traceback.

    Under torchrun rank 0 reports. Most errors occur on all ranks, and torchrun stops the others as soon as rank 0 has
    exited. A rank that still runs after a while has failed alone, and reports its own error.
    """
    try:
        yield
    except KeyboardInterrupt as error:
        if _rank() == 0:
            typer.echo(str(error) or "Interrupted.", err=True)
        raise typer.Exit(INTERRUPTED) from None
    except _UsageError:
        _wait_for_rank_0()
        raise
    except (ImportError, OSError, RuntimeError) as error:
        sentence = _sentence(error)
        if sentence is None:
            raise
        _wait_for_rank_0()
        named = f"rank {_rank()}: {sentence}" if _is_launched() and not sentence.startswith("rank ") else sentence
        typer.secho(named, fg="red", err=True)
        raise typer.Exit(1) from None


def _sentence(error: ImportError | OSError | RuntimeError) -> str | None:
    """An error as a sentence for the user; None for a bug, and for errors that typer handles."""
    if isinstance(error, (BrokenPipeError, typer.Exit, typer.Abort)):
        return None
    if isinstance(error, OSError):
        return f"{error.filename}: {error.strerror}" if error.filename else str(error)
    if isinstance(error, ModuleNotFoundError):
        return None if (error.name or "").startswith("ringspan") else missing_package("this", error.name, "train")
    if isinstance(error, RunError):
        return str(error)
    if isinstance(error, ImportError):
        return None
    return _sentence_of_torch(error)


def _sentence_of_torch(error: RuntimeError) -> str | None:
    from torch import OutOfMemoryError  # noqa: PLC0415
    from torch.distributed import DistError  # noqa: PLC0415

    import ringspan as rs  # noqa: PLC0415

    if isinstance(error, rs.RingError):
        return str(error)
    if isinstance(error, OutOfMemoryError) or "can't allocate memory" in str(error):
        return f"out of memory ({str(error).splitlines()[0]}): use fewer tokens, more ranks or a smaller model"
    if isinstance(error, DistError) or "gloo" in str(error):
        return f"another rank exited or cannot be reached ({error})"
    return None


def _rank() -> int:
    return int(os.environ.get("RANK", "0")) if _is_launched() else 0


def _is_launched() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def _wait_for_rank_0() -> None:
    if _rank():
        time.sleep(_HEAD_START)
