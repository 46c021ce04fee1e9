"""An error ends a command with one sentence and an exit status, printed once for any number of ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import ringspan as rs
from ringspan.cli import app as group
from ringspan.cli.app import app
from ringspan.runtime.settings import RunError
from tests.ranks import starts_processes

pytestmark = starts_processes

HANG = 300  # seconds
NOWHERE = Path("/proc/ringspan")  # not writable, even for root


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("train /no/such/folder", "/no/such/folder: no such file or folder"),
        pytest.param(
            f"train --tokens 64 --steps 1 --out {NOWHERE}", f"{NOWHERE}: cannot be written", marks=pytest.mark.slow
        ),
        pytest.param("generate /no/such/run", "a saved model is a folder with", marks=pytest.mark.slow),
        ("verify --layout round", "must be 'contiguous' or 'zigzag'"),
        pytest.param("--nothing", "No such option: --nothing", marks=pytest.mark.slow),
    ],
)
def test_under_torchrun_an_error_is_printed_once(command: str, words: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "-m", "ringspan", *command.split()],
        capture_output=True,
        text=True,
        check=False,
        timeout=HANG,
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
    )
    assert done.returncode == 1  # torchrun's own
    assert " ".join(done.stderr.split()).count(words) == 1, done.stderr
    assert done.stderr.count("Traceback") <= 1  # torchrun's own


def test_a_rank_that_failed_alone_reports_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "here")
    monkeypatch.setenv("RANK", "3")
    waits: list[float] = []
    monkeypatch.setattr(group.time, "sleep", waits.append)
    with pytest.raises(typer.Exit) as ended, group.reported():
        raise RunError("the disk is full")
    assert ended.value.exit_code == 1
    assert capsys.readouterr().err == "rank 3: the disk is full\n"
    assert waits == [group._HEAD_START]  # torchrun stops it during the wait if rank 0 has failed as well


def test_each_rank_reports_a_lost_rank_at_once_and_lets_others_report(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "here")
    monkeypatch.setenv("RANK", "3")
    waits: list[tuple[float, str]] = []
    monkeypatch.setattr(group.time, "sleep", lambda seconds: waits.append((seconds, capsys.readouterr().err)))
    with pytest.raises(typer.Exit), group.reported():
        raise rs.RingError("rank 3 on b: step 2: rank 0 on a exited")
    assert waits == [(group._LAST_WORDS, "rank 3 on b: step 2: rank 0 on a exited\n")]


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (PermissionError(13, "Permission denied", "/data"), "/data: Permission denied"),
        (TimeoutError("no answer from ranks [1]"), "no answer from ranks [1]"),
        (rs.RingError("ranks disagree"), "ranks disagree"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: ..."), "out of memory"),
        (RuntimeError("[gloo/pair.cc] Connection closed by peer"), "another rank exited"),
        (
            RuntimeError("[enforce fail at gloo/d.cc] Unable to find address for: eth9"),
            "eth9: no such network interface",
        ),
        (ModuleNotFoundError("No module named 'safetensors'", name="safetensors"), "pip install -c constraints.txt -e"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_expected_errors_are_one_sentence(error: Exception, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as ended, group.reported():
        raise error
    assert ended.value.exit_code == 1
    said = capsys.readouterr().err
    assert sentence in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("error", [RuntimeError("a bug"), BrokenPipeError(), TypeError("a bug"), typer.Exit(3)])
def test_bugs_keep_their_traceback(error: Exception) -> None:
    with pytest.raises(type(error)), group.reported():
        raise error


@pytest.mark.parametrize(
    "command",
    [
        f"verify --ranks 1 --pattern 16x1 --tokens 256 --out {NOWHERE}",
        f"bench --tokens 256 --ranks 1 --rounds 1 --out {NOWHERE}",
        f"bench hilbert --quick --out {NOWHERE}",
        f"stream --tokens 4k --out {NOWHERE}",
        f"train --tokens 64 --steps 1 --out {NOWHERE}",
    ],
)
def test_an_unwritable_folder_is_one_sentence(command: str) -> None:
    done = CliRunner().invoke(app, command.split(), env={"COLUMNS": "200"})
    assert done.exit_code in (1, 2), done.output
    assert isinstance(done.exception, SystemExit), done.output
    assert str(NOWHERE) in done.output
