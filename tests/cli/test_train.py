"""`ringspan train` and `ringspan evaluate` from the command line."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from ringspan.cli.app import app
from ringspan.train.metrics import read_metrics
from tests.ranks import shares_processes
from tests.traces import read_trace

pytestmark = shares_processes(__name__)

SMALL = ("--model", "nano", "--pattern", "32x1,256x4", "--tokens", "512", "--steps", "3")


def ringspan(*arguments: str, ranks: int = 0, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    launcher = ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}"] if ranks else []
    return subprocess.run(
        [sys.executable, *launcher, "-m", "ringspan", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=cwd,
    )


def test_train_on_two_ranks_resume_and_evaluate(tmp_path: Path) -> None:
    run = tmp_path / "run"
    data = str(Path(torch.__file__).parent / "nn")
    file = tmp_path / "trace.json"
    first = ringspan("train", data, *SMALL, "--out", str(run), "--trace", str(file), "--trace-steps", "2", ranks=2)
    assert first.returncode == 0, first.stderr
    trace = read_trace(file)
    phases = ["reading", "forward", "backward", "updating"]
    for rank in range(2):
        found = [(e["name"], e["args"]["step"]) for e in trace.spans(rank, "phases")]
        assert found == [*((name, 2) for name in phases), *((name, 3) for name in phases), ("saving", 3)]
        assert trace.spans(rank, "sends", "gradients of hop 1")
    assert "step 3: " in first.stdout
    assert "bits/byte" in first.stdout
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 3
    resumed = ringspan("train", "--config", str(run / "settings.json"), "--steps", "5", "--resume", "auto", "--json")
    assert resumed.returncode == 0, resumed.stderr
    assert json.loads(resumed.stdout)["number"] == 4
    assert "Resuming from step 3" in resumed.stderr
    found = evaluate(run, "--contexts", "512,1k")
    assert [row["context"] for row in found["scores"]] == [512, 1024]
    assert found["branches"][-1]["bits_per_byte"] == found["scores"][-1]["bits_per_byte"]  # no branch removed
    assert 2 < found["bigram"] < 6
    assert evaluate(run, "--contexts", "512,1k", "--step", "5", "--no-branches")["scores"] == found["scores"]
    assert evaluate(run, "--contexts", "512,1k", "--step", "3", "--no-branches")["scores"] != found["scores"]


@pytest.mark.slow
def test_train_windows_sinks_and_a_soft_cap_on_two_ranks(tmp_path: Path) -> None:
    run, flags = tmp_path / "run", ("--tokens", "512", "--steps", "3", "--layers", "3", "--dtype", "float64")
    model = ("--pattern", "window 31 + 256x4", "--pattern", "window 1k", "--sinks", "--softcap", "20")
    data = str(Path(torch.__file__).parent / "nn")
    two = ringspan("train", data, *flags, *model, "--out", str(run), ranks=2)
    assert two.returncode == 0, two.stderr
    assert "Layers 0, 2: window 31 + 256x4. A token reaches at most 256 of 512 tokens" in two.stdout
    assert "Layer 1: window 1024. A token reaches all 512 tokens" in two.stdout
    one = ringspan("train", data, *flags, *model, "--out", str(tmp_path / "one"))
    assert one.returncode == 0, one.stderr
    losses = [[step["loss"] for step in read_metrics(folder)] for folder in (run, tmp_path / "one")]
    assert losses[0] == pytest.approx(losses[1], abs=1e-9)
    assert losses[0][2] < losses[0][0]
    settings = json.loads((run / "settings.json").read_text())["model"]
    assert settings["patterns"] == ["window 31 + 256x4", "window 1024"]
    assert (settings["sinks"], settings["softcap"]) == (True, 20.0)
    weights = load_file(run / "model/model.safetensors")
    assert all(weights[f"layers.{layer}.attention.sinks"].any() for layer in range(3))  # they start at 0
    found = evaluate(run, "--contexts", "512,1k", "--windows", "4")
    assert [row["reach"] for row in found["branches"]] == [8, 16, 32, 256, 1025]
    assert found["branches"][-1]["bits_per_byte"] == found["scores"][-1]["bits_per_byte"]  # nothing is cut
    done = CliRunner().invoke(app, ["generate", str(run), "--prompt", "def ", "--tokens", "50", "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["cache_bound"] == 1025


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--pattern", "1024"), "'1024' must be full"),
        (("--pattern", "window 8", "--pattern", "64x0"), r"dilation_rates\[0\]=0"),
        (("--softcap", "-1"), "softcap=-1.0: must not be negative"),
        (("--segment-lengths", "64"), "No such option.*--segment-lengths"),
        (("--layout", "balanced"), "layout='balanced': .* add --documents"),
    ],
)
def test_invalid_model_settings_are_errors(flags: tuple[str, ...], words: str) -> None:
    result = CliRunner().invoke(app, ["train", "--dry-run", *flags], env={"COLUMNS": "300"})
    assert result.exit_code == 2, result.output
    assert re.search(words, " ".join(result.stderr.replace("│", " ").split()))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a book and a picture after `ringspan train books`; the file ``trained`` holds the output."""
    home = tmp_path_factory.mktemp("home")
    (home / "books/.git").mkdir(parents=True)
    (home / "books/.git/HEAD").write_text("hidden")
    (home / "books/[one].txt").write_text("The quick brown fox jumps over the lazy dog. " * 400)
    (home / "books/picture.png").write_bytes(bytes(range(256)) * 400)
    done = ringspan("train", "books", *SMALL, cwd=home)
    assert done.returncode == 0, done.stderr
    (home / "trained").write_text(done.stdout)
    return home


def test_training_on_a_folder_lists_read_and_skipped_files(home: Path) -> None:
    said = (home / "trained").read_text()
    assert f"Text: 1 file(s), 18,000 bytes: [one].txt in {home}/books" in said
    assert f"Skipped: 1 binary or not UTF-8 (picture.png in {home}/books); 1 hidden (.git in {home}/books)" in said
    record = json.loads((home / "ringspan-run/data.json").read_text())
    assert [Path(file["path"]).name for file in record["files"]] == ["[one].txt"]
    assert {Path(file["path"]).name: file["reason"] for file in record["skipped"]} == {
        "picture.png": "binary or not UTF-8",
        ".git": "hidden",
    }


def test_evaluate_works_after_train_from_any_folder(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(home)
    here = CliRunner().invoke(app, ["evaluate"])
    assert here.exit_code == 0, here.output
    assert "900 bytes of it are held out." in here.output
    monkeypatch.chdir(tmp_path)
    found = evaluate(home / "ringspan-run")
    assert found["scores"][-1]["context"] == 451  # the training length of 512 leaves no room for several windows
    assert found["windows"] > 1
    assert all(row["standard_error"] > 0 for row in found["scores"][1:])
    read = found["windows"] * sum(row["context"] for row in found["scores"] + found["branches"])
    assert found["windows"] == 4 or read <= 3 * 512  # no more than in training, or the fewest windows
    (home / "books/later.txt").write_text("came later")
    assert evaluate(home / "ringspan-run") == found
    resumed = ringspan("train", "--config", f"{home}/ringspan-run/settings.json", "--steps", "4", "--resume", "auto")
    assert resumed.returncode == 0, resumed.stderr
    assert "Text: 1 file(s), 18,000 bytes" in resumed.stdout


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--contexts 512,64k", "--contexts: 65536: .* at most 899"),
        ("--contexts 20", "--contexts: 20: must be at least 56"),
        ("--windows 50", "--windows: 50: .* room for 9"),
        ("--scored 900", "--windows: 1: .* room for 0"),
        ("--scored 0", "--scored"),
    ],
)
def test_errors_of_evaluate_name_the_flag(home: Path, flags: str, words: str) -> None:
    command = ["evaluate", str(home / "ringspan-run"), *flags.split()]
    result = CliRunner().invoke(app, command, env={"COLUMNS": "200"})
    assert result.exit_code == 2, result.output
    assert re.search(words, " ".join(result.stderr.replace("│", " ").split()))


def test_an_outdated_model_is_an_error_regardless_of_file_times(home: Path, tmp_path: Path) -> None:
    run = shutil.copytree(home / "ringspan-run", tmp_path / "copy", copy_function=shutil.copyfile)
    (*_, last) = sorted((run / "checkpoints").iterdir())
    os.utime(last, (2**31, 2**31))  # copying may change the order of times
    found = evaluate(run, "--no-branches")
    last.rename(run / "checkpoints/step-00000099")
    os.utime(run / "checkpoints/step-00000099", (0, 0))
    result = CliRunner().invoke(app, ["evaluate", str(run)], env={"COLUMNS": "300"})
    assert result.exit_code == 2
    assert "use --step 99" in " ".join(result.stderr.split())
    (run / "model/steps.txt").unlink()
    result = CliRunner().invoke(app, ["evaluate", str(run)], env={"COLUMNS": "300"})
    assert "use --step 99" in " ".join(result.stderr.split())
    assert found["scores"]


def test_changed_text_is_an_error(home: Path) -> None:
    book = home / "books/[one].txt"
    text = book.read_text()
    book.write_text("Another text, of another length.")
    try:
        result = CliRunner().invoke(app, ["evaluate", str(home / "ringspan-run")], env={"COLUMNS": "300"})
        again = ringspan("train", "--config", f"{home}/ringspan-run/settings.json", "--steps", "9", "--resume", "auto")
    finally:
        book.write_text(text)
    assert (result.exit_code, again.returncode) == (2, 2)
    for said in (result.stderr, again.stderr):
        assert "has changed since the run in" in " ".join(said.replace("│", " ").split())


def evaluate(run: Path, *flags: str) -> Any:
    result = CliRunner().invoke(app, ["evaluate", str(run), *flags, "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_a_dry_run_prints_estimates_and_trains_nothing(tmp_path: Path) -> None:
    done = ringspan("train", "--preset", "long", "--dry-run", "--ranks", "2", "--json", "--out", str(tmp_path / "run"))
    found = json.loads(done.stdout)
    assert found["ranks"] == 2
    assert found["bytes"]["total"] == sum(count for name, count in found["bytes"].items() if name != "total")
    assert found["patterns"] == {"512x1,8192x16,262144x512": [0], "512x1,8192x16,262144x512 shift 256": [1]}
    assert (found["tokens"], found["steps"], found["model"]["width"]) == (262144, 20, 64)
    assert found["seconds"]["run"] == 20 * found["seconds"]["step"] > 0
    assert not (tmp_path / "run").exists()


def test_a_dry_run_as_text_of_packed_documents() -> None:
    patterns = ("--pattern", "window 63 + 1k x4", "--pattern", "full", "--layers", "5")
    documents = ("--documents", "--layout", "balanced")
    done = ringspan("train", "--dry-run", *patterns, *documents, "--tokens", "512", "--steps", "10", "--ranks", "2")
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stdout.split())
    assert "Model: 299,712 parameters; 5 layers of width 64" in said
    assert "Layers 0, 2, 4: window 63 + 1024x4. A token reaches all 512 tokens; branches of 64, 512 rows cross" in said
    assert "Layers 1, 3: full. A token reaches all 512 tokens" in said
    assert "Run: 10 steps of 512 tokens x 1 x 1 (batch x accumulate) on 2 rank(s)" in said
    assert re.search(r"Time: about \S+ s per step, \S+ s in total. An estimate:", said)
    assert "activations" in said
