"""Training over real ranks: one loss, one curve, one set of weights, whatever the ring."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ringspan.runtime.launch import run_local_ranks
from tests.train import tasks

Found = dict[int, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What each rank of each number of ranks found; one rank comes after two, since it goes on with their run."""
    folder: Path = tmp_path_factory.mktemp("runs")
    return {world: run_local_ranks(world, tasks.everything, folder) for world in (2, 1, 3, 4)}


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_loss_and_gradients_do_not_depend_on_the_ring(found: Found, world: int) -> None:
    wanted_loss, wanted = found[1][0]["summed"]
    for rank in found[world]:
        for gradients in ("summed", "averaged"):
            loss, grads = rank[gradients]
            assert loss == pytest.approx(wanted_loss, abs=1e-12)
            for name, values in wanted.items():
                assert grads[name] == pytest.approx(values, abs=1e-12), name


@pytest.mark.parametrize("world", [2, 3, 4])
def test_curves_of_all_rings_agree(found: Found, world: int) -> None:
    curve = found[1][0]["curve"][0]
    assert curve[-1] < curve[0]
    for rank in found[world]:
        assert rank["curve"][0] == pytest.approx(curve, abs=1e-9)


def test_two_sequences_in_a_batch_in_two_micro_steps_or_on_two_data_ranks_are_the_same(found: Found) -> None:
    batch = found[1][0]["batch"][0]
    assert found[1][0]["accumulated"][0] == pytest.approx(batch, abs=1e-9)
    assert found[4][0]["mesh"][0] == pytest.approx(batch, abs=1e-9)
    assert batch != pytest.approx(found[1][0]["curve"][0], abs=1e-3)


def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(found: Found) -> None:
    for rank in found[2]:
        assert rank["cut"][0] + rank["resumed"][0] == rank["curve"][0]
        assert rank["resumed"][1] == rank["curve"][1]


def test_ranks_that_find_other_text_are_refused(found: Found) -> None:
    for rank in found[2]:
        other, none = rank["other text"]
        assert other.startswith("rank 1 reads 1 files of 10 bytes, but rank 0 1 of 13, or other content")
        assert "text-1-1: 1 empty" in none


def test_a_run_goes_on_with_another_ring(found: Found) -> None:
    assert found[1][0]["moved"][0] == pytest.approx(found[2][0]["curve"][0][tasks.STOP :], abs=1e-9)


def test_autocast_learns_what_wide_numbers_learn(found: Found) -> None:
    assert found[2][0]["bfloat16"][0] == pytest.approx(found[2][0]["curve"][0], abs=0.03)
