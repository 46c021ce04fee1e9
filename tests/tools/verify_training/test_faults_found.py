"""`ringspan verify --training` passes an honest trainer, and blames each faulty one for its own fault."""

from __future__ import annotations

import random
from functools import lru_cache
from typing import Any

import pytest

from ringspan.tools.verify.check import Check
from ringspan.tools.verify_training.judge import CHECKS, roots
from tests.ranks import shares_processes
from tests.tools.verify_training.subjects import FAULTS, checks_of_all, options_of, random_subject

pytestmark = [shares_processes(__name__), pytest.mark.timeout(900)]


# Those of public reports; `make test-all` runs all.
FAST = (
    *("documents_leak", "window_becomes_full", "sinks_dropped", "labels_shifted_in_shards", "mean_of_means"),
    *("loss_scaled", "odd_tokens_dropped", "order_of_split_not_undone", "sends_16_bits"),
)


def faults(*names: str) -> list[Any]:
    return [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in names]


@lru_cache
def checks_of_faults(fast: bool) -> dict[str, list[Check]]:
    """One launch for the fast ones, and one for the others."""
    names = [name for name in FAULTS if (name in FAST) == fast]
    subjects = [options_of(name) for name in names]
    return dict(zip(names, checks_of_all(subjects, (1, 2)), strict=True))


def checks_of(name: str) -> list[Check]:
    return checks_of_faults(name in FAST)[name]


@pytest.mark.parametrize("name", faults(*FAULTS))
def test_each_fault_is_found_and_nothing_else_is_blamed(name: str) -> None:
    found = roots(checks_of(name))
    assert [check.name for check in found] == [FAULTS[name][1]], [(c.name, c.result, c.reason) for c in found]


CAUSES = {
    "documents_leak": "the mask of documents is lost",
    "window_becomes_full": "a window became full attention",
    "sees_the_next_token": "not causal",
    "stops_at_borders": "stops at a border",
    "sinks_dropped": "layers.0.sinks",
    "labels_shifted_in_zigzag": "lost, doubled or shifted",
    "mean_of_means": "mean of the means",
    "loss_scaled": "summed over ranks",
    "gradients_scaled": "2 times too large",
    "gradients_not_reduced": "an all-reduce is missing",
    "order_of_split_not_undone": "order of the split is not undone",
    "predictions_of_rank_0": "never put back together",
}


@pytest.mark.parametrize("name", faults(*CAUSES))
def test_the_cause_is_named(name: str) -> None:
    (check,) = roots(checks_of(name))
    assert CAUSES[name] in check.reason


@pytest.mark.parametrize("name", faults("border_labels_lost", "border_labels_doubled"))
def test_labels_are_counted(name: str) -> None:
    row = "row 47 counts 0.00 times" if name == "border_labels_lost" else "row 48 counts 2.00 times"
    assert row in roots(checks_of(name))[0].result


def test_consequences_name_what_they_follow_from() -> None:
    failing = [check for check in checks_of("documents_leak") if check.verdict == "FAIL"]
    assert len(failing) > 3
    assert all("follows from" in check.reason for check in failing if check.name != "documents do not see each other")


@pytest.mark.parametrize(("size", "count"), [(2, 1), *(pytest.param(k, 12, marks=pytest.mark.slow) for k in (2, 3, 4))])
def test_honest_trainers_pass(size: int, count: int) -> None:
    """`python -m benchmarks trainers` does the same for 200."""
    rng = random.Random(size * count)
    subjects = [random_subject(rng) for _ in range(count)]
    for subject, checks in zip(subjects, checks_of_all(subjects, (1, size), seed=count), strict=True):
        assert len(checks) == len(CHECKS)
        failing = [(check.name, check.result, check.reason) for check in checks if check.verdict == "FAIL"]
        assert not failing, (subject, failing)
        refused = {check.name for check in checks if check.verdict == "not supported"}
        assert bool(refused) != subject["returns_rows"]
