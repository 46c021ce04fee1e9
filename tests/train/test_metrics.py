"""Metrics of a run are written by the trainer itself: JSON lines, TensorBoard and Prometheus."""

from __future__ import annotations

import dataclasses
import socket
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from ringspan.runtime.launch import run_local_ranks
from ringspan.train.config import TrainSettings
from ringspan.train.metrics import METRICS, RunMetrics, StepMetrics, hidden_share, read_metrics
from ringspan.train.trainer import Trainer
from ringspan.train.watchdog import Straggler
from tests.ranks import shares_processes
from tests.train.tasks import settings_for

pytestmark = shares_processes(__name__)


def step(number: int, loss: float = 2.0) -> StepMetrics:
    return StepMetrics(number, loss, 1.0, 1e-3, seconds=2.0, tokens=1000, peak_bytes=2**20, waiting_seconds=0.1)


def record(folder: Path, *steps: StepMetrics) -> None:
    metrics = RunMetrics(TrainSettings(out=str(folder)))
    metrics.open()
    for each in steps:
        metrics.record_step(each)
    metrics.close()


def test_a_repeated_step_counts_once(tmp_path: Path) -> None:
    record(tmp_path, step(0), step(1))
    record(tmp_path, step(1, loss=1.5))  # resumed from step 1
    assert [(row["number"], row["loss"]) for row in read_metrics(tmp_path)] == [(0, 2.0), (1, 1.5)]
    assert read_metrics(tmp_path)[0]["bits_per_byte"] == pytest.approx(2.885, abs=1e-3)


def test_a_straggler_is_written_once(tmp_path: Path) -> None:
    metrics = RunMetrics(TrainSettings(out=str(tmp_path)))
    metrics.open()
    found = Straggler(1, "rank 1", "why")
    for stragglers in ([found], [found], [], [found]):
        metrics.record_heartbeats([], stragglers)
    metrics.close()
    assert (tmp_path / METRICS).read_text().count("straggler") == 2
    assert read_metrics(tmp_path) == []


def test_tensorboard_is_written(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="TensorBoard is not installed")
    record(tmp_path, step(0))
    assert list((tmp_path / "tensorboard").glob("events*"))


def test_a_step_as_text() -> None:
    assert str(step(0)) == "2.885 bits/byte, 500 tokens/s, 1 MiB per rank"
    assert "25% of communication hidden" in str(dataclasses.replace(step(0), hidden_share=0.25))
    assert "waiting for rank 3" in str(dataclasses.replace(step(0), slowest_rank=3))
    assert "hidden_share" not in step(0).to_dict()
    assert hidden_share(communication=0.001, waited=0.5, step_seconds=1.0) is None
    assert hidden_share(communication=0.1, waited=0.5, step_seconds=1.0) == 0.0


def train_in_a_program(settings: TrainSettings) -> dict[str, Any]:
    """Train with no more than a program needs; Prometheus is read after each step."""
    pages: list[str] = []

    def read_prometheus(_: StepMetrics) -> None:
        url = f"http://127.0.0.1:{settings.metrics_port}/metrics"
        with urllib.request.urlopen(url) as answer:
            pages.append(answer.read().decode())

    with Trainer(settings) as trainer:
        trainer.run(read_prometheus)
    return {"pages": pages, "measured": trainer._communication_seconds}


def test_two_ranks_in_a_program_write_metrics_and_serve_prometheus(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = settings_for(tmp_path, metrics_port=port, steps=3)
    found = run_local_ranks(2, train_in_a_program, settings)
    assert [row["number"] for row in read_metrics(tmp_path)] == [0, 1, 2]
    assert all("hidden_share" not in row for row in read_metrics(tmp_path))
    assert all(rank["measured"] is None for rank in found)  # no benchmark unless asked for
    assert "ringspan_steps_done 3.0" in found[0]["pages"][-1]
    for written in ("settings.json", "data.json", "model/model.safetensors", "checkpoints/step-00000003/manifest.json"):
        assert (tmp_path / written).is_file()


def measured_communication(settings: TrainSettings) -> tuple[float | None, list[float | None]]:
    shares: list[float | None] = []
    with Trainer(settings) as trainer:
        trainer.run(lambda metrics: shares.append(metrics.hidden_share))
    return trainer._communication_seconds, shares


def test_communication_is_measured_on_request(tmp_path: Path) -> None:
    settings = settings_for(tmp_path, measure_communication=True, steps=2)
    for seconds, shares in run_local_ranks(2, measured_communication, settings):
        assert seconds is not None
        assert seconds > 0
        assert all(share is None or 0 <= share <= 1 for share in shares)


def test_only_the_main_rank_writes(tmp_path: Path) -> None:
    assert run_local_ranks(2, files_opened, settings_for(tmp_path, steps=1)) == [True, False]


def files_opened(settings: TrainSettings) -> bool:
    with Trainer(settings) as trainer:
        trainer.run()
    return trainer.metrics.latest is not None
