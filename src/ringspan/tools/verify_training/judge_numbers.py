"""Numbers that must not depend on the ring: losses, gradients, norms, predictions, bits and rounding."""

from __future__ import annotations

import math
from collections.abc import Callable

from ringspan.tools.verify.check import Check
from ringspan.tools.verify_training.batches import border_rows
from ringspan.tools.verify_training.compare import Rounding, StepComparison
from ringspan.tools.verify_training.findings import (
    ACCUMULATION,
    BITS,
    CLIPPING,
    EVALUATION,
    GRADIENTS,
    LOSS,
    MIXES,
    NORM,
    ODD,
    PREDICTIONS,
    REPLICAS,
    ROUNDING,
    TOKENS,
    Found,
    error_text,
    first_line,
    not_supported,
    ranges,
    scale_cause,
)
from ringspan.tools.verify_training.steps import ACCUMULATED, BASE, CLIPPED, EVALUATED, LENGTHS

_MAX_GROWTH = 2.0  # of the rounding error, from one process to a ring


def judge_loss(found: Found) -> Check:
    size, step = max(found.plain_steps(), key=lambda each: each[1].loss_error)
    error = step.loss_error
    case = f"{step.step}, {found.case}"
    if error <= step.loss_allowed:
        meaning = "training curves do not depend on the number of ranks"
        return Check(LOSS, "pass", error_text(error, step.loss_allowed), meaning, case)
    result = f"ring of {size}: {step.losses[0]:.6g}, one process {step.wanted_loss:.6g}"
    return Check(LOSS, "FAIL", result, _cause_of_loss(step, size), case)


def _cause_of_loss(step: StepComparison, size: int) -> str:
    losses, wanted = step.losses, step.wanted_loss
    if max(losses) - min(losses) > 1e-9 * abs(wanted):
        shown = ", ".join(f"{loss:.4g}" for loss in losses)
        return f"ranks return different losses ({shown}): each logs the loss of its own rows, not of the sequence"
    scaled = scale_cause(losses[0] / wanted, size)
    if scaled:
        return f"the loss is {losses[0] / wanted:.3g} times too large: {scaled}"
    if step.documents > 1:
        return "only packed documents are wrong: positions, masks or labels at their borders"
    return "the logged loss is not the mean over all labels of the sequence"


def judge_tokens(found: Found) -> Check:
    steps = [(size, s) for size, s in found.plain_steps() if s.row_error is not None]
    if not steps:
        return not_supported(TOKENS, "", "the adapter returns no token losses", found.case)
    size, step = max(steps, key=lambda each: each[1].row_error or 0.0)
    error, case = step.row_error or 0.0, f"{step.step}, {found.case}"
    if error <= step.row_allowed:
        meaning = "no position is treated differently for lying at a border of shards"
        return Check(TOKENS, "pass", error_text(error, step.row_allowed), meaning, case)
    rows = step.wrong_rows
    result = f"ring of {size}: {len(rows)} of {step.tokens} rows differ, by up to {error:.1e}"
    return Check(TOKENS, "FAIL", result, f"{_where(rows, step.tokens)}; {_unused(step)}", case)


def only_labels_are_wrong(found: Found) -> bool:
    """Whether logits are right where losses of rows are not, or, without logits, only rows at borders are wrong."""
    steps = [step for _, step in found.plain_steps() if step.wrong_rows]
    spans = found.settings.spans
    return bool(steps) and all(
        step.logit_error <= found.allowed
        if step.logit_error is not None
        else {*step.wrong_rows} <= {*border_rows(step.tokens, spans), step.tokens - 1}
        for step in steps
    )


def _where(rows: tuple[int, ...], tokens: int) -> str:
    return f"rows {ranges(rows)} of {tokens}"


def _unused(step: StepComparison) -> str:
    """The parameters without a gradient on the ring: what they belong to is dropped there."""
    unused = [name for name, ratio in step.gradient_ratios.items() if ratio == 0.0]
    if unused:
        names = ", ".join(unused[:3]) + (", ..." if len(unused) > 3 else "")
        return f"{names}: no gradient on the ring, so what it belongs to (sinks, a bias) is dropped there"
    return (
        "the same rows are reached, but attention weighs them differently: positions, sinks, scale or soft cap differ "
        "on the ring"
    )


def judge_gradients(found: Found) -> Check:
    steps = found.plain_steps()
    # A wrong loss explains wrong gradients, so steps with the right loss count, if there are any.
    steps = [(size, s) for size, s in steps if s.loss_error <= s.loss_allowed] or steps
    size, step = max(steps, key=lambda each: each[1].gradient_error)
    case = f"{len(step.gradient_errors)} parameters, {step.step}, {found.case}"
    if step.gradient_error <= found.allowed:
        result = error_text(step.gradient_error, found.allowed)
        return Check(GRADIENTS, "pass", result, "every parameter learns as on one process", case)
    wrong = {name: error for name, error in step.gradient_errors.items() if error > found.allowed}
    worst = max(wrong, key=lambda name: wrong[name])
    result = f"ring of {size}: {len(wrong)} of {len(step.gradient_errors)} parameters, {worst} by {wrong[worst]:.1e}"
    ratios = [step.gradient_ratios.get(name, 1.0) for name in wrong]
    scale = scale_cause(sum(ratios) / len(ratios), size)
    lost = [name for name in wrong if step.gradient_ratios.get(name) == 0.0]
    if max(ratios) - min(ratios) < 1e-6 and scale:
        cause = f"gradients are {ratios[0]:.3g} times too large: {scale}"
    elif lost:
        cause = (
            f"{', '.join(lost[:3])}: no gradient on the ring; it was cut off (detach, a collective without backward)"
        )
    else:
        cause = f"the loss is right, but backward is not: wrong are {', '.join(list(wrong)[:4])}"
    return Check(GRADIENTS, "FAIL", result, cause, case)


def judge_replicas(found: Found) -> Check:
    size, step = max(found.plain_steps(), key=lambda each: each[1].replicas_differ)
    if step.replicas_differ <= found.allowed:
        result = f"differ by {step.replicas_differ:.1e}" if step.replicas_differ else "equal"
        return Check(REPLICAS, "pass", result, "the weights of all ranks stay the same", found.case)
    cause = "gradients are not reduced over the ring: an all-reduce is missing, and the weights of ranks drift apart"
    return Check(REPLICAS, "FAIL", f"ring of {size}: differ by {step.replicas_differ:.1e}", cause, found.case)


def judge_norm(found: Found) -> Check:
    errors = {size: step.norm_error for size, step in found.steps(lambda name: name == BASE)}
    measured = {size: error for size, error in errors.items() if error is not None}
    if not measured:
        return not_supported(NORM, "", "the adapter returns no gradient norm", found.case)
    size = max(measured, key=lambda k: measured[k])
    if measured[size] <= found.allowed:
        result = error_text(measured[size], found.allowed)
        return Check(NORM, "pass", result, "clipping and logs see the same norm", found.case)
    cause = "the norm is that of a rank's own part, or of gradients before they are reduced"
    return Check(NORM, "FAIL", f"ring of {size}: off by {measured[size]:.1e}", cause, found.case)


def judge_evaluation(found: Found) -> Check:
    return _judge_steps(
        found,
        EVALUATION,
        lambda name: name == EVALUATED,
        "evaluation does not depend on the number of ranks",
        "evaluation does not reduce the loss as training does",
    )


def _judge_steps(found: Found, name: str, wanted: Callable[[str], bool], meaning: str, cause: str) -> Check:
    """A check of the loss and gradients of some steps. Steps that every ring refuses are named."""
    worst: tuple[float, int, StepComparison] | None = None
    refused: dict[str, str] = {}
    passed = 0
    for size, step in found.steps(wanted):
        if step.refused:
            refused.setdefault(step.step.partition(": ")[2] or step.step, f"ring of {size}: {step.refused}")
            continue
        if step.refused_alone:
            refused.setdefault(step.step, f"one process: {step.refused_alone}")
            continue
        passed += 1
        lost = math.inf if step.missing_rows or step.repeated_rows else 0.0
        # In units of what is allowed: losses may be allowed more than gradients.
        error = max(step.loss_error / step.loss_allowed, step.gradient_error / found.allowed, lost)
        if worst is None or error > worst[0]:
            worst = (error, size, step)
    if worst is None:
        reason = next(iter(refused.values()), "the step was not taken")
        return not_supported(name, "", first_line(reason), found.case)
    error, size, step = worst
    if error > 1:
        if step.loss_error > step.loss_allowed:
            result = f"ring of {size}: loss {step.losses[0]:.6g}, one process {step.wanted_loss:.6g}"
        elif step.gradient_error > found.allowed:
            result = f"ring of {size}: gradients off by {step.gradient_error:.1e}"
        else:
            result = f"ring of {size}: rows {ranges(step.missing_rows or step.repeated_rows)} missing or repeated"
        return Check(name, "FAIL", result, f"{step.step}: {cause}", found.case)
    largest, allowed = max(step.loss_error, step.gradient_error), max(step.loss_allowed, found.allowed)
    result = f"{passed} step{'s' if passed > 1 else ''}, {error_text(largest, allowed)}"
    if refused:
        texts = "; ".join(f"{what} ({first_line(why)})" for what, why in list(refused.items())[:2])
        more = f" and {len(refused) - 2} more" if len(refused) > 2 else ""
        return not_supported(name, result, f"refused: {texts}{more}", found.case)
    return Check(name, "pass", result, meaning, found.case)


def judge_odd(found: Found) -> Check:
    return _judge_steps(
        found,
        ODD,
        lambda name: name.startswith(LENGTHS) and "+" not in name and "documents" not in name,
        "no length needs padding by hand, also with fewer tokens than ranks",
        "tokens are dropped or padded where the length does not divide over the ring",
    )


def judge_mixes(found: Found) -> Check:
    return _judge_steps(
        found,
        MIXES,
        lambda name: name.startswith(LENGTHS) and ("+" in name or "documents" in name),
        "documents may be of any length and end anywhere",
        "documents that begin or end inside a shard, or many short ones, are treated differently",
    )


def judge_predictions(found: Found) -> Check:
    steps = found.plain_steps()
    if all(step.row_error is None and step.logit_error is None for _, step in steps):
        return not_supported(PREDICTIONS, "", "the adapter returns neither logits nor token losses", found.case)
    for size, step in steps:
        if step.missing_rows or step.repeated_rows:
            missing, repeated = step.missing_rows, step.repeated_rows
            what = f"{len(missing)} rows missing" if missing else f"{len(repeated)} rows returned twice"
            cause = (
                f"{_where(missing, step.tokens)} are returned by no rank: predictions are never put back together"
                if missing
                else f"{_where(repeated, step.tokens)} are returned by several ranks"
            )
            return Check(PREDICTIONS, "FAIL", f"ring of {size}: {what}", cause, found.case)
        if step.is_reordered:
            cause = "the right values are returned for other positions: the order of the split is not undone"
            return Check(PREDICTIONS, "FAIL", f"ring of {size}: rows in another order", cause, found.case)
    size, step = max(steps, key=lambda each: each[1].logit_error or 0.0)
    error = step.logit_error
    if error is not None and error > found.allowed and (step.row_error or 0.0) <= step.row_allowed:
        cause = "the losses of all rows are right, but not their logits: these belong to other positions"
        return Check(PREDICTIONS, "FAIL", f"ring of {size}: logits off by {error:.1e}", cause, found.case)
    right = error is not None and error <= found.allowed
    result = f"{step.tokens} rows, each from one rank" + (
        f"; logits: {error_text(error or 0.0, found.allowed)}" * right
    )
    return Check(PREDICTIONS, "pass", result, "each row is returned once, at its position", found.case)


def judge_bits(found: Found) -> Check:
    runs = {size: max(values["deterministic"] for values in ranks) for size, ranks in found.measured.items()}
    alone, size = runs.get(1, 0.0), max(runs, key=lambda k: runs[k])
    if runs[size] == 0.0:
        return Check(BITS, "pass", "equal on every ring", "a run can be repeated bit for bit", found.case)
    result = f"ring of {size}: {runs[size]:.1e} apart"
    if alone:
        reason = f"one process differs too, by {alone:.1e}: the model or the machine is not deterministic"
        return Check(BITS, "not measured", result, reason, found.case, essential=False)
    cause = "one process repeats its bits: gradients are added in an order that changes from run to run"
    return Check(BITS, "FAIL", result, cause, found.case)


def judge_rounding(found: Found) -> Check:
    rounding = {size: ranks[0]["rounding"] for size, ranks in found.measured.items()}
    case = f"{found.settings.tokens} tokens, {found.settings.dtype} against float64"
    for value in rounding.values():
        if not isinstance(value, Rounding):
            return not_supported(ROUNDING, "", first_line(value), case)
    errors = {size: value.gradient_error for size, value in rounding.items()}
    shown = ", ".join(f"{error:.1e}" for error in errors.values())
    result = f"gradients on rings of {', '.join(map(str, errors))}: {shown}"
    size = max(errors, key=lambda k: errors[k])
    if errors[size] > _MAX_GROWTH * errors.get(1, math.inf):
        cause = (
            f"{errors[size] / errors[1]:.1f} times that of one process: partial results or gradients are kept or sent "
            f"in {found.settings.dtype} between hops"
        )
        return Check(ROUNDING, "FAIL", result, cause, case)
    return Check(ROUNDING, "pass", result, f"at most {_MAX_GROWTH:g} times the error of one process", case)


def judge_accumulation(found: Found) -> Check:
    return _judge_steps(
        found,
        ACCUMULATION,
        lambda name: name == ACCUMULATED,
        "three batches with different numbers of labels weigh the same on every ring",
        "each batch is weighed by the labels of a rank, not of the whole batch",
    )


def judge_clipping(found: Found) -> Check:
    return _judge_steps(
        found,
        CLIPPING,
        lambda name: name == CLIPPED,
        "the step is as long as on one process",
        "gradients are clipped by the norm of a rank's own part, or before they are reduced",
    )
