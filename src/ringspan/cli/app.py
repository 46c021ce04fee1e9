"""The command group. A command's module, and with it torch, is imported only when that command runs."""

from __future__ import annotations

from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

import ringspan as rs
from ringspan.cli.console import reported

# Each command is the function of the same name in the module of the same name.
COMMANDS = {
    "verify": "Prove that a ring is exact, sharded and fast, on this machine.",
    "plan": "Show what a ring would compute, send and hold, before there is one.",
    "rehearse": "Run some ranks of a large ring that does not exist, one at a time.",
    "stream": "Attention over a sequence larger than memory, checked by samples.",
    "bench": "Measure speed, memory and the longest sequence, next to other implementations.",
    "train": "Train a LongNet on the bytes of any files, alone or under torchrun.",
    "evaluate": "Score a trained model on held-out text, by context length.",
    "generate": "Continue a prompt with a trained model.",
    "doctor": "Show what works on this machine, and what is missing for what.",
}


class Commands(TyperGroup):
    """Loads commands on first use, and reports whatever ends one of them early in the same way."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*COMMANDS]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Enough of a command to list it; `resolve_command` loads the real one."""
        return TyperCommand(cmd_name, help=COMMANDS[cmd_name]) if cmd_name in COMMANDS else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
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
    "Prove it, plan it, measure it, train with it.",
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
