"""A page of results, made once, shown three ways: in a terminal, as Markdown, and as one self-contained HTML file."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markdown import Markdown
from rich.table import Table as RichTable
from rich.text import Text

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.figure import Figure


Rows = list[list[str]]


@dataclass(frozen=True)
class Table:
    """``rows`` are cells as they are shown; the first row is the head. ``text`` says what to see, in Markdown.

    A table of ``details`` is left out of a terminal.
    """

    title: str
    rows: Rows
    text: str = ""
    details: bool = False


@dataclass(frozen=True)
class Picture:
    """A figure with a caption that says what to see. ``name`` becomes its file name beside a Markdown page."""

    name: str
    figure: Figure
    caption: str


@dataclass(frozen=True)
class Page:
    """One report: a title, one plain sentence, how it was made and on what, then tables and pictures."""

    title: str
    sentence: str
    command: str
    machine: str
    parts: list[Table | Picture] = field(default_factory=list)


def print_page(page: Page, console: Console) -> None:
    """Tables to a terminal; pictures and details are left out."""
    for part in page.parts:
        if isinstance(part, Table) and not part.details:
            console.print(rich_table(part))
            if part.text:
                console.print(Markdown(part.text), style="dim")
            console.print()


def rich_table(table: Table) -> RichTable:
    shown = RichTable(*table.rows[0], title=table.title, title_justify="left")
    for row in table.rows[1:]:
        shown.add_row(*map(Text, row))  # as it is, on any console: brackets are not markup
    return shown


def markdown(page: Page, pictures: str) -> str:
    """The page as Markdown; ``pictures`` is the folder of its pictures, as seen from the page."""
    lines = [f"# {page.title}", "", page.sentence, "", f"Written by `{page.command}`; do not edit. {page.machine}."]
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
    """The page as one HTML file that needs nothing else: no network, no script."""
    from jinja2 import Environment, PackageLoader  # noqa: PLC0415

    environment = Environment(loader=PackageLoader("ringspan.tools", "."), autoescape=True)
    environment.filters["svg"] = _svg
    environment.tests["picture"] = lambda part: isinstance(part, Picture)
    return environment.get_template("page.html.j2").render(page=page)


def write_page(page: Page, folder: Path, name: str) -> dict[str, Path]:
    """Write ``name``.md with its pictures beside it, and ``name``.html; where each one is."""
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
    """Replace what stands between ``<!-- marker -->`` and ``<!-- end of marker -->`` in a file of somebody's own."""
    before, after = split_at_markers(path, marker)
    path.write_text("\n".join([before, *lines, after]))


def split_at_markers(path: Path, marker: str) -> tuple[str, str]:
    """What stands before and after the place between a file's markers, markers included."""
    text = path.read_text()
    start, end = f"<!-- {marker} -->", f"<!-- end of {marker} -->"
    before, found, rest = text.partition(start)
    inside, found_end, after = rest.partition(end)
    if not found or not found_end or start in rest or end in before + inside + after:
        raise ValueError(f"{path}: needs one line {start!r} and, after it, one line {end!r}")
    return before + start, end + after


def _svg(figure: Figure) -> str:
    """A figure as an image that the page carries inside itself."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg")
    return "data:image/svg+xml;base64," + base64.b64encode(buffer.getvalue()).decode()
