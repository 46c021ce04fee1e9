"""Calls timed in turns, within one process."""

from __future__ import annotations

import datetime
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

import ringspan as rs
from ringspan.runtime.device import limit_growth, peak_growth
from ringspan.runtime.launch import run_local_ranks
from ringspan.tools.bench.cases import IMPLEMENTATIONS, Case, RingAttention, SimulatedAttention, case_from_json
from ringspan.tools.measure import Stopwatch, busy_seconds, is_disturbed
from ringspan.tools.peers import Attend

_ATTEMPTS = 3


class Clock:
    """Times calls in turns, so that a machine that drifts, drifts for all. A disturbed call is timed again.

    ``disturbed`` counts the calls that stayed disturbed; ``most_foreign_cores`` is the most that other programs took.
    """

    def __init__(self) -> None:
        self.most_foreign_cores = 0.0
        self.disturbed = 0

    def in_turns(
        self, calls: Mapping[str, Callable[[], object]], rounds: int, warm: bool = True
    ) -> dict[str, list[float]]:
        found: dict[str, list[float]] = {name: [] for name in calls}
        for turn in range(-1 if warm else 0, rounds):
            for name in sorted(calls, reverse=bool(turn % 2)):  # who comes first finds the caches of others
                if turn < 0:
                    calls[name]()
                else:
                    found[name].append(self._seconds(calls[name]))
        return found

    def _seconds(self, call: Callable[[], object]) -> float:
        watches: list[Stopwatch] = []
        while len(watches) < _ATTEMPTS:
            with Stopwatch() as watch:
                call()
            watches.append(watch)
            if not is_disturbed(watch.foreign_cores, watch.seconds):
                break
        best = min(watches, key=lambda watch: watch.foreign_cores)
        self.most_foreign_cores = max(self.most_foreign_cores, best.foreign_cores)
        self.disturbed += is_disturbed(best.foreign_cores, best.seconds)
        return best.seconds


def without_gradients(tensors: Sequence[Tensor], options: Mapping[str, Any]) -> Callable[[], object]:
    """A call of attention."""

    def call() -> object:
        with torch.no_grad():
            return rs.attention(*tensors, **options)

    return call


def with_gradients(tensors: Sequence[Tensor], grad: Tensor, options: Mapping[str, Any]) -> Callable[[], object]:
    """A call of attention and its gradients."""
    return lambda: torch.autograd.grad(rs.attention(*tensors, **options), tensors, grad)


_WARM_ROWS = 64
# Libraries, threads and connections come with the first call; they may take this much beside what is measured.
_START_UP_BYTES = 512 * 2**20


@dataclass(frozen=True)
class RankFigures:
    """What one rank measured. CPU seconds are those of the timed window: of this process, and of the whole machine."""

    forward_seconds: float
    backward_seconds: float
    peak_bytes: int
    own_cpu_seconds: float = 0.0
    busy_cpu_seconds: float = 0.0
    window_seconds: float = 0.0
    sent_bytes: int | None = None  # forward and backward; None if nobody counts


def measure_rank(case: Case, memory_bytes: int) -> list[RankFigures]:
    """One forward and, if the case asks for it, one backward on this rank's rows, within ``memory_bytes``.

    Peak memory counts from before the rows are made: inputs, masks, outputs and gradients are all in it.
    """
    limit_growth(memory_bytes + _START_UP_BYTES)
    implementation = IMPLEMENTATIONS[case.implementation]
    warm = case if implementation.compiled else replace(case, tokens=_WARM_ROWS * case.ranks)
    attend = implementation.prepare(warm)
    _run(warm, attend, _make_rows(warm))
    limit_growth(memory_bytes)

    def run() -> RankFigures:
        call = attend if implementation.compiled else implementation.prepare(case)
        found = _run(case, call, _make_rows(case))
        ring = call.ring if isinstance(call, RingAttention) else None
        return found if ring is None else replace(found, sent_bytes=ring.counters.bytes_sent)

    figures, peak = peak_growth(run)
    return [replace(figures, peak_bytes=peak)]


def measure_simulated_ring(case: Case, memory_bytes: int) -> list[RankFigures]:
    """The same on a simulated ring in this process: the peak of live bytes of each virtual rank, as it counts them."""
    limit_growth(memory_bytes + _START_UP_BYTES)
    attend = SimulatedAttention(case)
    figures = _run(case, attend, _make_rows(replace(case, ranks=1)))
    return [
        replace(figures, peak_bytes=counters.peak_bytes, sent_bytes=counters.bytes_sent)
        for counters in attend.ring.counters
    ]


def _make_rows(case: Case) -> list[Tensor]:
    rank = dist.get_rank()
    shape = (1, case.rows_of(rank), case.heads, case.dim)
    generator = torch.Generator().manual_seed(rank)
    return [
        torch.randn(shape, generator=generator, dtype=case.torch_dtype, requires_grad=case.backward) for _ in range(3)
    ]


def _run(case: Case, attend: Attend, rows: list[Tensor]) -> RankFigures:
    """Timed between barriers, so that no rank's time holds another's head start."""
    dist.barrier()
    busy, own = busy_seconds(), time.process_time()
    start = time.perf_counter()
    with torch.set_grad_enabled(case.backward):
        out = attend(*rows)
    forward, backward = time.perf_counter() - start, 0.0
    if case.backward:
        gradient = torch.ones_like(out)
        dist.barrier()
        middle = time.perf_counter()
        torch.autograd.grad(out, rows, gradient)
        backward = time.perf_counter() - middle
    dist.barrier()
    window = time.perf_counter() - start
    return RankFigures(forward, backward, 0, time.process_time() - own, busy_seconds() - busy, window)


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
