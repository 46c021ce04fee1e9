"""Training over real ranks: loss, curve and weights do not depend on the ring."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import ring_sizes, run_jobs, shares_processes
from tests.train import tasks

pytestmark = shares_processes(__name__)

Found = dict[int, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """By ring size, the results of the jobs on each rank. One rank comes after two, because it resumes their run."""
    folder: Path = tmp_path_factory.mktemp("runs")
    assert set(ring_sizes(tasks)) == {1, 2, 3, 4}
    return {size: run_jobs(tasks, size, folder) for size in (2, 1, 3, 4)}


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


def test_batch_micro_steps_and_data_parallel_ranks_agree(found: Found) -> None:
    batch = found[1][0]["batch"][0]
    assert found[1][0]["accumulated"][0] == pytest.approx(batch, abs=1e-9)
    assert found[4][0]["mesh"][0] == pytest.approx(batch, abs=1e-9)
    assert batch != pytest.approx(found[1][0]["curve"][0], abs=1e-3)


def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(found: Found) -> None:
    for rank in found[2]:
        stopped, resumed = rank["stopped_and_resumed"]
        assert stopped[0] + resumed[0] == rank["curve"][0]
        assert resumed[1] == rank["curve"][1]


def test_ranks_with_different_text_are_rejected(found: Found) -> None:
    for rank in found[2]:
        other, none = rank["different_text"]
        assert all(part in other for part in ("rank 1", "10 bytes", "13"))
        assert "text-1-1: 1 empty" in none


def test_a_run_resumes_on_another_ring_size(found: Found) -> None:
    wanted = found[2][0]["curve"][0][tasks.STOP :]
    assert found[1][0]["resumed_on_one_rank"][0] == pytest.approx(wanted, abs=1e-9)
    assert found[3][0]["resumed_on_three_ranks"][0] == pytest.approx(wanted, abs=1e-9)


def test_bfloat16_follows_the_float64_curve(found: Found) -> None:
    assert found[2][0]["bfloat16"][0] == pytest.approx(found[2][0]["curve"][0], abs=0.03)


def test_packed_documents_do_not_depend_on_ring_layout_or_mesh(found: Found) -> None:
    alone, in_a_batch = found[1][0]["documents"], found[1][0]["documents_in_a_batch"]
    assert alone[0] != pytest.approx(in_a_batch[0], abs=1e-3)
    for rank in (*found[2], *found[3]):
        assert_same_run(rank["documents"], alone)
    for rank in found[2]:
        assert_same_run(rank["documents_in_a_zigzag_batch"], in_a_batch)
    for rank in found[4]:
        assert_same_run(rank["documents_on_a_mesh"], in_a_batch)
    for rank in found[3]:
        losses, weights = rank["documents_resumed"]
        assert_same_run((found[2][0]["documents_resumed"][0] + losses, weights), alone)


def test_the_loss_of_packed_documents_is_that_of_each_alone(found: Found) -> None:
    packed, alone = found[1][0]["documents_alone"]
    assert packed == pytest.approx(alone, abs=1e-12)


def assert_same_run(found: tasks.Curve, wanted: tasks.Curve) -> None:
    """Losses of all steps, and weights at the end."""
    assert found[0] == pytest.approx(wanted[0], abs=1e-9)
    assert found[1].keys() == wanted[1].keys()
    for name, values in wanted[1].items():
        x, y = (torch.frombuffer(bytearray(each), dtype=torch.float64) for each in (found[1][name], values))
        torch.testing.assert_close(x, y, rtol=0, atol=1e-9)
