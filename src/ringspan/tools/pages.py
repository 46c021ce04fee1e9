"""A page of results, shown in three ways: in a terminal, as Markdown, and as one self-contained HTML file."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markdown import Markdown
from rich.table import Table as RichTable
from rich.text import Text

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.figure import Figure


Rows = list[list[str]]
Badge = Literal["", "PASS", "FAIL", "INCOMPLETE"]

_CELL_STYLES = {  # verdicts: CSS class in HTML, style in a terminal
    "pass": ("good", "green"),
    "FAIL": ("bad", "bold red"),
    "not measured": ("open", "yellow"),
    "not supported": ("open", "yellow"),
}

_MAX_NAME = 32  # characters of a first column that is never wrapped in a terminal
_TERMINAL = 80  # columns
_MAX_WORD = 12  # words and numbers up to this length are not broken over lines


@dataclass(frozen=True)
class Table:
    """``rows`` are the cells as shown; the first row is the header. ``text`` says what to look at, in Markdown.

    A terminal shows no table of ``details``, and only the ``terminal_columns`` of a table that has them.
    """

    title: str
    rows: Rows
    text: str = ""
    details: bool = False
    terminal_columns: tuple[int, ...] = ()


@dataclass(frozen=True)
class Picture:
    """A figure with a caption that says what to look at. ``name`` is the stem of its file next to a Markdown page."""

    name: str
    figure: Figure
    caption: str


@dataclass(frozen=True)
class Page:
    """One report: a title, the result in one sentence, the command and the machine, then tables and pictures.

    A page with a pass/fail result has a ``badge``.
    """

    title: str
    sentence: str
    command: str
    machine: str
    parts: list[Table | Picture] = field(default_factory=list)
    badge: Badge = ""


def print_page(page: Page, console: Console) -> None:
    """Print the tables to a terminal, without pictures and details."""
    for part in page.parts:
        if isinstance(part, Table) and not part.details:
            console.print(rich_table(part))
            if part.text:
                console.print(Markdown(part.text), style="dim")
            console.print()


def rich_table(table: Table) -> RichTable:
    """The table for a terminal: as wide as its cells, never wider than the console, and no cell is truncated."""
    columns = table.terminal_columns or tuple(range(len(table.rows[0])))
    words = {i: min(_MAX_WORD, max(len(w) for row in table.rows for w in [*row[i].split(), ""])) for i in columns}
    shown = RichTable(title=table.title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for i in columns:
        is_name = i == columns[0] and all(len(row[i]) <= _MAX_NAME for row in table.rows)
        min_width = words[i] if sum(words.values()) + 2 * len(columns) <= _TERMINAL else None
        shown.add_column(Text(table.rows[0][i]), overflow="fold", no_wrap=is_name, min_width=min_width)
    for row in table.rows[1:]:  # Text: brackets are not markup, on any console
        shown.add_row(*(Text(row[i], style=_CELL_STYLES.get(row[i], ("", ""))[1]) for i in columns))
    return shown


def markdown(page: Page, pictures: str) -> str:
    """The page as Markdown; ``pictures`` is the folder of its pictures, relative to the page."""
    result = f"**{page.badge}.** {page.sentence}" if page.badge else page.sentence
    lines = [f"# {page.title}", "", result, "", f"Written by `{page.command}`; do not edit. {page.machine}."]
    for part in page.parts:
        if isinstance(part, Picture):
            lines += ["", f"![{part.caption}]({pictures}/{part.name}.png)", "", f"*{part.caption}*"]
        else:
            lines += ["", f"## {part.title}", ""]
            lines += [part.text, ""] if part.text else []
            lines += markdown_table(part.rows)
    return "\n".join(lines) + "\n"


def markdown_table(rows: Rows) -> list[str]:
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return [lines[0], "|" + " --- |" * len(rows[0]), *lines[1:]]


def html(page: Page) -> str:
    """The page as one self-contained HTML file, without scripts or network access."""
    from jinja2 import Environment, PackageLoader  # noqa: PLC0415

    environment = Environment(loader=PackageLoader("ringspan.tools", "."), autoescape=True)
    environment.filters["svg"] = _svg
    environment.tests["picture"] = lambda part: isinstance(part, Picture)
    classes = {cell: css for cell, (css, _) in _CELL_STYLES.items()}
    return environment.get_template("page.html.j2").render(page=page, classes=classes)


def write_page(page: Page, folder: Path, name: str) -> dict[str, Path]:
    """Write ``name``.md with its pictures in ``figures/``, and ``name``.html; return the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    for part in page.parts:
        if isinstance(part, Picture):
            (folder / "figures").mkdir(exist_ok=True)
            part.figure.savefig(folder / "figures" / f"{part.name}.png", dpi=130)
    paths = {"markdown": folder / f"{name}.md", "html": folder / f"{name}.html"}
    paths["markdown"].write_text(markdown(page, "figures"))
    paths["html"].write_text(html(page))
    return paths


def write_into(path: Path, marker: str, lines: list[str]) -> None:
    """Replace the text between ``<!-- marker -->`` and ``<!-- end of marker -->`` in a file."""
    before, after = split_at_markers(path, marker)
    path.write_text("\n".join([before, *lines, after]))


def split_at_markers(path: Path, marker: str) -> tuple[str, str]:
    """The text up to and including the first marker, and from the second marker on."""
    text = path.read_text()
    start, end = f"<!-- {marker} -->", f"<!-- end of {marker} -->"
    before, found, rest = text.partition(start)
    inside, found_end, after = rest.partition(end)
    if not found or not found_end or start in rest or end in before + inside + after:
        raise ValueError(f"{path}: needs one line {start!r} and, after it, one line {end!r}")
    return before + start, end + after


def _svg(figure: Figure) -> str:
    """A figure as a data URI."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg")
    return "data:image/svg+xml;base64," + base64.b64encode(buffer.getvalue()).decode()
