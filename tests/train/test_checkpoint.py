"""Checkpoints are complete or absent, limited in number, and never overwrite another run."""

from __future__ import annotations

import dataclasses
import os
import signal
from pathlib import Path

import pytest

from ringspan.runtime.launch import run_local_ranks
from ringspan.train.checkpoint import Checkpoints
from ringspan.train.config import TrainSettings
from ringspan.train.trainer import Trainer
from tests.ranks import shares_processes
from tests.train.tasks import settings_for

pytestmark = shares_processes(__name__)


def steps_with_checkpoints(settings: TrainSettings) -> list[int]:
    trainer = Trainer(settings)
    trainer.run()
    return trainer.checkpoints.steps()


def die_while_writing(settings: TrainSettings) -> None:
    """Kill the process after all files are written, before the checkpoint is renamed."""
    Path.rename = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment, method-assign]
    Trainer(settings, resume=True).run()


def steps_after_resuming(settings: TrainSettings) -> tuple[int, list[int]]:
    trainer = Trainer(settings, resume=True)
    first = trainer.next_step
    trainer.run()
    return first, trainer.checkpoints.steps()


def test_a_killed_write_leaves_the_last_checkpoint_intact_and_old_ones_are_removed(tmp_path: Path) -> None:
    settings = settings_for(tmp_path / "run", save_every=1, keep=2, steps=3)
    assert run_local_ranks(1, steps_with_checkpoints, settings) == [[2, 3]]
    longer = dataclasses.replace(settings, steps=5)
    with pytest.raises(RuntimeError):
        run_local_ranks(1, die_while_writing, longer)
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir() if "writing" in path.name]
    assert Checkpoints(tmp_path / "run/checkpoints", 2).steps() == [2, 3]
    assert run_local_ranks(1, steps_after_resuming, longer) == [(3, [4, 5])]


def test_another_run_is_never_overwritten(tmp_path: Path) -> None:
    settings = settings_for(tmp_path)
    (tmp_path / "checkpoints/step-00000020").mkdir(parents=True)
    (tmp_path / "settings.json").write_text(settings.to_json())
    checkpoints = Checkpoints(tmp_path / "checkpoints", 3)
    with pytest.raises(ValueError, match="20 steps"):
        checkpoints.check_resume(settings, resume=False)
    checkpoints.check_resume(settings, resume=True)
    with pytest.raises(ValueError, match="different shape"):
        checkpoints.check_resume(settings.changed({"layers": 5}), resume=True)
