"""`ringspan train` and `ringspan evaluate`, as a user starts them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from ringspan.cli.app import app

SMALL = ("--model", "nano", "--segment-lengths", "32,256", "--dilation-rates", "1,4", "--tokens", "512", "--steps", "3")


def ringspan(*arguments: str, ranks: int = 0) -> subprocess.CompletedProcess[str]:
    launcher = ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}"] if ranks else []
    return subprocess.run(
        [sys.executable, *launcher, "-m", "ringspan", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def test_two_ranks_train_resume_and_are_evaluated(tmp_path: Path) -> None:
    run = tmp_path / "run"
    data = str(Path(__file__).parent.parent.parent / "src")
    first = ringspan("train", data, *SMALL, "--out", str(run), ranks=2)
    assert first.returncode == 0, first.stderr
    assert "step 3: " in first.stdout
    assert "bits/byte" in first.stdout
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 3
    resumed = ringspan("train", "--config", str(run / "settings.json"), "--steps", "5", "--resume", "auto", "--json")
    assert resumed.returncode == 0, resumed.stderr
    assert json.loads(resumed.stdout)["number"] == 4
    assert "Going on from step 3" in resumed.stderr
    found = evaluate(run, "--contexts", "512,1k")
    assert [row["context"] for row in found["scores"]] == [512, 1024]
    assert found["branches"][-1]["bits_per_byte"] == found["scores"][-1]["bits_per_byte"]  # nothing left out
    assert 2 < found["bigram"] < 6
    assert evaluate(run, "--contexts", "512,1k", "--step", "5", "--no-branches")["scores"] == found["scores"]
    assert evaluate(run, "--contexts", "512,1k", "--step", "3", "--no-branches")["scores"] != found["scores"]


def evaluate(run: Path, *flags: str) -> Any:
    result = CliRunner().invoke(app, ["evaluate", str(run), "--windows", "2", *flags, "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_a_dry_run_says_what_is_needed_and_trains_nothing(tmp_path: Path) -> None:
    done = ringspan("train", "--preset", "long", "--dry-run", "--ranks", "2", "--json", "--out", str(tmp_path / "run"))
    found = json.loads(done.stdout)
    assert found["ranks"] == 2
    assert found["bytes"]["total"] == sum(count for name, count in found["bytes"].items() if name != "total")
    assert not (tmp_path / "run").exists()
