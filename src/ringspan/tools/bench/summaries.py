"""From trials to figures: medians with their spread over rounds, speed-ups, and the longest length of each ladder."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from ringspan.tools.bench.cases import Case
from ringspan.tools.bench.ladder import is_planned, planned_bytes
from ringspan.tools.bench.trials import Trial


@dataclass(frozen=True)
class Spread:
    """The median of some figures, with the lowest and the highest; ``disturbed`` if every trial was."""

    median: float
    low: float
    high: float
    count: int
    disturbed: bool = False


def spread(figures: Iterable[float], disturbed: bool = False) -> Spread:
    """The median of some figures, and between what they lie.

    >>> spread([3.0, 1.0, 2.0])
    Spread(median=2.0, low=1.0, high=3.0, count=3, disturbed=False)
    """
    values = sorted(figures)
    return Spread(statistics.median(values), values[0], values[-1], len(values), disturbed)


@dataclass(frozen=True)
class Summary:
    """A case and all its trials. Figures may be asked for only if one was ``measured``.

    Times are those of the trials that other programs did not disturb; of all trials only if they disturbed every one.
    """

    case: Case
    trials: tuple[Trial, ...]

    @cached_property
    def measured(self) -> tuple[Trial, ...]:
        return tuple(trial for trial in self.trials if trial.measured)

    @cached_property
    def failure(self) -> Trial | None:
        """The trial that failed or was not run, if there is one."""
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
        """Bytes that the busiest rank sent, forward and backward; None if they were not counted."""
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
        """How many trials other programs disturbed, in spite of repeats."""
        return len(self.measured) - len(self.quiet)

    @property
    def foreign_cores(self) -> float:
        """The most cores that other programs kept busy during a trial whose time counts."""
        return max(trial.foreign_cores for trial in self.quiet or self.measured)

    def as_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {"case": self.case.as_json(), "trials": len(self.measured)}
        if self.measured:
            figures = ("forward", "backward", "total", "rank_bytes")
            found |= {name: asdict(getattr(self, name)) for name in figures}
            found |= {"tokens_per_second": self.tokens_per_second, "foreign_cores": self.foreign_cores}
            found |= {"disturbed_trials": self.disturbed, "sent_bytes": self.sent_bytes}
        if is_planned(self.case):
            found["planned_rank_bytes"] = max(planned_bytes(self.case))
        if self.failure:
            found |= {"outcome": self.failure.outcome, "reason": self.failure.reason}
        return found


def summarize(trials: Iterable[Trial]) -> dict[Case, Summary]:
    """A summary for each case, in the order in which they came up."""
    by_case: defaultdict[Case, list[Trial]] = defaultdict(list)
    for trial in trials:
        by_case[trial.case].append(trial)
    return {case: Summary(case, tuple(found)) for case, found in by_case.items()}


def speed_up(summaries: Mapping[Case, Summary], case: Case) -> Spread | None:
    """How many times as fast as the same implementation on one process, round by round; None if that is not known.

    Rounds are compared with each other, so that a drift of the machine cancels. Rounds with a disturbed trial count
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


def find_alone(summaries: Mapping[Case, Summary], case: Case) -> Summary | None:
    """The same implementation at the same length on one process (where the layout makes no difference)."""
    wanted = replace(case, ranks=1, layout="contiguous")
    for other, summary in summaries.items():
        if replace(other, layout="contiguous") == wanted:
            return summary
    return None


@dataclass(frozen=True)
class Reach:
    """How far a ladder went: its longest measured length, if any, and the trial that ended it, if any."""

    ladder: Case
    longest: Summary | None
    ended_by: Trial | None


def reaches(summaries: Mapping[Case, Summary]) -> list[Reach]:
    """For each ladder, in the order in which they came up."""
    ladders: defaultdict[Case, list[Summary]] = defaultdict(list)
    for case, summary in summaries.items():
        ladders[case.ladder].append(summary)
    return [Reach(ladder, _longest(found), _first_failure(found)) for ladder, found in ladders.items()]


def _longest(found: Sequence[Summary]) -> Summary | None:
    whole = [summary for summary in found if summary.measured and not summary.failure]
    return max(whole, key=lambda summary: summary.case.tokens, default=None)


def _first_failure(found: Sequence[Summary]) -> Trial | None:
    failed = [summary for summary in found if summary.failure]
    return min(failed, key=lambda summary: summary.case.tokens).failure if failed else None
