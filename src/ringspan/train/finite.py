"""A loss or a gradient that is not finite: which step, which rank, which weight. All ranks stop alike."""

from __future__ import annotations

import math

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ringspan.train.checkpoints import Checkpoints
from ringspan.train.errors import RunError
from ringspan.train.together import figures_of_all


def check_finite(step: int, losses: Tensor, gradient_norm: float, model: nn.Module, saved: Checkpoints) -> None:
    """Raise on all ranks, before any weight is changed, if a rank's loss or the norm of the gradients is not finite.

    ``losses`` has one for each rank; ``saved`` knows where the last good checkpoint is.
    """
    lost = [str(rank) for rank, loss in enumerate(losses.tolist()) if not math.isfinite(loss)]
    if lost:
        what = f"the loss is not finite on rank{'s' * (len(lost) > 1)} {', '.join(lost)}"
    elif not math.isfinite(gradient_norm):
        what = f"gradients are not finite: {_first_bad_gradient(model)}"
    else:
        return
    raise RunError(
        f"step {step + 1}: {what}. Nothing was written; {saved.last_good()}. Going on from it with the same settings "
        "leads here again, unless the hardware erred: try a lower --learning-rate, or look at the data"
    )


def _first_bad_gradient(model: nn.Module) -> str:
    """The first weight with a gradient that is not finite, and the ranks that hold the bad part of it."""
    gradients = [(name, _local(weight.grad)) for name, weight in model.named_parameters() if weight.grad is not None]
    bad = [number for number, (_, gradient) in enumerate(gradients) if not gradient.isfinite().all()]
    firsts = figures_of_all(gradients[0][1].device, min(bad, default=len(gradients)))[:, 0].tolist()
    first = int(min(firsts))
    if first == len(gradients):
        return "each number is, but their norm overflows"
    ranks = [str(rank) for rank, number in enumerate(firsts) if number == first]
    return f"that of {gradients[first][0]}, in the part of rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}"


def _local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
