"""Every option says what it does and what it is by default; presets say what they are for."""

from __future__ import annotations

from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from ringspan.cli.app import app
from ringspan.train.presets import PRESETS

COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
NOTHING = {"config", "into", "draw", "prompt_file", "suite"}  # not given, they do nothing


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_has_help_and_a_default(name: str) -> None:
    for option in COMMANDS[name].params:
        assert option.help or option.name == "help", option.name
        if (
            option.param_type_name != "option"
            or option.name in NOTHING
            or (option.is_flag and not option.secondary_opts)
        ):
            continue
        told = isinstance(option.show_default, str) or (option.show_default and option.default not in (None, ""))
        assert told, option.name


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
