"""Ctrl-C as a terminal sends it: one line, exit status 130, no traceback, no process left. Training saves first."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch

from ringspan.models import LongNet, LongNetConfig
from ringspan.train.config import TrainSettings
from ringspan.train.metrics import read_metrics
from tests.ranks import starts_processes

pytestmark = starts_processes

DATA = Path(torch.__file__).parent / "nn"
SMALL = (
    *("train", str(DATA), "--model", "nano", "--pattern", "32x1,256x4"),
    *("--tokens", "4k", "--steps", "20", "--save-every", "1000"),
)
HANG = 300  # seconds


class Started:
    """A command in its own session, with all processes that it starts."""

    def __init__(self, *arguments: str, ranks: int = 0) -> None:
        launcher = ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}"] if ranks else []
        self.process = subprocess.Popen(
            [sys.executable, *launcher, "-m", "ringspan", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self.family: list[psutil.Process] = []

    def wait_until(self, reached: Callable[[], bool]) -> None:
        deadline = time.monotonic() + HANG
        while not reached():
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        self.family = psutil.Process(self.process.pid).children(recursive=True)

    def cpu_seconds(self) -> float:
        """CPU time of all its processes so far."""
        me = psutil.Process(self.process.pid)
        times = [process.cpu_times() for process in (me, *me.children(recursive=True))]
        return sum(spent.user + spent.system for spent in times)

    def interrupt(self) -> None:
        os.killpg(self.process.pid, signal.SIGINT)

    def end(self) -> tuple[str, str]:
        """Its output; asserts that no process is left."""
        output, errors = self.process.communicate(timeout=HANG)
        _, alive = psutil.wait_procs(self.family, timeout=HANG)
        assert not alive
        return output, errors


def ended(run: Path) -> tuple[list[float], bytes]:
    return [step["loss"] for step in read_metrics(run)], (run / "model/model.safetensors").read_bytes()


def steps_of(run: Path) -> int:
    path = run / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.is_file() else 0


@pytest.mark.parametrize("ranks", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_training_saves_a_checkpoint_and_resumes_bit_for_bit(ranks: int, tmp_path: Path) -> None:
    run, whole = tmp_path / "run", tmp_path / "whole"
    started = Started(*SMALL, "--out", str(run), ranks=ranks)
    started.wait_until(lambda: steps_of(run) >= 3)
    started.interrupt()
    for process in started.family:  # as Slurm does: torchrun forwards the interrupt that its ranks have received, too
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
    output, errors = started.end()
    done = steps_of(run)
    assert 3 <= done < 20
    checkpoint = run / f"checkpoints/step-{done:08d}"
    assert (checkpoint / "manifest.json").is_file()
    sentence = f"Interrupted after step {done} of 20: the checkpoint is {checkpoint}. To continue, run the same command"
    assert errors.count(sentence) == 1
    assert output.count("Press Ctrl-C again to stop at once.") == 1
    if not ranks:  # torchrun itself ends with its own traceback and status
        assert started.process.returncode == 130
        assert "Traceback" not in errors
    for out, flags in ((run, ("--resume", "auto")), (whole, ())):
        again = Started(*SMALL, "--out", str(out), *flags, ranks=ranks)
        _, errors = again.end()
        assert again.process.returncode == 0, errors
    assert ended(run) == ended(whole)  # bit for bit


def test_a_second_interrupt_stops_at_once_and_names_the_last_checkpoint(tmp_path: Path) -> None:
    slow = ("--tokens", "64k", "--accumulate", "1000", "--save-every", "1")
    started = Started(*SMALL, *slow, "--out", str(tmp_path))
    started.wait_until((tmp_path / "heartbeats/rank-00000.json").is_file)
    time.sleep(1)
    started.interrupt()
    time.sleep(1)
    started.interrupt()
    _, errors = started.end()
    assert started.process.returncode == 130
    assert "Interrupted at once: there is no checkpoint yet. To continue, run the same command" in errors
    assert "Traceback" not in errors


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = LongNetConfig.named("nano", patterns=("16x1,64x4",))
    folder: Path = tmp_path_factory.mktemp("run")
    LongNet(config).save_pretrained(folder / "model")
    (folder / "settings.json").write_text(TrainSettings(model=config, data=(str(DATA),)).to_json())
    return folder


@pytest.mark.parametrize(
    ("command", "cpu_seconds"),
    [
        ("generate RUN --tokens 1M", 0.3),  # while torch is imported, where a KeyboardInterrupt can get lost
        pytest.param("generate RUN --tokens 1M", 5.0, marks=pytest.mark.slow),
        ("evaluate RUN --windows 50", 2.5),
        pytest.param("rehearse --tokens 16M --ranks 16", 5.0, marks=pytest.mark.slow),
        pytest.param("stream --tokens 64M --out OUT", 5.0, marks=pytest.mark.slow),
        pytest.param("verify --ranks 2 --out OUT", 8.0, marks=pytest.mark.slow),
        ("doctor", 0.5),
    ],
)
def test_interrupted_commands_print_one_line(command: str, cpu_seconds: float, trained: Path, tmp_path: Path) -> None:
    started = Started(*command.replace("RUN", str(trained)).replace("OUT", str(tmp_path)).split())
    started.wait_until(lambda: started.cpu_seconds() >= cpu_seconds)
    started.interrupt()
    _, errors = started.end()
    assert started.process.returncode == 130, errors
    assert "Traceback" not in errors
    assert "Interrupted" in errors


@pytest.mark.slow
def test_under_torchrun_only_rank_0_reports_the_interrupt(trained: Path) -> None:
    started = Started("generate", str(trained), "--tokens", "1M", ranks=2)
    started.wait_until(lambda: started.cpu_seconds() >= 15)
    started.interrupt()
    _, errors = started.end()
    assert errors.count("Interrupted.") == 1
    assert "KeyboardInterrupt" not in errors
