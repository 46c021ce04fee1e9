"""The commands of `ringspan`, each in a file of its own."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import ringspan as rs
from ringspan.cli import bench, doctor, evaluate, generate, plan, rehearse, stream, train, verify
from ringspan.cli.failures import reported


class Commands(TyperGroup):
    """The commands: whatever ends one of them early is reported in the same way."""

    def make_context(self, *arguments: Any, **options: Any) -> Any:
        with reported():
            return super().make_context(*arguments, **options)

    def invoke(self, ctx: Any) -> Any:
        with reported():
            return super().invoke(ctx)


app = typer.Typer(
    name="ringspan",
    cls=Commands,
    help="Exact dilated (LongNet) attention over a ring of devices: prove it, plan it, measure it, train with it.",
    epilog="Start with `ringspan verify`. Every command has examples: `ringspan COMMAND --help`.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
COMMANDS = (
    *(verify.verify, plan.plan, rehearse.rehearse, stream.stream, bench.bench),
    *(train.train, evaluate.evaluate, generate.generate, doctor.doctor),
)
for command in COMMANDS:
    app.command()(command)


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
