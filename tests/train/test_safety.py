"""Files and peers never execute code: each damaged, foreign or malicious file is a one-line error."""

from __future__ import annotations

import dataclasses
import os
import pickle
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.fuzz import fuzz
from ringspan.runtime.files import checksum
from ringspan.runtime.launch import run_local_ranks
from ringspan.runtime.settings import RunError
from ringspan.train.checkpoint import MANIFEST, read_manifest, write_manifest
from ringspan.train.config import TrainSettings
from ringspan.train.trainer import Trainer
from tests.ranks import starts_processes
from tests.train.tasks import settings_for

pytestmark = starts_processes

ROUNDS = 60  # for each of six kinds of file; `python -m benchmarks fuzz` runs more


def trained(settings: TrainSettings) -> tuple[Trainer, Path]:
    """A trained run and the folder of its last checkpoint."""
    trainer = Trainer(settings)
    trainer.run()
    return trainer, trainer.checkpoints.path_of(trainer.checkpoints.steps()[-1])


class Bomb:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.mark}",)


def load_foreign(settings: TrainSettings) -> dict[str, str]:
    """The errors for folders that are not valid checkpoints."""
    trainer, folder = trained(settings)
    whole = shutil.copytree(folder, folder.parent.parent / "whole")
    (shard,) = whole.glob("shard-*")
    said = {}

    def attempt(name: str) -> None:
        with pytest.raises(RunError) as caught:
            trainer.load()
        said[name] = str(caught.value)
        shutil.rmtree(folder)
        shutil.copytree(whole, folder)

    os.truncate(folder / shard.name, shard.stat().st_size // 2)
    attempt("truncated")
    (folder / shard.name).unlink()
    attempt("missing")
    (folder / MANIFEST).unlink()
    (folder / ".metadata").write_bytes(pickle.dumps(Bomb(whole.parent / "went-off")))
    attempt("foreign")
    torch.save({"weight": Bomb(whole.parent / "went-off")}, folder / shard.name)
    manifest = read_manifest(folder)
    files = {shard.name: ((folder / shard.name).stat().st_size, checksum(folder / shard.name))}
    write_manifest(folder, dataclasses.replace(manifest, files=files))
    attempt("pickled")
    write_manifest(folder, dataclasses.replace(manifest, files={"../whole/" + shard.name: (1, "")}))
    attempt("escaping")
    trainer.load()
    other = Trainer(dataclasses.replace(settings.changed({"mlp_width": 64}), out=settings.out + "-other"))
    other.checkpoints = trainer.checkpoints
    with pytest.raises(RunError) as caught:
        other.load()
    return {**said, "another shape": str(caught.value)}


def test_hundreds_of_damaged_files_raise_one_line_errors_and_run_no_code(tmp_path: Path) -> None:
    (found,) = run_local_ranks(1, fuzz, settings_for(tmp_path, steps=2), ROUNDS)
    assert sum(kind.tried for kind in found) == 6 * ROUNDS
    for kind in found:
        assert not kind.defects
        assert len(kind.messages) > 0.7 * ROUNDS
    checkpoints = [message for kind in found[:3] for message in kind.messages]
    assert all(message.startswith(str(tmp_path)) and "\n" not in message.strip() for message in checkpoints)


def test_errors_describe_foreign_and_truncated_checkpoints(tmp_path: Path) -> None:
    (said,) = run_local_ranks(1, load_foreign, settings_for(tmp_path / "run", steps=2))
    assert "bytes of" in said["truncated"]
    assert "missing" in said["missing"]
    assert "not a checkpoint of ringspan" in said["foreign"]
    assert "not a checkpoint file" in said["pickled"]
    assert "is not the name of" in said["escaping"]
    assert "has shape" in said["another shape"]
    assert not (tmp_path / "run/went-off").exists()


def without_pickles(settings: TrainSettings) -> tuple[int, int]:
    """Train, save and resume with all unpicklers of Python and of torch's collectives disabled."""

    def forbid(*_: Any, **__: Any) -> NoReturn:
        raise AssertionError("something was unpickled")

    pickle.load = pickle.loads = pickle.Unpickler = forbid  # type: ignore[assignment, misc]
    dist.distributed_c10d._unpickler = forbid  # type: ignore[assignment]
    with Trainer(settings) as trainer:
        trainer.run(until=2)
    with Trainer(settings, resume=True) as resumed:
        first = resumed.next_step
        resumed.run()
    assert (Path(settings.out) / "model/model.safetensors").is_file()
    return first, resumed.next_step


def fill_the_disk(settings: TrainSettings) -> tuple[str, list[int]]:
    """A run in which rank 1 can write only a few bytes per file from step 3 on, as on a full disk."""
    trainer = Trainer(settings)
    trainer.run(until=2)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        trainer.run()
    except RunError as error:
        return str(error), trainer.checkpoints.steps()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    raise AssertionError("no error")


def explode(settings: TrainSettings, spoil: Callable[[Tensor], Tensor]) -> tuple[str, list[int]]:
    """A run in which rank 1's loss is bad from step 3 on: the error, and the remaining checkpoints."""
    trainer = Trainer(settings)
    loss, calls = trainer.model.loss, []

    def spoiled(*tensors: Any, **more: Any) -> Tensor:
        calls.append(1)
        found = loss(*tensors, **more)
        return spoil(found) if len(calls) > 2 and dist.get_rank() == 1 else found

    trainer.model.loss = spoiled  # type: ignore[method-assign]
    try:
        trainer.run()
    except RunError as error:
        return str(error), trainer.checkpoints.steps()
    raise AssertionError("no error")


def not_a_number(loss: Tensor) -> Tensor:
    return loss * float("nan")


def infinite_gradients(loss: Tensor) -> Tensor:
    loss.register_hook(lambda gradient: gradient * float("inf"))
    return loss


def two_ranks(folder: Path) -> dict[str, Any]:
    """All tasks for two ranks, in one launch; the one that disables unpickling comes last."""
    return {
        "disk": fill_the_disk(settings_for(folder / "disk", save_every=1, steps=4)),
        "loss": explode(settings_for(folder / "loss", save_every=1, steps=6), not_a_number),
        "gradient": explode(settings_for(folder / "gradient", save_every=2, steps=6), infinite_gradients),
        "pickles": without_pickles(settings_for(folder / "pickles", steps=4)),
    }


def test_two_ranks_stop_together_and_never_unpickle(tmp_path: Path) -> None:
    found = run_local_ranks(2, two_ranks, tmp_path)
    for rank in found:
        message, steps = rank["disk"]
        assert "step 3 could not be saved: rank 1:" in message
        assert f"the last good checkpoint is {tmp_path}/disk/checkpoints/step-00000002" in message
        assert steps == [1, 2]
        message, steps = rank["loss"]
        assert message.startswith("step 3: the loss is not finite on rank 1.")
        assert steps == [1, 2]
        message, steps = rank["gradient"]
        assert message.startswith("step 3: gradients are not finite: that of embedding.weight")
        assert steps == [2]
        assert rank["pickles"] == (2, 4)
