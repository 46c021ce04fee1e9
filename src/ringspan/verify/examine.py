"""The questions that a rank is asked, in order, and the checks that are made of the answers.

Every rank of a ring runs `examine` at the same time. If a question raises, the error is its answer, and the questions
after it are not asked: the ring may be in pieces.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from ringspan.evidence.device import Device
from ringspan.verify import exactness, memory, reach, speed, wire, work
from ringspan.verify.check import Answers, ByRing, Check, Failed
from ringspan.verify.examination import Examination
from ringspan.verify.expected import Oracle, expect
from ringspan.verify.settings import Settings
from ringspan.verify.subject import Subject

# Memory comes first, while the process is fresh; what a subject may refuse comes last.
QUESTIONS: dict[str, Callable[[Examination], Any]] = {
    "memory": memory.ask_memory,
    "exact": exactness.ask_exact,
    "reach": reach.ask_reach,
    "bytes": wire.ask_bytes,
    "work": work.ask_work,
    "speed": speed.ask_speed,
    "overlap": speed.ask_overlap,
    "uneven": exactness.ask_uneven,
    "grouped": exactness.ask_grouped,
}

CHECKS: tuple[Callable[[ByRing, Settings], Check], ...] = (
    exactness.check_split,
    reach.check_mixing,
    reach.check_heads,
    reach.check_causality,
    exactness.check_output,
    exactness.check_gradients,
    exactness.check_uneven,
    exactness.check_grouped,
    wire.check_bytes,
    memory.check_memory,
    work.check_work,
    work.check_shares,
    speed.check_speed,
    speed.check_overlap,
)


def examine(
    group: dist.ProcessGroup,
    device: Device,
    subject: Subject,
    settings: Settings,
    questions: Sequence[str] = tuple(QUESTIONS),
    oracle: Oracle = expect,
) -> Answers:
    """Ask this rank everything, or only some questions."""
    examination = Examination(subject.on(group), device, settings, oracle)
    answers: Answers = {}
    broken = ""
    for name in questions:
        if broken:
            answers[name] = Failed(f"not asked, since {broken} failed")
            continue
        try:
            answers[name] = QUESTIONS[name](examination)
        except Exception as error:  # the subject may be anybody's code: whatever it raises is an answer
            answers[name] = Failed("".join(traceback.format_exception_only(error)).strip())
            broken = name
    return {**answers, "comparisons": list(examination.comparisons.values())}


def no_answers(size: int, reason: str) -> list[Answers]:
    """What stands for the answers of a ring that died or did not answer in time."""
    return [{**{name: Failed(reason) for name in QUESTIONS}, "comparisons": []} for _ in range(size)]


def judge(answers: ByRing, settings: Settings) -> list[Check]:
    """All checks, in the order in which one would ask."""
    return [check(answers, settings) for check in CHECKS]
