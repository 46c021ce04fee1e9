"""Reach: change one token in one head, and see which rows move. By the definition, no others may, and those must."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ringspan.oracle import multiplicity
from ringspan.tools.verify.check import ByRing, Check, answers_to, check_with
from ringspan.tools.verify.examination import Examination
from ringspan.tools.verify.settings import Settings

_PERTURBATION = 1000.0  # added to a value: every row that sees it moves by far more than rounding
_BORDERS = 3


@dataclass(frozen=True)
class ReachAnswer:
    """What moved when the value of one token changed in one head: (row, head) pairs of this rank, causal or not."""

    causal: bool
    token: int
    moved_far: int  # rows of this rank that may see the token, which another rank holds, and did move
    missed: int  # may see it, and did not move
    leaked: int  # may not see it, and moved
    other_heads: int  # moved in a head that was not touched


def ask_reach(examination: Examination) -> list[ReachAnswer]:
    case, bound = examination.settings.reach, examination.bound
    positions = bound.ring.positions(case.tokens)
    head = min(1, case.heads - 1)
    noise = 1e4 * torch.finfo(getattr(torch, case.dtype)).eps
    rows = examination.own_rows(case)
    answers = []
    for causal in (False, True):
        counts = multiplicity(case.pattern, case.tokens, case.kv_heads, causal=causal)[head]
        sees = counts[positions] > 0
        (before,) = examination.call(rows, case, causal, backward=False)
        examination.compare(examination.expect(case, causal, backward=False), [before])
        for token in _tokens(examination, counts.diagonal()):
            q, k, v, grad_out = rows
            is_mine = (positions == token).to(v.device)
            v = v.clone()
            v[:, is_mine, head] += _PERTURBATION
            (after,) = examination.call([q, k, v, grad_out], case, causal, backward=False)
            moved = ((after - before)[0].abs().amax(-1) > noise).cpu()  # (rows, heads)
            here, may_see = moved[:, head], sees[:, token]
            answers.append(
                ReachAnswer(
                    causal,
                    token,
                    moved_far=0 if is_mine.any() else int((here & may_see).sum()),
                    missed=int((~here & may_see).sum()),
                    leaked=int((here & ~may_see).sum()),
                    other_heads=int(moved.sum() - here.sum()),
                )
            )
    return answers


def _tokens(examination: Examination, branches: Tensor) -> list[int]:
    """Tokens on both sides of borders between ranks, with one after each that most branches select, and the last."""
    layout = examination.place(examination.settings.reach).layout
    starts = sorted(spans[0].start for r in range(layout.ring_size) if (spans := layout.spans(r)))[:_BORDERS]
    near = 2 * max(branch.rate for branch in examination.settings.reach.pattern.branches(layout.rows))
    best = (start + int(branches[start : start + near].argmax()) for start in starts)
    return sorted({layout.rows - 1, *best, *starts, *(start - 1 for start in starts if start)})


def check_mixing(answers: ByRing, settings: Settings) -> Check:
    name, ran = "tokens mix across ranks", str(settings.reach)

    def judge() -> Check:
        found = [answer for size, answer in _all(answers) if size > 1]
        moved, missed = (sum(getattr(answer, of) for answer in found) for of in ("moved_far", "missed"))
        if missed:
            reason = "a row does not see a token that it should see"
            return Check(name, "FAILS", f"{missed} rows did not move", reason, ran)
        if not found:
            return Check(name, "not seen", "no ring of 2 or more", "a ring of one has no other ranks", ran)
        if not moved:
            return Check(name, "FAILS", "no row moved", "no rank sees the tokens of another", ran)
        reason = "changing a token changes every row that may see it, on the other ranks too"
        return Check(name, "holds", f"{moved:,} rows of other ranks moved", reason, ran)

    return check_with(answers, "reach", name, ran, judge)


def check_heads(answers: ByRing, settings: Settings) -> Check:
    name, ran = "heads do not mix", str(settings.reach)

    def judge() -> Check:
        mixed = sum(answer.other_heads for _, answer in _all(answers))
        reason = "changing one head changes another" if mixed else "changing one head leaves the others alone"
        return Check(name, "FAILS" if mixed else "holds", f"{mixed:,} rows of other heads moved", reason, ran)

    return check_with(answers, "reach", name, ran, judge)


def check_causality(answers: ByRing, settings: Settings) -> Check:
    name, ran = "causality holds", str(settings.reach)

    def judge() -> Check:
        for size, answer in _all(answers):
            if answer.leaked:
                order = "causal" if answer.causal else "not causal"
                reason = f"{order}, ring of {size}: rows moved with token {answer.token}, which they may not see"
                return Check(name, "FAILS", f"{answer.leaked:,} rows moved", reason, ran)
        tried = {answer.token for _, answer in _all(answers)}
        reason = "no row moves with a token that it may not see"
        return Check(name, "holds", f"0 rows moved, {len(tried)} tokens at borders tried", reason, ran)

    return check_with(answers, "reach", name, ran, judge)


def _all(answers: ByRing) -> Iterator[tuple[int, ReachAnswer]]:
    for size, ranks in answers_to(answers, "reach").items():
        for given in ranks:
            yield from ((size, answer) for answer in given)
