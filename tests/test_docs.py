"""The README and the docs: Python blocks run; links, paths, make targets and options of commands exist.

Blocks marked ``python`` run here. Those marked ``python ring`` are pasted into one script, which torchrun starts on two
ranks. ``tests/integrations`` runs those marked ``integrations``. ``py`` is a fragment, or code of another library.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ringspan.cli.app import COMMANDS, load_command
from tests.ranks import shares_processes

ROOT = Path(__file__).parent.parent
RUN_HERE = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES = [*RUN_HERE, *sorted((ROOT / "docs/tutorials").glob("*.md"))]  # tests/test_tutorials.py runs these
CURRENT = [page for page in PAGES if page.name != "CHANGELOG.md"]
FAST = ("README.md",)  # `make test` starts the ring of this page, `make test-all` those of all


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", RUN_HERE, ids=lambda page: page.name)
def test_examples_run(page: Path) -> None:
    run_blocks(page, "python")


@shares_processes(__name__)
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[] if page.name in FAST else pytest.mark.slow, id=page.name)
        for page in RUN_HERE
        if "```python ring\n" in page.read_text()
    ],
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


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_make_target_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    for page in PAGES:
        assert set(re.findall(r"`make ([a-z-]+)`", page.read_text())) <= targets


@pytest.mark.parametrize("page", CURRENT, ids=name_of)
def test_every_path_exists(page: Path) -> None:
    for path in re.findall(r"`((?:src|tests|docs|benchmarks|examples)/[\w./-]*)", page.read_text()):
        assert (ROOT / path).exists() or path.startswith("docs/_build"), f"{page.name} names {path}"


@pytest.mark.parametrize("page", CURRENT, ids=name_of)
def test_every_option_of_a_command_exists(page: Path) -> None:
    for name, rest in re.findall(rf"ringspan ({'|'.join(COMMANDS)})\b([^`\n#]*)", page.read_text()):
        options = {option for each in load_command(name).params for option in (*each.opts, *each.secondary_opts)}
        unknown = set(re.findall(r"(?<=\s)--[a-z][a-z-]*", rest)) - options - {"--help"}
        assert not unknown, f"{page.name}: ringspan {name} has no {', '.join(sorted(unknown))}"


def test_contributing_lists_every_part_of_the_source() -> None:
    source = ROOT / "src/ringspan"
    parts = {f"{path.name}/" if path.is_dir() else path.name for path in source.iterdir()}
    listed = set(re.findall(r"^ {6}([\w.]+/?) ", (ROOT / "CONTRIBUTING.md").read_text(), re.M))
    assert listed == {part for part in parts if part.endswith((".py", "/")) and not part.startswith("__pycache__")}
