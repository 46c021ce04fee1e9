"""The order of trials, the end of a ladder, and continuing after an interruption. Trials have known values."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import ringspan as rs
from ringspan.tools.bench.cases import BenchCase, case_from_json, make_cases
from ringspan.tools.bench.ladder import BenchSettings, TrialStore, run_cases
from ringspan.tools.bench.trials import Trial, TrialLimits
from tests.tools.bench.examples import ROOMY, case, measured

Run = Callable[[BenchCase, int, TrialLimits, int], Trial]


class Recorder:
    """Runs nothing: records the requested trials and returns given answers."""

    def __init__(self, answer: Callable[[BenchCase, int], Trial] = measured) -> None:
        self.requests: list[tuple[str, int, int]] = []
        self.answer = answer

    def __call__(self, what: BenchCase, number: int, limits: TrialLimits, threads: int) -> Trial:
        self.requests.append((what.implementation, what.tokens, number))
        return self.answer(what, number)


@pytest.fixture
def store(tmp_path: Path) -> TrialStore:
    return TrialStore(tmp_path / "trials.jsonl", threads=1)


def test_all_cases_of_a_length_take_turns_and_lengths_grow(store: TrialStore) -> None:
    cases = [case(name, tokens, full=True) for name in ("ringspan", "sdpa") for tokens in (512, 256)]
    recorder = Recorder()
    trials = list(run_cases(cases, BenchSettings(ROOMY, rounds=2), store, run=recorder))
    assert recorder.requests == [
        (name, tokens, number) for tokens in (256, 512) for number in (1, 2) for name in ("ringspan", "sdpa")
    ]
    assert len(trials) == 8


@pytest.mark.parametrize("outcome", ["out of memory", "out of time", "crashed"])
def test_a_ladder_ends_at_its_first_failure_and_others_continue(store: TrialStore, outcome: str) -> None:
    def answer(what: BenchCase, number: int) -> Trial:
        if what.implementation == "sdpa" and what.tokens == 512:
            return Trial(what, number, outcome, ROOMY, "for the test")  # type: ignore[arg-type]
        return measured(what, number)

    cases = [case(name, tokens, full=True) for name in ("ringspan", "sdpa") for tokens in (256, 512, 1024, 2048)]
    recorder = Recorder(answer)
    trials = list(run_cases(cases, BenchSettings(ROOMY, rounds=2), store, run=recorder))
    assert [request for request in recorder.requests if request[0] == "sdpa"] == [
        ("sdpa", 256, 1),
        ("sdpa", 256, 2),
        ("sdpa", 512, 1),
    ]
    assert sum(request[0] == "ringspan" for request in recorder.requests) == 8
    ends = {t.case.tokens: (t.outcome, t.reason) for t in trials if t.case.implementation == "sdpa" and not t.measured}
    assert ends == {
        512: (outcome, "for the test"),
        1024: ("not tried", f"512 tokens: {outcome}"),
        2048: ("not tried", f"512 tokens: {outcome}"),
    }


def test_cases_that_cannot_fit_by_the_plan_are_refused(store: TrialStore) -> None:
    recorder = Recorder()
    tight = BenchSettings(TrialLimits(65 * 2**20, 60.0), rounds=1)
    fits, large = case(tokens=256), case(tokens=2**20)
    trials = list(run_cases([fits, large], tight, store, run=recorder))
    assert recorder.requests == [("ringspan", 256, 1)]
    assert trials[1].outcome == "refused"
    assert trials[1].reason == "planned to need 1,096 MiB; 65 MiB allowed"
    assert not trials[1].ran


def test_other_implementations_are_refused_by_extrapolation(store: TrialStore) -> None:
    """Memory that grew fourfold from 256 to 512 is expected to grow fourfold again."""

    def answer(what: BenchCase, number: int) -> Trial:
        return measured(what, number, peak=2**20 * (what.tokens // 256) ** 2)

    cases = [case("sdpa", tokens, full=True) for tokens in (256, 512, 1024, 2048)]
    trials = list(run_cases(cases, BenchSettings(TrialLimits(17 * 2**20, 60.0), rounds=1), store, run=Recorder(answer)))
    assert [trial.outcome for trial in trials] == ["measured", "measured", "measured", "refused"]
    assert trials[-1].reason == "expected to need 64 MiB; 17 MiB allowed"


def test_cases_that_would_take_too_long_are_refused(store: TrialStore) -> None:
    def answer(what: BenchCase, number: int) -> Trial:
        return measured(what, number, seconds=(what.tokens / 256) ** 2)

    cases = [case("sdpa", tokens, full=True) for tokens in (256, 512, 1024)]
    trials = list(run_cases(cases, BenchSettings(TrialLimits(2**30, 10.0), rounds=1), store, run=Recorder(answer)))
    assert trials[-1].reason == "expected to take about 16 s; 10 s allowed"


def test_a_missing_package_becomes_a_row(store: TrialStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    recorder = Recorder()
    cases = [case("ring_attention_pytorch", tokens, ranks=2, full=True) for tokens in (256, 512)]
    trials = list(run_cases(cases, BenchSettings(ROOMY), store, run=recorder))
    assert not recorder.requests
    assert [trial.outcome for trial in trials] == ["not installed", "not tried"]
    assert trials[0].reason == "ring_attention_pytorch is not installed: pip install -c constraints.txt -e '.[peers]'"


def test_long_trials_are_not_repeated(store: TrialStore) -> None:
    recorder = Recorder(lambda what, number: measured(what, number, seconds=what.tokens / 100))
    cases = [case(tokens=256), case(tokens=2048)]
    list(run_cases(cases, BenchSettings(ROOMY, rounds=3, long_seconds=10.0), store, run=recorder))
    assert recorder.requests == [
        ("ringspan", 256, 1),
        ("ringspan", 256, 2),
        ("ringspan", 256, 3),
        ("ringspan", 2048, 1),
    ]


def test_a_disturbed_trial_is_repeated_and_the_least_disturbed_is_kept(store: TrialStore) -> None:
    loads = iter([0.5, 0.2, 0.3])
    recorder = Recorder(lambda what, number: measured(what, number, foreign=next(loads)))
    (trial,) = run_cases([case()], BenchSettings(ROOMY, rounds=1, attempts=3), store, run=recorder)
    assert (trial.foreign_cores, trial.attempts, trial.disturbed) == (0.2, 3, True)
    loads = iter([0.5, 0.05, 0.3])
    (trial,) = run_cases([case(tokens=512)], BenchSettings(ROOMY, rounds=1, attempts=3), store, run=recorder)
    assert (trial.foreign_cores, trial.attempts, trial.disturbed) == (0.05, 2, False)


def test_an_interrupted_run_continues(store: TrialStore) -> None:
    """Interrupted in the third of four trials: finished trials are not run again, and a torn line is dropped."""
    cases = [case(tokens=256), case(tokens=512)]
    settings = BenchSettings(ROOMY, rounds=2)
    answers = iter([1.0, 2.0])

    def answer(what: BenchCase, number: int) -> Trial:
        try:
            return measured(what, number, seconds=next(answers))
        except StopIteration:
            raise KeyboardInterrupt from None

    with pytest.raises(KeyboardInterrupt):
        list(run_cases(cases, settings, store, run=Recorder(answer)))
    with store.path.open("a") as file:
        file.write('{"fingerprint": "torn')

    again, recorder = TrialStore(store.path, threads=1), Recorder()
    assert len(again) == 2
    trials = list(run_cases(cases, settings, again, run=recorder))
    assert recorder.requests == [("ringspan", 512, 1), ("ringspan", 512, 2)]
    assert [trial.total_seconds for trial in trials] == [1.0, 2.0, 1.0, 1.0]
    assert len(TrialStore(store.path, threads=1)) == 4

    more = Recorder()
    list(run_cases(cases, replace(settings, rounds=3), TrialStore(store.path, threads=1), run=more))
    assert more.requests == [("ringspan", 256, 3), ("ringspan", 512, 3)]


def test_trials_of_other_conditions_are_kept_but_ignored(store: TrialStore) -> None:
    list(run_cases([case()], BenchSettings(ROOMY, rounds=1), store, run=Recorder()))
    other, recorder = TrialStore(store.path, threads=2), Recorder()
    assert (len(other), other.others) == (0, 1)
    list(run_cases([case()], BenchSettings(ROOMY, rounds=1, threads=2), other, run=recorder))
    assert recorder.requests == [("ringspan", 256, 1)]
    assert len(TrialStore(store.path, threads=1)) == 1


def test_fresh_deletes_stored_trials(store: TrialStore) -> None:
    list(run_cases([case()], BenchSettings(ROOMY, rounds=1), store, run=Recorder()))
    assert len(TrialStore(store.path, threads=1, fresh=True)) == 0


def test_disturbed_trials_can_be_repeated(store: TrialStore) -> None:
    busy = Recorder(lambda what, number: measured(what, number, foreign=0.5 if what.tokens == 256 else 0.0))
    cases, settings = [case(tokens=256), case(tokens=512)], BenchSettings(ROOMY, rounds=1, attempts=1)
    list(run_cases(cases, settings, store, run=busy))
    quiet = Recorder()
    list(run_cases(cases, settings, TrialStore(store.path, threads=1, repeat_disturbed=True), run=quiet))
    assert quiet.requests == [("ringspan", 256, 1)]
    trials = run_cases(cases, settings, TrialStore(store.path, threads=1), run=quiet)
    assert not any(trial.disturbed for trial in trials)


def test_spanning_patterns_of_all_lengths_are_one_ladder() -> None:
    short, long = make_cases(("ringspan",), ("spanning",), (4096, 2**17), (2,))
    assert (short.pattern, long.pattern) == (rs.Dilated.spanning(4096), rs.Dilated.spanning(2**17))
    assert short.ladder == long.ladder
    fixed = make_cases(("ringspan",), (short.pattern,), (4096,), (2,))
    assert fixed[0].ladder != short.ladder
    assert case_from_json(short.as_json()) == short
