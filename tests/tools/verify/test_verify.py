"""`ringspan verify` finds a real ring real, and every faulty one faulty, for the right reason."""

from __future__ import annotations

import dataclasses
from functools import lru_cache
from typing import Any

import pytest

from ringspan.geometry import Dilated, Full
from ringspan.tools.verify.check import (
    NOT_A_RING,
    NOT_PROVEN,
    REAL,
    Answers,
    ByRing,
    Check,
    Unsupported,
    sentence,
    status,
)
from ringspan.tools.verify.expected import expect
from ringspan.tools.verify.report import make_page
from ringspan.tools.verify.run import QUESTIONS, LocalTeam, examine, judge, no_answers
from ringspan.tools.verify.settings import Settings, Subject, default_tokens, settings_for, shortened
from ringspan.tools.verify.speed import SpeedAnswer
from tests.ranks import starts_processes
from tests.tools.verify.faulty import TWELVE

# Memory is measured of these; it takes rings of 4 and 8.
LARGE = ("honest", "gathers_all_keys")
SMALL = (
    *(name for name in TWELVE if name not in LARGE),
    *(
        "equal_shards_only",
        "computes_the_whole",
        "flips_a_byte",
        "sees_one_too_far",
        "attends_alone",
        "mixes_heads",
        "drops_a_row",
        "raises",
    ),
)
EXPOSED_BY = {
    "averages": "the output is exact",
    "sends_16_bits": "the output is exact",
    "detaches_remote_rows": "the gradients are exact",
    "loses_an_odd_row": "the output is exact",
    "rank_0_computes_all": "every rank does its share",
    "gathers_all_keys": "memory falls as 1/k",
    "wrong_in_batches": "the output is exact",
    "wrong_past_512": "the output is exact",
    "wrong_past_4096": "the output is exact",
    "wrong_with_gqa": "grouped KV heads are exact",
    "wrong_every_tenth_call": "the output is exact",
    "swaps_heads": "the output is exact",
}
pytestmark = [starts_processes, pytest.mark.timeout(900)]  # the first test of a group starts its rings
TIMED = {"more ranks are faster", "communication is hidden"}  # sequences are too short here to mean anything
PATTERN = Dilated((32, 256, 2048), (1, 4, 16))


def examine_all(
    group: Any, device: Any, subjects: tuple[Subject, ...], settings: Settings, questions: tuple[str, ...]
) -> list[Answers]:
    oracle = lru_cache(expect)
    return [examine(group, device, subject, settings, questions, oracle) for subject in subjects]  # type: ignore[arg-type]


def settings_of(subject: Subject, sizes: list[int], tokens: int, dtype: str) -> Settings:
    return dataclasses.replace(settings_for(subject, sizes, tokens, dtype), trials=1)


@lru_cache
def answers_of(subjects: tuple[Subject, ...], settings: Settings, memory: bool) -> list[ByRing]:
    """One launch for each ring size serves all subjects."""
    found: list[ByRing] = [{} for _ in subjects]
    for size in sorted({1, 2, *(settings.memory_rings if memory else ())}):
        asked = tuple(QUESTIONS)[0 if memory else 1 :] if size <= 2 else ("memory",)
        ranks = LocalTeam(800.0).run(size, examine_all, subjects, settings, asked)
        for i, answers in enumerate(found):
            answers[size] = [given[i] for given in ranks]
    return found


def examined(name: str) -> tuple[Subject, ByRing, Settings]:
    names = LARGE if name in LARGE else SMALL
    subjects = tuple(Subject.load(f"tests.tools.verify.faulty:{each}") for each in names)
    settings = settings_of(subjects[0], [1, 2], 4224, "float32")
    return subjects[names.index(name)], answers_of(subjects, settings, name in LARGE)[names.index(name)], settings


def checks_of(name: str) -> dict[str, Check]:
    _, answers, settings = examined(name)
    return {check.name: check for check in judge(answers, settings)}


def failing(checks: dict[str, Check]) -> dict[str, str]:
    return {n: f"{c.reason} ({c.figure})" for n, c in checks.items() if c.verdict == "FAILS" and n not in TIMED}


@pytest.mark.parametrize("layout", [pytest.param("contiguous", marks=pytest.mark.slow), "zigzag"])
def test_ringspan_is_real(layout: Any) -> None:
    subject = Subject(pattern=PATTERN, layout=layout)
    settings = settings_of(subject, [1, 2], 2048, "float64")
    (answers,) = answers_of((subject,), settings, memory=True)
    checks = {check.name: check for check in judge(answers, settings)}
    assert failing(checks) == {}
    assert {c.verdict for n, c in checks.items() if n not in TIMED} == {"holds"}
    assert "planned and sent" in checks["bytes on the wire"].figure


def test_an_honest_ring_of_somebody_else_is_real() -> None:
    """Two ring sizes are enough: memory is measured on rings of 4 and 8 as well."""
    checks = checks_of("honest")
    assert failing(checks) == {}
    assert {c.verdict for n, c in checks.items() if n not in TIMED} == {"holds"}


@pytest.mark.parametrize("name", TWELVE)
def test_each_of_twelve_faults_is_exposed(name: str) -> None:
    checks = checks_of(name)
    assert EXPOSED_BY[name] in failing(checks)
    assert status(checks.values()) == NOT_A_RING


def test_a_fault_of_one_kind_fails_no_other_check() -> None:
    exact = {"the gradients are exact", "uneven shards are exact", "grouped KV heads are exact"}
    assert set(failing(checks_of("detaches_remote_rows"))) == exact
    assert set(failing(checks_of("gathers_all_keys"))) == {"memory falls as 1/k"}
    assert set(failing(checks_of("wrong_with_gqa"))) == {"grouped KV heads are exact"}
    assert set(failing(checks_of("rank_0_computes_all"))) == {"every rank does its share"}
    assert set(failing(checks_of("computes_the_whole"))) == {"no work is done twice"}


def test_the_reason_names_the_case() -> None:
    assert "batch" in failing(checks_of("wrong_in_batches"))["the output is exact"]
    assert "702 tokens" in failing(checks_of("wrong_past_512"))["the output is exact"]
    assert "4,2" in failing(checks_of("wrong_past_4096"))["the output is exact"]
    assert "100% of the work" in failing(checks_of("rank_0_computes_all"))["every rank does its share"]


def test_a_flipped_byte_is_found() -> None:
    assert "differ from the definition" in failing(checks_of("flips_a_byte"))["the output is exact"]


def test_a_rank_that_computes_the_whole_is_found_though_everything_is_right() -> None:
    assert "2.00 x" in checks_of("computes_the_whole")["no work is done twice"].figure


def test_causality_off_by_one_is_found() -> None:
    reasons = failing(checks_of("sees_one_too_far"))
    assert "the output is exact" in reasons
    assert "may not see" in reasons["causality holds"]


def test_a_ring_in_name_only_is_found() -> None:
    reasons = failing(checks_of("attends_alone"))
    assert {"tokens mix across ranks", "bytes on the wire", "the output is exact"} <= set(reasons)


def test_attention_over_heads_is_found() -> None:
    assert {"heads do not mix", "tokens mix across ranks"} <= set(failing(checks_of("mixes_heads")))


def test_what_is_refused_on_every_rank_is_not_supported_and_no_failure() -> None:
    checks = checks_of("equal_shards_only")
    assert failing(checks) == {}
    assert checks["uneven shards are exact"].verdict == "not supported"
    assert checks["grouped KV heads are exact"].reason == "NotImplementedError: no grouped KV heads"
    told = sentence([*checks.values()], "mine", [1, 2])
    assert "not supported: uneven shards are exact" in told


def test_what_only_some_ranks_refuse_is_a_failure() -> None:
    _, answers, settings = examined("honest")
    first, second = answers[2]
    partly = {**answers, 2: [first, {**second, "grouped": Unsupported("NotImplementedError: not here")}]}
    (check,) = (check for check in judge(partly, settings) if check.name == "grouped KV heads are exact")
    assert (check.verdict, check.figure) == ("FAILS", "1 of 2 ranks raised")


def test_an_attention_that_raises_fails_with_its_reason() -> None:
    checks = checks_of("raises")
    essential = [check for check in checks.values() if check.name != "memory falls as 1/k"]
    assert {check.verdict for check in essential if check.essential} == {"FAILS"}
    assert "NotImplementedError: not on this device" in checks["the output is exact"].reason
    assert "not asked, since exact failed" in checks["bytes on the wire"].reason


def test_rows_that_come_back_changed_are_found() -> None:
    assert "rows came back changed" in failing(checks_of("drops_a_row"))["the sequence is split"]


def test_nothing_is_real_while_an_essential_check_was_not_seen() -> None:
    _, answers, settings = examined("honest")
    without = {size: ranks for size, ranks in answers.items() if size != 8}
    checks = judge(without, settings)
    assert status(checks) == NOT_PROVEN
    told = sentence(checks, "mine", [1, 2])
    assert told.startswith("Not proven")
    assert "memory falls as 1/k (it needs rings of 4 and 8)" in told
    assert "real" not in told


def test_a_ring_that_died_fails() -> None:
    _, answers, settings = examined("honest")
    checks = judge({**answers, 2: no_answers(2, "rank 1 died with exit code -11")}, settings)
    assert status(checks) == NOT_A_RING
    assert "exit code -11" in checks[0].reason


def at_seconds(answers: ByRing, alone: float, ring_of_two: float, busy_cores: float, share: float) -> ByRing:
    """The same answers, as if they had been timed otherwise."""
    changed = {size: [dict(given) for given in ranks] for size, ranks in answers.items()}
    for size, seconds in ((1, alone), (2, ring_of_two)):
        for given in changed[size]:
            used = seconds * (size + busy_cores)
            given["speed"] = SpeedAnswer((seconds,), seconds, seconds, used, share if size > 1 else 1.0)
    return changed


@pytest.mark.parametrize(
    ("ring_of_two", "share", "verdict"),
    [(0.8, 0.75, "holds"), (1.1, 0.75, "FAILS"), (0.8, 0.5, "FAILS"), (0.55, 0.5, "holds")],
)
def test_speed_is_judged_by_what_the_layout_allows(ring_of_two: float, share: float, verdict: str) -> None:
    _, answers, settings = examined("honest")
    checks = {c.name: c for c in judge(at_seconds(answers, 1.0, ring_of_two, 0.0, share), settings)}
    speed = checks["more ranks are faster"]
    assert speed.verdict == verdict
    assert ("75% of the causal work" in speed.reason) == (share == 0.75)


def test_contiguous_causal_work_is_known_to_be_unbalanced() -> None:
    _, answers, _ = examined("honest")
    assert answers[2][0]["speed"].busiest_share == pytest.approx(0.75, abs=0.01)


def test_disturbed_times_are_neither_judged_nor_shown() -> None:
    subject, answers, settings = examined("honest")
    for busy_cores, shown in ((0.0, True), (1.0, False)):
        timed = at_seconds(answers, 12.34, 8.76, busy_cores, 0.75)
        checks = judge(timed, settings)
        page = make_page(subject, settings, "here", timed, checks, "ringspan verify")
        picture = page.parts[-1]
        assert len(picture.figure.axes) == (2 if shown else 1)  # type: ignore[union-attr]
        text = str([part.rows for part in page.parts if hasattr(part, "rows")]) + page.sentence
        assert ("8.76" in text) == shown
        assert ("disturbed" in text) != shown
        assert status(checks) == REAL
        assert ("not seen: more ranks are faster (the machine was busy" in page.sentence) != shown


def test_the_named_pattern_is_run_and_rates_are_never_changed() -> None:
    subject = Subject(pattern=Dilated((2048, 16384, 65536), (1, 8, 32)))
    settings = settings_for(subject, [1, 2, 4], default_tokens(subject.pattern), "float64")
    assert {case.pattern.dilation_rates for case in settings.all_cases} == {(1, 8, 32)}  # type: ignore[union-attr]
    for case in (settings.memory, settings.counted, settings.speed, settings.exact[-1]):
        assert case.pattern == subject.pattern
        assert case.tokens >= 65536
    for case in (*settings.exact, settings.reach, *settings.uneven, *settings.grouped):
        assert case.tokens >= max(case.pattern.segment_lengths)  # type: ignore[union-attr]
        assert all(branch.segment_length >= 4 * branch.rate for branch in case.pattern.branches(case.tokens))
    assert any(case.kv_heads > 32 for case in settings.exact)  # so that every offset is met


def test_cases_cover_odd_rows_batches_heads_and_lengths() -> None:
    settings = settings_for(
        Subject("tests.tools.verify.faulty:honest", Full(), "contiguous"), [1, 2, 4], 8192, "float32"
    )
    assert all(case.tokens % 4 == 0 and case.tokens // 4 % 2 for case in settings.exact)
    assert {1, 3, 5} < {case.heads for case in settings.exact}
    assert {1, 2, 3} <= {case.batch for case in settings.exact}
    assert max(case.tokens for case in settings.exact) > 8192
    assert all(case.grouped for case in settings.grouped)
    assert all(case.tokens % 4 for case in settings.uneven)


def test_shortened_patterns_keep_their_rates() -> None:
    assert shortened(Full(), 10) == Full()
    assert shortened(Dilated((8, 64), (1, 2)), 640) == Dilated((8, 64), (1, 2))
    assert shortened(Dilated((8, 64), (1, 64)), 10) == Dilated((1 * 4, 64), (1, 64))


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("no.such.module:f", "No module named"),
        ("tests.tools.verify.faulty:nothing", "nothing"),
        ("tests.tools.verify.faulty", "package.module:function"),
        ("tests.tools.verify.faulty:rs", "must be a function"),
    ],
)
def test_a_target_that_is_no_function_is_refused(target: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Subject.load(target)
