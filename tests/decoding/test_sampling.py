"""Drawing tokens: what can be drawn, how often, and that a seed decides."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ringspan.decoding import Sampler

LOGITS = torch.tensor([[0.5, 0.25, 0.15, 0.10]]).log()


def counts(draws: int = 4000, **settings: float) -> list[float]:
    sampler = Sampler(**settings)  # type: ignore[arg-type]
    drawn = sampler(LOGITS.expand(draws, -1))
    return (torch.bincount(drawn, minlength=4) / draws).tolist()


def test_temperature_one_draws_by_the_odds() -> None:
    assert counts() == pytest.approx([0.5, 0.25, 0.15, 0.10], abs=4 * (0.25 / 4000) ** 0.5)


def test_temperature_squares_the_odds_at_one_half_and_takes_the_likeliest_at_zero() -> None:
    squares = [0.25, 0.0625, 0.0225, 0.01]
    assert counts(temperature=0.5) == pytest.approx([x / sum(squares) for x in squares], abs=4 * (0.25 / 4000) ** 0.5)
    assert counts(temperature=0) == [1, 0, 0, 0]


@pytest.mark.parametrize(
    ("settings", "possible"),
    [
        (dict(top_k=2), 2),
        (dict(top_p=0.5), 1),
        (dict(top_p=0.51), 2),
        (dict(top_k=3, top_p=0.99), 3),
        (dict(top_k=9), 4),
    ],
)
def test_only_the_likely_ones_are_drawn(settings: dict[str, float], possible: int) -> None:
    assert sum(share > 0 for share in counts(**settings)) == possible


def test_a_seed_decides() -> None:
    logits = torch.zeros(50, 256)
    assert torch.equal(Sampler(seed=3)(logits), Sampler(seed=3)(logits))
    assert not torch.equal(Sampler(seed=3)(logits), Sampler(seed=4)(logits))


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (dict(temperature=-1), "temperature=-1: must be at least 0"),
        (dict(temperature=float("nan")), "temperature=nan"),
        (dict(top_k=-1), "top_k=-1"),
        (dict(top_p=0), "top_p=0: must be above 0"),
        (dict(seed=2**64), "seed=18446744073709551616: must have at most 64 bits"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, float], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Sampler(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (dict(temperature="1"), "temperature='1': must be a number"),
        (dict(top_p=True), "top_p=True: must be a number"),
        (dict(top_k=2.5), "top_k=2.5: must be an int"),
        (dict(seed="a"), "seed='a': must be an int"),
    ],
)
def test_settings_of_another_kind_are_named(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(TypeError, match=reason):
        Sampler(**settings)


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("logits", [torch.ones(4), torch.ones(2, 3, 4), torch.ones(2, 0), [[1.0, 2.0]]])
def test_logits_of_another_shape_are_refused(logits: Any, temperature: float) -> None:
    with pytest.raises(ValueError, match=r"logits are .*: must be a tensor \(batch, vocabulary\)"):
        Sampler(temperature=temperature)(logits)


def test_logits_that_are_no_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="logits are not finite"):
        Sampler()(torch.full((1, 4), float("nan")))


def test_a_temperature_near_zero_takes_the_likeliest_of_large_logits() -> None:
    assert Sampler(temperature=1e-300)(torch.tensor([[1e30, 2e30, -torch.inf]])).tolist() == [1]
