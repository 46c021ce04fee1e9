"""Every Python block of the README and the docs is run, page by page; every link and picture exists.

Blocks marked ``python`` run here. Those marked ``python ring`` are run as a reader would: pasted into one script, which
torchrun starts on two ranks. ``py`` is somebody else's, or a fragment.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_examples_run(page: Path) -> None:
    run_blocks(page, "python")


@pytest.mark.xdist_group("processes")
@pytest.mark.parametrize(
    "page", [page for page in PAGES if "```python ring\n" in page.read_text()], ids=lambda p: p.name
)
def test_examples_run_under_torchrun(page: Path, tmp_path: Path) -> None:
    run_blocks_under_torchrun(page, "python ring", tmp_path)


def run_blocks(page: Path, mark: str) -> None:
    names: dict[str, object] = {}
    for block in blocks_of(page, mark):
        exec(compile(block, str(page), "exec"), names)


def run_blocks_under_torchrun(page: Path, mark: str, folder: Path) -> None:
    script = folder / "pasted.py"
    script.write_text("\n".join(blocks_of(page, mark)))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder, env=environment)
    assert done.returncode == 0, done.stderr


def blocks_of(page: Path, mark: str) -> list[str]:
    return re.findall(rf"^```{mark}\n(.*?)^```", page.read_text(), re.M | re.S)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_make_target_in_the_readme_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    for page in PAGES:
        assert set(re.findall(r"`make ([a-z-]+)`", page.read_text())) <= targets
