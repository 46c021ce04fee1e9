"""Memory: the peak of a rank, which must fall as the ring grows."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import torch
from torch import Tensor

from ringspan.tools.verify.check import ByRing, Check, answers_to, check_with
from ringspan.tools.verify.examination import Examination
from ringspan.tools.verify.settings import Case, Settings

MOST_WORKSPACE_BYTES = 64 * 2**20


@dataclass(frozen=True)
class MemoryAnswer:
    """Peak growth of forward and backward, this rank's rows included."""

    peak_bytes: int


def ask_memory(examination: Examination) -> MemoryAnswer | None:
    """The first question, while the process is fresh. None on a ring whose memory says nothing."""
    settings, results = examination.settings, list[list[Tensor]]()
    case, small, causal = settings.memory, settings.warm_up, settings.memory_causal
    if examination.bound.ring.size not in settings.memory_rings:
        return None
    # Threads, libraries and connections are there before: their memory is not the sequence's.
    warm = examination.call(examination.own_rows(small), small, True, backward=True)
    examination.barrier()
    peak = examination.device.peak_growth(
        lambda: results.append(examination.call(examination.own_rows(case), case, causal, backward=True))
    )
    examination.barrier()
    examination.compare(examination.expect(small, True, backward=True), warm)
    examination.compare(examination.expect(case, causal, backward=True), results[0])
    return MemoryAnswer(peak)


def peaks(answers: ByRing) -> dict[int, int]:
    """Ring size -> the largest peak of a rank."""
    measured = answers_to(answers, "memory")
    return {size: max(given.peak_bytes for given in ranks) for size, ranks in measured.items() if ranks[0] is not None}


def fit(found: dict[int, int]) -> tuple[float, float]:
    """Least squares of the peaks by ring size k as a + b / k, in bytes."""
    slope, intercept = statistics.linear_regression([1 / size for size in found], list(found.values()))
    return intercept, slope


def most_bytes(case: Case) -> int:
    """What a rank may need beyond its share of the sequence: a workspace, and one of the tensors whole.

    A rank that gathers keys and values holds at least four: these, and their gradients.
    """
    number_bytes: int = getattr(torch, case.dtype).itemsize
    return MOST_WORKSPACE_BYTES + case.batch * case.tokens * case.heads * case.dim * number_bytes


def check_memory(answers: ByRing, settings: Settings) -> Check:
    name, ran = "memory falls as 1/k", str(settings.memory)

    def judge() -> Check:
        found = peaks(answers)
        if len(found) < 2:
            needed = (
                " and ".join(map(str, settings.memory_rings[:2])) if len(settings.memory_rings) > 1 else "two sizes"
            )
            return Check(name, "not seen", "too few rings", f"it needs rings of {needed}", ran)
        a, b = (x / 2**20 for x in fit(found))
        figure = f"{a:.0f} + {b:.0f} / k MiB"
        limit = most_bytes(settings.memory) / 2**20
        if a > limit:
            reason = f"{a:.0f} MiB do not fall with the ring, more than {limit:.0f}: a rank holds more than its share"
            return Check(name, "FAILS", figure, reason, ran)
        rings = ", ".join(map(str, found))
        return Check(name, "holds", figure, f"the peak of a rank, fitted over rings of {rings}", ran)

    return check_with(answers, "memory", name, ran, judge)
