"""How far the steps of a ring are from the same steps on one process.

The ring of one writes its results to a file; rank 0 of every larger ring reads them and compares. Nothing is judged
here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from ringspan.runtime.device import Device
from ringspan.tools.measure import count_flops
from ringspan.tools.verify.check import Failed, Measured
from ringspan.tools.verify.workload import import_function
from ringspan.tools.verify_training.adapter import AdapterFactory, UnsupportedError
from ringspan.tools.verify_training.batches import TrainingSettings, anchor_row, make_batch, rounded_tokens
from ringspan.tools.verify_training.steps import (
    AGAIN,
    BASE,
    LABELS,
    REACH,
    Outcome,
    StepTaker,
    describe_error,
    relative_error,
    take_all_steps,
    whole_gradient,
)

_FP64_ALLOWED = 1e-10
_FP32_ALLOWED = 2e-4
_FP32_LOSS_ALLOWED = 1e-6  # of losses that a trainer computes in fp32, whatever the dtype of its model


@dataclass(frozen=True)
class StepComparison:
    """A step on a ring against the same step on one process. Errors are relative; NaN counts as infinite."""

    step: str
    tokens: int
    documents: int
    refused: str = ""
    refused_alone: str = ""  # what one process raised
    wanted_loss: float = 0.0
    losses: tuple[float, ...] = ()  # of each rank
    loss_error: float = 0.0
    loss_allowed: float = 0.0
    gradient_errors: dict[str, float] = field(default_factory=dict)  # by parameter
    gradient_ratios: dict[str, float] = field(default_factory=dict)  # by parameter: 1 if right, k if summed k times
    norm_error: float | None = None  # of the gradient norm that the trainer returned
    replicas_differ: float = 0.0
    row_error: float | None = None  # of token losses
    row_allowed: float = 0.0
    wrong_rows: tuple[int, ...] = ()
    missing_rows: tuple[int, ...] = ()
    repeated_rows: tuple[int, ...] = ()
    logit_error: float | None = None
    is_reordered: bool = False  # the right values of rows, at other positions

    @property
    def gradient_error(self) -> float:
        return max(self.gradient_errors.values(), default=0.0)


@dataclass(frozen=True)
class ReachComparison:
    """How much the logits of each row, or its loss, change when one token changes: on one process and on the ring."""

    position: int
    lengths: tuple[int, ...]
    rows: tuple[int, ...]  # observed
    allowed: float  # the largest change that rounding explains
    alone: tuple[float, ...]
    ring: tuple[float, ...]


@dataclass(frozen=True)
class Rounding:
    """Loss and gradients in the user's dtype against those of one process in fp64."""

    loss_error: float
    gradient_error: float  # relative, of all gradients as one vector


@dataclass(frozen=True)
class Cost:
    """A long step on this rank."""

    flops: int
    peak_bytes: int
    gradient_bytes: int  # which do not depend on the ring


def measure_training(
    group: dist.ProcessGroup, device: Device, settings: TrainingSettings, factory: AdapterFactory | None, folder: str
) -> Measured:
    """All measurements of one rank. After one has failed, the rest are skipped."""
    factory = factory or import_function(settings.target)
    size = dist.get_world_size(group)
    measured: Measured = {}
    try:
        try:
            dtype, refused = torch.float64, ""
            adapter = factory(group, dtype)
        except UnsupportedError as refusal:
            dtype, refused = torch.float32, str(refusal)
            adapter = factory(group, dtype)
        taker = StepTaker(adapter, group, device)
        measured["dtype"] = {"name": str(dtype).removeprefix("torch."), "refused": refused}
        measured["cost"] = measure_cost(taker, settings)
        take_all_steps(taker, settings)
        reference = Path(folder) / "one_process.pt"
        if size == 1:
            torch.save({name: vars(outcome) for name, outcome in taker.outcomes.items()}, reference)
        measured["deterministic"] = _difference_of_runs(taker)
        if taker.rank == 0:
            alone = {name: Outcome(**values) for name, values in torch.load(reference).items()}
            allowed = allowed_error(measured["dtype"]["name"])
            measured["steps"] = list(compare_steps(taker, alone, allowed))
            measured["reach"] = list(compare_reach(taker, alone, allowed))
            measured["label_weights"] = label_weights(taker, alone)
        measured["rounding"] = measure_rounding(taker, settings, factory, group, reference, dtype)
    except Exception as error:
        measured["failed"] = Failed(describe_error(error))
    return measured


def allowed_error(dtype: str) -> float:
    """The largest relative error that rounding explains."""
    return _FP64_ALLOWED if dtype == "float64" else _FP32_ALLOWED


def _allowed_in(values: Tensor, allowed: float) -> float:
    """The largest relative error that rounding explains in losses, which some trainers compute in fp32 in any case."""
    known = values[~values.isnan()]
    return max(allowed, _FP32_LOSS_ALLOWED) if torch.equal(known.float().double(), known) else allowed


def _difference_of_runs(taker: StepTaker) -> float:
    """The largest relative difference between two runs of the same step, over all ranks: 0 if all bits are equal."""
    first, second = taker.outcomes[BASE], taker.outcomes[AGAIN]
    if second.refused:
        return math.inf
    differences = [abs(a - b) for a, b in zip(first.losses, second.losses, strict=True)]
    for name, gradient in first.gradients.items():
        again = second.gradients.get(name)
        differences.append(math.inf if again is None else relative_error(again, gradient))
    largest = max(differences)
    return max(taker.all_gather(math.inf if math.isnan(largest) else largest))


def compare_steps(taker: StepTaker, alone: dict[str, Outcome], allowed: float) -> Iterator[StepComparison]:
    """Every step that is not about reach."""
    for name, found in taker.outcomes.items():
        if name.startswith(REACH) or name == AGAIN:
            continue
        wanted, batch = alone[name], taker.batches[name]
        compared = StepComparison(name, batch.n, len(batch.lengths))
        if found.refused or wanted.refused:
            yield replace(compared, refused=found.refused, refused_alone=wanted.refused)
            continue
        loss = wanted.losses[0]
        errors = [abs(each - loss) / max(abs(loss), 1e-30) for each in found.losses]
        floor = 1e-3 * max((x.abs().max().item() for x in wanted.gradients.values() if x.numel()), default=0.0)
        gradient_errors = {
            parameter: relative_error(found.gradients[parameter], gradient, floor)
            if parameter in found.gradients
            else math.inf
            for parameter, gradient in wanted.gradients.items()
        }
        gradient_errors |= dict.fromkeys(found.gradients.keys() - wanted.gradients.keys(), math.inf)
        compared = replace(
            compared,
            wanted_loss=loss,
            losses=tuple(found.losses),
            loss_allowed=_allowed_in(torch.tensor(alone[BASE].losses, dtype=torch.float64), allowed),
            loss_error=max(math.inf if math.isnan(error) else error for error in errors),
            gradient_errors=gradient_errors,
            gradient_ratios={
                parameter: _ratio(found.gradients.get(parameter), gradient)
                for parameter, gradient in wanted.gradients.items()
            },
            norm_error=_norm_error(found, wanted),
            replicas_differ=found.replicas_differ,
        )
        yield _with_rows(compared, found, wanted, allowed)


def _ratio(found: Tensor | None, wanted: Tensor) -> float:
    """The factor by which a gradient is too large: its component along the wanted one."""
    total = wanted.square().sum().item()
    if found is None or found.shape != wanted.shape or not total:
        return 0.0 if found is None else 1.0
    return (found * wanted).sum().item() / total


def _norm_error(found: Outcome, wanted: Outcome) -> float | None:
    norm = wanted.norms[0] if wanted.norms else None
    if norm is None:
        return None
    errors = [math.inf if each is None else abs(each - norm) / max(norm, 1e-30) for each in found.norms]
    return max(math.inf if math.isnan(error) else error for error in errors)


def _with_rows(compared: StepComparison, found: Outcome, wanted: Outcome, allowed: float) -> StepComparison:
    if found.returned is not None:
        compared = replace(
            compared,
            missing_rows=tuple((found.returned == 0).nonzero()[:, 0].tolist()),
            repeated_rows=tuple((found.returned > 1).nonzero()[:, 0].tolist()),
        )
    if found.rows is not None and wanted.rows is not None:
        scale = max(wanted.rows.abs().max().item(), 1e-30)
        errors = ((found.rows - wanted.rows).abs() / scale).nan_to_num(nan=math.inf).amax(0)
        allowed = _allowed_in(wanted.rows, allowed)
        wrong = tuple((errors > allowed).nonzero()[:, 0].tolist())
        shuffled = wrong and relative_error(found.rows.sort().values, wanted.rows.sort().values) <= allowed
        compared = replace(
            compared,
            row_error=errors.max().item(),
            row_allowed=allowed,
            wrong_rows=wrong,
            is_reordered=bool(shuffled),
        )
    if found.logits is not None and wanted.logits is not None:
        compared = replace(compared, logit_error=relative_error(found.logits, wanted.logits))
    return compared


def compare_reach(taker: StepTaker, alone: dict[str, Outcome], allowed: float) -> Iterator[ReachComparison]:
    """For each changed token, the change of every row, on one process and on this ring."""
    for name, found in taker.outcomes.items():
        if not name.startswith(REACH) or ", " not in name:
            continue
        kind, _, position = name.rpartition(", ")
        rows_of = [outcomes[each].rows for outcomes in (alone, taker.outcomes) for each in (kind, name)]
        if found.refused or any(rows is None for rows in rows_of):
            continue
        before, after, ring_before, ring_after = cast("list[Tensor]", rows_of)
        changes = [(after - before).abs().amax(0), (ring_after - ring_before).abs().amax(0)]
        observed = ~(changes[0].isnan() | changes[1].isnan())  # rows that no rank returned are a matter of their own
        rows = observed.nonzero()[:, 0].tolist()
        lengths = taker.batches[name].lengths
        values = [tuple(change[observed].tolist()) for change in changes]
        limit = _allowed_in(before, allowed) * before.nan_to_num().abs().max().item()
        yield ReachComparison(int(position), lengths, tuple(rows), limit, *values)


def label_weights(taker: StepTaker, alone: dict[str, Outcome]) -> dict[str, float]:
    """How often the target of each border row counts on this ring: 1 if the loss is right.

    The loss of two rows is (w a + b) / (w + 1) if the first counts w times.
    """
    weights = {}
    for name, found in taker.outcomes.items():
        row, rows = name.removeprefix(f"{LABELS}row "), alone[name].rows
        if row != name and found.losses and rows is not None:
            counted, loss = rows.mean(0), found.losses[0]
            a, b = counted[int(row)].item(), counted[anchor_row(len(counted))].item()
            weights[row] = (loss - b) / (a - loss) if a != loss else math.inf
    return weights


def measure_cost(taker: StepTaker, settings: TrainingSettings) -> Cost | None:
    """Memory and FLOPs of one long step; first, while the process is fresh. None if the adapter refuses it."""
    vocab = taker.vocab_size
    short = make_batch([settings.spans * 4], vocab, batch=1)
    long = make_batch([rounded_tokens(settings.long_tokens, settings.sizes)], vocab, batch=1)
    _, refused = taker.run(lambda: taker.adapter.step([short]))  # creates threads, libraries and connections
    if refused:
        return None
    (result, refused), peak = taker.device.peak_growth(lambda: taker.run(lambda: taker.adapter.step([long])))
    if refused:
        return None
    gradient_bytes = sum(gradient.nbytes for gradient in result.gradients.values())
    return Cost(count_flops(lambda: taker.adapter.step([long])), peak, gradient_bytes)


def measure_rounding(
    taker: StepTaker,
    settings: TrainingSettings,
    factory: AdapterFactory,
    group: dist.ProcessGroup,
    reference: Path,
    dtype: torch.dtype,
) -> Rounding | str:
    """One step in the user's dtype, or why there is none."""
    if dtype != torch.float64:
        return "the adapter does not support float64, to compare with"
    adapter, refused = taker.run(lambda: factory(group, getattr(torch, settings.dtype)))
    if refused:
        return f"{settings.dtype}: {refused}"
    result, refused = taker.run(lambda: adapter.step([taker.batches[BASE]]))
    if refused:
        return f"{settings.dtype}: {refused}"
    gradients = {name: whole_gradient(gradient) for name, gradient in result.gradients.items()}
    losses = taker.all_gather(float(result.loss))
    if taker.rank:
        return Rounding(0.0, 0.0)
    wanted = Outcome(**torch.load(reference)[BASE])
    error = sum((gradients.get(name, 0.0) - x).square().sum().item() for name, x in wanted.gradients.items())
    total = sum(x.square().sum().item() for x in wanted.gradients.values())
    loss = wanted.losses[0]
    return Rounding(max(abs(each - loss) / abs(loss) for each in losses), math.sqrt(error / total) if total else 0.0)
