"""Commands print text unchanged: brackets are not markup, and install commands work from a clone."""

from __future__ import annotations

import json
import re
import sys
from importlib import metadata
from pathlib import Path
from unittest import mock

import pytest
from typer.testing import CliRunner

from ringspan.cli.app import app
from ringspan.cli.options import make_console
from ringspan.tools import doctor
from ringspan.tools.bench import cases

ROOT = Path(__file__).parent.parent.parent
COMMANDS = sorted((ROOT / "src/ringspan/cli").glob("*.py"))


def run(*arguments: str, status: int = 0) -> str:
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "250"})
    assert result.exit_code == status, result.output
    return " ".join(result.output.replace("│", " ").split())


def test_doctor_prints_whole_install_commands() -> None:
    with mock.patch.object(doctor, "_version", return_value=""):
        said, found = run("doctor"), json.loads(run("doctor", "--json"))
    assert found["missing"]["typer"] == "pip install -c constraints.txt -e '.[cli]'"
    for install in found["missing"].values():
        assert install in said


def test_bench_prints_whole_install_commands() -> None:
    with mock.patch.object(cases.importlib.util, "find_spec", return_value=None):
        said = run("bench", "--peers", "--pattern", "full", "--tokens", "256", "--dry-run")
    assert "pip install -c constraints.txt -e '.[peers]'" in said


def test_errors_print_whole_install_commands(tmp_path: Path) -> None:
    with mock.patch.dict(sys.modules, {"matplotlib": None, "ringspan.draw": None}):
        said = run("plan", "--no-measure", "--draw", str(tmp_path), status=2)
    assert "pip install -c constraints.txt -e '.[plot]'" in said


def test_every_install_command_names_an_extra_of_this_clone() -> None:
    extras = set(metadata.metadata("ringspan").get_all("Provides-Extra") or ())
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").glob("*")]
    text = "".join(path.read_text() for path in [*pages, *(ROOT / "src").rglob("*.py")])
    assert "ringspan[" not in text, "ringspan is not on a package index"
    named = set(re.findall(r"""(?:pip install [^`\n]*'\.\[|install_command\("|missing_package\(.*")(\w+)""", text))
    assert {"cli", "train", "plot", "peers", "transformers"} <= named <= extras


def test_a_console_prints_brackets(capsys: pytest.CaptureFixture[str]) -> None:
    make_console().print("in runs[1], [bold]no[/bold] markup", soft_wrap=True)
    assert capsys.readouterr().out == "in runs[1], [bold]no[/bold] markup\n"


@pytest.mark.parametrize("path", COMMANDS, ids=lambda path: path.name)
def test_commands_use_this_console(path: Path) -> None:
    """Progress bars and spinners parse markup on their own."""
    text = path.read_text()
    assert path.name == "options.py" or not re.search(r"(?<!_)\bConsole\(", text)
    for column in re.findall(r"TextColumn\((.*)\)", text):
        assert "fields" not in column or "markup=False" in column, column


def test_a_folder_name_with_brackets_is_printed_unchanged(tmp_path: Path) -> None:
    folder = tmp_path / "runs[red]1[end]"
    small = ["--model", "nano", "--pattern", "32x1", "--tokens", "64", "--steps", "1"]
    said = run("train", str(ROOT / "src/ringspan/cli"), *small, "--out", str(folder))
    assert f"The model is in {folder}/model" in said
    document = json.loads(run("train", "--preset", "quick", "--dry-run", "--json", "--out", str(folder)))
    assert document["ranks"] == 1
