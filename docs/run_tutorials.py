"""Run the tutorials, and write what they print, draw and their notebooks: `make tutorials`.

A tutorial is a page of `docs/tutorials`. Its blocks run from top to bottom in one empty folder: `python` in one
process, `python FILE` writes that file, `sh` runs in a shell. A `text` block that follows one is what it prints; "..."
in it stands for anything. Pictures of the page are files that the blocks write. tests/test_tutorials.py runs the pages
in the same way, and compares.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from doctest import ELLIPSIS, NORMALIZE_WHITESPACE, OutputChecker
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
FIGURES = DOCS / "figures"
PAGES = sorted((DOCS / "tutorials").glob("*.md"))
NOTEBOOKS = ("grids.md", "slides.md")  # pages that can be downloaded as notebooks too

_BLOCK = re.compile(r"^```(python|sh)(?: (\S+))?\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.M | re.S)


@dataclass(frozen=True)
class Block:
    """Code of a page. ``printed`` is what the page says that it prints; None if it says nothing."""

    language: str
    file: str  # that it is saved as; empty if it is run
    code: str
    printed: str | None


def blocks_of(text: str) -> list[Block]:
    """The code of a page, from top to bottom.

    >>> blocks_of("Text.\\n\\n```python\\nprint(6 * 7)\\n```\\n\\n```text\\n42\\n```\\n")
    [Block(language='python', file='', code='print(6 * 7)\\n', printed='42\\n')]
    """
    return [Block(match[1], match[2] or "", match[3], match[4]) for match in _BLOCK.finditer(text)]


def pictures_of(text: str) -> list[str]:
    """Names of the pictures of a page that its blocks write."""
    return re.findall(r"^!\[[^]]*\]\(\.\./figures/(.*?)\)$", text, re.M)


def run_blocks(blocks: list[Block], folder: Path) -> Iterator[str]:
    """Run blocks in a folder; what each prints to stdout."""
    names: dict[str, Any] = {"__name__": "tutorial"}
    for block in blocks:
        if block.file:
            (folder / block.file).write_text(block.code)
            yield ""
        elif block.language == "sh":
            yield _run_shell(block.code, folder)
        else:
            with _working_in(folder), contextlib.redirect_stdout(io.StringIO()) as out:
                exec(compile(block.code, "tutorial", "exec"), names)
            yield out.getvalue()


def _run_shell(code: str, folder: Path) -> str:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "100"}
    done = subprocess.run(
        ["sh", "-e", "-c", code], capture_output=True, text=True, check=False, cwd=folder, env=environment
    )
    if done.returncode:
        raise RuntimeError(f"{code}\nexit status {done.returncode}\n{done.stdout}\n{done.stderr}")
    return "".join(f"{line.rstrip()}\n" for line in done.stdout.splitlines())


@contextlib.contextmanager
def _working_in(folder: Path) -> Iterator[None]:
    """As a script in this folder runs: relative paths and imports are those of the folder."""
    before = Path.cwd()
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        os.chdir(before)


def is_as_printed(wanted: str, got: str) -> bool:
    """Whether a block prints what the page says. Long lines may be wrapped in the page.

    >>> is_as_printed("took ... s\\n", "took 0.31 s\\n"), is_as_printed("42\\n", "41\\n")
    (True, False)
    """
    return OutputChecker().check_output(wanted, got, ELLIPSIS | NORMALIZE_WHITESPACE)


def with_outputs(text: str, outputs: list[str]) -> str:
    """The page with what its blocks printed. A text with "..." that still fits is kept."""
    remaining = iter(outputs)

    def rewrite(match: re.Match[str]) -> str:
        got = next(remaining)
        if match[4] is None or is_as_printed(match[4], got):
            return match[0]
        return match[0][: match.start(4) - match.start()] + got + match[0][match.end(4) - match.start() :]

    return _BLOCK.sub(rewrite, text)


def notebook_of(text: str) -> dict[str, Any]:
    """The page as a notebook: files become `%%writefile`, shell lines start with `!`, figures are shown where drawn."""
    cells = [_cell("code", "%matplotlib inline\n%env OMP_NUM_THREADS=1", 0)]
    end = 0
    for match in _BLOCK.finditer(text):
        cells += _prose(text[end : match.start()], len(cells))
        (block,) = blocks_of(match[0])
        cells.append(_cell("code", _code(block), len(cells)))
        end = match.end()
    cells += _prose(text[end:], len(cells))
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}


def _prose(text: str, number: int) -> list[dict[str, Any]]:
    """Without pictures, which the code shows, and without links to pages, which a downloaded notebook does not have."""
    text = re.sub(r"^!\[[^]]*\]\([^)]*\)\n|^.*\.ipynb\).*\n", "", text, flags=re.M)
    text = re.sub(r"\[([^]]*)\]\((?!http)[^)]*\)", r"\1", text).strip()
    return [_cell("markdown", re.sub(r"\n{3,}", "\n\n", text), number)] if text else []


def _code(block: Block) -> str:
    code = block.code.rstrip("\n")
    if block.file:
        return f"%%writefile {block.file}\n{code}"
    if block.language == "sh":
        return "\n".join(f"!{line}" for line in code.splitlines())
    return f"{code}\nfigure" if "figure.savefig" in code else code


def _cell(kind: str, source: str, number: int) -> dict[str, Any]:
    cell = {"cell_type": kind, "id": f"cell-{number}", "metadata": {}, "source": source.splitlines(keepends=True)}
    return cell | ({"execution_count": None, "outputs": []} if kind == "code" else {})


def notebook_text(text: str) -> str:
    """The file of a page's notebook."""
    return json.dumps(notebook_of(text), indent=1, ensure_ascii=False) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="such as grids; all tutorials by default")
    names = parser.parse_args().names
    for page in PAGES:
        if names and page.stem not in names:
            continue
        text, start = page.read_text(), time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            page.write_text(with_outputs(text, list(run_blocks(blocks_of(text), Path(folder)))))
            for name in pictures_of(text):
                (found,) = Path(folder).rglob(name)
                shutil.copy(found, FIGURES / name)
        if page.name in NOTEBOOKS:
            page.with_suffix(".ipynb").write_text(notebook_text(page.read_text()))
        print(f"{page.relative_to(DOCS.parent)}: {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
