"""Trials: one measurement of a case in fresh processes, within limits. What happens there is a result, not a crash."""

from __future__ import annotations

import datetime
import re
import time
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

from ringspan.bench.cases import Case, case_from_json
from ringspan.bench.ranks import RankFigures, measure_rank, measure_simulated_ring
from ringspan.evidence.machine import is_disturbed
from ringspan.processes import run_local_ranks

_OUT_OF_MEMORY = re.compile(r"MemoryError|can't allocate memory|Cannot allocate memory|bad_alloc")

Ran = Literal["measured", "out of memory", "out of time", "crashed"]
DidNotRun = Literal["refused", "not installed", "not tried"]
Outcome = Ran | DidNotRun


@dataclass(frozen=True)
class Limits:
    """What a trial may take: bytes of all its processes together, and seconds with the start of the processes."""

    memory_bytes: int
    seconds: float


@dataclass(frozen=True)
class Trial:
    """What came of a trial, or why there was none. The slower rank counts.

    ``peak_bytes`` are those of each rank, and so are ``sent_bytes``, forward and backward, where they are counted.
    """

    case: Case
    round: int
    outcome: Outcome
    limits: Limits
    reason: str = ""
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    peak_bytes: tuple[int, ...] = ()
    foreign_cores: float = 0.0
    attempts: int = 1
    wall_seconds: float = 0.0
    sent_bytes: tuple[int, ...] = ()
    when: str = field(default_factory=lambda: datetime.datetime.now().isoformat(timespec="seconds"))

    @property
    def ran(self) -> bool:
        """Whether processes were started for it."""
        return self.outcome in get_args(Ran)

    @property
    def measured(self) -> bool:
        return self.outcome == "measured"

    @property
    def total_seconds(self) -> float:
        return self.forward_seconds + self.backward_seconds

    @property
    def disturbed(self) -> bool:
        return is_disturbed(self.foreign_cores, self.total_seconds)

    def holds_under(self, limits: Limits) -> bool:
        """Whether it would have ended the same under these limits, so that it need not be run again."""
        if self.measured:
            return sum(self.peak_bytes) <= limits.memory_bytes and self.wall_seconds <= limits.seconds
        if self.outcome == "out of memory":
            return limits.memory_bytes <= self.limits.memory_bytes
        return self.outcome == "crashed" or limits.seconds <= self.limits.seconds

    @property
    def _lists(self) -> dict[str, list[int]]:
        return {"peak_bytes": list(self.peak_bytes), "sent_bytes": list(self.sent_bytes)}

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "case": self.case.as_json(), **self._lists}


def trial_from_json(found: dict[str, Any]) -> Trial:
    """The trial that `Trial.as_json` wrote."""
    return Trial(
        **{
            **found,
            "case": case_from_json(found["case"]),
            "limits": Limits(**found["limits"]),
            "peak_bytes": tuple(found["peak_bytes"]),
            "sent_bytes": tuple(found.get("sent_bytes", ())),
        }
    )


def run_trial(case: Case, number: int, limits: Limits, threads: int = 1) -> Trial:
    """Run a case once, as its trial of round ``number``."""
    task = measure_simulated_ring if case.implementation == "simulated" else measure_rank
    share = limits.memory_bytes // case.processes
    start = time.monotonic()
    try:
        found = run_local_ranks(case.processes, task, case, share, threads=threads, timeout_seconds=limits.seconds)
    except (TimeoutError, RuntimeError) as error:
        outcome, reason = _what_failed(error, limits.seconds, share)
        return Trial(case, number, outcome, limits, reason, wall_seconds=time.monotonic() - start)
    return _combine(case, number, limits, [rank for ranks in found for rank in ranks], time.monotonic() - start)


def _what_failed(error: TimeoutError | RuntimeError, seconds: float, share: int) -> tuple[Ran, str]:
    """How a trial ended, in a word and a line; run_local_ranks names the rank in the message's first line."""
    if isinstance(error, TimeoutError):
        return "out of time", f"no result within {seconds:.0f} s"
    lines = str(error).strip().splitlines()
    rank = " ".join(lines[0].split()[:2])
    if _OUT_OF_MEMORY.search(str(error)):
        return "out of memory", f"{rank} needed more than its {share / 2**20:,.0f} MiB"
    return "crashed", lines[0] if len(lines) == 1 else f"{rank}: {lines[-1][:200]}"


def _combine(case: Case, number: int, limits: Limits, ranks: list[RankFigures], wall_seconds: float) -> Trial:
    """The slower rank counts. What kept the machine busy and was none of the ranks was somebody else."""
    own = sum(rank.own_cpu_seconds for rank in ranks[: case.processes])
    foreign = (ranks[0].busy_cpu_seconds - own) / ranks[0].window_seconds
    return Trial(
        case,
        number,
        "measured",
        limits,
        forward_seconds=max(rank.forward_seconds for rank in ranks),
        backward_seconds=max(rank.backward_seconds for rank in ranks),
        peak_bytes=tuple(rank.peak_bytes for rank in ranks),
        sent_bytes=tuple(rank.sent_bytes for rank in ranks if rank.sent_bytes is not None),
        foreign_cores=max(0.0, foreign),
        wall_seconds=wall_seconds,
    )
