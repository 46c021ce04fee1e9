"""docs/support.md and the README's support matrix say what the cells do: every cell is run.

If a test fails because the library changed on purpose, write the pages again: `python -m tests.support_matrix`.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
import torch

import ringspan as rs
from ringspan.streaming import TensorRows
from ringspan.tools.pages import split_at_markers
from tests.support_matrix import (
    CELLS,
    DILATED,
    FOLDED,
    GRID,
    KINDS,
    MARKER,
    PACKED,
    PAGE,
    PLAIN,
    README,
    TOGETHER,
    Case,
    Cell,
    Results,
    Run,
    attend,
    decode,
    oracle,
    read_support_page,
    readme_table,
    refusal,
    stream,
    support_page,
)

STATED, MACHINE = read_support_page(PAGE.read_text())


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: f"{cell.row}-{cell.column}".replace(" ", "_"))
def test_the_page_says_what_a_cell_does(cell: Cell) -> None:
    assert STATED[cell] == cell.run()


def test_the_pages_have_these_cells_and_nothing_else() -> None:
    assert list(STATED) == CELLS
    assert PAGE.read_text() == support_page(STATED, MACHINE)
    before, after = split_at_markers(README, MARKER)
    assert README.read_text() == "\n".join([before, *readme_table(STATED), after])


@pytest.mark.parametrize("change", [PLAIN, TOGETHER], ids=["plain", "together"])
@pytest.mark.parametrize("causal", [True, False])
def test_all_kinds_of_patterns_have_different_results(change: dict[str, Any], causal: bool) -> None:
    cases = [Case(**{**kind, **change, "causal": causal}) for kind in KINDS.values() if kind.get("order") != GRID]
    outs = [oracle(case, torch.float64)["out"] for case in cases]
    for one, other in combinations(outs, 2):
        assert (one - other).abs().max() > 0.01


@pytest.mark.parametrize("run", [attend, decode, stream])
@pytest.mark.parametrize(
    "option",
    [
        dict(pattern=rs.Window(9)),
        dict(causal=False),
        dict(order=FOLDED),
        dict(order=GRID),
        dict(softcap=1.5),
        dict(scale=0.7),
        dict(pattern=DILATED.for_heads(2, 12)),
        dict(dtype=torch.bfloat16, softcap=1.5),
        PACKED,
    ],
    ids=str,
)
def test_an_ignored_option_is_an_error_and_not_a_cell(run: Run, option: dict[str, Any]) -> None:
    case = Case(lse=False, **option)
    ignored = Case(lse=False, dtype=case.dtype)
    with pytest.raises(AssertionError, match="not close"):
        refusal(case, lambda _: run(ignored))


def test_ignored_sinks_are_an_error() -> None:
    def without_sinks(case: Case) -> Results:
        return attend(replace(case, sinks=""))

    for case in (Case(sinks="head"), Case(sinks="row")):
        with pytest.raises(AssertionError, match="out: "):
            refusal(case, without_sinks)


def test_other_errors_are_not_refusals() -> None:
    def broken(case: Case) -> Results:
        raise IndexError("a bug")

    with pytest.raises(IndexError):
        refusal(Case(), broken)


def test_a_cell_whose_calls_disagree_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse = iter(["", "ValueError: only one of the two"])
    monkeypatch.setattr("tests.support_matrix.refusal", lambda case, run: next(refuse))
    with pytest.raises(AssertionError, match="only one of the two"):
        Cell("GQA and MQA", "full").run()


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        (dict(causal="no"), TypeError, "causal='no': must be True or False"),
        (dict(sinks=[0.0] * 8), TypeError, "sinks is a list"),
        (dict(sinks=torch.zeros(8, dtype=torch.int64)), ValueError, "sinks is torch.int64"),
    ],
    ids=["causal", "list", "ints"],
)
def test_streaming_checks_its_options_as_attention_does(
    options: dict[str, Any], error: type[Exception], words: str
) -> None:
    q, k, v = Case().tensors()
    with pytest.raises(error, match=words):
        rs.attention(q, k, v, pattern=DILATED, **options)
    with pytest.raises(error, match=words):
        rs.stream_attention(TensorRows({"q": q, "k": k, "v": v}), TensorRows({}), q.shape[1], DILATED, **options)
