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
from ringspan.train.estimate import estimate_memory, reach_of, step_flops
from ringspan.train.trainer import Trainer
from tests.ranks import starts_processes
from tests.train.tasks import CONFIG, settings_for

pytestmark = starts_processes

PATTERNS = ("window 15", "window 1023", "window 15 + 32768x8")
CASES: dict[str, dict[str, Any]] = {
    "recompute": dict(dtype="float32"),
    "no recompute": dict(dtype="float32", recompute=False),
    "bfloat16": dict(dtype="bfloat16"),
    "patterns by layer": dict(dtype="float32", model=dataclasses.replace(CONFIG, layers=3, patterns=PATTERNS)),
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


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_memory_estimate_is_within_ten_percent(found: list[dict[str, tuple[int, int]]], case: str) -> None:
    for rank in found:
        estimated, allocated = rank[case]
        assert allocated == pytest.approx(estimated, rel=0.1)


def test_each_pattern_has_its_reach() -> None:
    level, shifted, near = "256x1,1024x4", "256x1,1024x4 shift 128", "window 63 right 5"
    model = LongNetConfig.named("nano", layers=3, patterns=(level, shifted, near))
    settings = TrainSettings(model=model, tokens=8192, layout="contiguous")
    assert [str(reach_of(settings, pattern, 4)) for pattern in model.layers_by_pattern] == [
        "No branch crosses ranks, so nothing is sent; a token reaches at most 1,024 of 8,192 tokens.",
        "A token reaches at most 1,024 of 8,192 tokens; branches of 256, 1,024 rows cross ranks.",
        "A token reaches at most 64 of 8,192 tokens; branches of 64 rows cross ranks.",  # causal: nothing to the right
    ]


def test_memory_and_flops_are_those_of_each_layer() -> None:
    def settings(*patterns: str) -> TrainSettings:
        return TrainSettings(model=LongNetConfig.named("nano", layers=4, patterns=patterns), tokens=8192)

    near, full = settings("window 63"), settings("full")
    for world in (1, 4):
        flops = step_flops(full, world) - step_flops(near, world)
        one_full = step_flops(settings("window 63", "window 63", "window 63", "full"), world)
        assert one_full - step_flops(near, world) == pytest.approx(flops / 4)
    last, first = (settings(*order) for order in (("window 63",) * 3 + ("full",), ("full",) + ("window 63",) * 3))
    assert estimate_memory(last, 4) == estimate_memory(full, 4)
    # In the first layer, backward has freed the activations of the others.
    assert estimate_memory(near, 4).total <= estimate_memory(first, 4).total < estimate_memory(full, 4).total


@pytest.mark.parametrize("name", PRESETS)
def test_preset_patterns_span_their_sequences(name: str) -> None:
    settings = PRESETS[name].settings
    for pattern in settings.model.layers_by_pattern:
        assert reach_of(settings, pattern, 1).longest == settings.tokens
