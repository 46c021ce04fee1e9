"""Renders the command-line reference from the commands themselves, each time the site is built."""

from __future__ import annotations

import re
from typing import Any

from ringspan.cli.app import COMMANDS, load_command

MARKER = "<!-- commands -->"


def insert_commands(app: Any, page: str, source: list[str]) -> None:
    """Handler of Sphinx's `source-read` event: replace the marker of a page by the reference."""
    if MARKER in source[0]:
        source[0] = source[0].replace(MARKER, "\n\n".join(render_command(name) for name in COMMANDS))


def render_command(name: str) -> str:
    """One command in Markdown: description, examples, arguments and options."""
    command = load_command(name)
    context = command.make_context(name, [], resilient_parsing=True)
    text, _, examples = command.help.partition("**Examples**")
    parts = [f"## ringspan {name}", text.strip()]
    if lines := re.findall(r"^`(.*)`$", examples, re.M):
        parts.append("\n".join(["```sh", *lines, "```"]))
    for title, kind in (("Arguments", "argument"), ("Options", "option")):
        records = [each.get_help_record(context) for each in command.params if each.param_type_name == kind]
        if entries := [_render_entry(*record) for record in records if record]:
            parts += [f"**{title}**", *entries]
    return "\n\n".join(parts)


def _render_entry(name: str, text: str) -> str:
    """One argument or option as an entry of a definition list; typer appends "[default: ..; range; required]"."""
    words, facts = re.fullmatch(r"(.*?)(?: ?\[([^\[\]]*)\])?", " ".join(text.split()), re.S).groups()  # type: ignore[union-attr]
    shown = [words, *(_render_fact(fact) for fact in re.split(r"; (?=x[<>]|\d+[<>]|required)", facts or "") if fact)]
    return f"`{name}`\n: {' '.join(shown)}"


def _render_fact(fact: str) -> str:
    """A default as code, or as text where it is a description, which typer puts in parentheses; ranges as code."""
    if not fact.startswith("default: "):
        return f"`{fact}`"
    value = fact.removeprefix("default: ")
    is_described = value.startswith("(") and value.endswith(")")
    return f"*Default:* {value[1:-1]}." if is_described else f"*Default:* `{value}`."


def setup(app: Any) -> None:
    app.connect("source-read", insert_commands)
