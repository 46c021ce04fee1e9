"""Checks, and the verdict that hangs on them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

Verdict = Literal["holds", "FAILS", "not seen", "not supported"]
Answers = dict[str, Any]  # question -> what a rank answered
ByRing = dict[int, list[Answers]]  # ring size -> the answers of its ranks

# Exit statuses of the command; 2 is a command line that cannot be read.
REAL, NOT_A_RING, NOT_PROVEN = 0, 1, 3


@dataclass(frozen=True)
class Check:
    """One line of the report.

    ``figure`` is what was measured, ``reason`` what the verdict means, ``ran`` what it was measured on. No ring is real
    while an essential check was not seen; the others say how fast it is, and a busy machine may hide that.
    """

    name: str
    verdict: Verdict
    figure: str
    reason: str
    ran: str
    essential: bool = True


@dataclass(frozen=True)
class Failed:
    """A question without an answer, and why."""

    reason: str


@dataclass(frozen=True)
class Unsupported:
    """What the subject raised for a case that it need not support."""

    reason: str


def answers_to(answers: ByRing, question: str) -> dict[int, list[Any]]:
    """Ring size -> what its ranks answered; without the rings that were not asked."""
    return {size: [given[question] for given in ranks] for size, ranks in answers.items() if question in ranks[0]}


def first_failure(answers: ByRing, question: str) -> str:
    """Why a question has no answer; empty if it has."""
    for size, ranks in answers_to(answers, question).items():
        for rank, given in enumerate(ranks):
            if isinstance(given, Failed):
                asked = not given.reason.startswith("not asked")
                return f"rank {rank} of {size} raised {given.reason}" if asked else given.reason
    return ""


def check_with(answers: ByRing, question: str, name: str, ran: str, judge: Callable[[], Check]) -> Check:
    """Judge the answers to a question, unless some rank has none."""
    failure = first_failure(answers, question)
    return Check(name, "FAILS", "no answer", failure, ran) if failure else judge()


def status(checks: Iterable[Check]) -> int:
    """The exit status that the checks amount to."""
    verdicts = [(check.verdict, check.essential) for check in checks]
    if any(verdict == "FAILS" for verdict, _ in verdicts):
        return NOT_A_RING
    return NOT_PROVEN if ("not seen", True) in verdicts else REAL


def sentence(checks: list[Check], subject: str, sizes: Iterable[int]) -> str:
    """One plain sentence. It claims nothing that was not seen.

    >>> held = Check("work is split evenly", "holds", "", "", "")
    >>> speed = Check("more ranks are faster", "not seen", "", "a busy machine", "", essential=False)
    >>> sentence([held, speed], "mine", [1, 2])
    'The ring is real: 1 check holds on rings of 1, 2 (mine); not seen: more ranks are faster (a busy machine).'
    """
    by = {verdict: [check for check in checks if check.verdict == verdict] for verdict in Verdict.__args__}  # type: ignore[attr-defined]
    rings = ", ".join(map(str, sizes))
    if by["FAILS"]:
        names = ", ".join(check.name for check in by["FAILS"])
        return f"This is not the ring it should be: {len(by['FAILS'])} of {len(checks)} checks fail ({names})."
    held = f"{len(by['holds'])} check{'s hold' if len(by['holds']) != 1 else ' holds'} on rings of {rings} ({subject})"
    rest = "".join(
        f"; {verdict}: {', '.join(f'{check.name} ({check.reason})' for check in by[verdict])}"
        for verdict in ("not seen", "not supported")
        if by[verdict]
    )
    if status(checks) == NOT_PROVEN:
        return f"Not proven: no check fails, but not all could be made. {held}{rest}."
    return f"The ring is real: {held}{rest}."
