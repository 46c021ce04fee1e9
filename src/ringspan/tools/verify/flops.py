"""Work: all ranks together do what one does alone, and no rank does more than its share."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ringspan.planning.api import plan
from ringspan.tools.measure import count_flops
from ringspan.tools.verify.check import ByRing, Check, answers_to, check_with
from ringspan.tools.verify.examination import Examination
from ringspan.tools.verify.settings import Settings

WORK_TOLERANCE = 0.05


@dataclass(frozen=True)
class WorkAnswer:
    """FLOPs of forward and backward, not causal, and this rank's share of the pairs, which its rows decide."""

    flops: int
    share: float


def ask_work(examination: Examination) -> WorkAnswer:
    case, ring = examination.settings.counted, examination.bound.ring
    rows, results = examination.own_rows(case), list[list[Tensor]]()
    flops = count_flops(lambda: results.append(examination.call(rows, case, False, backward=True)))
    examination.compare(examination.expect(case, False, backward=True), results[0])
    ring_plan = plan(
        case.pattern, case.tokens, ring_size=ring.size, layout=ring.layout, heads=case.heads, head_dim=case.dim
    )
    pairs = [ring_plan.work(rank) for rank in range(ring.size)]
    return WorkAnswer(flops, pairs[ring.rank] / sum(pairs))


def check_work(answers: ByRing, settings: Settings) -> Check:
    name, ran = "no work is done twice", str(settings.counted)

    def judge() -> Check:
        work = answers_to(answers, "work")
        alone = sum(answer.flops for answer in work.get(1, []))
        if not alone:
            return Check(name, "not seen", "0 FLOPs counted", "its kernels do not go through torch's dispatcher", ran)
        ratios = {size: sum(answer.flops for answer in ranks) / alone for size, ranks in work.items()}
        worst = max(ratios, key=lambda size: (round(abs(ratios[size] - 1), 2), size))
        figure = f"ring of {worst}: {ratios[worst]:.2f} x the FLOPs of one rank"
        if abs(ratios[worst] - 1) > WORK_TOLERANCE:
            reason = "ranks compute what others compute too" if ratios[worst] > 1 else "some of the work is not done"
            return Check(name, "FAILS", figure, reason, ran)
        return Check(name, "holds", figure, "all ranks together compute what one computes alone", ran)

    return check_with(answers, "work", name, ran, judge)


def check_shares(answers: ByRing, settings: Settings) -> Check:
    name, ran = "every rank does its share", str(settings.counted)

    def judge() -> Check:
        found = []
        for size, ranks in answers_to(answers, "work").items():
            total = sum(answer.flops for answer in ranks)
            if size > 1 and total:
                found += [
                    (answer.flops / total / answer.share, size, rank, answer) for rank, answer in enumerate(ranks)
                ]
        if not found:
            return Check(
                name, "not seen", "0 FLOPs counted", "no ring of 2 or more whose kernels torch's profiler sees", ran
            )
        ratio, size, rank, answer = max(found, key=lambda each: round(each[0], 2))
        figure = f"ring of {size}: rank {rank} does {ratio * answer.share:.0%} of the work"
        if ratio > 1 + WORK_TOLERANCE:
            return Check(
                name, "FAILS", figure, f"its rows are {answer.share:.0%} of it: others wait for this rank", ran
            )
        return Check(name, "holds", figure, f"the most above its share, which is {answer.share:.0%}; not causal", ran)

    return check_with(answers, "work", name, ran, judge)
