"""Cross-entropy over a ring, in slices of rows, so that no (rows x vocabulary) tensor is ever allocated."""

from __future__ import annotations

from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ringspan.ring import Ring, SimulatedRing

Gradients = Literal["summed", "averaged"]
IGNORED = -100


def ring_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    ring: Ring | SimulatedRing | None = None,
    group: dist.ProcessGroup | None = None,
    gradients: Gradients = "summed",
    ignore_index: int = IGNORED,
    slice_rows: int = 4096,
) -> Tensor:
    """This rank's share of the mean cross-entropy, in nats, over all targets on all ranks that are not ignored.

    The shares of all ranks add up to the mean over the whole sequence, and *backward differentiates the sum over ranks
    of the returned values*. So sum the gradients of replicated weights over ranks. If they are averaged instead (FSDP,
    DDP), pass ``gradients="averaged"``, which multiplies the share by the number of ranks.

    Args:
        hidden: (batch, rows, width), this rank's rows.
        weight: (vocabulary, width), the output head.
        targets: (batch, rows), the next token of each row, shifted before the split. ``ignore_index`` is not counted.
        ring: the ring that the sequence is split over.
        group: process group that the mean is taken over; that of the ring by default. With data parallelism, pass the
            group of the whole mesh.
        slice_rows: number of rows whose logits are in memory at a time. Backward recomputes them.

    Returns 0 (with zero gradients) on a rank without targets.

    >>> hidden, weight = torch.zeros(1, 6, 8), torch.zeros(4, 8)
    >>> round(ring_cross_entropy(hidden, weight, torch.tensor([[0, 1, 2, 3, 0, -100]])).item(), 4)  # log 4
    1.3863
    """
    if gradients not in ("summed", "averaged"):
        raise ValueError(
            f"gradients={gradients!r}: must be 'summed' or 'averaged': how gradients are reduced over ranks"
        )
    if ring is not None and not isinstance(ring, (Ring, SimulatedRing)):
        raise TypeError(
            f"ring is a {type(ring).__name__}: must be a Ring or a SimulatedRing; make one with Ring(group)"
        )
    if hidden.shape[:-1] != targets.shape:
        raise ValueError(f"targets {tuple(targets.shape)}: must be {tuple(hidden.shape[:-1])}, one per row of hidden")
    if slice_rows < 1:
        raise ValueError(f"slice_rows={slice_rows}: must be at least 1")
    group = ring.group if group is None and isinstance(ring, Ring) else group
    counted = (targets != ignore_index).sum()
    ranks = 1
    if group is not None:
        dist.all_reduce(counted, group=group)
        ranks = dist.get_world_size(group)
    rows, wanted = hidden.flatten(0, -2), targets.flatten()
    total = hidden.new_zeros((), dtype=torch.float64 if hidden.dtype == torch.float64 else torch.float32)
    # A rank without rows still runs backward, with zero gradients. (Not a sum times 0, which is NaN if it overflows.)
    total = total + rows[:0].sum() + weight[:0].sum()
    for first in range(0, len(rows), slice_rows):
        part = slice(first, first + slice_rows)
        total = total + checkpoint(_sum_of, rows[part], weight, wanted[part], ignore_index, use_reentrant=False)
    share = total / counted.clamp(min=1)
    return share * ranks if gradients == "averaged" else share


def _sum_of(hidden: Tensor, weight: Tensor, targets: Tensor, ignore_index: int) -> Tensor:
    logits = F.linear(hidden, weight)
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(wide, targets, ignore_index=ignore_index, reduction="sum")
