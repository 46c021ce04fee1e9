"""`ringspan verify` passes a correct ring, and fails every faulty one for the right reason."""

from __future__ import annotations

import dataclasses
from functools import lru_cache
from itertools import accumulate
from typing import Any

import pytest

from ringspan.geometry import Dilated, Full, Pattern, Window
from ringspan.layout import Layout
from ringspan.tools.pages import Table
from ringspan.tools.verify.check import ByRing, Check, Measured, Unsupported, expect
from ringspan.tools.verify.exactness import judge_packed
from ringspan.tools.verify.run import MEASUREMENTS, LocalRanks, failed_ring, judge_all, measure_rank
from ringspan.tools.verify.speed import SpeedMeasurement
from ringspan.tools.verify.verify_page import FAIL, INCOMPLETE, PASS, headline, make_page, status
from ringspan.tools.verify.workload import AttentionUnderTest, VerifySettings, default_tokens, settings_for, shortened
from tests.ranks import shares_processes
from tests.tools.verify.faulty import TWELVE

# Memory is measured for these, on rings of 4 and 8.
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
PACKED = ("leaks_across_ranks", "cuts_documents", "joins_documents")
WITHOUT_MEMORY = tuple(MEASUREMENTS)[1:]
FAILED_CHECK = {
    "averages": "the output is exact",
    "sends_16_bits": "the output is exact",
    "detaches_remote_rows": "the gradients are exact",
    "loses_an_odd_row": "the output is exact",
    "rank_0_computes_all": "every rank computes its share",
    "gathers_all_keys": "memory per rank falls as 1/k",
    "wrong_in_batches": "the output is exact",
    "wrong_past_512": "the output is exact",
    "wrong_past_4096": "the output is exact",
    "wrong_with_gqa": "grouped KV heads are exact",
    "wrong_every_tenth_call": "the output is exact",
    "swaps_heads": "the output is exact",
}
pytestmark = [shares_processes(__name__), pytest.mark.timeout(900)]  # the first test of a group starts its rings
TIMED = {"more ranks are faster", "communication overlaps compute"}  # sequences are too short here to mean anything
PATTERN = Dilated((32, 256, 2048), (1, 4, 16))


def measure_all(
    group: Any,
    device: Any,
    implementations: tuple[AttentionUnderTest, ...],
    settings: VerifySettings,
    names: tuple[str, ...],
) -> list[Measured]:
    oracle = lru_cache(expect)
    return [measure_rank(group, device, implementation, settings, names, oracle) for implementation in implementations]  # type: ignore[arg-type]


def settings_of(
    implementation: AttentionUnderTest, sizes: list[int], tokens: int, dtype: str, trials: int = 1
) -> VerifySettings:
    return dataclasses.replace(settings_for(implementation, sizes, tokens, dtype), trials=trials)


@lru_cache
def measured_by_ring(
    implementations: tuple[AttentionUnderTest, ...],
    settings: VerifySettings,
    names: tuple[str, ...] = tuple(MEASUREMENTS),
) -> list[ByRing]:
    """One launch for each ring size serves all implementations."""
    found: list[ByRing] = [{} for _ in implementations]
    for size in sorted({1, 2, *(settings.memory_rings if "memory" in names else ())}):
        here = names if size <= 2 else ("memory",)
        ranks = LocalRanks(800.0).run(size, measure_all, implementations, settings, here)
        for i, measured in enumerate(found):
            measured[size] = [given[i] for given in ranks]
    return found


def loaded(names: tuple[str, ...]) -> tuple[AttentionUnderTest, ...]:
    return tuple(AttentionUnderTest.load(f"tests.tools.verify.faulty:{name}") for name in names)


def measurements_of(name: str) -> tuple[AttentionUnderTest, ByRing, VerifySettings]:
    names, measurements = (LARGE, tuple(MEASUREMENTS)) if name in LARGE else (SMALL, WITHOUT_MEMORY)
    implementations = loaded(names)
    settings = settings_of(implementations[0], [1, 2], 4224, "float32", trials=int(name in LARGE))
    measured = measured_by_ring(implementations, settings, measurements)
    return implementations[names.index(name)], measured[names.index(name)], settings


def checks_of(name: str) -> dict[str, Check]:
    _, measured, settings = measurements_of(name)
    return {check.name: check for check in judge_all(measured, settings)}


def failing(checks: dict[str, Check]) -> dict[str, str]:
    return {n: f"{c.reason} ({c.result})" for n, c in checks.items() if c.verdict == "FAIL" and n not in TIMED}


@pytest.mark.parametrize(
    ("pattern", "layout"),
    [
        pytest.param(PATTERN, "contiguous", marks=pytest.mark.slow),
        (PATTERN, "zigzag"),
        pytest.param(Window(100), "zigzag", marks=pytest.mark.slow),
        pytest.param(Window(64, right=16, dilation=4), "contiguous", marks=pytest.mark.slow),
        pytest.param(Window(30) + Dilated((256, 2048), (4, 16)), "contiguous", marks=pytest.mark.slow),
    ],
)
def test_ringspan_passes(pattern: Pattern, layout: Any) -> None:
    implementation = AttentionUnderTest(pattern=pattern, layout=layout)
    settings = settings_of(implementation, [1, 2], 2048, "float64")
    (measured,) = measured_by_ring((implementation,), settings)
    checks = {check.name: check for check in judge_all(measured, settings)}
    assert failing(checks) == {}
    assert {c.verdict for n, c in checks.items() if n not in TIMED} == {"pass"}
    assert "planned and sent" in checks["bytes sent are as expected"].result


def test_a_correct_implementation_passes() -> None:
    """Rings of 1 and 2 suffice: memory is measured on rings of 4 and 8 as well."""
    checks = checks_of("honest")
    assert failing(checks) == {}
    assert {c.verdict for n, c in checks.items() if n not in TIMED} == {"pass"}
    assert "documents do not see each other" in checks["packed documents are exact"].reason


@pytest.mark.parametrize("name", TWELVE)
def test_each_of_twelve_faults_fails_its_check(name: str) -> None:
    checks = checks_of(name)
    assert FAILED_CHECK[name] in failing(checks)
    assert status(checks.values()) == FAIL


def test_a_fault_fails_no_unrelated_check() -> None:
    exact = {"the gradients are exact", "uneven shards are exact", "grouped KV heads are exact"}
    assert set(failing(checks_of("detaches_remote_rows"))) == exact
    assert set(failing(checks_of("gathers_all_keys"))) == {"memory per rank falls as 1/k"}
    assert set(failing(checks_of("wrong_with_gqa"))) == {"grouped KV heads are exact"}
    assert set(failing(checks_of("rank_0_computes_all"))) == {"every rank computes its share"}
    assert set(failing(checks_of("computes_the_whole"))) == {"no work is duplicated"}


def test_the_reason_names_the_case() -> None:
    assert "batch" in failing(checks_of("wrong_in_batches"))["the output is exact"]
    assert "702 tokens" in failing(checks_of("wrong_past_512"))["the output is exact"]
    assert "4,2" in failing(checks_of("wrong_past_4096"))["the output is exact"]
    assert "100% of the work" in failing(checks_of("rank_0_computes_all"))["every rank computes its share"]


def test_a_flipped_byte_is_found() -> None:
    assert "differ from the definition" in failing(checks_of("flips_a_byte"))["the output is exact"]


def test_duplicated_work_is_found_though_results_are_right() -> None:
    assert "2.00 x" in checks_of("computes_the_whole")["no work is duplicated"].result


def test_causality_off_by_one_is_found() -> None:
    reasons = failing(checks_of("sees_one_too_far"))
    assert "the output is exact" in reasons
    assert "must not attend" in reasons["masked tokens have no effect"]


def test_a_ring_without_communication_is_found() -> None:
    reasons = failing(checks_of("attends_alone"))
    assert {"tokens attend across ranks", "bytes sent are as expected", "the output is exact"} <= set(reasons)


def packed_check(name: str) -> Check:
    """Functions that are wrong with packed documents only."""
    implementations = loaded(PACKED)
    settings = settings_of(implementations[0], [1, 2], 4224, "float32")
    measured = measured_by_ring(implementations, settings, ("packed",))[PACKED.index(name)]
    return judge_packed(measured, settings)


def test_documents_that_leak_across_ranks_are_found() -> None:
    check = packed_check("leaks_across_ranks")
    assert check.verdict == "FAIL"
    assert "ring of 2: token 231 changed rows that must not attend to it" in check.reason  # the last of a document
    assert "differ from the definition" in check.reason


@pytest.mark.parametrize(
    ("name", "case"), [("cuts_documents", "in 7 documents"), ("joins_documents", "in 4 documents")]
)
def test_documents_that_change_at_shard_borders_are_found(name: str, case: str) -> None:
    """Only a document that spans ranks shows the first, and only one that begins with a shard the second."""
    check = packed_check(name)
    assert check.verdict == "FAIL"
    assert "on a ring of 2" in check.reason
    assert case in check.reason
    assert "must not attend" not in check.reason


def windowed_checks(name: str) -> dict[str, Check]:
    """Functions that declare a window: one is correct, the others are wrong in one way each."""
    names = ("windowed", "ignores_the_window", "ignores_the_halo", "window_one_too_long")
    implementations = loaded(names)
    settings = settings_of(implementations[0], [1, 2], 4224, "float32", trials=0)
    measured = measured_by_ring(implementations, settings, WITHOUT_MEMORY)[names.index(name)]
    return {check.name: check for check in judge_all(measured, settings)}


def test_a_correct_window_passes() -> None:
    assert failing(windowed_checks("windowed")) == {}


def test_an_ignored_window_is_found() -> None:
    reasons = failing(windowed_checks("ignores_the_window"))
    assert {"the output is exact", "the gradients are exact", "masked tokens have no effect"} <= set(reasons)
    assert "must not attend" in reasons["masked tokens have no effect"]
    assert "window 40 right 8" in reasons["the output is exact"]


def test_a_window_off_by_one_is_found() -> None:
    reasons = failing(windowed_checks("window_one_too_long"))
    assert {"the output is exact", "masked tokens have no effect"} <= set(reasons)


def test_a_window_without_its_halo_is_found() -> None:
    reasons = failing(windowed_checks("ignores_the_halo"))
    assert {"tokens attend across ranks", "bytes sent are as expected", "the output is exact"} <= set(reasons)
    assert "masked tokens have no effect" not in reasons


def test_attention_over_heads_is_found() -> None:
    assert {"heads are independent", "tokens attend across ranks"} <= set(failing(checks_of("mixes_heads")))


def test_an_error_on_every_rank_means_not_supported() -> None:
    checks = checks_of("equal_shards_only")
    assert failing(checks) == {}
    assert checks["uneven shards are exact"].verdict == "not supported"
    assert checks["grouped KV heads are exact"].reason == "NotImplementedError: no grouped KV heads"
    assert checks["packed documents are exact"].verdict == "not supported"
    assert checks["packed documents are exact"].reason == "the function has no parameter lengths"
    told = headline([*checks.values()], "mine", [1, 2])
    assert "Not supported: uneven shards are exact" in told


def test_the_report_says_what_was_not_looked_at() -> None:
    def told(name: str) -> str:
        implementation, measured, settings = measurements_of(name)
        page = make_page(implementation, settings, "here", measured, judge_all(measured, settings), "ringspan verify")
        table = page.parts[0]
        assert isinstance(table, Table)
        return table.text.partition("Not looked at: ")[2]

    rest = "anything beyond 4,226 tokens or 2 ranks; dtypes other than float32;"
    assert told("honest").startswith(f"uneven shards, grouped KV heads and packed documents beyond 303 tokens; {rest}")
    assert told("wrong_past_512").startswith(
        f"packed documents; uneven shards and grouped KV heads beyond 303 tokens; {rest}"
    )
    assert told("equal_shards_only").startswith(f"uneven shards; grouped KV heads; packed documents; {rest}")
    assert "head dimensions other than 16, 32, 64 and 128; soft caps, sinks" in told("honest")


def test_an_error_on_some_ranks_only_is_a_failure() -> None:
    _, measured, settings = measurements_of("honest")
    first, second = measured[2]
    partly = {**measured, 2: [first, {**second, "grouped": Unsupported("NotImplementedError: not here")}]}
    (check,) = (check for check in judge_all(partly, settings) if check.name == "grouped KV heads are exact")
    assert (check.verdict, check.result) == ("FAIL", "1 of 2 ranks raised")


def test_an_attention_that_raises_fails_with_its_reason() -> None:
    checks = checks_of("raises")
    essential = [check for check in checks.values() if check.name != "memory per rank falls as 1/k"]
    assert {check.verdict for check in essential if check.essential} == {"FAIL"}
    assert "NotImplementedError: not on this device" in checks["the output is exact"].reason
    assert "skipped, because exact failed" in checks["bytes sent are as expected"].reason


def test_an_output_of_the_wrong_shape_is_found() -> None:
    assert "must be that of q" in failing(checks_of("drops_a_row"))["the sequence is sharded"]


def test_incomplete_without_an_essential_check() -> None:
    _, measured, settings = measurements_of("honest")
    without = {size: ranks for size, ranks in measured.items() if size != 8}
    checks = judge_all(without, settings)
    assert status(checks) == INCOMPLETE
    told = headline(checks, "mine", [1, 2])
    assert "could not be measured" in told
    assert "memory per rank falls as 1/k (needs rings of 4 and 8)" in told
    assert "All" not in told


def test_a_ring_that_died_fails() -> None:
    _, measured, settings = measurements_of("honest")
    checks = judge_all({**measured, 2: failed_ring(2, "rank 1 died with exit code -11")}, settings)
    assert status(checks) == FAIL
    assert "exit code -11" in checks[0].reason


def at_seconds(measured: ByRing, alone: float, ring_of_two: float, busy_cores: float, share: float) -> ByRing:
    """The same measurements with other times."""
    changed = {size: [dict(given) for given in ranks] for size, ranks in measured.items()}
    for size, seconds in ((1, alone), (2, ring_of_two)):
        for given in changed[size]:
            used = seconds * (size + busy_cores)
            given["speed"] = SpeedMeasurement((seconds,), seconds, seconds, used, share if size > 1 else 1.0)
    return changed


@pytest.mark.parametrize(
    ("ring_of_two", "share", "verdict"),
    [(0.8, 0.75, "pass"), (1.1, 0.75, "FAIL"), (0.8, 0.5, "FAIL"), (0.55, 0.5, "pass")],
)
def test_speed_is_judged_by_what_the_layout_allows(ring_of_two: float, share: float, verdict: str) -> None:
    _, measured, settings = measurements_of("honest")
    checks = {c.name: c for c in judge_all(at_seconds(measured, 1.0, ring_of_two, 0.0, share), settings)}
    speed = checks["more ranks are faster"]
    assert speed.verdict == verdict
    assert ("75% of the causal work" in speed.reason) == (share == 0.75)


def test_contiguous_causal_work_is_unbalanced() -> None:
    _, measured, _ = measurements_of("honest")
    assert measured[2][0]["speed"].busiest_share == pytest.approx(0.75, abs=0.01)


def test_disturbed_times_are_neither_judged_nor_shown() -> None:
    implementation, measured, settings = measurements_of("honest")
    for busy_cores, shown in ((0.0, True), (1.0, False)):
        timed = at_seconds(measured, 12.34, 8.76, busy_cores, 0.75)
        checks = judge_all(timed, settings)
        page = make_page(implementation, settings, "here", timed, checks, "ringspan verify")
        picture = page.parts[-1]
        assert len(picture.figure.axes) == (2 if shown else 1)  # type: ignore[union-attr]
        text = str([part.rows for part in page.parts if hasattr(part, "rows")]) + page.sentence
        assert ("8.76" in text) == shown
        assert ("disturbed" in text) != shown
        assert status(checks) == PASS
        assert ("the machine was busy" in page.sentence) != shown


def test_the_named_pattern_runs_and_rates_never_change() -> None:
    implementation = AttentionUnderTest(pattern=Dilated((2048, 16384, 65536), (1, 8, 32)))
    settings = settings_for(implementation, [1, 2, 4], default_tokens(implementation.pattern), "float64")
    assert {case.pattern.dilation_rates for case in settings.all_cases} == {(1, 8, 32)}  # type: ignore[union-attr]
    for case in (settings.memory, settings.counted, settings.speed, settings.exact[-1]):
        assert case.pattern == implementation.pattern
        assert case.tokens >= 65536
    for case in (*settings.exact, settings.visibility, *settings.optional):
        assert case.tokens >= max(case.pattern.segment_lengths)  # type: ignore[union-attr]
        assert all(branch.segment_length >= 4 * branch.rate for branch in case.pattern.branches(case.tokens))
    assert any(case.kv_heads > 32 for case in settings.exact)  # so that every offset is met


@pytest.mark.parametrize(
    "pattern", [Window(1023), Window(8191, right=64, dilation=8), Window(511) + Dilated((4096, 65536), (4, 64))]
)
def test_windows_run_unchanged_at_length_and_with_both_edges_in_short_cases(pattern: Pattern) -> None:
    implementation = AttentionUnderTest(pattern=pattern)
    settings = settings_for(implementation, [1, 2, 4], default_tokens(pattern), "float64")
    for case in (settings.memory, settings.counted, settings.speed, settings.exact[-1]):
        assert case.pattern == pattern
        assert case.tokens >= 32768
    for case in (*settings.exact[:-1], settings.visibility, *settings.optional):
        window = case.pattern.parts[0]
        assert isinstance(window, Window)
        assert window.dilation == pattern.parts[0].dilation  # type: ignore[attr-defined]
        assert 4 * window.dilation <= window.left <= case.tokens // 3


def test_another_function_runs_its_own_pattern_everywhere() -> None:
    implementation = AttentionUnderTest.load("tests.tools.verify.faulty:windowed")
    settings = settings_for(implementation, [1, 2], 4224, "float32")
    assert {case.pattern for case in settings.all_cases} == {Window(40, right=8)}
    assert implementation.name.endswith(":windowed, window 40 right 8")


def test_cases_cover_odd_rows_batches_heads_and_lengths() -> None:
    settings = settings_for(
        AttentionUnderTest("tests.tools.verify.faulty:honest", Full(), "contiguous"), [1, 2, 4], 8192, "float32"
    )
    assert all(case.tokens % 4 == 0 and case.tokens // 4 % 2 for case in settings.exact)
    assert {1, 3, 5} < {case.heads for case in settings.exact}
    assert {1, 2, 3} <= {case.batch for case in settings.exact}
    assert max(case.tokens for case in settings.exact) > 8192
    assert all(case.grouped for case in settings.grouped)
    assert all(case.tokens % 4 for case in settings.uneven)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("sizes", [[1, 2], [1, 2, 4], [1, 3, 8]])
def test_packed_documents_span_ranks_and_meet_their_borders(sizes: list[int], layout: Any) -> None:
    inside, aligned = settings_for(AttentionUnderTest(layout=layout), sizes, 8192, "float64").packed
    assert all(sum(case.lengths) == case.tokens and case.batch > 1 for case in (inside, aligned))
    whole = Layout(layout, inside.tokens, max(sizes))
    starts = {span.start for rank in range(max(sizes)) for span in whole.spans(rank)}
    assert not starts & {*accumulate(inside.lengths)}
    assert starts - {0} < {*accumulate(aligned.lengths)}
    assert max(inside.lengths) > inside.tokens // max(sizes)
    assert min(inside.lengths) == min(aligned.lengths) == 1


def test_tokens_change_in_32_bits_at_least() -> None:
    for dtype, wide in (("float64", "float64"), ("float32", "float32"), ("bfloat16", "float32")):
        settings = settings_for(AttentionUnderTest(), [1, 2], 8192, dtype)
        assert settings.visibility.dtype == settings.packed[0].dtype == wide
        assert [case.dtype for case in settings.packed[-2:]].count(dtype) == 2


def test_shortened_patterns_keep_their_rates() -> None:
    assert shortened(Full(), 10) == Full()
    assert shortened(Window(20, 4), 640) == Window(20, 4)
    assert shortened(Window(1000, dilation=8), 90) == Window(32, dilation=8)
    assert shortened(Window(0) + Full(), 90) == Window(0) + Full()
    assert shortened(Dilated((8, 64), (1, 2)), 640) == Dilated((8, 64), (1, 2))
    assert shortened(Dilated((8, 64), (1, 64)), 10) == Dilated((1 * 4, 64), (1, 64))


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("no.such.module:f", "No module named"),
        ("tests.tools.verify.faulty:nothing", "nothing"),
        ("tests.tools.verify.faulty", "package.module:name"),
        ("tests.tools.verify.faulty:rs", "must be a function"),
    ],
)
def test_an_invalid_target_is_refused(target: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        AttentionUnderTest.load(target)
