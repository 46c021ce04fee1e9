"""The commands of `ringspan`, each in a file of its own."""

from __future__ import annotations

from typing import Annotated

import typer

import ringspan as rs
from ringspan.cli import bench, doctor, evaluate, generate, plan, rehearse, stream, train, verify

app = typer.Typer(
    name="ringspan",
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
