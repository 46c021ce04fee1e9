"""The tutorials run, print what their pages say and draw their pictures; their notebooks are those pages, and run."""

import doctest
import os
import sys
from pathlib import Path

import pytest

from docs import run_tutorials
from docs.run_tutorials import NOTEBOOKS, PAGES, blocks_of, is_as_printed, notebook_text, pictures_of, run_blocks
from tests.ranks import starts_processes


@pytest.mark.slow
@starts_processes
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_tutorial_runs(page: Path, tmp_path: Path) -> None:
    text = page.read_text()
    if "transformers" in "".join(block.code for block in blocks_of(text)):
        pytest.importorskip("transformers", reason="needs the extra transformers")
    blocks = blocks_of(text)
    for block, printed in zip(blocks, run_blocks(blocks, tmp_path), strict=True):
        wanted = block.printed or ""
        assert is_as_printed(wanted, printed), f"{block.code}\nprints\n{printed}\nand the page says\n{wanted}"
    for name in pictures_of(text):
        assert len([*tmp_path.rglob(name)]) == 1, f"no block draws {name}"


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_is_its_page(name: str) -> None:
    (page,) = (page for page in PAGES if page.name == name)
    assert page.with_suffix(".ipynb").read_text() == notebook_text(page.read_text()), "run make tutorials"


@pytest.mark.slow
@starts_processes
@pytest.mark.parametrize("name", NOTEBOOKS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")  # of Jupyter
def test_a_notebook_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat = pytest.importorskip("nbformat", reason="needs the extra docs")
    nbclient = pytest.importorskip("nbclient", reason="needs the extra docs")
    (page,) = (page for page in PAGES if page.name == name)
    notebook = nbformat.reads(page.with_suffix(".ipynb").read_text(), as_version=4)
    nbformat.validate(notebook)
    # torchrun of this environment, and a kernel of this Python
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"][1:]  # without the set-up
    blocks = blocks_of(page.read_text())
    for block, cell in zip(blocks, cells, strict=True):
        if block.printed is not None:
            printed = "".join(out.text for out in cell.outputs if out.output_type == "stream" and out.name == "stdout")
            assert is_as_printed(block.printed, printed.replace("\r\n", "\n"))
        if "figure.savefig" in block.code:
            assert any("image/png" in out.get("data", {}) for out in cell.outputs), "the figure is not shown"


def test_examples_of_the_runner() -> None:
    result = doctest.testmod(run_tutorials)
    assert result.attempted
    assert not result.failed


def test_every_picture_of_a_page_is_described() -> None:
    for page in [*PAGES, *(Path(__file__).parent.parent / "docs").glob("*.md")]:
        assert "![](" not in page.read_text(), f"{page.name} has a picture without a text alternative"
