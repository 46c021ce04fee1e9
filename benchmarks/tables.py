"""One table, two looks: printed to the terminal, and as Markdown for the docs."""

from __future__ import annotations

from rich.table import Table

Cells = list[list[str]]


def yes(flag: bool) -> str:
    return "yes" if flag else "no"


def rich_table(title: str, cells: Cells) -> Table:
    table = Table(*cells[0], title=title, title_justify="left")
    for row in cells[1:]:
        table.add_row(*row)
    return table


def markdown_table(cells: Cells) -> list[str]:
    lines = ["| " + " | ".join(row) + " |" for row in cells]
    return [lines[0], "|" + " --- |" * len(cells[0]), *lines[1:]]
