"""Statistics of trials: medians with their spread over rounds, speed-ups, and the longest length of each ladder."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from ringspan.geometry import Dilated, Pattern
from ringspan.tools.bench.cases import IMPLEMENTATIONS, BenchCase
from ringspan.tools.bench.ladder import is_planned, planned_bytes
from ringspan.tools.bench.trials import Trial


@dataclass(frozen=True)
class Spread:
    """A median with the lowest and the highest value; ``disturbed`` if every trial was disturbed."""

    median: float
    low: float
    high: float
    count: int
    disturbed: bool = False


def spread(numbers: Iterable[float], disturbed: bool = False) -> Spread:
    """Median, minimum and maximum.

    >>> spread([3.0, 1.0, 2.0])
    Spread(median=2.0, low=1.0, high=3.0, count=3, disturbed=False)
    """
    values = sorted(numbers)
    return Spread(statistics.median(values), values[0], values[-1], len(values), disturbed)


@dataclass(frozen=True)
class Summary:
    """A case and all its trials. Its statistics exist only if a trial is ``measured``.

    Times come from the trials that other programs did not disturb, or from all trials if every one was disturbed.
    """

    case: BenchCase
    trials: tuple[Trial, ...]

    @cached_property
    def measured(self) -> tuple[Trial, ...]:
        return tuple(trial for trial in self.trials if trial.measured)

    @cached_property
    def failure(self) -> Trial | None:
        """The first trial that failed or was not run, or None."""
        return next((trial for trial in self.trials if not trial.measured), None)

    @cached_property
    def quiet(self) -> tuple[Trial, ...]:
        """The measured trials that other programs did not disturb."""
        return tuple(trial for trial in self.measured if not trial.disturbed)

    @cached_property
    def forward(self) -> Spread:
        return self._times("forward_seconds")

    @cached_property
    def backward(self) -> Spread:
        return self._times("backward_seconds")

    @cached_property
    def total(self) -> Spread:
        return self._times("total_seconds")

    def _times(self, name: str) -> Spread:
        return spread((getattr(trial, name) for trial in self.quiet or self.measured), disturbed=not self.quiet)

    @property
    def sent_bytes(self) -> int | None:
        """Bytes sent by the busiest rank, forward and backward; None if they are not counted."""
        return max((max(trial.sent_bytes) for trial in self.measured if trial.sent_bytes), default=None)

    @cached_property
    def rank_bytes(self) -> Spread:
        """Peak growth of the largest rank."""
        return spread(max(trial.peak_bytes) for trial in self.measured)

    @property
    def tokens_per_second(self) -> float:
        return self.case.tokens / self.total.median

    @property
    def disturbed(self) -> int:
        """Number of trials that other programs disturbed in spite of repeats."""
        return len(self.measured) - len(self.quiet)

    @property
    def foreign_cores(self) -> float:
        """Most cores that other programs kept busy during a trial whose time counts."""
        return max(trial.foreign_cores for trial in self.quiet or self.measured)

    def as_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {"case": self.case.as_json(), "trials": len(self.measured)}
        if self.measured:
            names = ("forward", "backward", "total", "rank_bytes")
            found |= {name: asdict(getattr(self, name)) for name in names}
            found |= {"tokens_per_second": self.tokens_per_second, "foreign_cores": self.foreign_cores}
            found |= {"disturbed_trials": self.disturbed, "sent_bytes": self.sent_bytes}
        if is_planned(self.case):
            found["planned_rank_bytes"] = max(planned_bytes(self.case))
        if self.failure:
            found |= {"outcome": self.failure.outcome, "reason": self.failure.reason}
        return found


def summarize(trials: Iterable[Trial]) -> dict[BenchCase, Summary]:
    """A summary of each case, in order of first appearance."""
    by_case: defaultdict[BenchCase, list[Trial]] = defaultdict(list)
    for trial in trials:
        by_case[trial.case].append(trial)
    return {case: Summary(case, tuple(found)) for case, found in by_case.items()}


def speed_up(summaries: Mapping[BenchCase, Summary], case: BenchCase) -> Spread | None:
    """Speed relative to the same implementation on one process, round by round; None if that was not measured.

    Trials of the same round are compared, so that a drift of the machine cancels. Rounds with a disturbed trial count
    only if there are no others.
    """
    alone = find_alone(summaries, case)
    if alone is None or case.ranks == 1 or not summaries[case].measured:
        return None
    single = {trial.round: trial for trial in alone.measured}
    pairs = [(single[trial.round], trial) for trial in summaries[case].measured if trial.round in single]
    quiet = [(one, many) for one, many in pairs if not (one.disturbed or many.disturbed)]
    ratios = [one.total_seconds / many.total_seconds for one, many in quiet or pairs]
    return spread(ratios, disturbed=not quiet) if ratios else None


def find_alone(summaries: Mapping[BenchCase, Summary], case: BenchCase) -> Summary | None:
    """The same implementation at the same length on one process, where the layout makes no difference."""
    wanted = replace(case, ranks=1, layout="contiguous")
    for other, summary in summaries.items():
        if replace(other, layout="contiguous") == wanted:
            return summary
    return None


def title_of(case: BenchCase) -> str:
    return IMPLEMENTATIONS[case.implementation].title


def pattern_names(summaries: Mapping[BenchCase, Summary]) -> dict[Pattern, str]:
    """A short name for the pattern of each ladder: "dilated" if there is only one dilated pattern."""
    patterns = {case.ladder.pattern: case.pattern_name for case in summaries}
    alone = sum(isinstance(pattern, Dilated) for pattern in patterns) == 1
    return {p: "dilated" if alone and isinstance(p, Dilated) else name for p, name in patterns.items()}


@dataclass(frozen=True)
class LadderReach:
    """The longest measured length of a ladder, and the trial that ended it; either may be None."""

    ladder: BenchCase
    longest: Summary | None
    ended_by: Trial | None


def reaches(summaries: Mapping[BenchCase, Summary]) -> list[LadderReach]:
    """The reach of each ladder, in order of first appearance."""
    ladders: defaultdict[BenchCase, list[Summary]] = defaultdict(list)
    for case, summary in summaries.items():
        ladders[case.ladder].append(summary)
    return [LadderReach(ladder, _longest(found), _first_failure(found)) for ladder, found in ladders.items()]


def _longest(found: Sequence[Summary]) -> Summary | None:
    whole = [summary for summary in found if summary.measured and not summary.failure]
    return max(whole, key=lambda summary: summary.case.tokens, default=None)


def _first_failure(found: Sequence[Summary]) -> Trial | None:
    failed = [summary for summary in found if summary.failure]
    return min(failed, key=lambda summary: summary.case.tokens).failure if failed else None
