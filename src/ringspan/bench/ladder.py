"""In which order trials are run: length by length, in rounds, all cases of a length taking turns; and when to stop."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import psutil

from ringspan.bench.cases import Case
from ringspan.bench.forecast import refusal
from ringspan.bench.implementations import IMPLEMENTATIONS
from ringspan.bench.store import Store
from ringspan.bench.trials import Limits, Trial, run_trial


@dataclass(frozen=True)
class Settings:
    """How often and within what. A trial that took longer than ``long_seconds``, its start included, is run once."""

    limits: Limits
    rounds: int = 3
    threads: int = 1
    attempts: int = 3
    long_seconds: float = math.inf


def _silent(step: int, text: str) -> None:
    pass


def run_cases(
    cases: Sequence[Case],
    settings: Settings,
    store: Store,
    *,
    announce: Callable[[int, str], None] = _silent,
    run: Callable[[Case, int, Limits, int], Trial] = run_trial,
) -> Iterator[Trial]:
    """Every trial as it ends, and one for each case that is not run, with the reason.

    A ladder ends at its first length that fails: longer ones are not tried. ``announce(step, text)`` is told what comes
    next, out of ``len(cases) * rounds`` steps. Trials that ``store`` has are not run again.
    """
    ladders: defaultdict[Case, _Ladder] = defaultdict(_Ladder)
    step = 0
    for tokens in sorted({case.tokens for case in cases}):
        here = [case for case in cases if case.tokens == tokens]
        for number in range(1, settings.rounds + 1):
            for case in here:
                step += 1
                ladder = ladders[case.ladder]
                trial = store.find(case, number, settings.limits)
                if number == 1 and (obstacle := ladder.obstacle(case, settings.limits, known=trial is not None)):
                    yield obstacle
                if ladder.ended or (number > 1 and ladder.walls[tokens] > settings.long_seconds):
                    continue
                if trial is None:
                    announce(step, f"round {number}: {case}")
                    trial = _run_undisturbed(case, number, settings, run)
                    store.append(trial)
                ladder.learn(trial)
                yield trial


class _Ladder:
    """What is known of one implementation on so many ranks, from the lengths climbed so far."""

    def __init__(self) -> None:
        self.ended = ""
        self.seconds: dict[int, float] = {}
        self.bytes: dict[int, float] = {}
        self.walls: dict[int, float] = {}

    def obstacle(self, case: Case, limits: Limits, known: bool) -> Trial | None:
        """What keeps a case from being tried, and with it all longer ones; nothing if its trial is known already."""
        if self.ended:
            return Trial(case, 1, "not tried", limits, self.ended)
        if known:
            return None
        if missing := IMPLEMENTATIONS[case.implementation].missing():
            self.ended = missing
            return Trial(case, 1, "not installed", limits, missing)
        if reason := refusal(case, _free_now(limits), self.bytes, self.seconds):
            self.ended = f"{case.tokens:,} tokens were refused: {reason}"
            return Trial(case, 1, "refused", limits, reason)
        return None

    def learn(self, trial: Trial) -> None:
        if trial.measured:
            self.seconds[trial.case.tokens] = trial.total_seconds
            self.bytes[trial.case.tokens] = sum(trial.peak_bytes)
            self.walls[trial.case.tokens] = trial.wall_seconds
        else:
            self.ended = f"{trial.case.tokens:,} tokens: {trial.outcome}"


def _free_now(limits: Limits) -> Limits:
    """The budget was free when the run began; others may have taken some of it since."""
    return replace(limits, memory_bytes=min(limits.memory_bytes, psutil.virtual_memory().available))


def _run_undisturbed(
    case: Case, number: int, settings: Settings, run: Callable[[Case, int, Limits, int], Trial]
) -> Trial:
    """A trial; again if others were busy meanwhile; the least disturbed one if they always were."""
    limits, best = _free_now(settings.limits), None
    for attempt in range(1, settings.attempts + 1):
        trial = replace(run(case, number, limits, settings.threads), attempts=attempt)
        if not trial.measured or not trial.disturbed:
            return trial
        if best is None or trial.foreign_cores < best.foreign_cores:
            best = trial
    assert best is not None
    return replace(best, attempts=settings.attempts)
