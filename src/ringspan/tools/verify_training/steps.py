"""The steps that every ring takes: the same steps on the same batches, which need no knowledge of the model."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringspan.nn.cross_entropy import IGNORED
from ringspan.runtime.collectives import all_gather_json
from ringspan.runtime.device import Device
from ringspan.tools.verify_training.adapter import (
    DEFAULT_VOCABULARY,
    Batch,
    StepResult,
    TrainingAdapter,
    UnsupportedError,
)
from ringspan.tools.verify_training.batches import (
    TrainingSettings,
    accumulated_batches,
    changed_positions,
    label_batches,
    lengths_text,
    make_batch,
    odd_lengths,
    with_equal_labels,
    with_targets_in,
    with_token_changed,
)

BASE, PACKED, AGAIN, ACCUMULATED, CLIPPED, EVALUATED = (
    *("one document", "packed documents", "the same step again"),
    *("accumulated", "clipped", "evaluated"),
)
LABELS, LENGTHS, REACH = "labels: ", "lengths: ", "reach: "  # prefixes of steps
MAX_NORM = 1e-3  # clips the gradients of any model
_OBSERVED_ROWS = 8  # rows whose loss is read one by one if the adapter returns no token losses


@dataclass
class Outcome:
    """A step as all ranks together returned it; ``gradients`` are those of this rank."""

    losses: list[float] = field(default_factory=list)  # as each rank returned it
    norms: list[float | None] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    replicas_differ: float = 0.0  # the largest difference of a gradient between two ranks, relative
    rows: Tensor | None = None  # (batch, n), the loss of each row; NaN if no rank returned it
    returned: Tensor | None = None  # (n,), how many ranks returned each row
    logits: Tensor | None = None  # (batch, n), a fixed combination of the logits of each row
    refused: str = ""  # what every rank raised


def describe_error(error: Exception) -> str:
    """The error, and where it was raised, outside of this package."""
    text = "".join(traceback.format_exception_only(error)).strip()
    frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).parent != Path(__file__).parent]
    ends = frames[:1] + frames[1:][-1:]
    places = [f"{Path(frame.filename).name}, line {frame.lineno}, in {frame.name}" for frame in ends]
    return f"{text} ({'; '.join(places)})" if places else text


def _checked(result: StepResult) -> StepResult:
    if not isinstance(result, StepResult):
        raise TypeError(f"step() returned {type(result).__name__}: must return a ringspan.testing.StepResult")
    return result


class StepTaker:
    """Takes steps with an adapter on one rank, and keeps what all ranks returned.

    Own messages go through a group of their own, since an adapter that raises on some ranks leaves its group in
    disorder. Smaller rings under torchrun share theirs: all ranks of the world would have to create another.
    """

    def __init__(self, adapter: TrainingAdapter, group: dist.ProcessGroup, device: Device) -> None:
        self.adapter, self.device = adapter, device
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.control: Any = dist.new_group() if self.size == dist.get_world_size() else group
        self.vocab_size = int(getattr(adapter, "vocab_size", DEFAULT_VOCABULARY))
        self.outcomes: dict[str, Outcome] = {}
        self.batches: dict[str, Batch] = {}

    def all_gather(self, value: Any) -> list[Any]:
        return all_gather_json(value, group=self.control, device=self.device.device)

    def run(self, call: Callable[[], Any]) -> tuple[Any, str]:
        """The result of a call that may raise on all ranks, and what it raised."""
        result, error = None, ""
        try:
            result = call()
        except UnsupportedError as refusal:
            error = str(refusal)
        except Exception as raised:  # a trainer may raise anything
            error = describe_error(raised)
        errors = self.all_gather(error)
        if any(errors) and not all(errors):
            rank = next(rank for rank, text in enumerate(errors) if text)
            raise RuntimeError(f"rank {rank} raised and others did not: {errors[rank]}")
        return result, error

    def take(self, name: str, *batches: Batch, max_norm: float | None = None, in_full: bool = False) -> Outcome:
        """Take a step and keep its outcome under this name; ``in_full``, also logits and the gradients of all ranks."""
        result, refused = self.run(lambda: _checked(self.adapter.step(list(batches), max_norm=max_norm)))
        found = Outcome(refused=refused) if refused else self._gather(result, batches[0], in_full)
        self.outcomes[name], self.batches[name] = found, batches[0]
        return found

    def _gather(self, result: StepResult, batch: Batch, in_full: bool) -> Outcome:
        mine = {
            "loss": float(result.loss),
            "norm": None if result.gradient_norm is None else float(result.gradient_norm),
            "positions": None if result.positions is None else result.positions.tolist(),
            "rows": _listed(result.token_losses),
            "logits": None if result.logits is None else _listed(_combined(result.logits)),
        }
        by_rank = self.all_gather(mine)
        gradients = {name: whole_gradient(gradient) for name, gradient in result.gradients.items()}
        rows = logits = returned = None
        if all(each["rows"] is not None for each in by_rank):
            rows, returned = _put_together(by_rank, "rows", batch)
        if all(each["logits"] is not None for each in by_rank):
            logits, returned = _put_together(by_rank, "logits", batch)
        return Outcome(
            losses=[each["loss"] for each in by_rank],
            norms=[each["norm"] for each in by_rank],
            gradients=gradients,
            replicas_differ=self._difference_of_replicas(gradients) if in_full else 0.0,
            rows=rows,
            returned=returned,
            logits=logits,
        )

    def _difference_of_replicas(self, gradients: dict[str, Tensor]) -> float:
        """Between the gradients of rank 0 and of any other rank; infinite if they have different names."""
        if self.size == 1:
            return 0.0
        shapes = self.all_gather([[name, list(x.shape)] for name, x in gradients.items()])
        if any(each != shapes[0] for each in shapes):
            return math.inf
        largest = 0.0
        for mine in gradients.values():
            first = mine.to(self.device.device, copy=True)
            dist.broadcast(first, dist.get_global_rank(self.control, 0), group=self.control)
            largest = max(largest, relative_error(mine, first.cpu()))
        return max(self.all_gather(largest))

    def observe(self, name: str, batch: Batch) -> None:
        """Take a step for the losses of its rows: all of them, or some, one by one, if the adapter returns none."""
        first = self.outcomes[BASE]
        if first.rows is not None or first.logits is not None:
            found = self.take(name, batch)
            found.rows = found.rows if found.logits is None else found.logits  # rows without a target move too
            return
        targeted = (batch.targets[0] != IGNORED).nonzero()[:, 0]
        chosen = targeted[torch.linspace(0, len(targeted) - 1, _OBSERVED_ROWS).long()].unique().tolist()
        rows = torch.full((1, batch.n), math.nan, dtype=torch.float64)
        for row in chosen:
            found = self.take(name, with_targets_in(batch, [row]))
            rows[0, row] = found.losses[0] if found.losses else math.nan
        self.outcomes[name] = Outcome(losses=[0.0], rows=rows, refused=found.refused)
        self.batches[name] = batch


def _combined(logits: Tensor) -> Tensor:
    """One number for each row, which changes if any of its logits does: a vocabulary is too large to gather."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(logits.shape[-1], generator=generator, dtype=torch.float64)
    return logits.detach().cpu().double() @ weights


def _listed(x: Tensor | None) -> Any:
    return None if x is None else x.detach().double().cpu().tolist()


def whole_gradient(gradient: Tensor) -> Tensor:
    whole: Tensor = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    return whole.detach().double().cpu().clone()


def _put_together(by_rank: list[dict[str, Any]], name: str, batch: Batch) -> tuple[Tensor, Tensor]:
    """The rows of all ranks in the order of the sequence, and how many ranks returned each."""
    returned = torch.zeros(batch.n, dtype=torch.int64)
    whole: Tensor | None = None
    for rank, each in enumerate(by_rank):
        values, positions = torch.tensor(each[name], dtype=torch.float64), each["positions"]
        if positions is None or values.dim() < 2 or len(positions) != values.shape[1]:
            what = "token_losses" if name == "rows" else name
            held = "positions is missing" if positions is None else f"positions has {len(positions)}"
            raise ValueError(f"{what} has {values.shape[1]} rows, but {held}: give the position of each row")
        if whole is None:
            whole = torch.full((len(values), batch.n, *values.shape[2:]), math.nan, dtype=torch.float64)
        for i, position in enumerate(positions):
            if position < 0:
                continue
            if position >= batch.n:
                raise ValueError(f"rank {rank}: position {position}: must be below {batch.n}, or -1 for padding")
            whole[:, position] = values[:, i]
            returned[position] += 1
    assert whole is not None
    return whole, returned


def take_all_steps(taker: StepTaker, settings: TrainingSettings) -> None:
    """The same steps in the same order on every ring."""
    vocab = taker.vocab_size
    options: dict[str, Any] = dict(batch=settings.batch, seed=settings.seed)
    whole = make_batch([settings.tokens], vocab, **options)
    base = with_equal_labels(whole, settings)
    packed = make_batch(settings.documents, vocab, **options)
    first = taker.take(BASE, base, in_full=True)
    if first.refused:
        raise RuntimeError(f"every rank raised on one document of {base.n} tokens: {first.refused}")
    taker.take(AGAIN, base)
    taker.take(PACKED, packed, in_full=True)
    for name, batch in label_batches(whole, settings):
        taker.take(LABELS + name, batch)
    for lengths in odd_lengths(settings):
        taker.take(LENGTHS + lengths_text(lengths), make_batch(lengths, vocab, **options))
    taker.take(ACCUMULATED, *accumulated_batches(settings, vocab))
    taker.take(CLIPPED, base, max_norm=MAX_NORM)
    _evaluate(taker, base)
    has_documents = not taker.outcomes[PACKED].refused
    for kind, batch in ((BASE, base), (PACKED, packed)):
        if kind == PACKED and not has_documents:
            continue
        taker.observe(f"{REACH}{kind}", batch)
        for position in changed_positions(batch, settings):
            taker.observe(f"{REACH}{kind}, {position}", with_token_changed(batch, position, vocab))


def _evaluate(taker: StepTaker, batch: Batch) -> None:
    evaluate = getattr(taker.adapter, "evaluate", None)
    if evaluate is None:
        taker.outcomes[EVALUATED] = Outcome(refused="the adapter has no evaluate(batch)")
    else:
        value, refused = taker.run(lambda: float(evaluate(batch)))
        losses = [] if refused else taker.all_gather(value)
        taker.outcomes[EVALUATED] = Outcome(losses=losses, refused=refused)
    taker.batches[EVALUATED] = batch


def relative_error(found: Tensor, wanted: Tensor, floor: float = 0.0) -> float:
    """The largest difference, relative to the largest wanted value; infinite for NaN."""
    if found.shape != wanted.shape:
        return math.inf
    if not wanted.numel():
        return 0.0
    difference = (found - wanted).abs().max().item()
    scale = max(wanted.abs().max().item(), floor)
    if math.isnan(difference) or math.isnan(scale):
        return math.inf
    return difference / scale if scale else (math.inf if difference else 0.0)
