"""From answers to verdicts: each check has a line, a figure and a verdict, and says why it fails."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from ringspan.verify.examine import (
    Answers,
    BytesAnswer,
    ExactAnswer,
    Failed,
    MemoryAnswer,
    OverlapAnswer,
    ReachAnswer,
    SpeedAnswer,
    WorkAnswer,
)

Verdict = Literal["holds", "FAILS", "not seen"]
ByRing = dict[int, list[Answers]]  # ring size -> the answers of its ranks

MOST_WORKSPACE_BYTES = 64 * 2**20  # what a rank may need beyond its share of the sequence
FRAMING = 0.02  # headers and acknowledgements, as a share of what is sent
FRAMING_BYTES = 2**16  # and what the barriers around the measurement may send, for each rank
WORK_TOLERANCE = 0.05
LEAST_EFFICIENCY = 0.75  # speed-up over ranks: a ring of two must be at least 1.5 x as fast as one
LEAST_HIDDEN = 0.5
QUIET_CORES = 0.25  # something else may keep this much busy; beyond that, speed is not judged
SHORTEST_TRAVEL = 1e-3  # seconds: below that, how much of it is hidden is noise


@dataclass(frozen=True)
class Check:
    """One line of the report. ``figure`` is what was measured; ``reason`` says what the verdict means."""

    name: str
    verdict: Verdict
    figure: str
    reason: str


def judge(answers: ByRing, parallel_ranks: int) -> list[Check]:
    """All checks, in the order in which one would ask."""
    checks: list[tuple[str, str, Callable[[ByRing], Check]]] = [
        ("the sequence is split", "exact", check_split),
        ("tokens mix across ranks", "reach", check_mixing),
        ("heads do not mix", "reach", check_heads),
        ("causality holds", "reach", check_causality),
        ("the output is exact", "exact", check_output),
        ("the gradients are exact", "exact", check_gradients),
        ("bytes on the wire", "bytes", check_bytes),
        ("memory falls as 1/k", "memory", check_memory),
        ("no work is done twice", "work", check_work),
        ("more ranks are faster", "speed", lambda found: check_speed(found, parallel_ranks)),
        ("communication is hidden", "overlap", lambda found: check_overlap(found, parallel_ranks)),
    ]
    found = []
    for name, question, check in checks:
        failure = _first_failure(answers, question)
        if failure is None:
            found.append(check(answers))
        elif failure[2].startswith("not asked"):
            found.append(Check(name, "FAILS", "no answer", failure[2]))
        else:
            size, rank, reason = failure
            found.append(Check(name, "FAILS", "no answer", f"rank {rank} of {size} raised {reason}"))
    return found


def _first_failure(answers: ByRing, question: str) -> tuple[int, int, str] | None:
    for size, ranks in answers.items():
        for rank, given in enumerate(ranks):
            if isinstance(given[question], Failed):
                return size, rank, given[question].reason
    return None


def check_split(answers: ByRing) -> Check:
    name = "the sequence is split"
    for size, ranks in answers.items():
        exact: list[ExactAnswer] = [given["exact"] for given in ranks]
        held = sorted(position for answer in exact for position in answer.positions)
        if held != list(range(len(held))):
            return Check(name, "FAILS", f"ring of {size}", "rows are held twice, or by nobody")
        for rank, answer in enumerate(exact):
            if answer.returned_rows != len(answer.positions):
                reason = f"rank {rank} was given {len(answer.positions)} rows and returned {answer.returned_rows}"
                return Check(name, "FAILS", f"ring of {size}", reason)
    largest = max(answers)
    rows = [len(given["exact"].positions) for given in answers[largest]]
    figure = f"{sum(rows)} rows over {largest} ranks: {_range(rows)} each"
    return Check(name, "holds", figure, "every row is on exactly one rank, and comes back from it")


def check_mixing(answers: ByRing) -> Check:
    name = "tokens mix across ranks"
    moved = missed = 0
    for size, ranks in answers.items():
        if size == 1:
            continue
        for answer in _reaches(ranks):
            moved, missed = moved + answer.moved_far, missed + answer.missed
    if missed:
        return Check(name, "FAILS", f"{missed} rows did not move", "a row does not see a token that it should see")
    if not moved and len(answers) > 1:
        return Check(name, "FAILS", "no row moved", "no rank sees the tokens of another")
    reason = "changing a token changes every row that may see it, on the other ranks too"
    return Check(name, "holds", f"{moved:,} rows of other ranks moved", reason)


def check_heads(answers: ByRing) -> Check:
    mixed = sum(answer.other_heads for ranks in answers.values() for answer in _reaches(ranks))
    if mixed:
        reason = "changing one head changes another: attention is over heads instead of tokens"
        return Check("heads do not mix", "FAILS", f"{mixed:,} rows of other heads moved", reason)
    return Check(
        "heads do not mix", "holds", "0 rows of other heads moved", "changing one head leaves the others alone"
    )


def check_causality(answers: ByRing) -> Check:
    name = "causality holds"
    for size, ranks in answers.items():
        for rank, given in enumerate(ranks):
            for answer in given["reach"]:
                if answer.leaked:
                    figure = f"{answer.leaked:,} rows moved"
                    what = "with causality on, " if answer.causal else ""
                    reason = (
                        f"{what}rows of rank {rank} of {size} moved with token {answer.token}, which they may not see"
                    )
                    return Check(name, "FAILS", figure, reason)
    tried = {answer.token for ranks in answers.values() for answer in _reaches(ranks)}
    reason = "no row moves with a token that it may not see"
    return Check(name, "holds", f"0 rows moved, {len(tried)} tokens at borders tried", reason)


def _reaches(ranks: list[Answers]) -> Iterable[ReachAnswer]:
    return (answer for given in ranks for answer in given["reach"])


def check_output(answers: ByRing) -> Check:
    return _check_error(answers, "the output is exact", "output_error", "allowed_output")


def check_gradients(answers: ByRing) -> Check:
    return _check_error(answers, "the gradients are exact", "gradient_error", "allowed_gradient")


def _check_error(answers: ByRing, name: str, error: str, allowed: str) -> Check:
    worst = {
        size: max((getattr(given["exact"], error) for given in ranks), default=0.0) for size, ranks in answers.items()
    }
    limit = min(getattr(given["exact"], allowed) for ranks in answers.values() for given in ranks)
    figure = f"largest error {max(worst.values()):.1e}, allowed {limit:.1e}"
    wrong = [size for size, found in worst.items() if not found <= limit]  # a NaN is wrong too
    if wrong:
        return Check(name, "FAILS", figure, f"rings of {', '.join(map(str, wrong))} differ from a dense oracle")
    return Check(name, "holds", figure, f"equal to a dense oracle on rings of {', '.join(map(str, worst))}")


def check_bytes(answers: ByRing) -> Check:
    name = "bytes on the wire"
    figures, unseen = [], ""
    for size, ranks in answers.items():
        for case in range(len(ranks[0]["bytes"])):
            given: list[BytesAnswer] = [rank["bytes"][case] for rank in ranks]
            problem = _wire_problem(size, given)
            if problem:
                return Check(name, "FAILS", *problem)
            unseen = given[0].why_not_seen
        if size == max(answers):
            figures = [_wire_figure(rank["bytes"][0] for rank in ranks)]
    ours = answers[max(answers)][0]["bytes"][0].planned is not None
    reason = (
        "as planned to the byte, and the interface agrees" if ours else "at least what the ranks need of each other"
    )
    if unseen:
        verdict: Verdict = "holds" if ours else "not seen"
        reason = f"as planned to the byte; {unseen}" if ours else unseen
        return Check(name, verdict, figures[0], reason)
    return Check(name, "holds", figures[0], reason)


def _wire_problem(size: int, given: list[BytesAnswer]) -> tuple[str, str] | None:
    for rank, answer in enumerate(given):
        if answer.planned != answer.counted:
            figure = f"planned {answer.planned:,}, sent {answer.counted:,}"
            return figure, f"rank {rank} of {size} sent other bytes than planned"
    seen, needed = given[0].interface, given[0].needed
    if seen is None:
        return None
    if seen < needed:
        figure = f"{seen:,} seen, {needed:,} needed"
        return figure, f"on a ring of {size} less went over the wire than the ranks need: somebody had the rows already"
    if given[0].planned is not None:
        planned = sum(answer.planned or 0 for answer in given)
        most = planned * (1 + FRAMING) + FRAMING_BYTES * size
        if not planned <= seen <= most:
            return (
                f"planned {planned:,}, seen {seen:,}",
                f"on a ring of {size} the interface saw other bytes than planned",
            )
    return None


def _wire_figure(given: Iterable[BytesAnswer]) -> str:
    answers = list(given)
    seen = answers[0].interface
    interface = "" if seen is None else f"{seen:,} on the interface"
    if answers[0].planned is None:
        return interface or "not counted"
    planned = sum(answer.planned or 0 for answer in answers)
    return f"{planned:,} planned and sent" + (f", {interface}" if interface else "")


def fitted_sizes(answers: ByRing) -> list[int]:
    """The ring sizes that memory is fitted over: without 1 where parcels are large, since alone there are none."""
    alone_counts = next(iter(answers.values()))[0]["memory"].alone_counts
    return [size for size in answers if size > 1 or alone_counts]


def fit_memory(answers: ByRing) -> tuple[float, float]:
    """Least squares of the largest peak of each ring size k as a + b / k, in bytes."""
    sizes = fitted_sizes(answers)
    peaks = [max(_memory(given).peak_bytes for given in answers[size]) for size in sizes]
    slope, intercept = statistics.linear_regression([1 / size for size in sizes], peaks)
    return intercept, slope


def check_memory(answers: ByRing) -> Check:
    name = "memory falls as 1/k"
    sizes = fitted_sizes(answers)
    if len(sizes) < 2:
        return Check(name, "not seen", "too few rings", "at least two ring sizes make a line: --ranks 1,2,4")
    a, b = fit_memory(answers)
    figure = f"{a / 2**20:.0f} + {b / 2**20:.0f} / k MiB"
    if a > MOST_WORKSPACE_BYTES:
        reason = f"{a / 2**20:.0f} MiB do not fall with the ring, more than {MOST_WORKSPACE_BYTES // 2**20}"
        return Check(name, "FAILS", figure, f"{reason}: a rank holds more than its share of the sequence")
    return Check(name, "holds", figure, f"the peak of a rank, fitted over rings of {', '.join(map(str, sizes))}")


def _memory(given: Answers) -> MemoryAnswer:
    answer: MemoryAnswer = given["memory"]
    return answer


def check_work(answers: ByRing) -> Check:
    name = "no work is done twice"
    work = {size: [_work(given).flops for given in ranks] for size, ranks in answers.items()}
    if not work.get(1) or not work[1][0]:
        return Check(name, "not seen", "0 FLOPs counted", "its kernels do not go through torch's dispatcher")
    ratios = {size: sum(flops) / work[1][0] for size, flops in work.items()}
    worst = max(ratios, key=lambda size: (round(abs(ratios[size] - 1), 2), size))
    figure = f"ring of {worst}: {ratios[worst]:.2f} x the FLOPs of one rank"
    if abs(ratios[worst] - 1) > WORK_TOLERANCE:
        reason = "ranks compute what others compute too" if ratios[worst] > 1 else "some of the work is not done"
        return Check(name, "FAILS", figure, reason)
    return Check(name, "holds", figure, "all ranks together compute what one computes alone")


def _work(given: Answers) -> WorkAnswer:
    answer: WorkAnswer = given["work"]
    return answer


def speed_of(answers: ByRing) -> dict[int, float]:
    """Median seconds of forward and backward by ring size; in each trial the slowest rank counts."""
    seconds = {size: [_speed(given).seconds for given in ranks] for size, ranks in answers.items()}
    return {
        size: statistics.median(max(trial) for trial in zip(*of_ranks, strict=True))
        for size, of_ranks in seconds.items()
        if of_ranks[0]
    }


def _speed(given: Answers) -> SpeedAnswer:
    answer: SpeedAnswer = given["speed"]
    return answer


def foreign_cores(ranks: list[Answers]) -> float:
    """How many cores something else kept busy while the ranks of a ring were timed, as the first rank saw it."""
    first = _speed(ranks[0])
    own = sum(_speed(given).own_cpu_seconds for given in ranks)
    return max(0.0, (first.busy_cpu_seconds - own) / first.window_seconds)


def check_speed(answers: ByRing, parallel_ranks: int) -> Check:
    name = "more ranks are faster"
    size = _largest_parallel(answers, parallel_ranks)
    if size is None:
        return Check(name, "not seen", f"{parallel_ranks} device(s)", "no ring whose ranks all have one of their own")
    foreign = max(foreign_cores(answers[each]) for each in (1, size))
    if foreign > QUIET_CORES:
        reason = "other programs were busy meanwhile; ask again when the machine is quiet"
        return Check(name, "not seen", f"{foreign:.1f} cores were busy with something else", reason)
    seconds = speed_of(answers)
    ratio = seconds[1] / seconds[size]
    figure = f"{ratio:.2f} x with {size} ranks ({seconds[1]:.2f} s, {seconds[size]:.2f} s)"
    if ratio < LEAST_EFFICIENCY * size:
        return Check(name, "FAILS", figure, f"less than {LEAST_EFFICIENCY * size:.2f} x")
    return Check(name, "holds", figure, f"at least {LEAST_EFFICIENCY * size:.2f} x is asked; forward and backward")


def check_overlap(answers: ByRing, parallel_ranks: int) -> Check:
    name = "communication is hidden"
    size = _largest_parallel(answers, parallel_ranks)
    if size is None:
        return Check(name, "not seen", f"{parallel_ranks} device(s)", "no ring whose ranks all have one of their own")
    given: list[OverlapAnswer | None] = [rank["overlap"] for rank in answers[size]]
    known = [answer for answer in given if answer is not None]
    if len(known) < len(given):
        return Check(name, "not seen", "", "only ringspan counts how long it waits")
    waited, travelled = (max(getattr(answer, key) for answer in known) for key in ("waited", "travelled"))
    figure = f"waited {waited * 1000:.1f} ms of {travelled * 1000:.1f} ms"
    if travelled < SHORTEST_TRAVEL:
        return Check(name, "not seen", figure, "parcels travel too short a time to tell")
    hidden = max(0.0, 1 - waited / travelled)
    figure = f"{hidden:.0%} of it: {figure}"
    if hidden < LEAST_HIDDEN:
        return Check(
            name, "FAILS", figure, f"less than {LEAST_HIDDEN:.0%}: ranks wait for parcels instead of computing"
        )
    return Check(name, "holds", figure, "parcels travel while the rank computes")


def _largest_parallel(answers: ByRing, parallel_ranks: int) -> int | None:
    """The largest ring above one whose ranks each have a device of their own."""
    return max((size for size in answers if 1 < size <= parallel_ranks), default=None)


def _range(values: list[int]) -> str:
    return str(values[0]) if len(set(values)) == 1 else f"{min(values)} to {max(values)}"


def all_hold(checks: list[Check]) -> bool:
    return all(check.verdict != "FAILS" for check in checks)


def sentence(checks: list[Check], subject: str, sizes: Any) -> str:
    """One plain sentence."""
    failing = [check.name for check in checks if check.verdict == "FAILS"]
    unseen = [check.name for check in checks if check.verdict == "not seen"]
    rings = ", ".join(map(str, sizes))
    if failing:
        return f"This is not the ring it should be: {len(failing)} of {len(checks)} checks fail ({', '.join(failing)})."
    rest = f"; not seen: {', '.join(unseen)}" if unseen else ""
    return f"The ring is real: {len(checks) - len(unseen)} checks hold on rings of {rings} ({subject}){rest}."
