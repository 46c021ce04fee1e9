"""Collectives over JSON, on two real ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from ringspan.runtime.collectives import all_gather_floats, all_gather_json, run_on_all_ranks
from ringspan.runtime.launch import run_local_ranks
from ringspan.runtime.settings import RunError
from tests.ranks import shares_processes

pytestmark = shares_processes(__name__)


def gather_values() -> dict[str, Any]:
    rank = dist.get_rank()
    return {
        "any size": all_gather_json({"rank": rank, "text": "é" * 1000 * rank}),
        "fixed size": all_gather_json([rank], group=dist.group.WORLD, max_bytes=64),
        "floats": all_gather_floats(rank, 0.1).tolist(),
        "results": run_on_all_ranks(lambda: [rank]),
    }


def exceed_the_size() -> str:
    with pytest.raises(ValueError, match="max_bytes=4"):
        all_gather_json("too long", max_bytes=4)
    return "raised"


def fail_on_some_ranks(failing: tuple[int, ...]) -> str:
    def task() -> None:
        if dist.get_rank() in failing:
            raise OSError("no such file")

    with pytest.raises(RunError) as caught:
        run_on_all_ranks(task, torch.device("cpu"))
    return str(caught.value)


def test_every_rank_receives_all_values_in_order_of_rank() -> None:
    expected = {
        "any size": [{"rank": 0, "text": ""}, {"rank": 1, "text": "é" * 1000}],
        "fixed size": [[0], [1]],
        "floats": [[0.0, 0.1], [1.0, 0.1]],
        "results": [[0], [1]],
    }
    assert run_local_ranks(2, gather_values) == [expected, expected]


def test_a_value_above_max_bytes_raises_before_anything_is_sent() -> None:
    assert run_local_ranks(1, exceed_the_size) == ["raised"]


@pytest.mark.parametrize(("failing", "message"), [((1,), "rank 1: no such file"), ((0, 1), "no such file")])
def test_a_failed_task_raises_the_same_error_on_every_rank(failing: tuple[int, ...], message: str) -> None:
    assert run_local_ranks(2, fail_on_some_ranks, failing) == [message, message]
