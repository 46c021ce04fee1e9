"""The benchmark of plans: its configurations, and what the page says of results."""

from pathlib import Path
from typing import Any

import pytest

import ringspan as rs
from benchmarks.plans import (
    COLUMNS,
    CONFIGURATIONS,
    DEVICES,
    Configuration,
    broken,
    column,
    errors,
    measure_choices,
    ratio,
)
from benchmarks.suite import HEAD_DIM, HEADS, Results
from ringspan.runtime.launch import run_local_ranks
from tests.ranks import starts_processes

ROW: dict[str, Any] = dict(
    name="full",
    n=2048,
    chosen="zigzag",
    predicted={"one process": 0.4, "zigzag": 0.2},
    seconds={"one process": [0.5, 0.4, 0.4], "zigzag": [0.2, 0.25, 0.25]},
    spent={},
)


def test_configurations_are_of_every_kind() -> None:
    assert len(CONFIGURATIONS) >= 20
    kinds = [(one.causal, one.batch > 1, one.kv_heads < HEADS, one.documents is not None) for one in CONFIGURATIONS]
    assert all({kind[i] for kind in kinds} == {False, True} for i in range(4))
    assert {min(one.n for one in CONFIGURATIONS), max(one.n for one in CONFIGURATIONS)} == {2048, 16384}


@pytest.mark.parametrize("one", CONFIGURATIONS, ids=lambda one: f"{one.name}, {one.n}")
def test_every_choice_has_a_column_of_its_own(one: Configuration) -> None:
    n = one.n // 8
    options: dict[str, Any] = dict(
        causal=one.causal, batch=one.batch, kv_heads=one.kv_heads, heads=HEADS, head_dim=HEAD_DIM
    )
    lengths = one.documents(n) if one.documents else None
    found = rs.best_plan(one.pattern, n, devices=DEVICES, lengths=lengths, **options)
    columns = [column(choice) for choice in found.ranked]
    assert len(set(columns)) == len(columns) >= 3
    assert set(columns) <= set(COLUMNS)


def test_chosen_over_best_and_errors() -> None:
    assert ratio(ROW) == 1
    assert ratio(ROW | dict(chosen="one process")) == pytest.approx(1.6)
    assert sorted(errors([ROW])) == pytest.approx([-0.2, 0])


def test_a_slow_choice_breaks_the_promise(tmp_path: Path) -> None:
    results = Results(tmp_path / "plans.jsonl")
    results.add("choices", dict(rows=[ROW]))
    assert broken(results) == ""
    results.add("choices", dict(rows=[ROW, ROW | dict(chosen="one process")]))
    assert "full, 2,048 rows: 1.600" in broken(results)


@starts_processes
@pytest.mark.slow
def test_measured_on_two_processes() -> None:
    numbers = [6, 18, 27]  # a batch, a window, and documents that processes divide
    found = run_local_ranks(2, measure_choices, numbers, 16, 1)[0]
    for row in found["rows"]:
        assert set(row["predicted"]) == set(row["seconds"])
        assert all(0 < seconds < 10 for times in row["seconds"].values() for seconds in times)
