"""Who moves when one token moves, and which labels count: causality, windows, documents, labels at borders."""

from __future__ import annotations

import math

from ringspan.tools.verify.check import Check
from ringspan.tools.verify_training.compare import ReachComparison, StepComparison
from ringspan.tools.verify_training.findings import (
    DOCUMENTS,
    LABEL_COUNTS,
    REACHES,
    Found,
    first_line,
    not_supported,
    ranges,
    scale_cause,
)
from ringspan.tools.verify_training.steps import BASE, LABELS, PACKED

_COUNT = 0.02  # a count is a whole number
_FAR = 0.01  # below this share of the allowed change, a row certainly does not move


def judge_reach(found: Found) -> Check:
    """Rows of the same document that move on the ring and not on one process, or the other way round."""
    seen = 0
    for size, each in (*found.reach(packed=False), *found.reach(packed=True)):
        seen += 1
        more, fewer = moved_differently(each)
        if more or fewer:
            result = f"ring of {size}: the token at {each.position} moves {len(more)} rows more, {len(fewer)} fewer"
            return Check(REACHES, "FAIL", result, _cause_of_reach(each, more, fewer), found.case)
    if not seen:
        return not_supported(REACHES, "", "the adapter refused the steps", found.case)
    meaning = "causality, windows and prefixes are those of one process"
    return Check(REACHES, "pass", f"{seen} changed tokens move the same rows", meaning, found.case)


def moved_differently(each: ReachComparison) -> tuple[list[int], list[int]]:
    """Rows of the same document that move on the ring only, and those that move on one process only."""
    limit, inside = each.allowed, document_of(each)
    rows = [(row, a, b) for row, a, b in zip(each.rows, each.alone, each.ring, strict=True) if row in inside]
    more = [row for row, a, b in rows if b > limit and a <= _FAR * limit]
    fewer = [row for row, a, b in rows if a > limit and b <= _FAR * limit]
    return more, fewer


def document_of(each: ReachComparison) -> range:
    """The rows of the document whose token changed."""
    start = 0
    for length in each.lengths:
        if each.position < start + length:
            return range(start, start + length)
        start += length
    return range(0)


def _cause_of_reach(each: ReachComparison, more: list[int], fewer: list[int]) -> str:
    if any(row < each.position for row in more):
        return f"rows {ranges(more)}, before the token, move: attention is not causal on the ring"
    if more:
        return f"rows {ranges(more)} move, too far from the token: a window became full attention on the ring"
    return f"rows {ranges(fewer)} do not move: attention stops at a border of shards (a halo is missing, rows are lost)"


def judge_documents(found: Found) -> Check:
    """A changed token moves no row of another document, on any ring and on one process."""
    seen = 0
    for size, each in sorted(found.reach(packed=True, alone=True), key=lambda pair: pair[0]):
        seen += 1
        own = document_of(each)
        leaks = [row for row, b in zip(each.rows, each.ring, strict=True) if row not in own and b > each.allowed]
        if leaks:
            where = "one process" if size == 1 else f"ring of {size}"
            result = f"{where}: the token at {each.position} moves rows {ranges(leaks)} of other documents"
            cause = "packed documents attend to each other: " + (
                "the mask of documents is lost when the sequence is split"
                if size > 1
                else "the trainer ignores documents on one process too"
            )
            return Check(DOCUMENTS, "FAIL", result, cause, found.case)
    if all(size == 1 for size, _ in found.reach(packed=True, alone=True)):
        refused = [s.refused or s.refused_alone for _, s in found.steps(lambda name: name == PACKED)]
        return not_supported(DOCUMENTS, "", first_line(refused[0] if refused else "not measured"), found.case)
    return Check(DOCUMENTS, "pass", f"{seen} changed tokens", "packing does not change what is learned", found.case)


def judge_labels(found: Found) -> Check:
    """Losses of few targets, apart from a factor that all losses of a ring share."""
    wrong: list[tuple[int, StepComparison, float]] = []
    refused: list[StepComparison] = []
    seen = 0
    factors = dict(found.steps(lambda name: name == BASE))
    for size, step in found.steps(lambda name: name.startswith(LABELS)):
        if step.refused or step.refused_alone:
            refused.append(step)
            continue
        seen += 1
        base = factors[size]
        factor = base.losses[0] / base.wanted_loss
        scaled = scale_cause(factor, size)
        error = abs(step.losses[0] / (factor if scaled else 1.0) - step.wanted_loss) / abs(step.wanted_loss)
        if not error <= step.loss_allowed:
            wrong.append((size, step, error))
    if refused and not wrong:
        first = refused[0]
        reason = f"refused: {first.step.removeprefix(LABELS)} ({first_line(first.refused or first.refused_alone)})"
        return not_supported(LABEL_COUNTS, f"{seen} of {seen + len(refused)} choices of labels", reason, found.case)
    if not wrong:
        meaning = "no label at a border of shards is lost or doubled, and -100 may lie unevenly over ranks"
        return Check(LABEL_COUNTS, "pass", f"{seen} choices of labels", meaning, found.case)
    uneven = [(size, step) for size, step, _ in wrong if "row " not in step.step]
    if uneven:  # their rows are not at borders
        size, step = uneven[0]
        result = f"ring of {size}: {step.losses[0]:.6g}, one process {step.wanted_loss:.6g}"
        cause = f"{step.step}: the loss is a mean of the means of ranks, whatever the number of their labels"
        return Check(LABEL_COUNTS, "FAIL", result, cause, found.case)
    size, step, _ = wrong[0]
    row = step.step.removeprefix(f"{LABELS}row ")
    weight = found.rings[size][0]["label_weights"].get(row, math.nan)
    is_count = abs(weight - round(weight)) < _COUNT if math.isfinite(weight) and weight > -_COUNT else False
    counts = f"counts {weight:.2f} times" if is_count else "is another, or counts differently"
    result = f"ring of {size}: the label of row {row} {counts}"
    named = ", ".join(each.step.removeprefix(f"{LABELS}row ") for ring, each, _ in wrong if ring == size)
    cause = f"labels are lost, doubled or shifted where the sequence is split: rows {named}"
    return Check(LABEL_COUNTS, "FAIL", result, cause, found.case)
