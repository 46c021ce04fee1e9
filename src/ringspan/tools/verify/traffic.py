"""Bytes: by the plan, by the ranks' own counters, and by the network interface, which counts for itself."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from ringspan.planning.api import plan
from ringspan.tools.measure import loopback_bytes_sent, why_not_seen
from ringspan.tools.verify.check import ByRing, Check, answers_to, check_with
from ringspan.tools.verify.examination import Examination
from ringspan.tools.verify.settings import Settings

FRAMING = 0.02  # headers and acknowledgements, as a share of what is sent
FRAMING_BYTES = 2**16  # and what the barriers around the measurement may send, for each rank
_MOST_TRIALS = 8  # others may use the interface too: the least is nearest the truth


@dataclass(frozen=True)
class BytesAnswer:
    """What this rank sent, by the plan and by its own count, and what the interface saw of all ranks together."""

    causal: bool
    planned: int | None  # of this rank; only ringspan has a plan
    counted: int | None
    needed: int  # bytes of K and V rows that the ranks together lack: not causal, nothing less can do
    interface: int | None
    why_not_seen: str


def ask_bytes(examination: Examination) -> list[BytesAnswer]:
    case, ring = examination.settings.counted, examination.bound.ring
    rows = examination.own_rows(case)
    unseen = why_not_seen(examination.group)
    answers = []
    for causal in (False, True):
        expected = examination.expect(case, causal, backward=False)
        planned = counted = None
        most, seen = float("inf"), list[int]()
        if examination.bound.subject.is_ringspan:
            priced = plan(
                case.pattern,
                case.tokens,
                ring_size=ring.size,
                layout=ring.layout,
                causal=causal,
                batch=case.batch,
                heads=case.heads,
                kv_heads=case.kv_heads,
                head_dim=case.dim,
                dtype=rows[0].dtype,
            )
            planned = priced.bytes_sent(ring.rank)
            most = _most_bytes(sum(priced.bytes_sent(rank) for rank in range(ring.size)), ring.size)
        while not seen or (not unseen and min(seen) > most and len(seen) < _MOST_TRIALS):
            ring.reset_counters()
            before = _interface(examination, unseen)
            found = examination.call(rows, case, causal, backward=False)
            counted = None if planned is None else ring.counters.bytes_sent
            seen.append(_interface(examination, unseen) - before)
            examination.compare(expected, found)
        lacking = 0 if causal or planned is not None else case.tokens * (ring.size - 1)
        needed = lacking * 2 * case.batch * case.kv_heads * case.dim * rows[0].element_size()
        answers.append(BytesAnswer(causal, planned, counted, needed, None if unseen else min(seen), unseen))
    return answers


def _interface(examination: Examination, unseen: str) -> int:
    """What the first rank reads while nobody sends; the same on all ranks, so that they agree on what to do next."""
    if unseen:
        return 0
    examination.barrier()
    reading = torch.tensor([loopback_bytes_sent()])
    dist.broadcast(reading, dist.get_global_rank(examination.group, 0), group=examination.group)
    examination.barrier()
    return int(reading)


def _most_bytes(planned: int, size: int) -> float:
    return planned * (1 + FRAMING) + FRAMING_BYTES * size


def check_bytes(answers: ByRing, settings: Settings) -> Check:
    name, ran = "bytes on the wire", str(settings.counted)

    def judge() -> Check:
        by_ring = answers_to(answers, "bytes")
        for size, ranks in by_ring.items():
            for given in zip(*ranks, strict=True):  # causal, and not
                problem = _problem(size, list(given))
                if problem:
                    return Check(name, "FAILS", *problem, ran)
        largest = [given[0] for given in by_ring[max(by_ring)]]  # not causal
        first, figures = largest[0], []
        if first.planned is not None:
            figures.append(f"{sum(answer.planned for answer in largest):,} planned and sent")
        if first.interface is not None:
            figures.append(f"{first.interface:,} on the interface")
        figure = ", ".join(figures) or "not counted"
        if first.planned is not None:
            reason = f"as planned to the byte; {first.why_not_seen or 'the interface agrees'}"
            return Check(name, "holds", figure, reason, ran)
        if first.why_not_seen:
            return Check(name, "not seen", figure, first.why_not_seen, ran)
        return Check(name, "holds", figure, "at least what the ranks need of each other", ran)

    return check_with(answers, "bytes", name, ran, judge)


def _problem(size: int, given: list[BytesAnswer]) -> tuple[str, str] | None:
    for rank, answer in enumerate(given):
        if answer.planned != answer.counted:
            figure = f"planned {answer.planned:,}, sent {answer.counted:,}"
            return figure, f"rank {rank} of {size} sent other bytes than planned"
    seen, needed = given[0].interface, given[0].needed
    if seen is None:
        return None
    if seen < needed:
        figure = f"{seen:,} seen, {needed:,} needed"
        return figure, f"on a ring of {size} less went over the wire than the ranks need of each other"
    if given[0].planned is not None:
        planned = sum(answer.planned or 0 for answer in given)
        if not planned <= seen <= _most_bytes(planned, size):
            figure = f"planned {planned:,}, seen {seen:,}"
            return figure, f"on a ring of {size} the interface saw other bytes than planned"
    return None
