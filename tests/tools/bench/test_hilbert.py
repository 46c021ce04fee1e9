"""`ringspan bench hilbert`: the quick study runs, writes its report, and concludes only what its times support."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.hilbert import SUITE
from ringspan.cli.app import app
from ringspan.tools.bench.hilbert_page import verdict

HILBERT = [sys.executable, "-m", "ringspan", "bench", "hilbert"]


@pytest.mark.slow
def test_quick_prints_one_document_and_writes_a_page(tmp_path: Path) -> None:
    command = [*HILBERT, "--quick", "--json", "--out", str(tmp_path)]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    document = json.loads(found.stdout)
    assert set(document["shortest"]) == {"row-major", "snake", "Morton", "Hilbert"}
    assert document["shortest"]["Hilbert"] < document["shortest"]["row-major"]
    assert all(len(times) == 2 for times in document["shortest_seconds"].values())
    assert json.loads((tmp_path / "hilbert.json").read_text()) == document
    page = (tmp_path / "hilbert.md").read_text()
    for title in ("at equal cost", "The cost of a share of 0.8", "in a ring", "permutation", "folded order"):
        assert title in page
    assert (tmp_path / "figures/hilbert_orders.png").exists()


def test_docs_have_the_markers_of_the_suite() -> None:
    text = (Path(__file__).parents[3] / "docs/hilbert.md").read_text()
    assert text.count(f"<!-- {SUITE.marker} -->") == text.count(f"<!-- end of {SUITE.marker} -->") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["peano"], "'peano': must be hilbert"),
        (["hilbert", "--tokens", "4k"], "leave out --tokens"),
        (["--quick"], "a study only"),
    ],
)
def test_invalid_options_are_named(options: list[str], message: str) -> None:
    found = CliRunner().invoke(app, ["bench", *options], env={"COLUMNS": "200", "TERM": "dumb"})
    assert found.exit_code == 2
    assert message in found.output


def test_verdicts_respect_the_noise() -> None:
    assert verdict([1.0, 1.3], [1.2, 1.5]) == "no difference beyond the noise"
    assert verdict([1.0, 1.1], [0.8, 0.9]) == "faster"
    assert verdict([1.0, 1.1], [1.2, 1.3]) == "no speed-up: slower"
