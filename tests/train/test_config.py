"""Settings: presets, files and flags, and the memory and time estimated from them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

import ringspan as rs
from ringspan.models import LongNet, LongNetConfig
from ringspan.tools.measure import count_flops
from ringspan.train.config import PRESETS, TrainSettings, choices_of
from ringspan.train.estimate import estimate_memory, estimate_time, step_flops

SMALL = TrainSettings(model=LongNetConfig.named("nano"), tokens=8192)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_round_trip_through_a_file(name: str, tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    path.write_text(PRESETS[name].settings.to_json())
    assert TrainSettings.read(path) == PRESETS[name].settings


def test_patterns_sinks_and_soft_cap_round_trip_through_a_file(tmp_path: Path) -> None:
    patterns = ["window 511 + 4096x4,65536x64", "full", "16x1 blocked shift 8"]
    settings = SMALL.changed({"patterns": patterns, "sinks": True, "softcap": 30.0})
    path = tmp_path / "settings.json"
    path.write_text(settings.to_json())
    again = TrainSettings.read(path)
    assert again == settings
    assert again.model.patterns == tuple(patterns)
    path.write_text(settings.to_json().replace('"patterns"', '"segment_lengths"'))
    with pytest.raises(ValueError, match=r"settings\.json: unknown settings segment_lengths: .*patterns"):
        TrainSettings.read(path)


def test_changes_apply_to_the_model_or_the_run() -> None:
    changed = SMALL.changed({"layers": 7, "steps": 5})
    assert (changed.model.layers, changed.steps) == (7, 5)
    assert changed.model.width == SMALL.model.width


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (dict(tokens=0), "tokens=0"),
        (dict(ring=-1), "ring=-1"),
        (dict(held_out=1.0), "held_out=1.0"),
        (dict(dtype="float8"), "dtype='float8'"),
        (dict(model=LongNetConfig.named("nano", vocab_size=100)), "vocab_size=100"),
        (dict(learning_rate=0.0), "learning_rate=0.0"),
        (dict(timeout=2e6), "timeout=2000000.0"),
        (dict(metrics_port=65536), "metrics_port=65536"),
        (dict(metrics_port=-1), "metrics_port=-1"),
        (dict(layout="balanced"), "layout='balanced': .* add --documents"),
        (dict(measure_communication=True, documents=True), "measure_communication=True: .* differ from step to step"),
        (dict(model=LongNetConfig.named("nano", causal=False)), "causal"),
    ],
)
def test_bad_settings_are_refused(changes: dict[str, object], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        dataclasses.replace(SMALL, **changes)  # type: ignore[arg-type]


def test_balanced_is_by_the_work_of_the_pattern_with_the_most() -> None:
    patterns = ("window 63", "full", "window 63", "window 15")
    settings = SMALL.changed({"patterns": patterns, "layers": 8, "documents": True, "layout": "balanced"})
    assert settings.ring_layout() == rs.Balanced(rs.Full())
    assert settings.changed({"patterns": ("window 63", "window 15")}).ring_layout() == rs.Balanced(rs.Window(63))
    assert (
        estimate_memory(settings, 2).activations
        > estimate_memory(settings.changed({"layout": "zigzag"}), 2).activations
    )


def test_an_error_in_a_settings_file_names_the_file(tmp_path: Path) -> None:
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
    assert choices_of(TrainSettings, "layout") == ("contiguous", "zigzag", "balanced")
    assert choices_of(TrainSettings, "tokens") == ()


def test_a_ring_must_divide_the_ranks() -> None:
    assert SMALL.ring_size(4) == 4
    with pytest.raises(ValueError, match="ring=3"):
        dataclasses.replace(SMALL, ring=3).ring_size(4)


def test_memory_falls_with_the_number_of_ranks() -> None:
    memory = {world: estimate_memory(SMALL, world) for world in (1, 2, 4)}
    weights = 4 * sum(weight.numel() for weight in LongNet(SMALL.model).parameters())
    assert memory[1].weights == memory[1].gradients == memory[1].optimizer // 2 == weights
    assert memory[4].gradients == weights // 4
    assert memory[1].parcels == 0 < memory[2].parcels
    assert memory[1].activations == 2 * memory[2].activations == 4 * memory[4].activations
    assert estimate_memory(dataclasses.replace(SMALL, weights="replicated"), 4).gradients == weights
    assert estimate_memory(dataclasses.replace(SMALL, recompute=False), 1).activations > memory[1].activations


def test_estimated_flops_match_the_profiler() -> None:
    """With negligible attention, because the profiler counts causal tiles as full squares."""
    config = LongNetConfig.named("nano", patterns=("16x1",))
    settings = TrainSettings(model=config, tokens=256, recompute=False)
    model = LongNet(config)
    text = torch.zeros(1, 256, dtype=torch.int64)
    counted = count_flops(lambda: model.loss(text, text).backward())
    assert step_flops(settings, 1) == pytest.approx(counted, rel=0.1)
    again = step_flops(dataclasses.replace(settings, recompute=True), 1)  # one more forward pass of the layers
    assert again == pytest.approx(counted + 2 * 256 * sum(p.numel() for p in model.layers.parameters()), rel=0.1)


def test_flops_are_divided_among_the_ranks() -> None:
    alone = step_flops(SMALL, 1)
    assert step_flops(SMALL, 4) == pytest.approx(alone / 4, rel=0.1)
    assert step_flops(dataclasses.replace(SMALL, ring=1), 4) == alone
    assert step_flops(dataclasses.replace(SMALL, batch=2, accumulate=3), 1) == 6 * alone


def test_the_time_estimate_measures_this_machine() -> None:
    found = estimate_time(dataclasses.replace(SMALL, tokens=256, steps=7), 1)
    assert found.flops_per_second > 1e6
    assert found.step_seconds == pytest.approx(found.flops / found.flops_per_second)
    assert found.run_seconds == pytest.approx(7 * found.step_seconds)
