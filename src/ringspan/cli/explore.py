"""`ringspan explore`: the explorer, served to a browser on this machine. Does not import torch."""

from __future__ import annotations

import json
import tempfile
import webbrowser
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlencode

import typer

from ringspan.cli.options import LENGTHS_HELP, PATTERN_HELP, SPANNING, read_as, read_count, read_pattern_at
from ringspan.tools.explorer.results import read_result
from ringspan.tools.explorer.server import address, make_server
from ringspan.tools.explorer.settings import ExplorerSettings
from ringspan.tools.explorer.site import write_site

_EXAMPLE = "those of a small example"


def explore(
    result: Annotated[
        Path | None,
        typer.Argument(
            metavar="[RESULT]",
            help="A result to start with: bench.json, verify.json, a trace, or what `ringspan plan --json` prints.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    pattern: Annotated[str | None, typer.Option(metavar="PATTERN", help=PATTERN_HELP, show_default=_EXAMPLE)] = None,
    tokens: Annotated[
        str | None, typer.Option("--tokens", "-n", metavar="COUNT", help="Sequence length.", show_default=_EXAMPLE)
    ] = None,
    lengths: Annotated[
        str | None, typer.Option(metavar="COUNTS", help=LENGTHS_HELP, show_default="one document")
    ] = None,
    causal: Annotated[
        bool | None,
        typer.Option(help="Whether a query attends only to keys up to its own position.", show_default="causal"),
    ] = None,
    ranks: Annotated[
        str | None, typer.Option("--ranks", "-k", metavar="COUNT", help="Ring size.", show_default=_EXAMPLE)
    ] = None,
    layout: Annotated[str | None, typer.Option(help="contiguous, zigzag or balanced.", show_default="zigzag")] = None,
    routing: Annotated[str | None, typer.Option(help="relay, direct or by-node.", show_default="relay")] = None,
    ranks_per_node: Annotated[
        str | None, typer.Option(metavar="COUNT", help="Ranks of a node, with --routing by-node.", show_default="2")
    ] = None,
    head_ranks: Annotated[
        str | None,
        typer.Option(metavar="COUNT", help="Ranks that hold a shard together and exchange heads.", show_default="1"),
    ] = None,
    optimize: Annotated[
        str | None,
        typer.Option(help="auto: no pair is computed twice where that is faster; or none.", show_default="auto"),
    ] = None,
    heads: Annotated[str | None, typer.Option(help="Query heads.", show_default=_EXAMPLE)] = None,
    kv_heads: Annotated[str | None, typer.Option(help="KV heads.", show_default="same as heads")] = None,
    head_dim: Annotated[str | None, typer.Option(help="Head dimension.", show_default="64")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="bfloat16, float16, float32 or float64.", show_default="bfloat16")
    ] = None,
    order: Annotated[
        str | None, typer.Option(help="row_major, snake, morton or hilbert: the order of a grid.", show_default="none")
    ] = None,
    grid: Annotated[
        str | None,
        typer.Option(help="Sides of the grid, such as 32x32; its cells replace --tokens.", show_default="8x8"),
    ] = None,
    port: Annotated[int, typer.Option(help="Port of the server.", min=0, max=65535, show_default="a free one")] = 0,
    browser: Annotated[bool, typer.Option(help="Whether to open the page in a browser.")] = True,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Write the page as a static site instead.", show_default="serve it"),
    ] = None,
) -> None:
    """Look at patterns, layouts and rings in a browser: who sees what, who holds what, and what moves at each hop.

    The page runs the planner itself, as Python in the browser, and needs no internet. The first time, npm fetches
    Pyodide (Python for browsers) into the user's cache. The server answers this machine only.

    **Examples**

    `ringspan explore`

    `ringspan explore --pattern "window 511 + 4096x4,65536x64" --tokens 1M --ranks 64`

    `ringspan explore ringspan-report/verify.json`

    `ringspan explore --port 8000 --no-browser`

    `ringspan explore --out site`
    """
    found, table = ({}, None) if result is None else read_result(result)
    given = dict(
        pattern=pattern, tokens=tokens, lengths=lengths, causal=causal, order=order, grid=grid,
        ranks=ranks, layout=layout, routing=routing, ranks_per_node=ranks_per_node, head_ranks=head_ranks,
        optimize=optimize, heads=heads, kv_heads=kv_heads or heads, head_dim=head_dim, dtype=dtype,
    )  # fmt: skip
    fields: dict[str, Any] = found | {name: value for name, value in given.items() if value is not None}
    if fields.get("pattern") == SPANNING:
        length = read_as("--tokens", read_count, fields.get("tokens", ExplorerSettings.tokens))
        fields["pattern"] = read_pattern_at(length)(SPANNING).text
    try:
        ExplorerSettings.of(fields).ring  # noqa: B018  # raises for invalid settings
    except (ValueError, TypeError) as error:
        raise typer.BadParameter(str(error)) from error
    link = ("?result" if table else "") + (f"#{_fragment(fields)}" if fields else "")
    if out is not None:
        _write(out, table)
        typer.echo(f"Written. Serve {out} with any file server, and open index.html{link}")
        return
    with tempfile.TemporaryDirectory() as folder:
        _write(Path(folder), table)
        try:
            server = make_server(Path(folder), port)
        except OSError as error:
            raise typer.BadParameter(
                f"{port}: {error.strerror}; leave it out for a free port", param_hint="--port"
            ) from error
        with server:
            typer.echo(f"{address(server)}{link}")
            typer.echo("Press Ctrl-C to stop.")
            if browser:
                webbrowser.open(address(server) + link)
            server.serve_forever()


def _write(folder: Path, table: dict[str, Any] | None) -> None:
    write_site(folder)
    if table:
        (folder / "result.json").write_text(json.dumps(table))


def _fragment(fields: dict[str, Any]) -> str:
    """The settings as the page writes them into its link."""
    words = {name: str(value).lower() if isinstance(value, bool) else value for name, value in fields.items()}
    return urlencode(words, safe=",")
