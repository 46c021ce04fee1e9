"""ringspan's own adapters pass all checks; reports, exit statuses and the pytest helper of `ringspan.testing`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import ringspan.testing as rt
from ringspan.cli.app import app
from ringspan.tools.verify_training.batches import label_batches, make_batch, with_equal_labels
from ringspan.tools.verify_training.judge import CHECKS
from ringspan.tools.verify_training.rings import settings_for_training
from tests.ranks import shares_processes

pytestmark = [shares_processes(__name__), pytest.mark.timeout(900)]
SUBJECTS = "tests.tools.verify_training.subjects"
LONGNET = "ringspan.tools.verify_training.own_trainers:longnet"


@pytest.mark.slow
def test_longnet_passes_every_check() -> None:
    report = rt.verify_training(LONGNET, ranks=(1, 2), tokens=512)
    assert {check.name: check.reason for check in report.checks if check.verdict != "pass"} == {}
    assert len(report.checks) == len(CHECKS)


@pytest.mark.parametrize(
    ("name", "cause", "picture"),
    [
        ("documents_leak", "documents do not see each other", "training_reach"),
        ("gradients_scaled", "the gradients are those of one process", "training_gradients"),
    ],
)
def test_the_command_writes_a_report_with_a_picture_of_what_failed(
    name: str, cause: str, picture: str, tmp_path: Path
) -> None:
    arguments = ["verify", "--training", f"{SUBJECTS}:{name}", "--ranks", "2", "--tokens", "256"]
    done = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path)])
    assert done.exit_code == 1
    assert f'Likely cause: "{cause}": ' in " ".join(done.output.split())
    assert [path.stem for path in (tmp_path / "figures").iterdir()] == [picture]
    assert f"figures/{picture}.png" in (tmp_path / "verify_training.md").read_text()
    document = json.loads((tmp_path / "verify_training.json").read_text())
    assert document["causes"] == [cause]
    assert document["verdict"] == "FAIL"


@pytest.mark.slow
def test_the_ranks_of_torchrun_are_verified(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "ringspan"]
    command += ["verify", "--training", f"{SUBJECTS}:honest", "--tokens", "256", "--json", "--out", str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=300)
    found = json.loads(done.stdout)
    assert found["verdict"] == "PASS"
    assert "torchrun" in found["where"]


def test_one_process_is_not_a_ring(tmp_path: Path) -> None:
    arguments = ["verify", "--training", f"{SUBJECTS}:honest", "--ranks", "1", "--out", str(tmp_path)]
    assert CliRunner().invoke(app, arguments).exit_code == 3


def test_the_helper_raises_with_the_cause() -> None:
    with pytest.raises(AssertionError, match="mean of the means"):
        rt.assert_training_is_exact(f"{SUBJECTS}:mean_of_means")
    with pytest.raises(AssertionError, match="follows from"):  # consequences are not skipped
        rt.assert_training_is_exact(f"{SUBJECTS}:mean_of_means", skip=["every label counts once"])
    with pytest.raises(ValueError, match="must be the name of a check"):
        rt.assert_training_is_exact(f"{SUBJECTS}:honest", skip=["two runs"])


class Raises:
    def __init__(self, group: object, dtype: torch.dtype) -> None:
        del group, dtype

    def step(self, batches: object, *, max_norm: float | None = None) -> rt.StepResult:
        raise NotImplementedError("no step yet")


def test_an_adapter_that_raises_fails_with_its_reason() -> None:
    report = rt.verify_training(Raises, ranks=(1, 2))
    assert [check.verdict for check in report.checks] == ["FAIL"]
    assert "did not run: rank 0 of 1" in report.sentence
    assert "no step yet (test_adapters.py, line" in report.checks[0].reason


@pytest.mark.parametrize(
    "options",
    [{"ranks": (1,)}, {"ranks": ()}, {"ranks": (0, 2)}, {"tokens": 0}, {"dtype": "int64"}, {"dtype": "x"}],
)
def test_bad_arguments_are_named(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(ValueError, match=f"^{name}="):
        rt.verify_training(Raises, **options)


def test_other_options_do_not_apply(tmp_path: Path) -> None:
    for option in (["--pattern", "full"], ["--attention", "a:b"], ["--into", str(tmp_path / "x.md")]):
        done = CliRunner().invoke(app, ["verify", "--training", f"{SUBJECTS}:honest", *option])
        assert done.exit_code == 2
        assert "does not apply" in " ".join(done.output.split())


def test_large_rings_have_labels_inside_every_shard() -> None:
    for size in (8, 12, 64):
        settings = settings_for_training("", (1, size))
        batch = make_batch([settings.tokens], 64)
        for name, labelled in [("equal", with_equal_labels(batch, settings)), *label_batches(batch, settings)]:
            assert (labelled.targets != -100).any(), name


def test_unknown_targets_are_errors_of_the_command() -> None:
    done = CliRunner().invoke(app, ["verify", "--training", "no.such:thing"])
    assert done.exit_code == 2
    assert "no.such" in done.output


def test_batches_in_every_convention() -> None:
    batch = rt.Batch(torch.tensor([[3, 4, 5, 6, 7]]), torch.tensor([[4, -100, 6, 7, -100]]), (2, 3))
    assert batch.labels.tolist() == [[-100, 4, -100, 6, 7]]
    assert batch.cu_seqlens.tolist() == [0, 2, 5]
    assert batch.position_ids.tolist() == [[0, 1, 0, 1, 2]]
    assert batch.is_packed
