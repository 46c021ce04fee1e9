"""All checks of a training step, in the order of the report, with causes before consequences."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from ringspan.tools.verify.check import ByRing, Check, Failed
from ringspan.tools.verify_training import judge_cost, judge_numbers, judge_reach
from ringspan.tools.verify_training.batches import TrainingSettings
from ringspan.tools.verify_training.findings import EXPLAINED_BY, LABEL_COUNTS, LOSS, REACHES, RUNS, TOKENS, Found

CHECKS: tuple[Callable[[Found], Check], ...] = (
    judge_numbers.judge_loss,
    judge_numbers.judge_tokens,
    judge_numbers.judge_gradients,
    judge_numbers.judge_replicas,
    judge_numbers.judge_norm,
    judge_numbers.judge_evaluation,
    judge_reach.judge_reach,
    judge_reach.judge_documents,
    judge_reach.judge_labels,
    judge_numbers.judge_odd,
    judge_numbers.judge_mixes,
    judge_numbers.judge_predictions,
    judge_numbers.judge_bits,
    judge_numbers.judge_rounding,
    judge_numbers.judge_accumulation,
    judge_numbers.judge_clipping,
    judge_cost.judge_duplicates,
    judge_cost.judge_balance,
    judge_cost.judge_memory,
)


_FOLLOWS = "follows from "


def judge_training(measured: ByRing, settings: TrainingSettings) -> list[Check]:
    """All checks, in the order of the report; a single one if the trainer did not run, or if there is no ring."""
    case = f"{settings.tokens} tokens"
    for size, ranks in measured.items():
        for rank, values in enumerate(ranks):
            failed = values.get("failed")
            if isinstance(failed, Failed):
                return [Check(RUNS, "FAIL", "not measured", f"rank {rank} of {size}: {failed.reason}", case)]
    found = Found(measured, settings)
    if not found.rings:
        reason = "only one process was measured: there is no ring to compare"
        return [Check(LOSS, "not measured", "", reason, found.case)]
    checks = [judge(found) for judge in CHECKS]
    failing = {check.name for check in checks if check.verdict == "FAIL"}
    explained = dict(EXPLAINED_BY)
    if judge_numbers.only_labels_are_wrong(found):
        explained |= {TOKENS: (LABEL_COUNTS, *explained[TOKENS]), LABEL_COUNTS: (REACHES,)}
    return [
        _with_explanation(check, [name for name in explained.get(check.name, ()) if name in failing])
        for check in checks
    ]


def roots(checks: Iterable[Check]) -> list[Check]:
    """The failing checks that no other failing check explains."""
    return [check for check in checks if check.verdict == "FAIL" and not check.reason.startswith(_FOLLOWS)]


def _with_explanation(check: Check, causes: list[str]) -> Check:
    if check.verdict != "FAIL" or not causes:
        return check
    return replace(check, reason=f'{_FOLLOWS}"{causes[0]}"')
