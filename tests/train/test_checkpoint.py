"""Checkpoints: whole or not there, a fixed number of them, and never over another run."""

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
from tests.ranks import starts_processes
from tests.train.tasks import settings_for

pytestmark = starts_processes


def steps_with_checkpoints(settings: TrainSettings) -> list[int]:
    trainer = Trainer(settings)
    trainer.run(lambda step: None)
    return trainer.checkpoints.steps()


def die_while_writing(settings: TrainSettings) -> None:
    """Killed after all parts are written, and before the checkpoint has its name."""
    Path.rename = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment, method-assign]
    Trainer.resumed(settings).run(lambda step: None)


def steps_after_resuming(settings: TrainSettings) -> tuple[int, list[int]]:
    trainer = Trainer.resumed(settings)
    first = trainer.next_step
    trainer.run(lambda step: None)
    return first, trainer.checkpoints.steps()


def test_a_killed_write_never_spoils_the_last_good_one_and_only_some_are_kept(tmp_path: Path) -> None:
    settings = settings_for(tmp_path / "run", save_every=1, keep=2, steps=3)
    assert run_local_ranks(1, steps_with_checkpoints, settings) == [[2, 3]]
    longer = dataclasses.replace(settings, steps=5)
    with pytest.raises(RuntimeError):
        run_local_ranks(1, die_while_writing, longer)
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir() if "writing" in path.name]
    assert Checkpoints(tmp_path / "run/checkpoints", 2).steps() == [2, 3]
    assert run_local_ranks(1, steps_after_resuming, longer) == [(3, [4, 5])]


def test_another_run_is_never_written_over(tmp_path: Path) -> None:
    settings = settings_for(tmp_path)
    (tmp_path / "checkpoints/step-00000020").mkdir(parents=True)
    (tmp_path / "settings.json").write_text(settings.to_json())
    checkpoints = Checkpoints(tmp_path / "checkpoints", 3)
    with pytest.raises(ValueError, match=r"holds a run of 20 steps: say --resume auto, or give another --out"):
        checkpoints.check_before(settings, resume=False)
    checkpoints.check_before(settings, resume=True)
    with pytest.raises(ValueError, match="a model of another shape"):
        checkpoints.check_before(settings.changed({"layers": 5}), resume=True)
