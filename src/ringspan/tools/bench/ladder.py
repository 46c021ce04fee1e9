"""What a case will need, before it is run: ringspan's memory from its plan, everybody else's from shorter lengths."""

from __future__ import annotations

import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil

import ringspan as rs
from ringspan.geometry import Full
from ringspan.planning import RingPlan
from ringspan.runtime.files import Journal, read_journal
from ringspan.tools.bench.cases import IMPLEMENTATIONS, BenchCase
from ringspan.tools.bench.trials import TrialLimits, Trial, run_trial, trial_from_json
from ringspan.tools.measure import describe_machine

# Beside what the plan counts, a rank needs its workspace, and what libraries and allocators keep.
OVERHEAD_BYTES = 64 * 2**20
_SURELY_TOO_SLOW = 1.5  # a case is not tried if it is expected to take this many times its limit

Seen = Mapping[int, float]  # by length: what shorter cases of the same ladder took


def is_planned(case: BenchCase) -> bool:
    """Whether a plan says beforehand what the case needs."""
    return case.implementation in ("ringspan", "simulated")


def plan_of(case: BenchCase) -> RingPlan:
    """ringspan's plan of a case."""
    return rs.plan(
        case.pattern,
        case.tokens,
        ring_size=case.ranks,
        layout=case.layout,
        causal=case.causal,
        heads=case.heads,
        head_dim=case.dim,
        dtype=case.torch_dtype,
    )


def planned_bytes(case: BenchCase) -> list[int]:
    """Bytes of each rank as ringspan's plan has them: rows of every tensor, and parcels at their peak."""
    plan = plan_of(case)
    return [plan.memory(rank, backward=case.backward).total for rank in range(case.ranks)]


def predicted_bytes(case: BenchCase, seen: Seen) -> int:
    """Bytes of all ranks together; ``seen`` are those of shorter lengths.

    Another implementation is taken to grow as it did between its last two lengths, or by the square if there is but
    one; before the first, all that is known are the rows of its tensors.
    """
    if case.implementation == "ringspan":
        return sum(planned_bytes(case)) + case.ranks * OVERHEAD_BYTES
    if case.implementation == "simulated":
        return 2 * sum(planned_bytes(case)) + OVERHEAD_BYTES  # whole tensors, and each rank's rows of them
    alone = rs.plan(Full(), case.tokens, heads=case.heads, head_dim=case.dim, dtype=case.torch_dtype)
    rows = alone.memory(0, backward=case.backward).rows
    return max(rows, int(extrapolate(seen, case.tokens))) if seen else rows


def expected_seconds(case: BenchCase, seen: Seen) -> float:
    """Seconds of forward and backward, if two shorter lengths have been measured; otherwise 0: nobody knows."""
    return extrapolate(seen, case.tokens) if len(seen) > 1 else 0.0


def extrapolate(seen: Seen, tokens: int) -> float:
    """On with the power of the length by which the last two lengths grew, between 1 and 2; 2 if there is but one.

    >>> extrapolate({1024: 10.0, 2048: 40.0}, 4096)
    160.0
    >>> extrapolate({1024: 10.0, 2048: 20.0}, 8192)
    80.0
    """
    *before, last = sorted(seen)
    power = 2.0
    if before and seen[before[-1]] > 0:
        power = math.log(seen[last] / seen[before[-1]]) / math.log(last / before[-1])
    return seen[last] * (tokens / last) ** min(2.0, max(1.0, power))


def refusal(case: BenchCase, limits: TrialLimits, bytes_seen: Seen, seconds_seen: Seen) -> str:
    """Why a case is not worth trying under these limits, or nothing."""
    needed = predicted_bytes(case, bytes_seen)
    if needed > limits.memory_bytes:
        how = "planned" if is_planned(case) else "expected"
        return f"{how} to need {needed / 2**20:,.0f} MiB; {limits.memory_bytes / 2**20:,.0f} MiB are allowed"
    seconds = expected_seconds(case, seconds_seen)
    if seconds > _SURELY_TOO_SLOW * limits.seconds:
        return f"expected to take about {seconds:.0f} s; {limits.seconds:.0f} s are allowed"
    return ""


@dataclass(frozen=True)
class CaseForecast:
    """What is known of a case before anything has run. ``exact``: from a plan, and not just a lower bound."""

    case: BenchCase
    memory_bytes: int
    exact: bool
    obstacle: str

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "case": self.case.as_json()}


def foretell(case: BenchCase, limits: TrialLimits) -> CaseForecast:
    obstacle = IMPLEMENTATIONS[case.implementation].missing() or refusal(case, limits, {}, {})
    return CaseForecast(case, predicted_bytes(case, {}), is_planned(case), obstacle)


def conditions(threads: int) -> dict[str, Any]:
    """What must be equal for two trials to be comparable: the machine, the versions, the threads of a rank."""
    machine = describe_machine()
    same = ("processor", "cores", "torch", "cpu_capability", "python")
    return {"ringspan": rs.__version__, "threads": threads, **{name: machine[name] for name in same}}


class TrialStore:
    """The trials of one file that were run under the same conditions. Others in it are left alone, and counted.

    With ``repeat_disturbed``, trials that other programs disturbed do not count: they are run again.
    """

    def __init__(self, path: Path, threads: int, *, fresh: bool = False, repeat_disturbed: bool = False) -> None:
        self.path, self.conditions, self.repeat_disturbed = path, conditions(threads), repeat_disturbed
        self.fingerprint = hashlib.sha256(json.dumps(self.conditions, sort_keys=True).encode()).hexdigest()[:12]
        self.others = 0
        self._trials: dict[tuple[BenchCase, int], Trial] = {}
        if fresh:
            path.unlink(missing_ok=True)
        self._journal = Journal(path)
        self._load()

    def __len__(self) -> int:
        return len(self._trials)

    def find(self, case: BenchCase, number: int, limits: TrialLimits) -> Trial | None:
        """The trial of a case in a round, if it is there and still holds under these limits."""
        trial = self._trials.get((case, number))
        return trial if trial is not None and trial.holds_under(limits) else None

    def append(self, trial: Trial) -> None:
        """Add a line, and return when it is on disk."""
        self._journal.append({"fingerprint": self.fingerprint, "conditions": self.conditions, **trial.as_json()})
        self._trials[trial.case, trial.round] = trial

    def _load(self) -> None:
        for found in read_journal(self.path):
            del found["conditions"]
            if found.pop("fingerprint") == self.fingerprint:
                trial = trial_from_json(found)
                self._trials[trial.case, trial.round] = trial  # a later trial replaces an earlier one
            else:
                self.others += 1
        if self.repeat_disturbed:
            self._trials = {key: trial for key, trial in self._trials.items() if not trial.disturbed}


@dataclass(frozen=True)
class BenchSettings:
    """How often and within what. A trial that took longer than ``long_seconds``, its start included, is run once."""

    limits: TrialLimits
    rounds: int = 3
    threads: int = 1
    attempts: int = 3
    long_seconds: float = math.inf


def _silent(step: int, text: str) -> None:
    pass


def run_cases(
    cases: Sequence[BenchCase],
    settings: BenchSettings,
    store: TrialStore,
    *,
    announce: Callable[[int, str], None] = _silent,
    run: Callable[[BenchCase, int, TrialLimits, int], Trial] = run_trial,
) -> Iterator[Trial]:
    """Every trial as it ends, and one for each case that is not run, with the reason.

    A ladder ends at its first length that fails: longer ones are not tried. ``announce(step, text)`` is told what comes
    next, out of ``len(cases) * rounds`` steps. Trials that ``store`` has are not run again.
    """
    ladders: defaultdict[BenchCase, _Ladder] = defaultdict(_Ladder)
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

    def obstacle(self, case: BenchCase, limits: TrialLimits, known: bool) -> Trial | None:
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


def _free_now(limits: TrialLimits) -> TrialLimits:
    """The budget was free when the run began; others may have taken some of it since."""
    return replace(limits, memory_bytes=min(limits.memory_bytes, psutil.virtual_memory().available))


def _run_undisturbed(
    case: BenchCase, number: int, settings: BenchSettings, run: Callable[[BenchCase, int, TrialLimits, int], Trial]
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
