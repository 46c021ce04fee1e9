"""The command group. A command's module, and with it torch, is imported only when that command runs."""

from __future__ import annotations

from difflib import get_close_matches
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

import ringspan as rs
from ringspan.cli.console import reported

# Each command is the function of the same name in the module of the same name.
COMMANDS = {
    "verify": "Check on this machine that a ring is exact, sharded and fast.",
    "plan": "Show what each rank of a ring would compute, send and hold.",
    "rehearse": "Run some ranks of a large ring on this machine, one at a time.",
    "stream": "Compute attention over a sequence larger than memory.",
    "bench": "Measure speed, memory and maximum length; compare with others.",
    "train": "Train a LongNet on any files, in one process or under torchrun.",
    "evaluate": "Score a trained model on held-out text, by context length.",
    "generate": "Continue a prompt with a trained model.",
    "doctor": "Show what works on this machine, and how to install the rest.",
}


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
    help="Exact context parallelism: dilated (LongNet) and full attention over a ring of devices. "
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
