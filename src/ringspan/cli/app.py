"""The command group, and how it reports errors: as one sentence, once for any number of ranks.

A command's module, and with it torch, is imported only when that command runs.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

import ringspan as rs
from ringspan.runtime.settings import RunError, missing_package

# Each command is the function of the same name in the module of the same name.
COMMANDS = {
    "verify": "Check on this machine that a ring is exact, sharded and fast.",
    "plan": "Show what each rank of a ring would compute, send and hold.",
    "explore": "Look at patterns, layouts and rings in a browser.",
    "rehearse": "Run some ranks of a large ring on this machine, one at a time.",
    "stream": "Compute attention over a sequence larger than memory.",
    "bench": "Measure speed, memory and maximum length; compare with others.",
    "train": "Train a LongNet on any files, in one process or under torchrun.",
    "evaluate": "Score a trained model on held-out text, by context length.",
    "generate": "Continue a prompt with a trained model.",
    "embed": "Embed slides: tile embeddings in, slide embeddings out.",
    "doctor": "Show what works on this machine, and how to install the rest.",
}
INTERRUPTED = 130  # exit status after Ctrl-C, by the convention of shells
_HEAD_START = 20.0  # seconds that another rank waits, so that rank 0 reports first
_LAST_WORDS = 3.0  # seconds in which all ranks of a host report a lost rank, before torchrun stops them
# click's UsageError; newer versions of typer bundle click.
_UsageError: type[Exception] = typer.BadParameter.__bases__[0]


class Commands(TyperGroup):
    """Imports a command on first use, and reports the errors of all commands in the same way."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*COMMANDS]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """A placeholder that is sufficient to list the command; `resolve_command` loads the real one."""
        return TyperCommand(cmd_name, help=COMMANDS[cmd_name]) if cmd_name in COMMANDS else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            nearest = get_close_matches(args[0], COMMANDS, n=1)
            hint = f"did you mean {nearest[0]!r}?" if nearest else f"must be one of {', '.join(COMMANDS)}"
            ctx.fail(f"No such command {args[0]!r}: {hint}")
        name, command, rest = super().resolve_command(ctx, args)
        return name, load_command(name) if name in COMMANDS else command, rest

    def make_context(self, *arguments: Any, **options: Any) -> Any:
        with reported():
            return super().make_context(*arguments, **options)

    def invoke(self, ctx: Any) -> Any:
        with reported():
            return super().invoke(ctx)


def load_command(name: str) -> Any:
    """The click command of this name, imported."""
    alone = typer.Typer(rich_markup_mode="markdown", add_completion=False, pretty_exceptions_show_locals=False)
    alone.command(name)(getattr(import_module(f"ringspan.cli.{name}"), name))
    return typer.main.get_command(alone)


app = typer.Typer(
    name="ringspan",
    cls=Commands,
    help="Exact context parallelism: full, sliding-window and dilated (LongNet) attention over a ring of devices. "
    "Verify it, plan it, measure it, train with it.",
    epilog="Start with `ringspan verify`. Every command has examples: `ringspan COMMAND --help`.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ringspan {rs.__version__}")
        raise typer.Exit


@app.callback()
def _ringspan(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@contextmanager
def reported() -> Iterator[None]:
    """Report interrupts and expected errors in the block as one sentence on stderr; bugs keep their traceback.

    Under torchrun rank 0 reports. Most errors occur on all ranks, and torchrun stops the others as soon as rank 0 has
    exited. A rank that still runs after a while has failed alone, and reports its own error. A RingError that
    starts with a rank is what this rank has observed, such as a lost rank: each rank reports it at once.
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
        names_rank = sentence.startswith("rank ")
        is_own = names_rank and isinstance(error, rs.RingError)  # what this rank has observed
        if not is_own:
            _wait_for_rank_0()
        named = f"rank {_rank()}: {sentence}" if _is_launched() and not names_rank else sentence
        typer.secho(named, fg="red", err=True)
        if is_own and _is_launched():
            time.sleep(_LAST_WORDS)
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

    if isinstance(error, rs.RingError):
        return str(error)
    if isinstance(error, OutOfMemoryError) or "can't allocate memory" in str(error):
        return f"out of memory ({str(error).splitlines()[0]}): use fewer tokens, more ranks or a smaller model"
    if found := re.search(r"Unable to find address for: (\S+?)\)*$", str(error), re.MULTILINE):
        return f"{found[1]}: no such network interface on {socket.gethostname()}: correct GLOO_SOCKET_IFNAME"
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
