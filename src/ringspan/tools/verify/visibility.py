"""Visibility: change one token in one head, and see which rows change. Exactly the rows that attend to it must."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ringspan.oracle import multiplicity
from ringspan.tools.verify.check import ByRing, Check, Harness, judge_if_measured, values_of
from ringspan.tools.verify.workload import VerifySettings

_PERTURBATION = 1000.0  # added to a value: changes every row that attends to it by far more than rounding
_BORDERS = 3


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
    positions = harness.bound.ring.positions(case.tokens)
    head = min(1, case.heads - 1)
    noise = 1e4 * torch.finfo(getattr(torch, case.dtype)).eps
    rows = harness.own_rows(case)
    measured = []
    for causal in (False, True):
        counts = multiplicity(case.pattern, case.tokens, case.kv_heads, causal=causal)[head]
        attends = counts[positions] > 0
        (before,) = harness.call(rows, case, causal, backward=False)
        harness.compare(harness.expect(case, causal, backward=False), [before])
        for token in _tokens(harness, counts.diagonal()):
            q, k, v, grad_out = rows
            is_mine = (positions == token).to(v.device)
            v = v.clone()
            v[:, is_mine, head] += _PERTURBATION
            (after,) = harness.call([q, k, v, grad_out], case, causal, backward=False)
            changed = ((after - before)[0].abs().amax(-1) > noise).cpu()  # (rows, heads)
            here, visible = changed[:, head], attends[:, token]
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


def _tokens(harness: Harness, branches: Tensor) -> list[int]:
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
        found = [each for size, each in _all(measured) if size > 1]
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
        mixed = sum(each.other_heads for _, each in _all(measured))
        reason = f"changing one head {'changes another' if mixed else 'does not change the others'}"
        return Check(name, "FAIL" if mixed else "pass", f"{mixed:,} rows of other heads changed", reason, case)

    return judge_if_measured(measured, "visibility", name, case, judge)


def judge_masking(measured: ByRing, settings: VerifySettings) -> Check:
    name, case = "masked tokens have no effect", str(settings.visibility)

    def judge() -> Check:
        for size, each in _all(measured):
            if each.leaked:
                order = "causal" if each.causal else "not causal"
                reason = f"{order}, ring of {size}: token {each.token} changed rows that must not attend to it"
                return Check(name, "FAIL", f"{each.leaked:,} rows changed", reason, case)
        tokens = {each.token for _, each in _all(measured)}
        reason = "no row depends on a later token (causal) or on one outside the pattern"
        return Check(name, "pass", f"0 rows changed, {len(tokens)} tokens at shard borders tested", reason, case)

    return judge_if_measured(measured, "visibility", name, case, judge)


def _all(measured: ByRing) -> Iterator[tuple[int, VisibilityMeasurement]]:
    for size, ranks in values_of(measured, "visibility").items():
        for rank in ranks:
            yield from ((size, each) for each in rank)
