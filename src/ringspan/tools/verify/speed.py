"""Speed: is a larger ring faster, as far as its layout allows, and does communication cost time?

Neither is judged on a machine that something else keeps busy.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

from torch import Tensor

from ringspan.planning.api import plan
from ringspan.schedule import communication_seconds
from ringspan.tools.measure import busy_seconds
from ringspan.tools.verify.check import ByRing, Check, answers_to, check_with
from ringspan.tools.verify.examination import Examination
from ringspan.tools.verify.settings import Settings

LEAST_EFFICIENCY = 0.75  # of the speed-up that the layout's balance allows
LEAST_HIDDEN = 0.5
QUIET_CORES = 0.25  # something else may keep this much busy; beyond that, speed is not judged
SHORTEST_TRAVEL = 1e-3  # seconds: below that, how much of it is hidden is noise


@dataclass(frozen=True)
class SpeedAnswer:
    """Seconds of forward and backward, trial by trial; none where ranks share a core, and speed means nothing."""

    seconds: tuple[float, ...]
    window_seconds: float  # from before the first trial to after the last
    own_cpu_seconds: float  # of this process meanwhile
    busy_cpu_seconds: float  # of the whole machine meanwhile
    busiest_share: float  # of the causal work, by the layout


@dataclass(frozen=True)
class OverlapAnswer:
    """Seconds that a forward waited for parcels, and seconds that the same parcels take with nothing else to do."""

    waited: float
    travelled: float


def ask_speed(examination: Examination) -> SpeedAnswer:
    case, ring = examination.settings.speed, examination.bound.ring
    if not examination.settings.trials:
        return SpeedAnswer((), 0.0, 0.0, 0.0, 0.0)
    layout_plan = plan(
        case.pattern, case.tokens, ring_size=ring.size, layout=ring.layout, causal=True, heads=case.heads
    )
    pairs = [layout_plan.work(rank) for rank in range(ring.size)]
    expected, rows = examination.expect(case, True, backward=True), examination.own_rows(case)
    seconds, results = [], list[list[Tensor]]()
    examination.barrier()
    start, own, busy = time.perf_counter(), time.process_time(), busy_seconds()
    for _ in range(examination.settings.trials):
        examination.barrier()
        seconds.append(
            examination.device.seconds(lambda: results.append(examination.call(rows, case, True, backward=True)))
        )
        examination.compare(expected, results.pop())
    window, own, busy = time.perf_counter() - start, time.process_time() - own, busy_seconds() - busy
    return SpeedAnswer(tuple(seconds), window, own, busy, max(pairs) / sum(pairs))


def ask_overlap(examination: Examination) -> OverlapAnswer | None:
    """How long a forward waits for parcels, beside the same run that computes nothing. Only ringspan can be asked."""
    case, bound = examination.settings.speed, examination.bound
    if not bound.subject.is_ringspan or not examination.settings.trials:
        return None
    rows, expected = examination.own_rows(case), examination.expect(case, True, backward=False)
    waited, travelled = [], []
    for _ in range(examination.settings.trials):
        examination.barrier()
        bound.ring.reset_counters()
        found = examination.call(rows, case, True, backward=False)
        waited.append(bound.ring.counters.waiting_seconds)
        examination.compare(expected, found)
        travelled.append(communication_seconds(bound.ring, case.pattern, case.tokens, rows[1], rows[2], causal=True))
    return OverlapAnswer(statistics.median(waited), statistics.median(travelled))


def seconds_by_ring(answers: ByRing) -> dict[int, float]:
    """Median seconds of forward and backward; in each trial the slowest rank counts."""
    return {
        size: statistics.median(max(trial) for trial in zip(*(answer.seconds for answer in ranks), strict=True))
        for size, ranks in answers_to(answers, "speed").items()
        if ranks[0].seconds
    }


def disturbance(answers: ByRing) -> float:
    """How many cores something else kept busy while rings were timed, as the first rank of each saw it."""
    foreign = [0.0]
    for ranks in answers_to(answers, "speed").values():
        if ranks[0].seconds:
            own = sum(answer.own_cpu_seconds for answer in ranks)
            foreign.append((ranks[0].busy_cpu_seconds - own) / ranks[0].window_seconds)
    return max(foreign)


def is_disturbed(answers: ByRing) -> bool:
    """Whether what was timed says nothing about the ring."""
    return disturbance(answers) > QUIET_CORES


def check_speed(answers: ByRing, settings: Settings) -> Check:
    name, ran = "more ranks are faster", f"{settings.speed}, causal"

    def judge() -> Check:
        seconds = seconds_by_ring(answers)
        unseen = _not_seen(name, ran, answers)
        if unseen is not None:
            return unseen
        size = max(seconds)
        ratio = seconds[1] / seconds[size]
        share = answers_to(answers, "speed")[size][0].busiest_share
        figure = f"{ratio:.2f} x with {size} ranks ({seconds[1]:.2f} s, {seconds[size]:.2f} s)"
        allows = f"the layout allows {1 / share:.2f} x"
        if 1 / share < 0.98 * size:
            allows += f", since its busiest rank has {share:.0%} of the causal work"
        least = LEAST_EFFICIENCY / share
        verdict = "holds" if ratio >= least else "FAILS"
        reason = f"{'at least' if verdict == 'holds' else 'less than'} {least:.2f} x; {allows}"
        return Check(name, verdict, figure, reason, ran, essential=False)  # type: ignore[arg-type]

    return check_with(answers, "speed", name, ran, judge)


def check_overlap(answers: ByRing, settings: Settings) -> Check:
    name, ran = "communication is hidden", f"{settings.speed}, causal"

    def judge() -> Check:
        unseen = _not_seen(name, ran, answers)
        if unseen is not None:
            return unseen
        given = answers_to(answers, "overlap")[max(seconds_by_ring(answers))]
        if None in given:
            return Check(name, "not seen", "", "only ringspan counts how long it waits", ran, essential=False)
        waited, travelled = (max(getattr(answer, key) for answer in given) for key in ("waited", "travelled"))
        figure = f"waited {waited * 1000:.1f} ms of {travelled * 1000:.1f} ms"
        if travelled < SHORTEST_TRAVEL:
            return Check(name, "not seen", figure, "parcels travel too short a time to tell", ran, essential=False)
        hidden = max(0.0, 1 - waited / travelled)
        figure = f"{hidden:.0%} of it: {figure}"
        if hidden < LEAST_HIDDEN:
            reason = f"less than {LEAST_HIDDEN:.0%}: ranks wait for parcels instead of computing"
            return Check(name, "FAILS", figure, reason, ran, essential=False)
        return Check(name, "holds", figure, "parcels travel while the rank computes", ran, essential=False)

    return check_with(answers, "overlap", name, ran, judge)


def _not_seen(name: str, ran: str, answers: ByRing) -> Check | None:
    """Why speed cannot be judged here; None if it can."""
    if len(seconds_by_ring(answers)) < 2:
        return Check(
            name, "not seen", "not timed", "no ring whose ranks each have a core or device", ran, essential=False
        )
    if is_disturbed(answers):
        figure = f"{disturbance(answers):.1f} cores were busy with something else"
        return Check(name, "not seen", figure, "the machine was busy with other programs", ran, essential=False)
    return None
