"""The memory estimate of `--dry-run` matches what a step allocates, within 10 %."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ringspan.models.config import LongNetConfig
from ringspan.runtime.launch import run_local_ranks
from ringspan.train.config import PRESETS, TrainSettings
from ringspan.train.estimate import estimate_memory, reach_of
from ringspan.train.trainer import Trainer
from tests.ranks import starts_processes
from tests.train.tasks import settings_for

pytestmark = starts_processes

CASES: dict[str, dict[str, Any]] = {
    "recompute": dict(dtype="float32"),
    "no recompute": dict(dtype="float32", recompute=False),
    "bfloat16": dict(dtype="bfloat16"),
}


def estimated_and_allocated(settings: TrainSettings) -> tuple[int, int]:
    """Bytes of one step without weights and optimizer state: as estimated, and the peak in torch's profiler."""
    trainer = Trainer(settings)
    trainer.run(until=1)  # creates the optimizer state
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        trainer.run(until=2)
    recorded = profile.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in recorded if event.name() == "[memory]")
    live = peak = 0
    for _, change in changes:
        live += change
        peak = max(peak, live)
    memory = estimate_memory(settings, dist.get_world_size())
    return memory.total - memory.weights - memory.optimizer, peak


def all_cases(folder: Path) -> dict[str, tuple[int, int]]:
    return {
        name: estimated_and_allocated(settings_for(folder / name, tokens=32768, steps=3, **changes))
        for name, changes in CASES.items()
    }


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, tuple[int, int]]]:
    return run_local_ranks(2, all_cases, tmp_path_factory.mktemp("memory"))


@pytest.mark.parametrize("case", CASES)
def test_the_memory_estimate_is_within_ten_percent(found: list[dict[str, tuple[int, int]]], case: str) -> None:
    for rank in found:
        estimated, allocated = rank[case]
        assert allocated == pytest.approx(estimated, rel=0.1)


def test_the_reach_is_of_the_layer_that_sends_most() -> None:
    """Every second layer is shifted, so that its segments cross the borders between ranks."""
    model = LongNetConfig.named("nano", segment_lengths=(256, 1024), dilation_rates=(1, 4))
    settings = TrainSettings(model=model, tokens=8192, layout="contiguous")
    assert str(reach_of(settings, 4)) == (
        "A token reaches at most 1,024 of 8,192 tokens; branches of 256, 1,024 rows cross ranks."
    )
    level = dataclasses.replace(settings, model=dataclasses.replace(model, alternate_shift=False))
    assert str(reach_of(level, 4)).startswith("No branch crosses ranks, so nothing is sent; ")
    assert estimate_memory(settings, 4).parcels > estimate_memory(level, 4).parcels == 0


@pytest.mark.parametrize("name", PRESETS)
def test_preset_patterns_span_their_sequences(name: str) -> None:
    assert reach_of(PRESETS[name].settings, 1).longest == PRESETS[name].settings.tokens
