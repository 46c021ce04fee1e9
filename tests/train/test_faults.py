"""A run whose ranks or launcher are killed resumes and ends with the same result, bit for bit.

Covers a few of the fault points of `benchmarks.faults`, which has all of them and random ones.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from typer.testing import CliRunner

from ringspan.cli.app import app
from ringspan.train.metrics import read_metrics
from tests.ranks import starts_processes

pytestmark = starts_processes

ROOT = Path(__file__).parent.parent.parent
DATA = Path(torch.__file__).parent / "nn"
SMALL = (
    *("--model", "nano", "--pattern", "32x1,256x4", "--tokens", "512"),
    *("--steps", "8", "--save-every", "2", "--keep", "2", "--resume", "auto"),
)


def torchrun(out: Path, script: str = "", restarts: int = 0) -> subprocess.Popen[str]:
    program = ["benchmarks.fault_points", script] if script else ["ringspan"]
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node=2", f"--max-restarts={restarts}", "-m", *program]
    return subprocess.Popen(
        [sys.executable, *launcher, "train", str(DATA), *SMALL, "--out", str(out)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def finish(process: subprocess.Popen[str]) -> tuple[str, str]:
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    return output, errors


def ended(run: Path) -> tuple[list[float], bytes]:
    """The losses of a finished run, and its weights."""
    return [step["loss"] for step in read_metrics(run)], (run / "model/model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], bytes]:
    run = tmp_path_factory.mktemp("uninterrupted")
    finish(torchrun(run))
    return ended(run)


@pytest.mark.slow
def test_killing_ranks_in_a_hop_while_loading_and_while_writing_changes_nothing(
    uninterrupted: tuple[list[float], bytes], tmp_path: Path
) -> None:
    output, errors = finish(torchrun(tmp_path, "1:3:hop,0:0:loading,1:6:writing", restarts=3))
    assert "Resuming from step 2" in output
    assert "Resuming from step 4" in output, "the checkpoint of step 6 was incomplete, that of step 4 is intact"
    assert "Traceback" not in errors
    assert ended(tmp_path) == uninterrupted


@pytest.mark.slow
def test_workers_stop_when_their_launcher_is_killed_and_the_same_command_resumes(
    uninterrupted: tuple[list[float], bytes], tmp_path: Path
) -> None:
    process = torchrun(tmp_path, "0:3:launcher")
    workers: list[psutil.Process] = []
    while process.poll() is None:
        with contextlib.suppress(psutil.NoSuchProcess):
            workers = psutil.Process(process.pid).children() or workers
        time.sleep(0.05)
    assert len(workers) == 2
    _, alive = psutil.wait_procs(workers, timeout=300)
    assert not alive
    _, errors = process.communicate()
    assert process.returncode == -signal.SIGKILL
    for rank in (0, 1):  # also the rank that notices its lost peer before the lost launcher
        assert f"rank {rank}: the launcher (process {process.pid}) is gone" in errors
    assert "Traceback" not in errors
    output, _ = finish(torchrun(tmp_path))
    assert "Resuming from step" in output
    assert ended(tmp_path) == uninterrupted


def test_restarts_without_resume_are_refused_at_the_start(tmp_path: Path) -> None:
    """torchrun passes its number of restarts in the environment."""
    done = CliRunner().invoke(app, ["train", "--out", str(tmp_path)], env={"TORCHELASTIC_MAX_RESTARTS": "3"})
    assert done.exit_code == 2
    assert "needs --resume auto" in " ".join(done.output.replace("│", " ").split())
