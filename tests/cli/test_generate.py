"""`ringspan generate` from the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from ringspan.cli.app import app
from ringspan.models import LongNet, LongNetConfig
from ringspan.train.config import TrainSettings
from tests.ranks import shares_processes

pytestmark = shares_processes(__name__)

CONFIG = LongNetConfig.named("nano", patterns=("16x1,64x4", "16x1,64x4 shift 8"))


def ringspan(*arguments: str, ranks: int = 0, text: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    launcher = ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}"] if ranks else []
    return subprocess.run(
        [sys.executable, *launcher, "-m", "ringspan", *arguments],
        input=text,
        capture_output=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder: Path = tmp_path_factory.mktemp("run")
    LongNet(CONFIG).save_pretrained(folder / "model")
    (folder / "settings.json").write_text(TrainSettings(model=CONFIG).to_json())
    return folder


def test_text_streams_and_statistics_follow(run: Path) -> None:
    done = ringspan("generate", str(run), "--prompt", "def ", "--tokens", "100", "--seed", "3")
    assert done.returncode == 0, done.stderr
    assert done.stdout
    statistics = " ".join(done.stderr.decode().split())
    assert "4 bytes read in" in statistics
    assert "100 generated at" in statistics
    assert "tokens/s; cache" in statistics
    assert "(at most 32)" in statistics


@pytest.mark.slow
def test_one_rank_and_two_with_gathered_or_sharded_cache_generate_the_same_text(run: Path) -> None:
    arguments = ("generate", str(run), "--prompt-file", "-", "--tokens", "80", "--temperature", "0", "--json")
    prompt = bytes(range(32, 120))
    alone = ringspan(*arguments, text=prompt)
    assert alone.returncode == 0, alone.stderr
    wanted = json.loads(alone.stdout)
    assert wanted["prompt_tokens"] == len(prompt)
    assert wanted["tokens"] == 80
    assert wanted["cache_bound"] == 32
    assert wanted["tokens_per_second"] > 0
    file = run / "prompt.txt"
    file.write_bytes(prompt)
    for cache in ("gathered", "sharded"):
        two = ringspan(*arguments[:2], "--prompt-file", str(file), *arguments[4:], "--cache", cache, ranks=2)
        assert two.returncode == 0, two.stderr
        assert json.loads(two.stdout)["text"] == wanted["text"]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--seed", str(2**64)), "64 bits"),
        (("--step", "7"), "no checkpoint of step 7"),
        (("/no/such/run",), "a saved model is a folder with"),
        (("--temperature", "-1"), "temperature=-1.0"),
        (("--prompt", ""), "prompt is empty"),
        (("--prompt-file", "/no/such/file"), "No such file"),
        (("--cache", "sharded"), "needs several ranks"),
        (("--tokens", "some"), "must be a whole number"),
    ],
)
def test_invalid_values_are_errors(run: Path, arguments: tuple[str, ...], reason: str) -> None:
    first = () if arguments[0].startswith("/") else (str(run),)
    done = CliRunner().invoke(app, ["generate", *first, *arguments], env={"COLUMNS": "200"})
    assert done.exit_code == 2, done.output
    assert reason in " ".join(done.stderr.replace("│", " ").split())
