"""How benchmarks measure: calls timed in turns in one process, and trials in fresh processes within limits.

`ringspan bench` and the suites in benchmarks/ share these. Knows one case at a time and no results of other trials.
"""

from __future__ import annotations

import datetime
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

import ringspan as rs
from ringspan.runtime.device import Cpu, Device, limit_growth
from ringspan.runtime.launch import run_local_ranks
from ringspan.tools.bench.cases import IMPLEMENTATIONS, BenchCase, RingAttention, SimulatedAttention, case_from_json
from ringspan.tools.measure import Stopwatch, busy_seconds, is_disturbed
from ringspan.tools.peers import Attend

_CPU = Cpu()
_ATTEMPTS = 3
_WARM_UP_ROWS = 64
# The first call loads libraries and starts threads and connections, which may take this much on top of the limit.
_START_UP_BYTES = 512 * 2**20
_OUT_OF_MEMORY = re.compile(r"MemoryError|can't allocate memory|Cannot allocate memory|bad_alloc")

Call = Callable[[], object]
Ran = Literal["measured", "out of memory", "out of time", "crashed"]
DidNotRun = Literal["refused", "not installed", "not tried"]
Outcome = Ran | DidNotRun


class TurnTimer:
    """Times calls in turns, so that a drift of the machine affects all of them. Disturbed calls are timed again.

    ``disturbed`` counts the calls that stayed disturbed after all attempts. ``most_foreign_cores`` is the highest load
    from other programs during a call whose time counts.
    """

    def __init__(self, stopwatch: Callable[[], Stopwatch] = Stopwatch) -> None:
        self.stopwatch = stopwatch
        self.most_foreign_cores = 0.0
        self.disturbed = 0

    def in_turns(self, calls: Mapping[str, Call], rounds: int, warm: bool = True) -> dict[str, list[float]]:
        """Seconds of each call in each round; with ``warm``, one round that is not timed comes first."""
        times: dict[str, list[float]] = {name: [] for name in calls}
        names = list(calls)
        for turn in range(-1 if warm else 0, rounds):
            for name in names[:: -1 if turn % 2 else 1]:  # the order alternates: the first call finds cold caches
                if turn < 0:
                    calls[name]()
                else:
                    times[name].append(self._seconds(calls[name]))
        return times

    def _seconds(self, call: Call) -> float:
        watches: list[Stopwatch] = []
        while len(watches) < _ATTEMPTS:
            with self.stopwatch() as watch:
                call()
            watches.append(watch)
            if not is_disturbed(watch.foreign_cores, watch.seconds):
                break
        best = min(watches, key=lambda watch: watch.foreign_cores)
        self.most_foreign_cores = max(self.most_foreign_cores, best.foreign_cores)
        self.disturbed += is_disturbed(best.foreign_cores, best.seconds)
        return best.seconds


@dataclass
class RankStopwatch(Stopwatch):
    """A stopwatch that all ranks of the default group use together: the slowest rank's time, equal on every rank.

    CPU time that is not used by the ranks is attributed to other processes.
    """

    def __enter__(self) -> RankStopwatch:
        dist.barrier()
        self._busy_before, self._own_before = busy_seconds(), time.process_time()
        self._started = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        elapsed = time.perf_counter() - self._started
        dist.barrier()
        window = time.perf_counter() - self._started
        mine = torch.tensor([elapsed, time.process_time() - self._own_before], dtype=torch.float64)
        every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(every, mine)
        own = sum(rank[1].item() for rank in every)
        foreign = torch.tensor([(busy_seconds() - self._busy_before - own) / window], dtype=torch.float64)
        dist.broadcast(foreign, 0)
        self.seconds = max(rank[0].item() for rank in every)
        self.foreign_cores = max(0.0, foreign.item())


def without_gradients(tensors: Sequence[Tensor], options: Mapping[str, Any]) -> Call:
    """A call of `rs.attention` without autograd."""

    def call() -> object:
        with torch.no_grad():
            return rs.attention(*tensors, **options)

    return call


def with_gradients(tensors: Sequence[Tensor], grad: Tensor, options: Mapping[str, Any]) -> Call:
    """A call of `rs.attention` and its backward pass."""
    return lambda: torch.autograd.grad(rs.attention(*tensors, **options), tensors, grad)


@dataclass(frozen=True)
class TrialLimits:
    """Limits of a trial: bytes of all its processes together, and seconds, including the start of the processes."""

    memory_bytes: int
    seconds: float


class TrialError(RuntimeError):
    """A task ran out of memory or time, or crashed: ``outcome`` says which, ``reason`` adds one line of detail."""

    def __init__(self, outcome: Ran, reason: str) -> None:
        super().__init__(f"{outcome}: {reason}")
        self.outcome: Ran = outcome
        self.reason = reason


def run_limited(
    processes: int, limits: TrialLimits, task: Callable[..., Any], *arguments: Any, threads: int = 1
) -> list[Any]:
    """Run a task in fresh processes within limits and return what each returned, in order of rank.

    Every process may grow by its share of the memory limit. Raises `TrialError`.
    """
    share = limits.memory_bytes // processes
    try:
        return run_local_ranks(
            processes, _limited, share, task, arguments, threads=threads, timeout_seconds=limits.seconds
        )
    except TimeoutError:
        raise TrialError("out of time", f"no result within {limits.seconds:.0f} s") from None
    except RuntimeError as error:
        lines = str(error).strip().splitlines()
        rank = " ".join(lines[0].split()[:2])  # run_local_ranks names the rank in the first line
        if _OUT_OF_MEMORY.search(str(error)):
            raise TrialError("out of memory", f"{rank} needed more than its {share / 2**20:,.0f} MiB") from error
        detail = lines[0] if len(lines) == 1 else f"{rank}: {lines[-1][:200]}"
        raise TrialError("crashed", detail) from error


def _limited(memory_bytes: int, task: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    limit_growth(memory_bytes + _START_UP_BYTES)
    return task(*arguments)


@dataclass(frozen=True)
class RankMetrics:
    """Measurements of one rank. CPU seconds cover the timed window: of this process, and of the whole machine."""

    forward_seconds: float
    backward_seconds: float
    peak_bytes: int
    own_cpu_seconds: float = 0.0
    busy_cpu_seconds: float = 0.0
    window_seconds: float = 0.0
    sent_bytes: int | None = None  # forward and backward; None if the implementation does not count them


def measure_rank(case: BenchCase, memory_bytes: int) -> list[RankMetrics]:
    """One forward pass and, if the case includes it, one backward pass on this rank's rows, within ``memory_bytes``."""
    call = prepare_warm(case)
    limit_growth(memory_bytes)
    return [measure_pass(case, call)]


def prepare_warm(case: BenchCase, device: Device = _CPU) -> Attend | None:
    """Warm up with a short sequence. Returns the call itself if it is compiled for one length."""
    implementation = IMPLEMENTATIONS[case.implementation]
    small = case if implementation.compiled else replace(case, tokens=_WARM_UP_ROWS * case.ranks)
    attend = implementation.prepare(small)
    _run(small, attend, _make_rows(small, device), device)
    return attend if implementation.compiled else None


def measure_pass(case: BenchCase, prepared: Attend | None = None, device: Device = _CPU) -> RankMetrics:
    """One pass, with its peak memory.

    That counts from before the rows are created, so it includes inputs, masks, outputs and gradients.
    """

    def run() -> RankMetrics:
        call = prepared or IMPLEMENTATIONS[case.implementation].prepare(case)
        metrics = _run(case, call, _make_rows(case, device), device)
        ring = call.ring if isinstance(call, RingAttention) else None
        return metrics if ring is None else replace(metrics, sent_bytes=ring.counters.bytes_sent)

    metrics, peak = device.peak_growth(run)
    return replace(metrics, peak_bytes=peak)


def time_passes(case: BenchCase, rounds: int, device: Device = _CPU) -> list[RankMetrics]:
    """Passes on the same rows, one after the other. The memory that the first one needed stays with the allocator."""
    call, rows = IMPLEMENTATIONS[case.implementation].prepare(case), _make_rows(case, device)
    return [_run(case, call, rows, device) for _ in range(rounds)]


def trace_case(case: BenchCase, path: Path, limits: TrialLimits, threads: int = 1) -> None:
    """Run a case of ringspan over a ring once more, after a pass that warms it up, and write a trace of it."""
    run_limited(case.ranks, limits, _trace_rank, case, path.absolute(), threads=threads)


def _trace_rank(case: BenchCase, path: Path) -> None:
    attend = RingAttention(case)
    assert attend.ring is not None
    rows = _make_rows(case)
    _run(case, attend, rows)
    with attend.ring.trace(path):
        _run(case, attend, rows)


def measure_simulated_ring(case: BenchCase, memory_bytes: int) -> list[RankMetrics]:
    """The same on a simulated ring in this process: the peak of live bytes that each virtual rank counts."""
    attend = SimulatedAttention(case)
    metrics = _run(case, attend, _make_rows(replace(case, ranks=1)))
    return [
        replace(metrics, peak_bytes=counters.peak_bytes, sent_bytes=counters.bytes_sent)
        for counters in attend.ring.counters
    ]


def _make_rows(case: BenchCase, device: Device = _CPU) -> list[Tensor]:
    rank = dist.get_rank()
    shape = (1, case.rows_of(rank), case.heads, case.head_dim)
    generator = torch.Generator(device.device).manual_seed(rank)
    options: dict[str, Any] = dict(dtype=case.torch_dtype, device=device.device, requires_grad=case.backward)
    return [torch.randn(shape, generator=generator, **options) for _ in range(3)]


def _run(case: BenchCase, attend: Attend, rows: list[Tensor], device: Device = _CPU) -> RankMetrics:
    """Times each pass between barriers, so that no rank starts ahead of another."""
    _barrier(device)
    busy, own = busy_seconds(), time.process_time()
    start = time.perf_counter()
    with torch.set_grad_enabled(case.backward):
        out = attend(*rows)
    device.synchronize()
    forward, backward = time.perf_counter() - start, 0.0
    if case.backward:
        gradient = torch.ones_like(out)
        _barrier(device)
        middle = time.perf_counter()
        torch.autograd.grad(out, rows, gradient)
        device.synchronize()
        backward = time.perf_counter() - middle
    _barrier(device)
    window = time.perf_counter() - start
    return RankMetrics(forward, backward, 0, time.process_time() - own, busy_seconds() - busy, window)


def _barrier(device: Device) -> None:
    dist.barrier()
    device.synchronize()  # NCCL only enqueues it


@dataclass(frozen=True)
class Trial:
    """The result of a trial, or the reason why there is none. Times are those of the slowest rank.

    ``peak_bytes`` holds one number per rank. So does ``sent_bytes`` (forward and backward), if they are counted.
    """

    case: BenchCase
    round: int
    outcome: Outcome
    limits: TrialLimits
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
        """Whether processes were started."""
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

    def holds_under(self, limits: TrialLimits) -> bool:
        """Whether the outcome would be the same under these limits, so that the trial need not be repeated."""
        if self.measured:
            return sum(self.peak_bytes) <= limits.memory_bytes and self.wall_seconds <= limits.seconds
        if self.outcome == "out of memory":
            return limits.memory_bytes <= self.limits.memory_bytes
        return self.outcome == "crashed" or limits.seconds <= self.limits.seconds

    def as_json(self) -> dict[str, Any]:
        lists = {"peak_bytes": list(self.peak_bytes), "sent_bytes": list(self.sent_bytes)}
        return {**asdict(self), "case": self.case.as_json(), **lists}


def trial_from_json(values: dict[str, Any]) -> Trial:
    """Inverse of `Trial.as_json`."""
    return Trial(
        **{
            **values,
            "case": case_from_json(values["case"]),
            "limits": TrialLimits(**values["limits"]),
            "peak_bytes": tuple(values["peak_bytes"]),
            "sent_bytes": tuple(values.get("sent_bytes", ())),
        }
    )


def run_trial(case: BenchCase, number: int, limits: TrialLimits, threads: int = 1) -> Trial:
    """Run a case once, as its trial of round ``number``."""
    task = measure_simulated_ring if case.implementation == "simulated" else measure_rank
    share = limits.memory_bytes // case.processes
    start = time.monotonic()
    try:
        metrics = run_limited(case.processes, limits, task, case, share, threads=threads)
    except TrialError as error:
        return Trial(case, number, error.outcome, limits, error.reason, wall_seconds=time.monotonic() - start)
    return combine_ranks(case, number, limits, [rank for ranks in metrics for rank in ranks], time.monotonic() - start)


def combine_ranks(
    case: BenchCase, number: int, limits: TrialLimits, ranks: list[RankMetrics], wall_seconds: float
) -> Trial:
    """The slowest rank counts. CPU time not used by our ranks is attributed to other processes."""
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
