"""Every Python block of the README and the docs is run, page by page; every link and picture exists.

Blocks marked ``python`` run here, those marked ``python ring`` on two ranks; ``py`` is somebody else's, or a fragment.
"""

import re
from pathlib import Path

import pytest

from ringspan.processes import run_local_ranks

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_examples_run(page: Path) -> None:
    run_blocks(page, "python")


@pytest.mark.xdist_group("processes")
@pytest.mark.parametrize(
    "page", [page for page in PAGES if "```python ring\n" in page.read_text()], ids=lambda p: p.name
)
def test_examples_run_on_a_ring(page: Path) -> None:
    run_local_ranks(2, run_blocks, page, "python ring")


def run_blocks(page: Path, mark: str) -> None:
    names: dict[str, object] = {}
    for block in re.findall(rf"^```{mark}\n(.*?)^```", page.read_text(), re.M | re.S):
        exec(compile(block, str(page), "exec"), names)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_make_target_in_the_readme_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    for page in PAGES:
        assert set(re.findall(r"`make ([a-z-]+)`", page.read_text())) <= targets
