"""What each process of a trial does: make its own rows, warm up at a tiny length, run one forward and backward."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from ringspan.bench.cases import Case
from ringspan.bench.implementations import IMPLEMENTATIONS, RingAttention, SimulatedAttention
from ringspan.evidence.machine import busy_seconds
from ringspan.evidence.masked import Attend
from ringspan.measure import limit_growth, peak_growth

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
