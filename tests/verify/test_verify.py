"""`ringspan verify` finds a real ring real, and every faulty one faulty, for the right reason."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest

from ringspan.geometry import Dilated, Full
from ringspan.verify.examine import Answers, examine
from ringspan.verify.settings import Settings, Size
from ringspan.verify.subject import Subject, shortened
from ringspan.verify.team import LocalTeam
from ringspan.verify.verdicts import ByRing, Check, judge, sentence

RIGHT = ("computes_the_whole", "honest")  # in every number: only memory and work tell them apart
WRONG = ("flips_a_byte", "drops_gradients", "sees_one_too_far", "attends_alone", "mixes_heads", "raises")
SMALL = Size(256, 2, 64)
PLAIN = Settings(
    exact=Size(96, 2, 16),
    counted=SMALL,
    memory=SMALL,
    speed=SMALL,
    memory_backward=False,
    memory_alone_counts=False,
    trials=1,
)
LARGE = replace(PLAIN, memory=Size(2048, 64, 64))
DILATED = Settings(
    exact=Size(97, 3, 16), counted=Size(1024, 2, 64), memory=Size(16384, 8, 64), speed=Size(2048, 2, 64), trials=1
)
SHORT_ANSWERS = {"more ranks are faster", "communication is hidden"}  # sequences are too short here to mean anything


def examine_all(group: Any, device: Any, subjects: list[Subject], settings: Settings) -> list[Answers]:
    return [examine(group, device, subject, settings) for subject in subjects]


@lru_cache
def verdicts(subjects: tuple[Subject, ...], settings: Settings, sizes: tuple[int, ...]) -> list[dict[str, Check]]:
    """One launch for each ring size serves all subjects."""
    found = {size: LocalTeam(100.0).run(size, examine_all, subjects, settings) for size in sizes}
    checks = []
    for i in range(len(subjects)):
        answers: ByRing = {size: [given[i] for given in ranks] for size, ranks in found.items()}
        checks.append({check.name: check for check in judge(answers, parallel_ranks=2)})
    return checks


def checks_of(name: str) -> dict[str, Check]:
    names, settings, sizes = (RIGHT, LARGE, (1, 2, 4)) if name in RIGHT else (WRONG, PLAIN, (1, 2))
    subjects = tuple(Subject.load(f"tests.verify.faulty:{each}") for each in names)
    return verdicts(subjects, settings, sizes)[names.index(name)]


def failing(checks: dict[str, Check]) -> dict[str, str]:
    return {n: f"{c.reason} ({c.figure})" for n, c in checks.items() if c.verdict == "FAILS" and n not in SHORT_ANSWERS}


@pytest.mark.parametrize("place", [0, 1], ids=["contiguous", "zigzag"])
def test_ringspan_is_real(place: int) -> None:
    pattern = Dilated((32, 96, 8192), (1, 2, 4))
    subjects = (Subject(pattern=pattern, layout="contiguous"), Subject(pattern=pattern, layout="zigzag"))
    checks = verdicts(subjects, DILATED, (1, 2, 4))[place]
    assert failing(checks) == {}
    assert "planned and sent" in checks["bytes on the wire"].figure


def test_an_honest_ring_of_somebody_else_is_real() -> None:
    assert failing(checks_of("honest")) == {}


def test_a_flipped_byte_is_found() -> None:
    checks = checks_of("flips_a_byte")
    assert "differ from a dense oracle" in failing(checks)["the output is exact"]


def test_lost_gradients_are_found_though_the_output_is_right() -> None:
    assert set(failing(checks_of("drops_gradients"))) == {"the gradients are exact"}


def test_a_rank_that_computes_the_whole_is_found_though_everything_is_right() -> None:
    checks = checks_of("computes_the_whole")
    assert set(failing(checks)) == {"memory falls as 1/k", "no work is done twice"}
    assert "4.00 x" in checks["no work is done twice"].figure


def test_causality_off_by_one_is_found() -> None:
    reasons = failing(checks_of("sees_one_too_far"))
    assert "the output is exact" in reasons
    assert "may not see" in reasons["causality holds"]


def test_a_ring_in_name_only_is_found() -> None:
    reasons = failing(checks_of("attends_alone"))
    assert {"tokens mix across ranks", "bytes on the wire", "the output is exact"} <= set(reasons)


def test_attention_over_heads_is_found() -> None:
    assert {"heads do not mix", "tokens mix across ranks"} <= set(failing(checks_of("mixes_heads")))


def test_an_attention_that_raises_fails_with_its_reason() -> None:
    checks = checks_of("raises")
    assert all(check.verdict == "FAILS" for check in checks.values())
    assert "NotImplementedError: not on this device" in checks["memory falls as 1/k"].reason
    assert "not asked, since memory failed" in checks["the output is exact"].reason
    assert sentence([*checks.values()], "raises", [1]).startswith("This is not the ring")


def test_shortened_patterns_fit_the_sequence() -> None:
    assert shortened(Full(), 10) == Full()
    assert shortened(Dilated((8, 64), (1, 2)), 64) == Dilated((8, 64), (1, 2))
    assert max(shortened(Dilated((8, 64), (1, 2)), 10).segment_lengths) == 10  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("no.such.module:f", "No module named"),
        ("tests.verify.faulty:nothing", "nothing"),
        ("tests.verify.faulty", "package.module:function"),
        ("tests.verify.faulty:rs", "must be a function"),
    ],
)
def test_a_target_that_is_no_function_is_refused(target: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Subject.load(target)
