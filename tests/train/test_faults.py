"""Ranks and launchers that are killed in the middle of things: the run goes on, and ends as if nothing had happened.

A few of the points of `benchmarks.faults`, which has all of them and random ones.
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
from typer.testing import CliRunner

from ringspan.cli.app import app
from ringspan.train.metrics import read_metrics
from tests.ranks import starts_processes

pytestmark = starts_processes

ROOT = Path(__file__).parent.parent.parent
SMALL = (
    *("--model", "nano", "--segment-lengths", "32,256", "--dilation-rates", "1,4", "--tokens", "512"),
    *("--steps", "8", "--save-every", "2", "--keep", "2", "--resume", "auto"),
)


def torchrun(out: Path, script: str = "", restarts: int = 0) -> subprocess.Popen[str]:
    program = ["benchmarks.fault_points", script] if script else ["ringspan"]
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node=2", f"--max-restarts={restarts}", "-m", *program]
    return subprocess.Popen(
        [sys.executable, *launcher, "train", str(ROOT / "src"), *SMALL, "--out", str(out)],
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
def test_ranks_killed_in_a_hop_while_loading_and_while_writing_change_nothing(
    uninterrupted: tuple[list[float], bytes], tmp_path: Path
) -> None:
    output, errors = finish(torchrun(tmp_path, "1:3:hop,0:0:loading,1:6:writing", restarts=3))
    assert "Going on from step 2" in output
    assert "Going on from step 4" in output, "the checkpoint of step 6 was half written, and that of step 4 is whole"
    assert "Traceback" not in errors
    assert ended(tmp_path) == uninterrupted


@pytest.mark.slow
def test_workers_of_a_killed_launcher_stop_by_themselves_and_the_same_command_goes_on(
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
    for rank in (0, 1):  # also the one that finds its peer gone before it looks for the launcher itself
        assert f"rank {rank}: the launcher (process {process.pid}) is gone: stopping." in errors
    assert "Traceback" not in errors
    output, _ = finish(torchrun(tmp_path))
    assert "Going on from step" in output
    assert ended(tmp_path) == uninterrupted


def test_restarts_that_could_not_go_on_are_refused_at_the_start(tmp_path: Path) -> None:
    """torchrun tells its workers how often it may start them again."""
    done = CliRunner().invoke(app, ["train", "--out", str(tmp_path)], env={"TORCHELASTIC_MAX_RESTARTS": "3"})
    assert done.exit_code == 2
    assert "Say --resume auto" in " ".join(done.output.replace("│", " ").split())
