"""Where figures go: lines of JSON, and TensorBoard where it is installed."""

from __future__ import annotations

from pathlib import Path

import pytest

from ringspan.train.metrics import Metrics, Step, hidden_share, read_metrics


def step(number: int, loss: float = 2.0) -> Step:
    return Step(
        number, loss, 1.0, 1e-3, seconds=2.0, tokens=1000, peak_bytes=2**20, waiting_seconds=0.1, hidden_share=None
    )


def test_a_step_done_again_counts_once(tmp_path: Path) -> None:
    with Metrics(tmp_path, speaks=True) as metrics:
        metrics.write(step(0))
        metrics.write(step(1))
    with Metrics(tmp_path, speaks=True) as metrics:  # resumed from step 1
        metrics.write(step(1, loss=1.5))
    assert [(row["number"], row["loss"]) for row in read_metrics(tmp_path)] == [(0, 2.0), (1, 1.5)]
    assert read_metrics(tmp_path)[0]["bits_per_byte"] == pytest.approx(2.885, abs=1e-3)


def test_only_one_rank_writes(tmp_path: Path) -> None:
    with Metrics(tmp_path / "run", speaks=False) as metrics:
        metrics.write(step(0))
    assert not (tmp_path / "run").exists()


def test_tensorboard_gets_them_too(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="TensorBoard is not installed")
    with Metrics(tmp_path, speaks=True) as metrics:
        metrics.write(step(0))
    assert list((tmp_path / "tensorboard").glob("events*"))


def test_a_step_in_words() -> None:
    assert str(step(0)) == "2.885 bits/byte, 500 tokens/s, 1 MiB a rank"
    assert hidden_share(travel=0.001, waited=0.5, step_seconds=1.0) is None
    assert hidden_share(travel=0.1, waited=0.5, step_seconds=1.0) == 0.0
