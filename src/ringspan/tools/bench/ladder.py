"""Ladders of lengths: what to run next, what to refuse beforehand, and the store of trials.

ringspan's memory is known from its plan; that of other implementations is extrapolated from shorter lengths.
"""

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
from ringspan.tools.bench.trials import Trial, TrialLimits, run_trial, trial_from_json
from ringspan.tools.measure import describe_machine

# Workspace, libraries and allocator caches of a rank, which the plan does not count.
OVERHEAD_BYTES = 64 * 2**20
_SURELY_TOO_SLOW = 1.5  # a case is refused if it is expected to take this many times its limit

Seen = Mapping[int, float]  # length -> bytes or seconds of the shorter cases of the same ladder
RunTrial = Callable[[BenchCase, int, TrialLimits, int], Trial]


def is_planned(case: BenchCase) -> bool:
    """Whether a plan predicts what the case needs."""
    return case.implementation in ("ringspan", "simulated")


def plan_of(case: BenchCase) -> RingPlan:
    """ringspan's plan for a case."""
    return rs.plan(
        case.pattern,
        case.tokens,
        ring_size=case.ranks,
        layout=case.layout,
        causal=case.causal,
        heads=case.heads,
        head_dim=case.head_dim,
        dtype=case.torch_dtype,
    )


def planned_bytes(case: BenchCase) -> list[int]:
    """Bytes of each rank according to ringspan's plan: the rows of every tensor, and parcels at their peak."""
    plan = plan_of(case)
    return [plan.memory(rank, backward=case.backward).total for rank in range(case.ranks)]


def predicted_bytes(case: BenchCase, seen: Seen) -> int:
    """Bytes of all ranks together; ``seen`` has those of shorter lengths.

    Other implementations are assumed to grow as they did between their last two lengths, or quadratically if there is
    only one. Before the first, the rows of their tensors are a lower bound.
    """
    if case.implementation == "ringspan":
        return sum(planned_bytes(case)) + case.ranks * OVERHEAD_BYTES
    if case.implementation == "simulated":
        return 2 * sum(planned_bytes(case)) + OVERHEAD_BYTES  # whole tensors, and each rank's rows of them
    alone = rs.plan(Full(), case.tokens, heads=case.heads, head_dim=case.head_dim, dtype=case.torch_dtype)
    rows = alone.memory(0, backward=case.backward).rows
    return max(rows, int(extrapolate(seen, case.tokens))) if seen else rows


def expected_seconds(case: BenchCase, seen: Seen) -> float:
    """Seconds of forward and backward, extrapolated from two or more shorter lengths; 0 if there are fewer."""
    return extrapolate(seen, case.tokens) if len(seen) > 1 else 0.0


def extrapolate(seen: Seen, tokens: int) -> float:
    """Extrapolate with the exponent of the last two lengths, clamped to 1 .. 2; 2 if there is only one length.

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
    """Why a case cannot succeed under these limits; empty if it may."""
    needed = predicted_bytes(case, bytes_seen)
    if needed > limits.memory_bytes:
        how = "planned" if is_planned(case) else "expected"
        return f"{how} to need {needed / 2**20:,.0f} MiB; {limits.memory_bytes / 2**20:,.0f} MiB allowed"
    seconds = expected_seconds(case, seconds_seen)
    if seconds > _SURELY_TOO_SLOW * limits.seconds:
        return f"expected to take about {seconds:.0f} s; {limits.seconds:.0f} s allowed"
    return ""


@dataclass(frozen=True)
class CaseForecast:
    """What is known about a case before it runs. ``exact`` memory comes from a plan; otherwise it is a lower bound."""

    case: BenchCase
    memory_bytes: int
    exact: bool
    obstacle: str

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "case": self.case.as_json()}


def forecast_case(case: BenchCase, limits: TrialLimits) -> CaseForecast:
    obstacle = IMPLEMENTATIONS[case.implementation].missing() or refusal(case, limits, {}, {})
    return CaseForecast(case, predicted_bytes(case, {}), is_planned(case), obstacle)


def conditions(threads: int) -> dict[str, Any]:
    """What must be equal for two trials to be comparable: machine, versions, and threads per rank."""
    machine = describe_machine()
    same = ("processor", "cores", "torch", "cpu_capability", "python")
    return {"ringspan": rs.__version__, "threads": threads, **{name: machine[name] for name in same}}


class TrialStore:
    """The trials in a journal that were run under the current conditions. Trials of other conditions are counted only.

    ``repeat_disturbed`` ignores trials that other programs disturbed, so that they run again. ``of_last_run`` takes the
    conditions of the last stored trial instead of the current ones, to write a report from stored trials.
    """

    def __init__(
        self,
        path: Path,
        threads: int,
        *,
        fresh: bool = False,
        repeat_disturbed: bool = False,
        of_last_run: bool = False,
    ) -> None:
        self.path, self.conditions = path, conditions(threads)
        self.others = 0
        self._trials: dict[tuple[BenchCase, int], Trial] = {}
        if fresh:
            path.unlink(missing_ok=True)
        self._journal = Journal(path)
        lines = [line for line in read_journal(path) if "case" in line]  # a suite adds lines of its own
        if of_last_run and lines:
            self.conditions = lines[-1]["conditions"]
        self.fingerprint = hashlib.sha256(json.dumps(self.conditions, sort_keys=True).encode()).hexdigest()[:12]
        for line in lines:
            if line["fingerprint"] != self.fingerprint:
                self.others += 1
                continue
            trial = trial_from_json({k: v for k, v in line.items() if k not in ("fingerprint", "conditions")})
            if not (repeat_disturbed and trial.disturbed):
                self._trials[trial.case, trial.round] = trial  # a later trial replaces an earlier one
            else:
                self._trials.pop((trial.case, trial.round), None)

    def __len__(self) -> int:
        return len(self._trials)

    def find(self, case: BenchCase, number: int, limits: TrialLimits) -> Trial | None:
        """The trial of a case in a round, if it is stored and still valid under these limits."""
        trial = self._trials.get((case, number))
        return trial if trial is not None and trial.holds_under(limits) else None

    def stored_case(self, case: BenchCase) -> BenchCase:
        """The stored case that equals this one up to its layout: an older planner may have chosen another one."""
        alike = (stored for stored, _ in self._trials if replace(stored, layout=case.layout) == case)
        return case if any(stored == case for stored, _ in self._trials) else next(alike, case)

    def append(self, trial: Trial) -> None:
        """Add a line, and return when it is on disk."""
        self._journal.append({"fingerprint": self.fingerprint, "conditions": self.conditions, **trial.as_json()})
        self._trials[trial.case, trial.round] = trial


@dataclass(frozen=True)
class BenchSettings:
    """Limits, repetitions and threads. A trial that takes longer than ``long_seconds`` with its start is run once."""

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
    run: RunTrial | None = run_trial,
) -> Iterator[Trial]:
    """Yield every trial as it ends, and one for each case that is not run, with the reason.

    A ladder ends at its first length that fails: longer ones are not tried. ``announce(step, text)`` is called before
    each trial, with its number out of ``len(cases) * rounds``. Stored trials are not run again. With ``run=None``
    nothing is run: only stored trials are reported.
    """
    ladders: defaultdict[BenchCase, _Ladder] = defaultdict(_Ladder)
    step = 0
    for tokens in sorted({case.tokens for case in cases}):
        of_length = [case for case in cases if case.tokens == tokens]
        for number in range(1, settings.rounds + 1):
            for case in of_length:
                step += 1
                ladder = ladders[case.ladder]
                trial = store.find(case, number, settings.limits)
                if number == 1 and (obstacle := ladder.obstacle(case, settings.limits, trial, reporting=run is None)):
                    yield obstacle
                if ladder.ended or (number > 1 and ladder.walls.get(tokens, 0.0) > settings.long_seconds):
                    continue
                if trial is None:
                    if run is None:
                        continue
                    announce(step, f"round {number}: {case}")
                    trial = _run_undisturbed(case, number, settings, run)
                    store.append(trial)
                ladder.learn(trial)
                yield trial


class _Ladder:
    """What the lengths measured so far tell about one implementation on one number of ranks."""

    def __init__(self) -> None:
        self.ended = ""
        self.seconds: dict[int, float] = {}
        self.bytes: dict[int, float] = {}
        self.walls: dict[int, float] = {}

    def obstacle(self, case: BenchCase, limits: TrialLimits, stored: Trial | None, reporting: bool) -> Trial | None:
        """The reason not to try a case, which ends the ladder; None if there is none or its trial is stored.

        A report from stored trials ignores what is installed and free now.
        """
        if self.ended:
            return Trial(case, 1, "not tried", limits, self.ended)
        if stored is not None:
            return None
        missing = "" if reporting else IMPLEMENTATIONS[case.implementation].missing()
        if missing:
            self.ended = missing
            return Trial(case, 1, "not installed", limits, missing)
        if reason := refusal(case, limits if reporting else _within_free_memory(limits), self.bytes, self.seconds):
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


def _within_free_memory(limits: TrialLimits) -> TrialLimits:
    """The budget was free when the run began; other programs may have taken some of it since."""
    return replace(limits, memory_bytes=min(limits.memory_bytes, psutil.virtual_memory().available))


def _run_undisturbed(case: BenchCase, number: int, settings: BenchSettings, run: RunTrial) -> Trial:
    """Run a trial, and repeat it if other programs disturbed it; the least disturbed one if they always did."""
    limits, best = _within_free_memory(settings.limits), None
    for attempt in range(1, settings.attempts + 1):
        trial = replace(run(case, number, limits, settings.threads), attempts=attempt)
        if not trial.measured or not trial.disturbed:
            return trial
        if best is None or trial.foreign_cores < best.foreign_cores:
            best = trial
    assert best is not None
    return replace(best, attempts=settings.attempts)
