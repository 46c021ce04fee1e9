"""Exactness: output and gradients of every call against the definition, and what changes when one token changes.

Uneven shards, grouped KV heads and packed documents are compared as well. Changing one token shows which rows attend to
it: tokens attend across ranks, masked tokens have no effect, and heads and documents are independent.
"""

from __future__ import annotations

import traceback
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from ringspan.oracle import multiplicity
from ringspan.tools.verify.check import (
    ByRing,
    Check,
    Comparison,
    Harness,
    Unsupported,
    judge_if_measured,
    values_of,
)
from ringspan.tools.verify.workload import VerifyCase, VerifySettings

_ALL_CASES = "every compared case"
_PERTURBATION = 1000.0  # added to a value: changes every row that attends to it by far more than rounding
_HEAD = 1  # the head whose value changes
_BORDERS = 3


@dataclass(frozen=True)
class ShardMeasurement:
    """The number of rows that the rank held, and returned, in each case."""

    rows: tuple[int, ...]
    tokens: tuple[int, ...]


def measure_exact(harness: Harness) -> ShardMeasurement:
    cases = harness.settings.exact
    for case in cases:
        for causal in (False, True):
            harness.run(case, causal)
    rows = (harness.layout(case).rows_of(harness.rank) for case in cases)
    return ShardMeasurement(tuple(rows), tuple(case.tokens for case in cases))


def measure_uneven(harness: Harness) -> Unsupported | None:
    if harness.bound.implementation.equal_shards:
        return Unsupported("the function sets equal_shards = True")
    return _run_if_supported(harness, harness.settings.uneven)


def measure_grouped(harness: Harness) -> Unsupported | None:
    return _run_if_supported(harness, harness.settings.grouped)


def measure_packed(harness: Harness) -> Unsupported | list[VisibilityMeasurement]:
    if not harness.bound.takes_lengths:
        return Unsupported("the function has no parameter lengths")
    first = harness.settings.packed[0]
    ends = {token for end in accumulate(first.lengths) for token in (end - 1, end % first.tokens)}
    return _run_if_supported(harness, harness.settings.packed) or _change_tokens(harness, first, sorted(ends))


def _run_if_supported(harness: Harness, cases: Iterable[VerifyCase]) -> Unsupported | None:
    """An implementation may raise, if it does so on every rank. If it returns, the results must be correct."""
    for case in cases:
        for causal in (False, True):
            try:
                found = harness.call(harness.own_rows(case), case, causal, backward=True)
            except Exception as error:
                return Unsupported("".join(traceback.format_exception_only(error)).strip())
            harness.compare(harness.expect(case, causal, backward=True), found)
    return None


def judge_sharding(measured: ByRing, settings: VerifySettings) -> Check:
    name, case = "the sequence is sharded", f"{len(settings.exact)} cases; the result is that of {settings.exact[-1]}"

    def judge() -> Check:
        exact = values_of(measured, "exact")
        for size, ranks in exact.items():
            for i, tokens in enumerate(ranks[0].tokens):
                rows = [each.rows[i] for each in ranks]
                if sum(rows) != tokens or max(rows) > -(-tokens // size) + 1:
                    reason = f"the ranks hold {rows} rows of {tokens:,}"
                    return Check(name, "FAIL", f"ring of {size}", reason, case)
        rows = [each.rows[-1] for each in exact[max(exact)]]
        each_rank = f"{rows[0]:,}" if len(set(rows)) == 1 else f"{min(rows):,} to {max(rows):,}"
        result = f"{sum(rows):,} rows over {len(rows)} ranks: {each_rank} each"
        return Check(name, "pass", result, "each rank gets its own rows only, and returns the same number", case)

    return judge_if_measured(measured, "exact", name, case, judge)


def judge_output(measured: ByRing, settings: VerifySettings) -> Check:
    name, cases = "the output is exact", _own_cases(settings)
    return judge_if_measured(
        measured, "exact", name, _ALL_CASES, lambda: _judge_errors(measured, name, "output", cases)
    )


def judge_gradients(measured: ByRing, settings: VerifySettings) -> Check:
    name, cases = "the gradients are exact", _own_cases(settings)
    return judge_if_measured(
        measured, "exact", name, _ALL_CASES, lambda: _judge_errors(measured, name, "gradient", cases)
    )


def judge_uneven(measured: ByRing, settings: VerifySettings) -> Check:
    return _judge_if_supported(measured, "uneven", "uneven shards are exact", settings.uneven)


def judge_grouped(measured: ByRing, settings: VerifySettings) -> Check:
    return _judge_if_supported(measured, "grouped", "grouped KV heads are exact", settings.grouped)


def judge_packed(measured: ByRing, settings: VerifySettings) -> Check:
    check = _judge_if_supported(measured, "packed", "packed documents are exact", settings.packed)
    if leak := _first_leak(measured, "packed"):
        return replace(check, verdict="FAIL", reason=f"{leak[1]}; {check.reason}")
    told = "; documents do not see each other" if check.verdict == "pass" else ""
    return replace(check, reason=check.reason + told)


def _judge_if_supported(measured: ByRing, measurement: str, name: str, cases: tuple[VerifyCase, ...]) -> Check:
    texts = dict.fromkeys(map(str, cases))
    case = "; ".join(texts)

    def judge() -> Check:
        refused = ""
        for size, ranks in values_of(measured, measurement).items():
            raised = [value.reason for value in ranks if isinstance(value, Unsupported)]
            if raised and len(raised) < size:
                reason = f"some ranks of a ring raise and leave the others waiting: {raised[0]}"
                return Check(name, "FAIL", f"{len(raised)} of {size} ranks raised", reason, case)
            refused = raised[0] if raised else refused
        if refused:
            return Check(name, "not supported", "no rank supports it", refused, case, essential=False)
        output, gradients = (_judge_errors(measured, name, what, set(texts)) for what in ("output", "gradient"))
        return replace(output if output.verdict == "FAIL" else gradients, case=case)

    return judge_if_measured(measured, measurement, name, case, judge)


def _judge_errors(measured: ByRing, name: str, what: str, cases: set[str]) -> Check:
    """Every call of these cases on every rank, including calls that measured something else."""
    calls = wrong = 0
    worst: dict[str, tuple[float, float, float, str]] = {}  # by dtype
    for size, ranks in values_of(measured, "comparisons").items():
        for comparison in (each for rank in ranks for each in rank if each.case in cases):
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
    result = "; ".join(errors)
    if wrong:
        reason = f"{wrong} of {calls} results differ from the definition; worst {max(worst.values())[3]}"
        return Check(name, "FAIL", result, reason, _ALL_CASES)
    return Check(name, "pass", result, f"all {calls} results, on every rank, match the definition", _ALL_CASES)


def _own_cases(settings: VerifySettings) -> set[str]:
    """The cases that every implementation must support."""
    return {str(case) for case in settings.all_cases} - {str(case) for case in settings.optional}


def comparison_rows(measured: ByRing) -> list[list[str]]:
    """A table of the comparisons: one row per case, over all rings and ranks."""
    by_case: defaultdict[str, list[Comparison]] = defaultdict(list)
    for ranks in values_of(measured, "comparisons").values():
        for comparison in (each for rank in ranks for each in rank):
            by_case[comparison.case].append(comparison)
    table = [
        ["case", "causal", "rows compared", "calls", "output error", "output limit", "gradient error", "gradient limit"]
    ]
    for case, comparisons in by_case.items():
        causal = " and ".join(dict.fromkeys("yes" if each.causal else "no" for each in comparisons))
        rows, tokens = comparisons[0].rows, comparisons[0].tokens
        cells = [case, causal, f"{rows:,}" + (" (all)" if rows == tokens else f" of {tokens:,}")]
        cells.append(f"{sum(each.calls for each in comparisons):,}")
        for what in ("output", "gradient"):
            compared = [each for each in comparisons if what == "output" or each.backward]
            if not compared:
                cells += ["forward only", ""]
                continue
            worst = max(compared, key=lambda each: getattr(each, f"{what}_error"))
            cells += [f"{getattr(worst, f'{what}_{part}'):.1e}" for part in ("error", "allowed")]
        table.append(cells)
    return table


@dataclass(frozen=True)
class VisibilityMeasurement:
    """What changed on this rank after the value of one token changed in one head, in (row, head) pairs."""

    causal: bool
    token: int
    changed_remotely: int  # rows that attend to the token of another rank, and changed
    missed: int  # rows that attend to it, and did not change
    leaked: int  # rows that do not attend to it, and changed
    other_heads: int  # rows that changed in another head


def measure_visibility(harness: Harness) -> list[VisibilityMeasurement]:
    case = harness.settings.visibility
    branches = multiplicity(case.pattern, case.tokens, case.kv_heads)[_HEAD].diagonal()
    return _change_tokens(harness, case, _perturbed_tokens(harness, branches))


def _change_tokens(harness: Harness, case: VerifyCase, tokens: list[int]) -> list[VisibilityMeasurement]:
    positions = harness.bound.ring.positions(case.tokens)
    noise = 1e4 * torch.finfo(getattr(torch, case.dtype)).eps
    rows = harness.own_rows(case)
    measured = []
    for causal in (False, True):
        lengths = case.lengths or None
        counts = multiplicity(case.pattern, case.tokens, case.kv_heads, causal=causal, lengths=lengths)[_HEAD]
        attends = counts[positions] > 0
        (before,) = harness.call(rows, case, causal, backward=False)
        harness.compare(harness.expect(case, causal, backward=False), [before])
        for token in tokens:
            q, k, v, grad_out = rows
            is_mine = (positions == token).to(v.device)
            v = v.clone()
            v[:, is_mine, _HEAD] += _PERTURBATION
            (after,) = harness.call([q, k, v, grad_out], case, causal, backward=False)
            changed = ((after - before).abs().amax((0, -1)) > noise).cpu()  # (rows, heads)
            here, visible = changed[:, _HEAD], attends[:, token]
            measured.append(
                VisibilityMeasurement(
                    causal,
                    token,
                    changed_remotely=0 if is_mine.any() else int((here & visible).sum()),
                    missed=int((~here & visible).sum()),
                    leaked=int((here & ~visible).sum()),
                    other_heads=int(changed.sum() - here.sum()),
                )
            )
    return measured


def _perturbed_tokens(harness: Harness, branches: Tensor) -> list[int]:
    """The last token, both sides of the borders between ranks, and near each border a token of as many branches as
    possible."""
    layout = harness.layout(harness.settings.visibility)
    starts = sorted(spans[0].start for r in range(layout.ring_size) if (spans := layout.spans(r)))[:_BORDERS]
    near = 2 * max(branch.rate for branch in harness.settings.visibility.pattern.branches(layout.rows))
    best = (start + int(branches[start : start + near].argmax()) for start in starts)
    return sorted({layout.rows - 1, *best, *starts, *(start - 1 for start in starts if start)})


def judge_mixing(measured: ByRing, settings: VerifySettings) -> Check:
    name, case = "tokens attend across ranks", str(settings.visibility)

    def judge() -> Check:
        found = [each for size, each in _visibilities(measured) if size > 1]
        changed, missed = (sum(getattr(each, of) for each in found) for of in ("changed_remotely", "missed"))
        if missed:
            reason = "a row does not attend to a token that it must attend to"
            return Check(name, "FAIL", f"{missed} rows did not change", reason, case)
        if not found:
            return Check(name, "not measured", "no ring of 2 or more", "needs a ring of 2 or more ranks", case)
        if not changed:
            return Check(name, "FAIL", "no row changed", "no rank attends to the tokens of another", case)
        reason = "changing a token changes every row that attends to it, also on other ranks"
        return Check(name, "pass", f"{changed:,} rows on other ranks changed", reason, case)

    return judge_if_measured(measured, "visibility", name, case, judge)


def judge_heads(measured: ByRing, settings: VerifySettings) -> Check:
    name, case = "heads are independent", str(settings.visibility)

    def judge() -> Check:
        mixed = sum(each.other_heads for _, each in _visibilities(measured))
        reason = f"changing one head {'changes another' if mixed else 'does not change the others'}"
        return Check(name, "FAIL" if mixed else "pass", f"{mixed:,} rows of other heads changed", reason, case)

    return judge_if_measured(measured, "visibility", name, case, judge)


def judge_masking(measured: ByRing, settings: VerifySettings) -> Check:
    name, case = "masked tokens have no effect", str(settings.visibility)

    def judge() -> Check:
        if leak := _first_leak(measured, "visibility"):
            return Check(name, "FAIL", *leak, case)
        tokens = {each.token for _, each in _visibilities(measured)}
        reason = "no row depends on a later token (causal) or on one outside the pattern"
        return Check(name, "pass", f"0 rows changed, {len(tokens)} tokens at shard borders tested", reason, case)

    return judge_if_measured(measured, "visibility", name, case, judge)


def _first_leak(measured: ByRing, measurement: str) -> tuple[str, str] | None:
    """How many rows changed that must not, and where."""
    for size, each in _visibilities(measured, measurement):
        if each.leaked:
            order = "causal" if each.causal else "not causal"
            where = f"{order}, ring of {size}: token {each.token} changed rows that must not attend to it"
            return f"{each.leaked:,} rows changed", where
    return None


def _visibilities(measured: ByRing, measurement: str = "visibility") -> Iterator[tuple[int, VisibilityMeasurement]]:
    for size, ranks in values_of(measured, measurement).items():
        for rank in ranks:
            if isinstance(rank, list):  # neither failed nor refused
                yield from ((size, each) for each in rank)
