"""Settings: one place for presets, files and flags; what they foretell of memory."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from ringspan.models import LongNet, LongNetConfig
from ringspan.tools.measure import count_flops
from ringspan.train.config import PRESETS, TrainSettings, choices_of
from ringspan.train.estimate import forecast, needs_of, step_flops

SMALL = TrainSettings(model=LongNetConfig.named("nano"), tokens=8192)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_come_back_from_their_file(name: str, tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    path.write_text(PRESETS[name].settings.to_json())
    assert TrainSettings.read(path) == PRESETS[name].settings


def test_changes_go_to_the_model_or_to_the_run() -> None:
    changed = SMALL.changed({"layers": 7, "steps": 5})
    assert (changed.model.layers, changed.steps) == (7, 5)
    assert changed.model.width == SMALL.model.width


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (dict(tokens=0), "tokens=0: must be at least 1"),
        (dict(ring=-1), "ring=-1: must not be negative"),
        (dict(held_out=1.0), "held_out=1.0: must be at least 0 and below 1"),
        (dict(dtype="float8"), "dtype='float8': must be one of float32, bfloat16, float64"),
        (dict(model=LongNetConfig.named("nano", vocab_size=100)), "vocab_size=100: must be at least 256"),
        (dict(learning_rate=0.0), "learning_rate=0.0: must be positive"),
        (dict(model=LongNetConfig.named("nano", causal=False)), "needs a causal model"),
    ],
)
def test_bad_settings_are_refused(changes: dict[str, object], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        dataclasses.replace(SMALL, **changes)  # type: ignore[arg-type]


def test_a_file_with_unknown_settings_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    path.write_text('{"speed": 1}')
    with pytest.raises(ValueError, match="unknown settings speed"):
        TrainSettings.read(path)
    path.write_text("[1]")
    with pytest.raises(ValueError, match="JSON object"):
        TrainSettings.read(path)
    with pytest.raises(ValueError, match="No such file"):
        TrainSettings.read(tmp_path / "nothing.json")


def test_choices_come_from_the_types() -> None:
    assert choices_of(TrainSettings, "layout") == ("zigzag", "contiguous")
    assert choices_of(TrainSettings, "tokens") == ()


def test_a_ring_must_divide_the_ranks() -> None:
    assert SMALL.ring_size(4) == 4
    with pytest.raises(ValueError, match="ring=3: must divide the number of ranks, 4"):
        dataclasses.replace(SMALL, ring=3).ring_size(4)


def test_needs_fall_with_the_ranks() -> None:
    needs = {world: needs_of(SMALL, world) for world in (1, 2, 4)}
    weights = 4 * sum(weight.numel() for weight in LongNet(SMALL.model).parameters())
    assert needs[1].weights == needs[1].gradients == needs[1].optimizer // 2 == weights
    assert needs[4].gradients == weights // 4
    assert needs[1].parcels == 0 < needs[2].parcels
    assert needs[1].activations == 2 * needs[2].activations == 4 * needs[4].activations
    assert needs_of(dataclasses.replace(SMALL, weights="replicated"), 4).gradients == weights
    assert needs_of(dataclasses.replace(SMALL, recompute=False), 1).activations > needs[1].activations


def test_the_flops_of_a_step_are_those_that_run() -> None:
    """Attention is made negligible: the profiler counts causal tiles as squares."""
    config = LongNetConfig.named("nano", segment_lengths=(16,), dilation_rates=(1,))
    settings = TrainSettings(model=config, tokens=256, recompute=False)
    model = LongNet(config)
    text = torch.zeros(1, 256, dtype=torch.int64)
    counted = count_flops(lambda: model.loss(text, text).backward())
    assert step_flops(settings, 1) == pytest.approx(counted, rel=0.1)
    again = step_flops(dataclasses.replace(settings, recompute=True), 1)  # one more pass of the layers
    assert again == pytest.approx(counted + 2 * 256 * sum(p.numel() for p in model.layers.parameters()), rel=0.1)


def test_the_flops_of_a_step_are_shared_by_the_ranks() -> None:
    alone = step_flops(SMALL, 1)
    assert step_flops(SMALL, 4) == pytest.approx(alone / 4, rel=0.1)
    assert step_flops(dataclasses.replace(SMALL, ring=1), 4) == alone
    assert step_flops(dataclasses.replace(SMALL, batch=2, accumulate=3), 1) == 6 * alone


def test_a_forecast_measures_this_machine() -> None:
    found = forecast(dataclasses.replace(SMALL, tokens=256, steps=7), 1)
    assert found.flops_per_second > 1e6
    assert found.run_seconds == 7 * found.step_seconds == 7 * found.flops / found.flops_per_second
