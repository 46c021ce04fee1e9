"""Exactness: output and gradients of every call against the definition; uneven shards and grouped KV heads."""

from __future__ import annotations

import traceback
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace

from ringspan.tools.verify.check import ByRing, Check, Unsupported, answers_to, check_with
from ringspan.tools.verify.examination import Comparison, Examination
from ringspan.tools.verify.settings import Case, Settings

_RAN = "every case that was compared"


@dataclass(frozen=True)
class ExactAnswer:
    """How many rows the rank held, and gave back, of each case."""

    rows: tuple[int, ...]
    tokens: tuple[int, ...]


def ask_exact(examination: Examination) -> ExactAnswer:
    cases = examination.settings.exact
    for case in cases:
        for causal in (False, True):
            examination.run(case, causal)
    rows = (examination.place(case).layout.rows_of(examination.bound.ring.rank) for case in cases)
    return ExactAnswer(tuple(rows), tuple(case.tokens for case in cases))


def ask_uneven(examination: Examination) -> Unsupported | None:
    if examination.bound.subject.equal_shards:
        return Unsupported("it says equal_shards = True")
    return _if_supported(examination, examination.settings.uneven)


def ask_grouped(examination: Examination) -> Unsupported | None:
    return _if_supported(examination, examination.settings.grouped)


def _if_supported(examination: Examination, cases: Iterable[Case]) -> Unsupported | None:
    """A subject may raise instead, if it does so on every rank. What it returns must be right."""
    for case in cases:
        for causal in (False, True):
            try:
                found = examination.call(examination.own_rows(case), case, causal, backward=True)
            except Exception as error:
                return Unsupported("".join(traceback.format_exception_only(error)).strip())
            examination.compare(examination.expect(case, causal, backward=True), found)
    return None


def check_split(answers: ByRing, settings: Settings) -> Check:
    name, ran = "the sequence is split", f"{len(settings.exact)} cases; the figure is of {settings.exact[-1]}"

    def judge() -> Check:
        exact = answers_to(answers, "exact")
        for size, ranks in exact.items():
            for i, tokens in enumerate(ranks[0].tokens):
                rows = [answer.rows[i] for answer in ranks]
                if sum(rows) != tokens or max(rows) > -(-tokens // size) + 1:
                    reason = f"of {tokens:,} rows, ranks hold {rows}"
                    return Check(name, "FAILS", f"ring of {size}", reason, ran)
        largest = exact[max(exact)]
        rows = [answer.rows[-1] for answer in largest]
        each = f"{rows[0]:,}" if len(set(rows)) == 1 else f"{min(rows):,} to {max(rows):,}"
        figure = f"{sum(rows):,} rows over {len(rows)} ranks: {each} each"
        return Check(name, "holds", figure, "each rank is given its own rows, and returns as many", ran)

    return check_with(answers, "exact", name, ran, judge)


def check_output(answers: ByRing, settings: Settings) -> Check:
    name, cases = "the output is exact", _own_cases(settings)
    return check_with(answers, "exact", name, _RAN, lambda: _check_error(answers, name, "output", cases))


def check_gradients(answers: ByRing, settings: Settings) -> Check:
    name, cases = "the gradients are exact", _own_cases(settings)
    return check_with(answers, "exact", name, _RAN, lambda: _check_error(answers, name, "gradient", cases))


def check_uneven(answers: ByRing, settings: Settings) -> Check:
    return _check_supported(answers, "uneven", "uneven shards are exact", settings.uneven)


def check_grouped(answers: ByRing, settings: Settings) -> Check:
    return _check_supported(answers, "grouped", "grouped KV heads are exact", settings.grouped)


def _check_supported(answers: ByRing, question: str, name: str, cases: tuple[Case, ...]) -> Check:
    ran = _cases_text(cases)

    def judge() -> Check:
        refused = ""
        for size, ranks in answers_to(answers, question).items():
            raised = [answer.reason for answer in ranks if isinstance(answer, Unsupported)]
            if raised and len(raised) < size:
                reason = f"some ranks of a ring raise, and the others go on without them: {raised[0]}"
                return Check(name, "FAILS", f"{len(raised)} of {size} ranks raised", reason, ran)
            refused = raised[0] if raised else refused
        if refused:
            return Check(name, "not supported", "refused on every rank", refused, ran, essential=False)
        texts = {str(case) for case in cases}
        output, gradients = (_check_error(answers, name, what, texts) for what in ("output", "gradient"))
        return replace(output if output.verdict == "FAILS" else gradients, ran=ran)

    return check_with(answers, question, name, ran, judge)


def _check_error(answers: ByRing, name: str, what: str, cases: set[str]) -> Check:
    """Every call of these cases, on every rank, whatever it was made for."""
    calls = wrong = 0
    worst: dict[str, tuple[float, float, float, str]] = {}  # by dtype
    for size, ranks in answers_to(answers, "comparisons").items():
        for comparison in (each for given in ranks for each in given if each.case in cases):
            if what == "gradient" and not comparison.backward:
                continue
            error, allowed = getattr(comparison, f"{what}_error"), getattr(comparison, f"{what}_allowed")
            calls, wrong = calls + comparison.calls, wrong + getattr(comparison, f"wrong_{what}s")
            order = "causal" if comparison.causal else "not causal"
            where = f"on a ring of {size}: {comparison.case}, {order}"
            found = (error / allowed if allowed else float(error > 0), error, allowed, where)
            dtype = comparison.case.rpartition(", ")[2]
            worst[dtype] = max(found, worst.get(dtype, found))
    errors = [f"{dtype}: error {worst[dtype][1]:.1e}, allowed {worst[dtype][2]:.1e}" for dtype in sorted(worst)[::-1]]
    figure = "; ".join(errors)
    if wrong:
        reason = f"{wrong} of {calls} results differ from the definition; worst {max(worst.values())[3]}"
        return Check(name, "FAILS", figure, reason, _RAN)
    return Check(name, "holds", figure, f"all {calls} results, of every call on every rank, equal the definition", _RAN)


def _own_cases(settings: Settings) -> set[str]:
    return {str(case) for case in settings.all_cases} - {str(case) for case in (*settings.uneven, *settings.grouped)}


def _cases_text(cases: Iterable[Case]) -> str:
    return "; ".join(dict.fromkeys(str(case) for case in cases))


def comparison_rows(answers: ByRing) -> list[list[str]]:
    """A table of what was compared: one row for each case, over all rings and ranks."""
    found: defaultdict[str, list[Comparison]] = defaultdict(list)
    for ranks in answers_to(answers, "comparisons").values():
        for comparison in (each for given in ranks for each in given):
            found[comparison.case].append(comparison)
    table = [["case", "causal", "rows compared", "calls", "output error", "allowed", "gradient error", "allowed"]]
    for case, some in found.items():
        causal = " and ".join(dict.fromkeys("yes" if each.causal else "no" for each in some))
        rows = f"{some[0].rows:,}" + (" (all)" if some[0].rows == some[0].tokens else f" of {some[0].tokens:,}")
        cells = [case, causal, rows, f"{sum(each.calls for each in some):,}"]
        for what in ("output", "gradient"):
            of = [each for each in some if what == "output" or each.backward]
            if not of:
                cells += ["forward only", ""]
                continue
            worst = max(of, key=lambda each: getattr(each, f"{what}_error"))
            cells += [f"{getattr(worst, f'{what}_{part}'):.1e}" for part in ("error", "allowed")]
        table.append(cells)
    return table
