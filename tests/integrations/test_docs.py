"""The documentation: what needs other libraries is run, and the site builds without network and without a warning."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks import starts_processes
from tests.test_docs import ROOT, run_blocks, run_blocks_under_torchrun


@starts_processes
@pytest.mark.parametrize("page", ["README.md", "docs/integrations.md"])
def test_examples_run_under_torchrun(page: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs the extra transformers")
    run_blocks_under_torchrun(ROOT / page, "python ring integrations", tmp_path)


def test_decoding_runs() -> None:
    pytest.importorskip("transformers", reason="needs the extra transformers")
    run_blocks(ROOT / "docs/decoding.md", "python integrations")


def test_the_site_builds(tmp_path: Path) -> None:
    pytest.importorskip("sphinx", reason="needs the extra docs")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", str(ROOT / "docs"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "attention" in (tmp_path / "api.html").read_text()
