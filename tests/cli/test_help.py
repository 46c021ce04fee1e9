"""Every option has help and a default; presets are described."""

from __future__ import annotations

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from ringspan.cli.app import COMMANDS, app, load_command
from ringspan.train.config import PRESETS

OPTIONAL = {"config", "into", "draw", "prompt_file", "suite"}  # without a default


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_has_help_and_a_default(name: str) -> None:
    for option in load_command(name).params:
        assert option.help or option.name == "help", option.name
        if (
            option.param_type_name != "option"
            or option.name in OPTIONAL
            or (option.is_flag and not option.secondary_opts)
        ):
            continue
        shown = isinstance(option.show_default, str) or (option.show_default and option.default not in (None, ""))
        assert shown, option.name


@pytest.mark.parametrize("name", COMMANDS)
def test_help_prints_with_examples(name: str) -> None:
    done = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "120"})
    assert done.exit_code == 0
    assert f"ringspan {name}" in done.stdout.partition("Examples")[2]


def test_presets_are_described() -> None:
    done = CliRunner().invoke(app, ["train", "--help"], env={"COLUMNS": "200"})
    said = " ".join(done.stdout.split())
    for name, preset in PRESETS.items():
        assert f"{name}: {preset}" in said
    assert "8192" in said.partition("--tokens")[2][:200]  # the default of the first preset


def test_help_imports_no_torch() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "ringspan", "--help"]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    imported = {line.rpartition("|")[2].strip() for line in found.stderr.splitlines()}
    assert "typer" in imported
    assert "torch" not in imported
    assert all(name in found.stdout for name in COMMANDS)
