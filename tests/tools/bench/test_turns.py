"""Calls timed in turns: disturbed calls are timed again, and those that stay disturbed are counted."""

import pytest

from ringspan.tools.bench.hilbert import QUICK, Findings
from ringspan.tools.bench.hilbert_page import _sentence
from ringspan.tools.bench.trials import TurnTimer
from ringspan.tools.measure import Stopwatch


class LoadedStopwatch(Stopwatch):
    """A stopwatch with known loads: each call takes one second while other programs use this many cores."""

    loads: list[float] = []  # noqa: RUF012

    def __exit__(self, *_: object) -> None:
        self.seconds, self.foreign_cores = 1.0, self.loads.pop(0)


@pytest.mark.parametrize(
    ("loads", "most", "disturbed"), [([0.0], 0.0, 0), ([0.9, 0.05], 0.05, 0), ([0.9, 0.4, 0.6], 0.4, 1)]
)
def test_disturbed_calls_are_repeated_and_counted(loads: list[float], most: float, disturbed: int) -> None:
    LoadedStopwatch.loads = list(loads)
    clock, calls = TurnTimer(LoadedStopwatch), []
    assert clock.in_turns({"call": lambda: calls.append(1)}, rounds=1, warm=False) == {"call": [1.0]}
    assert len(calls) == len(loads)
    assert (clock.most_foreign_cores, clock.disturbed) == (most, disturbed)


def test_disturbed_times_of_a_study_are_not_headlined() -> None:
    seconds = {"row-major": [9.0], "Hilbert": [1.0]}
    shortest = {"row-major": 4000, "Hilbert": 1000}
    quiet, busy = (Findings(QUICK, [], {}, shortest, seconds, {}, [], [], 0.0, count) for count in (0, 1))
    assert "9.0 times cheaper" in _sentence(quiet)
    assert "4.0 times cheaper" in _sentence(busy)
    assert "in seconds" not in _sentence(busy)
    assert busy.spread([1.0]).disturbed
