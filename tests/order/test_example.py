"""The example trains; that it learns is shown by docs/figures/hilbert_learning.png, which it draws."""

import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parent.parent.parent / "examples/grid_orders.py"


def test_the_example_runs_and_draws(tmp_path: Path) -> None:
    picture = tmp_path / "curves.png"
    command = [sys.executable, str(EXAMPLE), "--steps", "2", "--seeds", "1", "--out", str(picture)]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert [line.split()[0] for line in found.stdout.splitlines()] == [
        "row-major",
        "snake",
        "Morton",
        "Hilbert",
        "Loss",
    ]
    assert picture.stat().st_size > 10_000
