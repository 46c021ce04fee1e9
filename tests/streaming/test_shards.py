"""The number of shards fits the budget and allows overlap; reading, computing and writing do overlap."""

import threading

import pytest
import torch

import ringspan as rs
from ringspan.planning import RingPlan
from ringspan.streaming.job import ENOUGH_TO_OVERLAP, OVERHEAD_BYTES, fewest_shards, held_bytes
from ringspan.streaming.transport import run_pipeline

WORKSPACE = 2**20


def plan_with(shards: int, n: int = 2**30) -> RingPlan:
    pattern = rs.Dilated((256, 65536, n), (1, 256, n // 256))
    return rs.plan(
        pattern, n, ring_size=shards, layout="contiguous", causal=True, routing="direct", heads=2, head_dim=32
    )


@pytest.mark.parametrize("budget", [2**31, 2**33])
@pytest.mark.parametrize("backward", [False, True])
def test_the_fewest_that_fit(budget: int, backward: bool) -> None:
    shards = fewest_shards(plan_with, WORKSPACE, budget, backward=backward)
    assert held_bytes(plan_with(shards), WORKSPACE, backward=backward) <= budget
    assert held_bytes(plan_with(shards // 2), WORKSPACE, backward=backward) > budget


def test_enough_to_overlap_but_none_for_short_sequences() -> None:
    assert fewest_shards(lambda k: plan_with(k, 2**21), WORKSPACE, 2**40, backward=False) == ENOUGH_TO_OVERLAP
    assert fewest_shards(lambda k: plan_with(k, 2**17), WORKSPACE, 2**40, backward=False) == 1


def test_held_bytes_counts_three_shards() -> None:
    """q, k, v and results of one shard, inputs of the next, results of the previous one, also as pages of files."""
    n, shards = 2**16, 16
    rows, row = n // shards, 4 * 2 * 32  # fp32, 2 heads of 32
    held = held_bytes(plan_with(shards, n), 0)
    parcels = max(plan_with(shards, n).memory(rank).parcels for rank in range(shards))
    results = row + 2 * 4
    assert held == rows * ((3 * row + results) + 3 * row + 2 * results) + parcels + OVERHEAD_BYTES


def test_reading_computing_and_writing_overlap() -> None:
    """While an item is computed, the next one is read and the previous one is written."""
    steps: list[tuple[str, int]] = []
    done = {(what, item): threading.Event() for what in ("read", "compute", "write") for item in range(8)}

    def do(what: str, item: int, *awaited: tuple[str, int]) -> int:
        for other in awaited:
            assert other not in done or done[other].wait(timeout=300), f"{what} {item} and {other} do not overlap"
        steps.append((what, item))
        done[what, item].set()
        return item

    run_pipeline(
        range(8),
        lambda item: do("read", item),
        lambda item, rows: do("compute", rows, ("read", item + 1), ("write", item - 1)),
        lambda item, results: do("write", results) and None,
    )
    for what in ("read", "compute", "write"):
        assert [item for step, item in steps if step == what] == list(range(8))
    for item in range(7):  # never more than one item ahead and one behind
        assert steps.index(("write", item)) < steps.index(("compute", item + 1)) + 2 * 3


def test_nothing_to_do() -> None:
    run_pipeline([], lambda item: torch.ones(1), lambda item, rows: rows, lambda item, results: None)
