"""Medians, spread, speed-up and reach from known numbers."""

import pytest

from ringspan.tools.bench.summaries import Spread, reaches, speed_up, summarize
from ringspan.tools.bench.trials import Trial
from tests.tools.bench.examples import ROOMY, case, measured


def test_medians_and_spread() -> None:
    trials = [measured(case(tokens=1000), number, seconds) for number, seconds in enumerate((4.0, 8.0, 5.0), start=1)]
    (summary,) = summarize(trials).values()
    assert summary.total == Spread(5.0, 4.0, 8.0, 3)
    assert summary.forward == Spread(1.25, 1.0, 2.0, 3)
    assert summary.backward == Spread(3.75, 3.0, 6.0, 3)
    assert summary.tokens_per_second == 200.0


def test_the_largest_rank_counts() -> None:
    trials = [
        Trial(case(ranks=2), number, "measured", ROOMY, forward_seconds=1.0, peak_bytes=peaks)
        for number, peaks in enumerate([(10, 30), (20, 40), (50, 10)], start=1)
    ]
    (summary,) = summarize(trials).values()
    assert summary.rank_bytes == Spread(40, 30, 50, 3)


def test_speed_up_compares_rounds_with_each_other() -> None:
    """In the third round the machine is half as fast for both, which does not change the ratio."""
    alone = [measured(case(), number, seconds) for number, seconds in ((1, 4.0), (2, 4.2), (3, 8.0))]
    two = [measured(case(ranks=2), number, seconds) for number, seconds in ((1, 2.0), (2, 2.0), (3, 4.0))]
    found = summarize(alone + two)
    assert speed_up(found, case(ranks=2)) == Spread(2.0, 2.0, 2.1, 3)
    assert speed_up(found, case()) is None
    assert speed_up(summarize(two), case(ranks=2)) is None


def test_reach_is_the_longest_length_without_a_failure() -> None:
    failed = Trial(case(tokens=1024), 2, "crashed", ROOMY, "rank 0 died")
    trials = [
        measured(case(tokens=256)),
        measured(case(tokens=512)),
        measured(case(tokens=1024)),
        failed,
        Trial(case(tokens=2048), 1, "not tried", ROOMY, "1,024 tokens: crashed"),
    ]
    (reach,) = reaches(summarize(trials))
    assert reach.longest is not None
    assert reach.longest.case.tokens == 512
    assert reach.ended_by == failed


@pytest.mark.parametrize(("seen", "tokens", "wanted"), [({100: 5.0}, 200, 20.0), ({100: 5.0, 200: 5.0}, 400, 10.0)])
def test_extrapolation_is_cautious(seen: dict[int, float], tokens: int, wanted: float) -> None:
    """Quadratic from one length; at least linear if there was no growth."""
    from ringspan.tools.bench.ladder import extrapolate

    assert extrapolate(seen, tokens) == wanted
