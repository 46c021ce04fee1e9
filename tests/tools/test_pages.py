"""Pages of results: the same page as Markdown, and as one HTML file that a real browser opens without network."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from ringspan.tools.pages import Page, Picture, Table, html, markdown, write_into, write_page

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


@pytest.fixture
def page() -> Page:
    figure = Figure(figsize=(3, 2))
    figure.subplots().plot([1, 2, 4], [4, 2, 1], "o-")
    table = Table("Is it real?", [["check", "verdict"], ["a | b", "pass"], ["<script>", "FAIL"]], "What to see.")
    return Page(
        "A report", "It is.", "ringspan verify", "a machine", [table, Picture("curve", figure, "It falls.")], "FAIL"
    )


def test_markdown_has_all_parts(page: Page) -> None:
    text = markdown(page, "figures")
    assert text.startswith("# A report\n\n**FAIL.** It is.\n")
    assert "| a \\| b | pass |" in text
    assert "![It falls.](figures/curve.png)" in text
    assert "`ringspan verify`" in text


def test_html_is_self_contained(page: Page) -> None:
    text = html(page)
    assert "&lt;script&gt;" in text  # results are escaped, never markup
    assert "<script" not in text
    assert 'class="verdict fail"' in text
    assert 'name="viewport"' in text
    assert text.count('data-label="check"') == 2  # the header of each cell, where a phone shows no table head
    sources = re.findall(r'(?:src|href)="([^"]*)"', text)
    assert sources
    assert all(source.startswith("data:") for source in sources)


def test_a_report_opens_in_a_browser_without_network(page: Page, tmp_path: Path) -> None:
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip(f"no browser: install one of {', '.join(BROWSERS)}")
    paths = write_page(page, tmp_path, "report")
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--v=0"]
    command += ["--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom"]
    shown = subprocess.run([*command, paths["html"].as_uri()], capture_output=True, text=True, check=True)
    assert "<h1>A report</h1>" in shown.stdout
    assert 'class="good"' in shown.stdout
    complaints = [line for line in shown.stderr.splitlines() if "CONSOLE" in line]
    assert not complaints


def test_pictures_are_written_next_to_the_markdown(page: Page, tmp_path: Path) -> None:
    paths = write_page(page, tmp_path / "new", "report")
    assert (tmp_path / "new/figures/curve.png").stat().st_size > 1000
    assert paths["markdown"].read_text() == markdown(page, "figures")


def test_only_the_text_between_the_markers_is_replaced(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("before\n<!-- ringspan verify -->\nold\n<!-- end of ringspan verify -->\nafter\n")
    for lines in (["new"], ["newer", "still"]):
        write_into(readme, "ringspan verify", lines)
        middle = "\n".join(lines)
        whole = f"before\n<!-- ringspan verify -->\n{middle}\n<!-- end of ringspan verify -->\nafter\n"
        assert readme.read_text() == whole
    readme.write_text("no markers")
    with pytest.raises(ValueError, match="needs one line '<!-- ringspan verify -->'"):
        write_into(readme, "ringspan verify", ["new"])
