"""Every example runs as its own text says, and finds itself equal to one process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks import starts_processes

pytestmark = starts_processes

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


def run_example(name: str, ranks: int, *flags: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", str(EXAMPLES / name), *flags],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("flags", [(), ("--mixed-precision",)], ids=["fp64", "mixed"])
def test_fsdp2(flags: tuple[str, ...]) -> None:
    assert "4 ranks, rings of 2: weights differ from plain training by" in run_example("fsdp2.py", 4, *flags)


def test_tensor_parallel() -> None:
    assert "loss and gradients differ from one process by" in run_example("tensor_parallel.py", 4)


def test_transformers() -> None:
    pytest.importorskip("transformers", reason="needs the extra transformers")
    found = run_example("transformers_ring.py", 2, "--model", "qwen3", "--gradient-checkpointing")
    assert "loss and gradients differ from one process by" in found


def test_trainer() -> None:
    pytest.importorskip("transformers", reason="needs the extra transformers")
    assert "Trainer over 2 ranks differs from one process by" in run_example("transformers_trainer.py", 2)


def test_trl() -> None:
    pytest.importorskip("trl", reason="needs the extra trl")
    assert "SFTTrainer over 2 ranks differs from one process by" in run_example("trl_sft.py", 2)


@pytest.mark.parametrize(("ranks", "flag"), [(2, "--quick"), (2, "--alone"), (1, "--pooled")])
def test_slide_learning(ranks: int, flag: str) -> None:
    found = run_example("slide_learning.py", ranks, "--quick", flag)
    assert ("losses and weights differ from one process by" in found) == (flag == "--quick")
    assert [line.split()[0] for line in found.splitlines()[-3:]] == ["step", "1", "2"]


@pytest.mark.parametrize("stage", ["2", "3"])
def test_deepspeed(stage: str) -> None:
    pytest.importorskip("deepspeed", reason="needs pip install --no-build-isolation deepspeed")
    assert "weights differ from plain training by" in run_example("deepspeed_zero.py", 2, "--stage", stage)
