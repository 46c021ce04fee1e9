"""The documentation: what needs other libraries is run, and the site builds without network and without a warning."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ringspan.processes import run_local_ranks
from tests.test_docs import ROOT, run_blocks


@pytest.mark.xdist_group("processes")
def test_examples_run_on_a_ring() -> None:
    pytest.importorskip("transformers", reason="needs pip install 'ringspan[transformers]'")
    run_local_ranks(2, run_blocks, ROOT / "docs/integrations.md", "python ring integrations")


def test_decoding_runs() -> None:
    pytest.importorskip("transformers", reason="needs pip install 'ringspan[transformers]'")
    run_blocks(ROOT / "docs/decoding.md", "python integrations")


def test_the_site_builds(tmp_path: Path) -> None:
    pytest.importorskip("sphinx", reason="needs pip install 'ringspan[docs]'")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", str(ROOT / "docs"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=110)
    assert done.returncode == 0, done.stderr
    assert "attention" in (tmp_path / "api.html").read_text()
