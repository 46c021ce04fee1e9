"""The balanced layout: exact work, every row once, rows within the slack, and work that is even on realistic mixes."""

import math
import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ringspan as rs
from ringspan.balance import Balanced, assign_rows, work_before
from ringspan.geometry import SegmentBranch
from ringspan.layout import Layout
from tests.strategies import patterns

LENGTHS = st.lists(st.one_of(st.integers(1, 12), st.integers(1, 300)), min_size=1, max_size=12).map(tuple)


def lognormal_mix(seed: int, total: int = 262_144) -> tuple[int, ...]:
    """Documents of 64 to 65,536 tokens; the median is 1,500."""
    draw, lengths = random.Random(seed), list[int]()
    while sum(lengths) < total:
        length = int(draw.lognormvariate(math.log(1500), 1.4))
        if 64 <= length <= 65_536:
            lengths.append(min(length, total - sum(lengths)))
    return tuple(lengths)


def one_long_mix(total: int = 262_144, long: int = 131_072) -> tuple[int, ...]:
    """One long document after a third of 1,840 short ones."""
    draw, lengths = random.Random(0), list[int]()
    while sum(lengths) < total - long:
        lengths.append(min(draw.randint(16, 128), total - long - sum(lengths)))
    return (*lengths[: len(lengths) // 3], long, *lengths[len(lengths) // 3 :])


MIXES = {"lognormal 0": lognormal_mix(0), "lognormal 1": lognormal_mix(1), "one long": one_long_mix()}


@given(patterns(), st.booleans(), st.integers(1, 40), st.data())
def test_work_is_counted_exactly(pattern: rs.Pattern, causal: bool, rows: int, data: st.DataObject) -> None:
    stop = data.draw(st.integers(0, rows))
    branches = pattern.branches(rows)
    unit = math.lcm(*(branch.rate for branch in branches if isinstance(branch, SegmentBranch)))
    wanted = 0
    for branch in branches:
        rate = branch.rate if isinstance(branch, SegmentBranch) else 1
        for offset in range(rate):
            one = SegmentBranch(branch.segment_length, rate, branch.shift, (offset,)) if rate > 1 else branch  # type: ignore[union-attr]
            seen = (one.sees(p, t) for p in range(stop) for t in range(p + 1 if causal else rows))
            wanted += unit // rate * sum(seen)
    assert work_before(pattern, causal, rows, stop) == wanted


@given(LENGTHS, st.integers(1, 9), patterns(), st.booleans(), st.sampled_from([0.01, 0.05, 0.5]))
def test_every_row_is_on_one_rank_and_no_rank_has_too_many(
    lengths: tuple[int, ...], size: int, pattern: rs.Pattern, causal: bool, slack: float
) -> None:
    runs = assign_rows(Balanced(pattern, causal, slack), lengths, size)
    assert [start for _, start, _ in runs] == [0, *(stop for _, _, stop in runs[:-1])]
    assert runs[-1][2] == sum(lengths)
    assert all(start < stop for _, start, stop in runs)
    assert all(before[0] != after[0] for before, after in pairwise(runs))
    rows = [sum(stop - start for rank, start, stop in runs if rank == each) for each in range(size)]
    assert max(rows) <= math.ceil(sum(lengths) / size * (1 + slack)) + 1


@pytest.mark.parametrize("size", [2, 4, 8, 64])
@pytest.mark.parametrize("mix", MIXES)
def test_realistic_mixes_are_balanced(mix: str, size: int) -> None:
    lengths = MIXES[mix]
    plan, zigzag = (
        rs.plan(rs.Full(), sum(lengths), ring_size=size, layout=layout, causal=True, lengths=lengths, heads=1)
        for layout in ("balanced", "zigzag")
    )
    rows = [plan.layout.rows_of(rank) for rank in range(size)]
    assert plan.imbalance <= 1.03 < zigzag.imbalance
    assert max(rows) <= math.ceil(sum(lengths) / size * 1.05)
    pieces = sum(len(list(plan.layout.rank_spans(start, stop))) for start, stop in plan.documents.spans())
    assert pieces <= len(lengths) + 10 * size  # a long document is split over as few ranks as it takes


@pytest.mark.parametrize("pattern", [rs.Window(511), rs.Dilated((2048, 8192), (1, 4)), rs.Full()])
def test_the_work_of_any_pattern_is_balanced(pattern: rs.Pattern) -> None:
    lengths = MIXES["lognormal 1"]
    for causal in (True, False):
        layout = Balanced(pattern, causal)
        options = dict(ring_size=8, causal=causal, lengths=lengths, heads=4)
        assert rs.plan(pattern, sum(lengths), layout=layout, **options).imbalance < 1.05  # type: ignore[arg-type]


def test_short_documents_stay_whole_and_equal_ones_move_nothing() -> None:
    plan = rs.plan(rs.Full(), 8192, ring_size=4, layout="balanced", causal=True, lengths=[64] * 128)
    assert not any(plan.bytes_sent(rank) for rank in range(4))
    assert plan.imbalance == 1


def test_consecutive_rows_where_zigzag_would_not_balance_better() -> None:
    lengths = (4096, 4096)
    spans = [len(Layout(Balanced(rs.Full(), causal), 8192, 4, lengths).spans(0)) for causal in (False, True)]
    assert spans == [1, 2]


def test_refusals() -> None:
    with pytest.raises(TypeError, match="pattern='full': must be a pattern"):
        Balanced("full")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="causal=1: must be"):
        Balanced(causal=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"slack=0: must be from 0\.01 to 1"):
        Balanced(slack=0)
    with pytest.raises(ValueError, match="lengths add up to 5, but the sequence has 6 rows"):
        Layout("balanced", 6, 2, (2, 3))
